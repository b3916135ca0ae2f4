"""Copies of the tensors that a model keeps as plain attributes (a hidden state, a queue), where its steps write to them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bisect_nan.recording.live import counts


class Attributes:
    """Most of them are never written to, or replaced as a whole: each is copied when it is new, and again once it was written to."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: dict[int, tuple[torch.Tensor, int, bool]] = {}

    def now(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return those that the coming step may write to, each with a copy of its present elements.

        Args:
            tensors: All of them, as they are before the step.
        """
        tensors, known, found = list(tensors), self._known, []
        self._known = {}
        for tensor, count in zip(tensors, counts(tensors), strict=True):
            _, before, written = known.get(id(tensor), (tensor, -1, False))
            new = before < 0 or tensor.is_inference()  # torch does not count writes to those
            written = written or (not new and count != before)
            self._known[id(tensor)] = tensor, count, written
            if new or written:
                found.append((tensor, tensor.detach().clone()))
        return found
