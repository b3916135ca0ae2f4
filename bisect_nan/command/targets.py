"""Turns what a user names on the command line into a snapshot.

Three kinds of target are understood: a crash snapshot (`*.safetensors`), a case file (`*.py`, with a function `build`), and saved
tensors or a checkpoint, to which the user adds a model, its weights, a batch and a loss (see `bisect_nan.command.tensors`).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bisect_nan.command.child import Request
from bisect_nan.command.reading import is_snapshot
from bisect_nan.command.tensors import capture_tensors
from bisect_nan.command.user_code import import_file, user_code
from bisect_nan.errors import NonFiniteStep, TargetError
from bisect_nan.finding import Finding
from bisect_nan.loop.guard import Guard
from bisect_nan.snapshots.snapshot import Snapshot

_CASE = """a function build() that returns {"model": ..., "batch": ..., "step": step(model, batch) -> loss}"""


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
        raise TargetError(f"got {path}, which has no function build", _CASE, "add it, or name another file")
    with user_code(str(path)):
        build = getattr(import_file(path), "build", None)
    if not callable(build):
        raise TargetError(f"got {path}, in which build is {build!r}", _CASE, "define it at the top level of the file")
    with user_code(f"build() of {path}"):
        built = build()
    missing = [key for key in ("model", "batch", "step") if not isinstance(built, Mapping) or key not in built]
    if missing:
        kind = f"a dictionary without {' and '.join(missing)}" if isinstance(built, Mapping) else type(built).__name__
        raise TargetError(f"got {kind} from build() of {path}", _CASE, "return these three keys")
    if not isinstance(built["model"], torch.nn.Module):
        raise TargetError(
            f"got {type(built['model']).__name__} as the model of {path}", "a torch.nn.Module", f"see {_CASE}"
        )
    case = dict(built)
    with user_code(f"the step of {path}"):
        if request.device:
            case["model"] = case["model"].to(request.device)
            case["batch"] = tree_map_only(torch.Tensor, lambda tensor: tensor.to(request.device), case["batch"])
        if case.get("autocast") is not None:
            case["step"] = _under_autocast(case["step"], case["autocast"], _device_type(case["model"]))
        if case.get("optimizer") is None and case.get("steps", 1) == 1:
            return Target(Snapshot.capture(case["model"], case["batch"], case["step"]), captured=True)
        return _train(case, Path(request.scratch or tempfile.mkdtemp(prefix="bisect_nan_")))


def _train(case: Mapping[str, Any], folder: Path) -> Target:
    """Train a case under a guard; the snapshot is the one that the guard saved."""
    model, batch, steps = case["model"], case["batch"], case.get("steps", 1)
    optimizer = case["optimizer"](model) if case.get("optimizer") else torch.optim.SGD(model.parameters(), lr=0.0)
    guard = Guard(model, optimizer, directory=folder)
    step = guard.watch(case["step"])
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = step(model, batch)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
        guard.check()
    except NonFiniteStep as fault:
        if fault.path is None:
            raise TargetError(f"got {fault}", "room for a snapshot of the step", f"make {folder} writable") from fault
        note = f"Trained under a guard until {fault.symptom.describe()}."
        return Target(Snapshot.load(fault.path), captured=True, notes=(note,))
    note = f"Trained {steps} steps under a guard, and every one was finite."
    return Target(None, captured=False, notes=(note,))


def _under_autocast(step: Callable[..., Any], dtype: torch.dtype, device_type: str) -> Callable[..., Any]:
    """Return the step as it runs inside `torch.autocast`."""

    def cast_step(model: torch.nn.Module, batch: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return step(model, batch)

    return cast_step


def _device_type(model: torch.nn.Module) -> str:
    """Return the kind of device that a model lives on; `cpu` for a model without parameters."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")
