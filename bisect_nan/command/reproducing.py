"""The work of `bisect-nan repro`, in the child process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from bisect_nan.command.answers import write_text
from bisect_nan.command.child import CLEAN, REDUCE, USAGE, Progress, Request
from bisect_nan.errors import TargetError
from bisect_nan.finding import Finding
from bisect_nan.reproduction.minimal import minimal_script
from bisect_nan.snapshots.snapshot import Snapshot


def write_script(
    snapshot: Snapshot | None, finding: Finding, request: Request, progress: Progress
) -> tuple[str, str, int]:
    """Make the script and write it to the file that was asked for.

    Args:
        snapshot: The step; None where nothing had to run for the finding.
        finding: What was located in it.
        request: Its `repro` is the file, or `-` for standard output; `skip` are scripts that end the process.
        progress: Told about the work.

    Returns:
        What to print on standard output, a message for people, and the exit status. The script itself is printed where its file cannot
        be written.

    Raises:
        ReproductionError: There is no such script.
    """
    with _quiet():
        script = minimal_script(
            snapshot, finding, progress=lambda _, asked, most: progress(REDUCE, asked, most), skip=request.skip
        )
    checked = f"checked: {script.checked}"
    if request.repro == "-":
        return script.code, checked, CLEAN
    try:
        write_text(Path(request.repro), script.code, "-o")
    except TargetError as problem:
        return script.code, f"error: {problem}\n{checked}", USAGE
    count = len(script.code.splitlines())
    return f"wrote {request.repro}: {count} lines, {script.drafts} scripts tried\n{checked}\n", "", CLEAN


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch's kernels print about the scripts that are tried, hundreds of times."""
    before, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nothing)
