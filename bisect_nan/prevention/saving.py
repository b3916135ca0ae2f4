"""Checkpoints that are good when they are there: whole files, with finite weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bisect_nan.errors import BisectNanError
from bisect_nan.prevention import nested
from bisect_nan.prevention.check import Check, examine
from bisect_nan.prevention.meant import kind_in_file
from bisect_nan.prevention.model import model_tensors
from bisect_nan.whole_file import whole_file

_LOG = logging.getLogger(__name__)

MARK = ".nonfinite"
"""What stands in the name of a checkpoint with bad numbers: `last.nonfinite.pt`."""


def save_checkpoint(state: Any, path: str | os.PathLike[str], *, on_bad: Literal["refuse", "mark"] = "refuse") -> Path:
    """Save a checkpoint with `torch.save`, but none with NaN or Inf in the place of a good one.

    The file is written under another name, brought to the disk, and then put in its place in one move: whatever happens meanwhile, at
    `path` there is the old file or the new one, as a whole.

        save_checkpoint({"model": model, "optimizer": optimizer, "step": step}, "checkpoints/last.pt")

    Args:
        state: A module, a state dict, or a nested dictionary. What has a `state_dict` (modules, optimizers, schedulers, scalers) is
            saved as that. All tensors are checked; infinities that look meant (masks) are let through.
        path: The file; folders on the way are made, a file that is there is replaced.
        on_bad: What to do with bad numbers: `refuse` to save, or `mark`: save beside `path`, as `last.nonfinite.pt`, and log a warning.

    Returns:
        Where it was saved.

    Raises:
        NonFiniteValues: A tensor is not finite, and `on_bad` is `refuse`; nothing was written.
        BisectNanError: The file cannot be written, or has a name for another format; what was at `path` is still there.
        ValueError: `on_bad` is none of these.
    """
    path = Path(path)
    if on_bad not in ("refuse", "mark"):
        raise ValueError(f"got on_bad={on_bad!r}\nexpected: 'refuse' or 'mark'\ndo this: choose one")
    if path.suffix == ".safetensors":
        do = "call it .pt, or check_model(model).require(...) and then safetensors.torch.save_model"
        raise BisectNanError(f"got {path}, a name for another format", "a name for torch.save", do)
    check = check_state(state)
    if on_bad == "refuse":
        check.require(f"go on from what is at {path}, or look for the cause: bisect_nan.Guard names it in the loop")
    elif not check.ok:
        path = path.with_name(f"{path.stem}{MARK}{path.suffix}")
        _LOG.warning("saved as %s: %s", path, check.describe())
    _write(_plain(state), path)
    return path


def check_state(state: Any) -> Check:
    """Check what `save_checkpoint` takes."""
    return examine("checkpoint", _tensors(state, ""))


def _tensors(state: Any, path: str, kind: str = "") -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kind, path and tensor of everything to be saved; paths are those of what is saved: `model['0.weight']`."""
    if isinstance(state, nn.Module):
        kinds = {name: known for known, name, _ in model_tensors(state)}
        for name, item in state.state_dict().items():  # without buffers that are not saved
            yield from _tensors(item, f"{path}[{name!r}]" if path else name, kinds.get(name, ""))
        return
    if isinstance(state, torch.optim.Optimizer):
        kind = "optimizer"
    if _has_state(state):
        state = state.state_dict()
    if isinstance(state, Mapping):
        for key, item in state.items():
            yield from _tensors(item, f"{path}[{key!r}]" if path else str(key), kind)
    else:
        yield from ((kind or kind_in_file(name), name, tensor) for name, tensor in nested.tensors(state, path))


def _plain(state: Any) -> Any:
    """Return the state with a state dict in the place of each object that has one."""
    if _has_state(state):
        return state.state_dict()
    return {key: _plain(item) for key, item in state.items()} if type(state) is dict else state


def _has_state(state: Any) -> bool:
    return callable(getattr(state, "state_dict", None)) and not isinstance(state, type)


def _write(state: Any, path: Path) -> None:
    try:
        with whole_file(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as problem:  # torch's writer turns a full disk into a RuntimeError
        got = f"got {path}, which cannot be written: {str(problem).splitlines()[0]}"
        raise BisectNanError(got, "a file", "make room, or choose another folder") from problem
