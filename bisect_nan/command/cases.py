"""Runs a case: what a function `build` returns, as a user or a file names it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bisect_nan.command.user_code import user_code
from bisect_nan.errors import NonFiniteStep, TargetError
from bisect_nan.loop.guard import Guard
from bisect_nan.snapshots.snapshot import Snapshot

CASE = """a function build() that returns {"model": ..., "batch": ..., "step": step(model, batch) -> loss}"""


def built(build: Callable[[], Any], name: str) -> dict[str, Any]:
    """Call a case's function.

    Args:
        build: The function.
        name: What it is called in messages: `build() of case.py`.

    Raises:
        TargetError: It raised, or returned something else.
    """
    with user_code(name):
        case = build()
    missing = [key for key in ("model", "batch", "step") if not isinstance(case, Mapping) or key not in case]
    if missing:
        kind = f"a dictionary without {' and '.join(missing)}" if isinstance(case, Mapping) else type(case).__name__
        raise TargetError(f"got {kind} from {name}", CASE, "return these three keys")
    if not isinstance(case["model"], torch.nn.Module):
        raise TargetError(
            f"got {type(case['model']).__name__} as the model of {name}", "a torch.nn.Module", f"see {CASE}"
        )
    return dict(case)


def run_case(case: Mapping[str, Any], name: str, device: str = "", scratch: str = "") -> tuple[Snapshot | None, str]:
    """Capture the step of a case, or train it under a guard until a step comes out non-finite.

    Args:
        case: What `built` returns.
        name: What it is called in messages.
        device: Where to run; empty for where it is.
        scratch: Folder for the snapshot of a case that trains; a new one when empty.

    Returns:
        The snapshot, or None when all steps of a training were finite, and a sentence about the training.

    Raises:
        CodeError: The step raised.
        RecordingError: The step cannot be recorded.
    """
    case = dict(case)
    with user_code(f"the step of {name}"):
        if device:
            case["model"] = case["model"].to(device)
            case["batch"] = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), case["batch"])
        if case.get("autocast") is not None:
            case["step"] = _under_autocast(case["step"], case["autocast"], _device_type(case["model"]))
        if case.get("optimizer") is None and case.get("steps", 1) == 1:
            return Snapshot.capture(case["model"], case["batch"], case["step"]), ""
        return _train(case, Path(scratch or tempfile.mkdtemp(prefix="bisect_nan_")))


def _train(case: Mapping[str, Any], folder: Path) -> tuple[Snapshot | None, str]:
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
        return Snapshot.load(fault.path), f"Trained under a guard until {fault.symptom.describe()}."
    except Exception as error:
        path = next(folder.glob("*.safetensors"), None)
        if path is None:
            raise
        return Snapshot.load(path), f"Trained under a guard until {type(error).__name__} was raised."
    return None, f"Trained {steps} steps under a guard, and every one was finite."


def _under_autocast(step: Callable[..., Any], dtype: torch.dtype, device_type: str) -> Callable[..., Any]:
    """Return the step as it runs inside `torch.autocast`."""

    def cast_step(model: torch.nn.Module, batch: Any) -> Any:
        with torch.autocast(device_type, dtype=dtype):
            return step(model, batch)

    return cast_step


def _device_type(model: torch.nn.Module) -> str:
    """Return the kind of device that a model lives on; `cpu` for a model without parameters."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")
