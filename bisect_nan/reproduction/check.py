"""Runs a script in a fresh process, which also locates the fault in it.

Started as `python -m bisect_nan.reproduction.check`; reads one JSON object from standard input, the script and its lines, runs
the script, and writes what it found as one JSON object.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from bisect_nan.errors import ReproductionError
from bisect_nan.finding import Finding
from bisect_nan.reproduction.draft import Mode
from bisect_nan.reproduction.recapture import Lines, execute, located

_SECONDS = 120


def check(codes: list[tuple[str, Lines]]) -> list[Finding]:
    """Run scripts in a fresh process, where each must end without an error; return what is located in each.

    Args:
        codes: The scripts and the lines that they run.

    Raises:
        ReproductionError: A script failed, or the process ended.
    """
    command = [sys.executable, "-P", "-W", "ignore", "-m", "bisect_nan.reproduction.check"]
    given = json.dumps([[code, {**asdict(lines), "mode": lines.mode.value}] for code, lines in codes])
    try:
        done = subprocess.run(  # noqa: S603  (our own module)
            command, input=given, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        raise _failed(f"no end after {_SECONDS} s") from late
    if done.returncode:
        raise _failed((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return [Finding.from_dict(item) for item in json.loads(done.stdout)]


def main() -> None:
    """Do what standard input says."""
    answers = []
    for code, lines in json.load(sys.stdin):
        with contextlib.redirect_stdout(io.StringIO()):
            execute([code], {})
        answers.append(located(_lines(lines), {}).to_dict())
    sys.stdout.write(json.dumps(answers))


def _lines(data: dict[str, Any]) -> Lines:
    return Lines(
        tuple(data["literals"]), tuple(data["calls"]), Mode(data["mode"]), data["result"], tuple(data["element"])
    )


def _failed(what: str) -> ReproductionError:
    do = "report this fault of bisect_nan, and use the snapshot itself"
    return ReproductionError(f"got {what} from the script in a fresh process", "the fault that was found", do)


if __name__ == "__main__":
    main()
