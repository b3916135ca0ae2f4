"""Turns what a user names on the command line into a snapshot.

Three kinds of target are understood: a crash snapshot (`*.safetensors`), a case file (`*.py`, with a function `build`), and saved
tensors or a checkpoint, to which the user adds a model, its weights, a batch and a loss (see `bisect_nan.command.tensors`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from bisect_nan.command.cases import CASE, built, run_case
from bisect_nan.command.child import Request
from bisect_nan.command.reading import is_snapshot
from bisect_nan.command.tensors import capture_tensors
from bisect_nan.command.user_code import import_file, user_code
from bisect_nan.errors import TargetError
from bisect_nan.finding import Finding
from bisect_nan.snapshots.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Target:
    """A snapshot, and how it came about.

    Attributes:
        snapshot: The step to look at; None when a case trained through all of its steps without a fault, or with a finding.
        captured: Whether the snapshot was made here and now, so that there is something new to save.
        notes: What was used of the file and what was ignored, each a sentence.
        finding: The answer, where nothing had to be run for it.
    """

    snapshot: Snapshot | None
    captured: bool
    notes: tuple[str, ...] = ()
    finding: Finding | None = None


def load_target(request: Request) -> Target:
    """Turn a file and the options that belong to it into a snapshot.

    Args:
        request: Its `target` is a snapshot, a case file, saved tensors or a checkpoint; `model`, `weights`, `batch` and `loss` belong
            to the latter two, and are refused elsewhere; a case that trains under a guard leaves its snapshot in `scratch`.

    Raises:
        SnapshotError: The file is no snapshot that can be opened.
        TargetError: Something that the user named cannot be used; the message says what is missing and what to add.
        RecordingError: The step cannot be recorded.
    """
    path = Path(request.target)
    if not path.exists():
        raise TargetError(f"got {path}, which is no file", "a snapshot, a case file or saved tensors", "check the path")
    _check_device(request.device)
    snapshot = path.suffix == ".safetensors" and path.is_file() and is_snapshot(path)
    if not snapshot and path.suffix != ".py":
        captured = capture_tensors(request)
        return Target(captured.snapshot, captured.snapshot is not None, captured.notes, captured.finding)
    unused = [f"--{name}" for name in ("model", "weights", "batch", "loss") if getattr(request, name)]
    if unused:
        kind = "a snapshot, which carries its program" if snapshot else "a case file"
        raise TargetError(
            f"got {' and '.join(unused)} together with {kind}", "the file alone", "leave these options out"
        )
    if path.suffix == ".py":
        return _from_case(path, request)
    return Target(Snapshot.load(path, device=request.device or None), captured=False)


def _check_device(device: str) -> None:
    """Refuse a device that this machine lacks, before anything expensive happens."""
    try:
        torch.empty(0, device=device or "cpu")
    except (RuntimeError, AssertionError) as error:  # A torch without CUDA fails an assertion.
        problem = str(error).strip().splitlines()[0]
        expected = "a device of this machine, such as cpu or cuda:0"
        raise TargetError(
            f"got --device {device}: {problem}", expected, "name another one, or leave --device out"
        ) from error


def _from_case(path: Path, request: Request) -> Target:
    """Capture the step of a case, or train it under a guard until a step comes out non-finite."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if not re.search(r"\bbuild\b", text):  # Looked for before the file is executed: it may be a whole training script.
        raise TargetError(f"got {path}, which has no function build", CASE, "add it, or name another file")
    with user_code(str(path)):
        build = getattr(import_file(path), "build", None)
    if not callable(build):
        raise TargetError(f"got {path}, in which build is {build!r}", CASE, "define it at the top level of the file")
    case = built(build, f"build() of {path}")
    snapshot, note = run_case(case, str(path), request.device, request.scratch)
    return Target(snapshot, captured=snapshot is not None, notes=(note,) if note else ())
