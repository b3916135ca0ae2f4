"""The numbers of a training, step by step: what a snapshot brings along as evidence."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import torch

_EVERY, _FIRST, _JUMP = 10, 10, 2.0
"""Parameters are measured in each of the first updates, then every so often, and when loss or gradients have grown by a factor."""


class Journal:
    """The latest numbers of a training."""

    def __init__(self, length: int) -> None:
        """Keep the numbers of so many updates."""
        self.entries: deque[Mapping[str, float]] = deque(maxlen=length)
        self._measured: tuple[float, float] = (0.0, 0.0)
        self._count = 0

    def due(self, loss: float, gradient_norm: float) -> bool:
        """Whether the norm of the parameters is worth a read of all of them, where the update itself needs none."""
        then = self._measured
        grown = abs(loss) > _JUMP * then[0] or gradient_norm > _JUMP * then[1]
        if self._count >= _FIRST and self._count % _EVERY and not grown:
            return False
        self._measured = (abs(loss), gradient_norm)
        return True

    def add(self, numbers: Mapping[str, float]) -> None:
        """Note an update."""
        self._count += 1
        self.entries.append(finite_only(numbers))


def finite_only(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that are finite, which is what a snapshot's history holds."""
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Return the rate of the first group; NaN where it lies on an accelerator, which is not waited for."""
    rate = optimizer.param_groups[0].get("lr", math.nan)
    if isinstance(rate, torch.Tensor):
        return float(rate) if rate.device.type == "cpu" else math.nan
    return float(rate)
