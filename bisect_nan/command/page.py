"""Writes the page that `bisect-nan run --html FILE` asks for."""

from __future__ import annotations

from pathlib import Path

from bisect_nan.answer.picture import picture
from bisect_nan.command.answers import write_text
from bisect_nan.errors import BisectNanError, ReplayError
from bisect_nan.finding import Finding
from bisect_nan.snapshots.snapshot import Snapshot


def write_page(path: Path, finding: Finding, snapshot: Snapshot | None) -> str:
    """Write a finding as a page, as a whole or not at all, and say so; a problem costs the page, not the answer.

    Args:
        path: The file; folders on the way are made, a file that is there is replaced.
        finding: What to report.
        snapshot: The step, for the pictures; None where there is none.

    Returns:
        Where the page is, or what went wrong, for people.
    """
    drawn, missing = None, "."
    try:
        drawn = picture(snapshot, finding) if snapshot is not None else None
    except ReplayError as problem:
        missing = f", without pictures: {problem}"
    try:
        write_text(path, finding.to_html(drawn), "--html")
    except BisectNanError as problem:
        return f"error: {problem}"
    return f"Wrote the report as {path}{missing}"
