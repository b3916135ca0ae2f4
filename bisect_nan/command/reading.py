"""Reads what people save with `torch.save`, as safetensors or with NumPy; nothing in such a file is executed.

Checkpoints often hold objects beside tensors: a configuration, an enum. With `weights_only=True` torch refuses
such a file as a whole. Here those objects come out as empty stand-ins, and the tensors can be used.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.utils._pytree import tree_map_only

from bisect_nan.errors import TargetError
from bisect_nan.snapshots.manifest import KEY

np: Any = None  # where it is not installed, there is none of its arrays to be read
with contextlib.suppress(ImportError):
    import numpy as np

_EXPECTED = "tensors, numbers, strings, lists and dictionaries, which torch.load reads with weights_only=True"


class StandIn:
    """What an object of an unknown class becomes; whatever was saved of it is dropped."""

    def __new__(cls, *_: object, **__: object) -> Self:
        """Take any arguments, for the classes that it stands for had their own."""
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        """Drop them."""

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


def read(path: Path, device: str) -> tuple[Any, tuple[str, ...]]:
    """Read a file of tensors.

    Args:
        path: A `torch.save` file, safetensors, or arrays of NumPy's.
        device: Where the tensors go.

    Returns:
        What the file holds, and the classes whose objects were left out of it.

    Raises:
        TargetError: There is no such file, or it is of another kind; the message says which, as far as that can be seen.
    """
    if not path.is_file():
        raise TargetError(f"got {path}, which is no file", "a file of tensors", "check the path")
    kind = _kind(path)
    if kind:
        do = "save the batch with torch.save, or write a case file (*.py) with build()"
        raise TargetError(f"got {path}, which cannot be read: it is {kind}", _EXPECTED, do)
    unknown: list[str] = []
    try:
        if path.suffix == ".safetensors":
            return load_file(path, device=device), ()
        if path.suffix in (".npy", ".npz") and np is not None:
            return _as_tensors(_arrays(path), device), ()
        arrays = _array_types()
        with torch.serialization.safe_globals(arrays):
            unknown = _unknown(path)
        known = torch.serialization.safe_globals([*arrays, *((StandIn, name) for name in unknown)])
        with known, warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # that another program wrote it: either it can be read, or the error says why not
            return _as_tensors(torch.load(path, map_location=device, weights_only=True), device), tuple(unknown)
    except Exception as error:  # Each reader has errors of its own, and they all mean this.
        if unknown:
            problem = f"it holds objects of {', '.join(unknown)}, which are not loaded, for loading them would run code"
        else:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
        do = "where you trust it, load it in Python and save its tensors alone, as a state dict or a dictionary"
        raise TargetError(f"got {path}, which cannot be read: {problem}", _EXPECTED, do) from error


def is_snapshot(path: Path) -> bool:
    """Whether a safetensors file was written by this package; one that cannot be read counts, so that its error is told."""
    try:
        with safe_open(path, framework="pt") as file:
            return KEY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return True


def step_number(content: Any) -> int | None:
    """Return the number of the training step, where a dictionary has it."""
    for key in ("step", "global_step"):
        number = content.get(key) if isinstance(content, Mapping) else None
        if isinstance(number, torch.Tensor) and number.numel() == 1 and not number.is_floating_point():
            number = number.item()
        if isinstance(number, int) and number >= 0:
            return number
    return None


def _unknown(path: Path) -> list[str]:
    """Return the classes and functions that a file names and torch does not load."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (ValueError, RuntimeError):  # A file in torch's old format, or none of torch's at all.
        return []


def _array_types() -> list[Any]:
    """Return what NumPy's numbers and arrays of numbers are made of; the Trainer of transformers loads these, too."""
    if np is None:
        return []
    array, number = np.zeros(0), np.float64(0)
    rebuild, scalar = array.__reduce__()[0], number.__reduce__()[0]
    dtypes = {type(np.dtype(kind)) for kind in np.typecodes["AllFloat"] + np.typecodes["AllInteger"] + "?"}
    old = [(function, f"numpy.core.multiarray.{function.__name__}") for function in (rebuild, scalar)]  # before NumPy 2
    return [np.ndarray, np.dtype, rebuild, scalar, *old, *dtypes]


def _arrays(path: Path) -> Any:
    """Return the array of a file of NumPy's, or its arrays by name."""
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        return dict(loaded)


def _as_tensors(content: Any, device: str) -> Any:
    """Return content with NumPy's arrays as tensors and its numbers as Python's."""
    if np is None:
        return content
    content = tree_map_only(np.ndarray, lambda array: torch.from_numpy(array.copy()).to(device), content)
    return tree_map_only(np.generic, lambda number: number.item(), content)


def _kind(path: Path) -> str:
    """Return what a file is that is surely none of tensors, or an empty string."""
    with path.open("rb") as file:
        start = file.read(512)
    if not start:
        return "empty"
    try:
        text = start.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(start) - 3:  # else a character that the end of the excerpt cut
            return ""
        text = start[: error.start].decode("utf-8")
    return "text" if all(letter.isprintable() or letter in "\r\n\t" for letter in text) else ""
