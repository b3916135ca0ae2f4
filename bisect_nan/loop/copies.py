"""Copies of the buffers of a model, before each step; large ones that were not written to are copied once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from bisect_nan.recording.live import writes

_LARGE = 1 << 20
"""Elements from which on a copy is taken again only when torch has counted a write, which it does not do for `.data`."""


class Copies:
    """The buffers of a model: statistics change in every step, tables of positions and masks never do."""

    def __init__(self) -> None:
        """Nothing is copied yet."""
        self._held: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def now(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each tensor with a copy of its present elements."""
        held, self._held = self._held, {}
        for tensor in tensors:
            known, count = held.get(id(tensor)), _count(tensor)
            if known is None or count < 0 or known[1] != count:
                known = (tensor, count, tensor.detach().clone())
            self._held[id(tensor)] = known
        return [(tensor, copy) for tensor, _, copy in self._held.values()]

    def changed(self, tensors: Iterable[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return those that may be other than at the latest `now`."""
        held = self._held
        return [t for t in tensors if (k := held.get(id(t))) is None or (n := _count(t)) < 0 or k[1] != n]


def _count(tensor: torch.Tensor) -> int:
    """Return how often a large tensor was written to; -1 for one that is to be copied anyway."""
    return -1 if tensor.numel() < _LARGE or tensor.is_inference() else writes(tensor)
