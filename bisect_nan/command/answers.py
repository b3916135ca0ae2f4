"""A finding in the forms that were asked for: one of them on standard output, others as files."""

from __future__ import annotations

import json
from pathlib import Path

from bisect_nan import causes
from bisect_nan.command.child import Request
from bisect_nan.errors import TargetError
from bisect_nan.finding import Finding, SourceLine
from bisect_nan.reports import to_annotations, to_markdown, to_sarif, to_text
from bisect_nan.whole_file import whole_file


def render(finding: Finding, request: Request) -> str:
    """Return what goes to standard output."""
    if request.json:
        return json.dumps(finding.to_dict(), indent=2, allow_nan=False) + "\n"
    if request.markdown:
        return to_markdown(finding)
    report = to_text(finding, verbose=request.verbose, colour=request.colour)
    return report + to_annotations(finding) if request.github else report


def write_sarif(path: Path, finding: Finding) -> str:
    """Write a finding as SARIF; a problem costs the file, not the answer.

    Returns:
        What went wrong, for people; nothing when all is well.
    """
    explained = {culprit.cause: causes.explain(culprit.cause) for culprit in finding.culprits}
    text = json.dumps(to_sarif(finding, explained, _lines_here(finding)), indent=2, allow_nan=False)
    try:
        write_text(path, text + "\n", "--sarif")
    except TargetError as problem:
        return f"error: {problem}"
    return ""


def write_text(path: Path, text: str, option: str) -> None:
    """Write what an option asks for into its file, as a whole or not at all; folders on the way are made.

    Raises:
        TargetError: It cannot be written.
    """
    try:
        with whole_file(path) as file:
            file.write(text.encode())
    except OSError as problem:
        got = f"got {path}, which cannot be written: {problem.strerror}"
        raise TargetError(got, "a file", f"name another one after {option}") from problem


def _lines_here(finding: Finding) -> dict[SourceLine, str]:
    """Return the lines to be changed that still stand in the files below the working directory, as they stand there."""
    found = {}
    for culprit in finding.culprits:
        source = culprit.remedy.source if culprit.remedy else None
        if source is None or not Path(source.file).is_file():
            continue
        lines = Path(source.file).read_text(encoding="utf-8", errors="replace").splitlines()
        line = lines[source.line - 1] if 0 < source.line <= len(lines) else ""
        if line.strip() == source.text:
            found[source] = line
    return found
