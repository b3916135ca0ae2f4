"""Watches a `GradScaler`: which updates it leaves out, and whether gradients were written to while they were still scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from bisect_nan.recording.live import writes

_LOW, _FALL = 128.0, 256.0
"""A scale that is so small, and by such a factor below where it was, protects no gradient from underflow any more."""


class Judge(Protocol):
    """Judges a step that a scaler left out."""

    def __call__(self, scale: float, *, collapses: bool) -> None:
        """Tell a fault from the search for a scale."""


class ScalerWatch:
    """Sits around `scaler.step` and `scaler.unscale_` for one optimizer."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        updates: Callable[[], int],
        judge: Judge,
        written: Callable[[], None],
    ) -> None:
        """Begin to watch.

        Args:
            scaler: The scaler.
            optimizer: The optimizer whose steps count.
            updates: Returns how often the optimizer has begun a step.
            judge: Called with the scale after each step that the scaler left out.
            written: Called when gradients were written to between the backward pass and `unscale_`.
        """
        self._scaler, self._optimizer = scaler, optimizer
        self._updates, self._judge, self._written = updates, judge, written
        self._highest = 0.0
        self._originals = scaler.step, scaler.unscale_
        self._writes = -1  # to the first parameter's gradient, when the backward pass had left it there
        scaler.step = self._step  # type: ignore[method-assign]
        scaler.unscale_ = self._unscale  # type: ignore[method-assign]
        parameter = optimizer.param_groups[0]["params"][0]
        with torch.enable_grad():
            # A hook of the node and not of the tensor, which recordings would take for one that changes gradients.
            self._node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        self._parameter = parameter
        self._hook = self._node.register_hook(self._accumulated)

    def scale(self) -> torch.Tensor:
        """Return the present scale where the parameters lie, without waiting for it."""
        scale: torch.Tensor = self._scaler.scale(torch.ones((), device=self._parameter.device))
        return scale

    def leaves_out(self) -> bool:
        """Whether the step that runs is one that the optimizer's own kernel leaves out: fused ones are told what the scaler found."""
        return getattr(self._optimizer, "found_inf", None) is not None

    def judge(self, scale: float) -> None:
        """Have a step that was left out judged; the scale collapses when it has fallen far below where it started."""
        self._highest = max(self._highest, scale)
        self._judge(scale, collapses=scale <= min(_LOW, self._highest / _FALL))

    def remove(self) -> None:
        """Leave the scaler as it was."""
        self._hook.remove()
        vars(self._scaler).pop("step", None)
        vars(self._scaler).pop("unscale_", None)

    def _accumulated(self, *_: Any) -> None:
        gradient = self._parameter.grad
        self._writes = -1 if gradient is None else writes(gradient)

    def _step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._updates()
        result = self._originals[0](optimizer, *args, **kwargs)
        if self._is_ours(optimizer) and self._scaler.is_enabled() and self._updates() == before:
            self.judge(self._scaler.get_scale())
        return result

    def _unscale(self, optimizer: Any) -> None:
        gradient = self._parameter.grad
        if self._is_ours(optimizer) and gradient is not None and -1 < self._writes < writes(gradient):
            self._written()
        self._writes = -1
        self._originals[1](optimizer)

    def _is_ours(self, optimizer: Any) -> bool:
        """Whether this is the optimizer, or a wrapper of it, as some libraries have."""
        return optimizer is self._optimizer or getattr(optimizer, "optimizer", None) is self._optimizer
