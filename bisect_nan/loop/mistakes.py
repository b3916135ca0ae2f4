"""Mistakes of a training loop that a guard can see: each is told once, with its remedy, as a warning."""

from __future__ import annotations

import enum
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from bisect_nan.loop.sight import Bad
from bisect_nan.recording.live import writes

_LATE_STEP = 1000
"""An optimizer or a schedule that has counted so many steps is in the middle of a training."""

_INITIAL_SCALE = 2.0**16
"""What `torch.amp.GradScaler` starts with (torch 2.6 to 2.13)."""


class LoopMistake(UserWarning):
    """The training loop does something that makes a fault, or hides one."""


class Mistake(enum.StrEnum):
    """What is wrong with a loop, and what to do."""

    CLIPPED_WHILE_SCALED = (
        "gradients were written to between backward() and scaler.unscale_(optimizer): clipping compares its limit with gradients"
        " that are still multiplied by the scale. Call scaler.unscale_(optimizer) first, then clip_grad_norm_"
    )
    NORM_IGNORED = (
        "clipping met a norm that is not finite and multiplied all gradients with it, so that they are NaN or 0 now. Look at what"
        " clip_grad_norm_ returns and leave such a step out, or pass error_if_nonfinite=True"
    )
    NEVER_ZEROED = (
        "gradients of the last update are still there when the next backward pass begins, which adds to them. Call"
        " optimizer.zero_grad() once for each optimizer.step()"
    )
    FRESH_OPTIMIZER = (
        "the learning rate schedule is in the middle of a training, and the optimizer has no state: its moments start from zero."
        " Load the optimizer's state_dict together with the model's when you resume"
    )
    FRESH_SCALER = (
        "the optimizer is in the middle of a training, and the GradScaler is new: the first steps overflow until it has found its"
        " scale again. Load the scaler's state_dict, too, when you resume"
    )
    ANOMALY_MODE = (
        "anomaly mode is on: it raises in the middle of a backward pass, before the guard sees a gradient, and makes every step slow. The"
        " snapshot of a bad step tells more. Call torch.autograd.set_detect_anomaly(False)"
    )
    BAD_CHECKPOINT = "state_dict() is called while the model holds values that are not finite. Do not overwrite a good checkpoint with it"


class Mistakes:
    """What has been told already, and what is needed to notice the next one."""

    def __init__(self) -> None:
        """Nothing is wrong yet."""
        self._told: set[Mistake] = set()
        self._left: tuple[torch.Tensor, int] | None = (
            None  # a gradient after an update, and how often it was written to
        )
        self._added: torch.Tensor | None = None  # such a gradient, when a backward pass began to add to it
        self._unzeroed = 0

    def tell(self, mistake: Mistake, detail: str = "") -> None:
        """Warn, unless it has been told already."""
        if mistake not in self._told:
            self._told.add(mistake)
            warnings.warn(f"{detail}{': ' if detail else ''}{mistake}", LoopMistake, stacklevel=2)

    def updated(self, gradients: Sequence[torch.Tensor]) -> None:
        """Remember a gradient that an update has used; one that the update before has used, too, was never meant to be added to."""
        first = gradients[0] if gradients else None
        self._unzeroed = self._unzeroed + 1 if first is not None and first is self._added else 0
        if self._unzeroed > 1:
            self.tell(Mistake.NEVER_ZEROED)
        self._left, self._added = None if first is None else (first, writes(first)), None

    def backward_begins(self, gradients: Sequence[torch.Tensor]) -> None:
        """Compare: a gradient that is as the update left it is added to, unless it is thrown away before the next update.

        A loop that trains two models in turns does that: the backward pass of the one leaves gradients at the other.
        """
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            self.tell(Mistake.ANOMALY_MODE)
        if self._left is None:
            return
        (gradient, count), self._left = self._left, None
        kept = any(other is gradient for other in gradients[:1]) and writes(gradient) == count and bool(gradient.any())
        self._added = gradient if kept else None

    def saving(self, bad: Bad | None) -> None:
        """Look at what is about to be saved."""
        if bad is not None:
            kind, tensors = bad
            self.tell(Mistake.BAD_CHECKPOINT, f"{kind} {next(iter(tensors))}, {len(tensors)} in all")

    def resumed(self, optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Any) -> None:
        """Look at the first update for states that were not loaded."""
        if (
            not optimizer.state
            and getattr(scheduler, "last_epoch", 0) >= _LATE_STEP
            and optimizer.param_groups[0].get("betas")
        ):
            self.tell(Mistake.FRESH_OPTIMIZER)
        counts = [state.get("step", 0) for state in optimizer.state.values() if isinstance(state, Mapping)]
        if scaler is not None and counts and float(max(counts)) >= _LATE_STEP:
            state = scaler.state_dict()
            if state.get("scale") == _INITIAL_SCALE and state.get("_growth_tracker") == 0:
                self.tell(Mistake.FRESH_SCALER)


def watch_saving(model: nn.Module, look: Callable[[], None]) -> Any:
    """Call `look` whenever the `state_dict` of a model is asked for, and return a handle; copies of the model do not call it."""
    return model.register_state_dict_pre_hook(_BeforeSaving(model, look))  # type: ignore[no-untyped-call]


class _BeforeSaving:
    """A hook that copies and pickles of the model have as well, where it does nothing."""

    def __init__(self, model: object = None, look: Callable[[], None] | None = None) -> None:
        self._model, self._look = model, look

    def __call__(self, model: object, *_: Any) -> None:
        if self._look is not None and model is self._model:
            self._look()

    def __deepcopy__(self, _: Any) -> _BeforeSaving:
        return _BeforeSaving()

    def __reduce__(self) -> tuple[Any, ...]:
        return _BeforeSaving, ()
