"""Optimizers that are handed the whole step as a closure: it is evaluated before the guard looks, so that gradients are there."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bisect_nan.loop.alarm import capturing
from bisect_nan.recording.live import writes


class ClosureFirst:
    """Takes the closure of an `optimizer.step` to itself while a guard looks at the step.

    Optimizers evaluate their closure before anything else. Here it is evaluated even before that, and the guard sees a plain update
    of the gradients that it left. Those of torch that can do without a closure get none; others get the loss that is known already.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin in front of the guard's hooks; `follow` them when they are there."""
        self._optimizer = optimizer
        self._closure: _Evaluated | None = None
        self._hooks = [optimizer.register_step_pre_hook(self._take)]

    def follow(self) -> None:
        """Continue behind the guard's hooks, which are registered by now; where nothing follows, it knows what the update does."""
        kind = type(self._optimizer)
        closure = inspect.signature(kind.step).parameters.get("closure")
        optional = closure is not None and closure.default is None
        if not (optional and kind.__module__.startswith("torch.optim.")):
            self._hooks.append(self._optimizer.register_step_pre_hook(self._give_back))

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def _take(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (
            capturing.get()
        ):  # the update is run again: from the same gradients, so its closure counts as evaluated once more
            if self._closure is not None:
                self._closure.rewind()
            return args, kwargs
        closure, *_ = [*args[1:], kwargs.get("closure")]
        self._closure = None if closure is None else _Evaluated(closure, optimizer)
        return args[:1], {key: value for key, value in kwargs.items() if key != "closure"}

    def _give_back(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs if self._closure is None else {**kwargs, "closure": self._closure}


class _Evaluated:
    """A closure whose first evaluation has been made; an optimizer that has changed its parameters before gets a true one."""

    def __init__(self, closure: Any, optimizer: torch.optim.Optimizer) -> None:
        self._closure, self._optimizer = closure, optimizer
        self._loss = closure()
        self.rewind()

    def rewind(self) -> None:
        """Let the next evaluation be the first again."""
        self._waits, self._writes = True, self._count()

    def __call__(self) -> Any:
        if self._waits and self._writes == self._count():
            self._waits = False
            return self._loss
        return self._closure()

    def _count(self) -> list[int]:
        return [writes(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]
