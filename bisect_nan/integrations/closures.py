"""Optimizers that are handed the whole step as a closure: it is run before the guard looks, so that gradients are there to look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bisect_nan.recording.live import writes

Hook = Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


class Ahead:
    """A closure whose first evaluation has been made already.

    Optimizers evaluate their closure before anything else; one that has changed its parameters before gets a true evaluation.
    """

    def __init__(self, closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> None:
        """Evaluate a closure.

        Args:
            closure: Makes forward and backward pass, and returns the loss.
            optimizer: Whose `step` gets this object in its place.
        """
        self._closure, self._optimizer = closure, optimizer
        self._loss = closure()
        self.rewind()

    def rewind(self) -> None:
        """Make it new again: `step` runs once more, from the same state and with the same gradients."""
        self._waits, self._writes = True, self._count()

    def __call__(self) -> Any:
        """Return the loss."""
        if self._waits and self._writes == self._count():
            self._waits = False
            return self._loss
        return self._closure()

    def _count(self) -> list[int]:
        return [writes(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]


def evaluate_ahead(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Evaluate the closure that `optimizer.step` was called with; to be registered as a step pre-hook, before a guard's own.

    Returns:
        The arguments for `step` with an `Ahead` in place of the closure.
    """
    changed = {key: _ahead(value, optimizer) for key, value in kwargs.items()}
    return (optimizer, *(_ahead(value, optimizer) for value in args[1:])), changed


def _ahead(value: Any, optimizer: torch.optim.Optimizer) -> Any:
    if isinstance(value, Ahead):
        value.rewind()
        return value
    return Ahead(value, optimizer) if callable(value) else value
