"""The child process of the command line: loads the target, locates the fault, renders the answer.

Started by `bisect_nan.command.child` as `python -m bisect_nan.command.worker REQUEST`. It writes one JSON object a line to its standard
output, each in one system call, so that everything said before a crash arrives; whatever the user's code prints goes to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bisect_nan.answer.driver import locate
from bisect_nan.command.answers import render, write_sarif
from bisect_nan.command.child import CANNOT_TELL, CAPTURED, CLEAN, LOCATED, USAGE, Request
from bisect_nan.command.page import write_page
from bisect_nan.command.reproducing import write_script
from bisect_nan.command.targets import load_target
from bisect_nan.errors import BisectNanError, CodeError, SnapshotError, TargetError
from bisect_nan.finding import Finding, SearchCost, Verdict
from bisect_nan.snapshots.snapshot import Snapshot

STATUS = {Verdict.CLEAN: CLEAN, Verdict.LOCATED: LOCATED}

Located = tuple[Finding, Snapshot | None]
"""A finding, and the step that it is about where there is one."""


def main() -> int:
    """Do what the request on the command line asks, and send the answer."""
    request = Request(**json.loads(sys.argv[1]))
    send = _sender()
    last: dict[str, Any] = {"stage": "load", "node": -1}

    def progress(stage: str, done: int, total: int) -> None:
        last.update(stage=stage, node=done)
        send({"progress": [stage, done, total]})

    messages: list[str] = []
    found: dict[str, Any] | None = None
    text = ""
    try:
        finding, snapshot = _find(request, progress, messages)
        if request.repro:
            text, message, status = write_script(snapshot, finding, request, progress)
            messages.append(message)
        else:
            status = STATUS.get(finding.verdict, CANNOT_TELL)
            text = render(finding, request)
            if request.sarif:
                messages.append(write_sarif(Path(request.sarif), finding))
            if request.html:
                progress("draw", 0, 0)
                messages.append(write_page(Path(request.html), finding, snapshot))
        found = finding.to_dict()
    except CodeError as error:  # The user's own code raised, which says nothing about the fault.
        messages, status = [f"error: {error}", *_trace(error.__cause__, request)], CANNOT_TELL
    except (SnapshotError, TargetError, OSError) as error:
        told = TargetError.refused(error) if isinstance(error, OSError) else error
        messages, status = [f"error: {told}", *_trace(error.__cause__, request)], USAGE
    except BisectNanError as error:
        messages, status = [f"error: {error}", *_trace(error.__cause__, request)], CANNOT_TELL
    except (MemoryError, torch.OutOfMemoryError) as error:
        where = f" in stage {last['stage']}, node {last['node']}" if last["node"] >= 0 else ""
        wanted = " ".join(str(error).split()).split(". ")[0] or "no memory left"
        do = "use --device for a larger one, or run on a machine with more memory"
        messages, status = (
            [f"error: got {wanted}{where}\nexpected: room for the step's values\ndo this: {do}"],
            CANNOT_TELL,
        )
    except Exception as error:  # noqa: BLE001  (the last resort: a user reads a message, never a bare traceback)
        got = f"error: got an unexpected {type(error).__name__} in stage {last['stage']}: {error}"
        do = "report this fault of bisect_nan; -v shows the traceback"
        messages, status = [f"{got}\ndo this: {do}", *_trace(error, request)], CANNOT_TELL
    send({"answer": text, "messages": list(filter(None, messages)), "status": status, "finding": found})
    return status


def _find(request: Request, progress: Callable[[str, int, int], None], messages: list[str]) -> Located:
    """Load the target of a request and locate its fault; add what is worth saying to the messages."""
    scratch = Path(request.scratch)
    progress("load" if request.target.endswith(".safetensors") else "record", 0, 0)
    target = load_target(request)
    messages += target.notes
    if target.finding is not None:
        return target.finding, None
    if target.snapshot is None:
        return Finding(Verdict.CLEAN, search=SearchCost()), None
    if request.save and target.captured:
        entry = f"{Path(request.target).as_posix()}:build" if request.target.endswith(".py") else ""
        target.snapshot.save(Path(request.save), entry=entry)
        messages.append(f"Saved the snapshot as {request.save}.")
    elif request.careful and target.captured:
        target.snapshot.save(scratch / CAPTURED)
    careful = {"careful": True} if request.careful else {}
    wanted = {"remedies": False} if request.repro else {}
    finding = locate(target.snapshot, search=request.search, progress=progress, **careful, **wanted)
    return finding, target.snapshot


def _trace(error: BaseException | None, request: Request) -> list[str]:
    """Return the traceback of an error when the user asked for more."""
    return ["".join(traceback.format_exception(error)).rstrip()] if request.verbose and error is not None else []


def _sender() -> Callable[[dict[str, Any]], None]:
    """Take standard output for the protocol, and give the user's code standard error in its place."""
    pipe = os.dup(1)
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        line = f"{json.dumps(message)}\n".encode()
        try:
            while line:
                line = line[os.write(pipe, line) :]
        except BrokenPipeError:  # The command line is gone; nobody waits for an answer.
            os._exit(CANNOT_TELL)

    return send


if __name__ == "__main__":
    sys.exit(main())
