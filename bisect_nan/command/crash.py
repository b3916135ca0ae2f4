"""Says in one message how the child process died, and at which node of the step."""

from __future__ import annotations

import signal
from pathlib import Path

from bisect_nan.command.child import CAPTURED, Crash, Request
from bisect_nan.errors import BisectNanError, SnapshotError
from bisect_nan.snapshots.manifest import Manifest

_BEFORE = {"": "started", "load": "loaded the snapshot", "record": "ran and recorded the step"}
"""What the child does in the stages before it executes nodes."""


def describe_crash(crash: Crash, request: Request) -> str:
    """Return the three-part message for a child that ended without an answer.

    Args:
        crash: How it ended.
        request: What it was asked to do; with `careful`, so that the node is the one that was being executed.
    """
    what = f"killed by {crash.signal}{_meaning(crash)}" if crash.signal else f"ended with exit code {crash.code}"
    if crash.stage in _BEFORE:
        where = f"while it {_BEFORE[crash.stage]}"
        do = "run the step in plain Python to see what happens there"
    else:
        where = f"in stage {crash.stage}{_node(crash, request)}"
        do = "look at what reaches this node: some kernels crash on NaN coordinates or on indices out of range"
    if crash.wanted:
        do = "run again and let it end by itself"
    elif crash.signal == "SIGKILL":
        do = "give it more memory, or capture the step with a smaller batch"
    return str(BisectNanError(f"the working process was {what} {where}", "an answer from it", do))


def _meaning(crash: Crash) -> str:
    """Return what a signal usually means, in brackets."""
    if crash.signal == "SIGKILL":
        return " (most likely for lack of memory)"
    text = signal.strsignal(-crash.code)
    return f" ({text.lower()})" if text else ""


def _node(crash: Crash, request: Request) -> str:
    """Return `, at node 12 (aten.mm.default) of file:line` as far as it is known."""
    captured = Path(request.scratch) / CAPTURED
    path = captured if captured.is_file() else Path(request.target)
    if crash.node < 0:
        return ""
    try:
        return f", while it executed {Manifest.read(path).describe_node(crash.node)}"
    except SnapshotError:
        return f", while it executed node {crash.node}"
