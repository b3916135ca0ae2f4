"""A memory that a recording has met, and tensors that show one as a program says."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from bisect_nan.recording.program import NO_STORAGE, Value


@dataclass(slots=True)
class Memory:
    """A storage that the recording has met.

    Attributes:
        number: Its number in the program.
        reference: The storage, while it lives. Its Python object lives as long (torch 2.6 to 2.13).
        base: A value that lives in it; -1 before there is one.
        owner: The storage itself where it is from outside: it has to be as before when the recording ends.
        original: Its bytes before the first write to memory from outside.
        sparse: Whether a sparse tensor shows it too, which no analysis of writes could follow.
    """

    number: int
    reference: weakref.ref[torch.UntypedStorage]
    base: int = -1
    owner: torch.UntypedStorage | None = None
    original: torch.UntypedStorage | None = None
    sparse: bool = False

    @property
    def changes(self) -> bool:
        """Whether it holds something else than before the step: made by the step, or from outside and written to."""
        return self.owner is None or self.original is not None


def view(storage: torch.UntypedStorage, value: Value) -> torch.Tensor:
    """Return a tensor that shows a storage as a value says."""
    shown = torch.empty(0, dtype=value.dtype, device=storage.device)
    shown.set_(storage, value.offset, value.shape, value.stride)
    shown = shown.conj() if value.conj else shown
    negated: torch.Tensor = torch.ops.aten._neg_view.default(shown) if value.neg else shown
    return negated


def extent(value: Value) -> int:
    """Return how many bytes of its storage a value reaches over, counted from the start of the storage."""
    if 0 in value.shape or value.storage == NO_STORAGE:
        return 0
    last = value.offset
    for step, size in zip(value.stride, value.shape, strict=True):
        last += step * (size - 1)
    return (last + 1) * value.dtype.itemsize
