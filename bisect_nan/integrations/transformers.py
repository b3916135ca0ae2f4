"""A callback that watches the training of a `transformers.Trainer`.

What is run again after a fault is the trainer's `compute_loss`, so losses that are computed outside of the model (label smoothing,
`compute_loss_func`, a subclass) belong to the recorded step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from torch import nn

from bisect_nan.errors import TargetError
from bisect_nan.integrations.accelerate import optimizer_in
from bisect_nan.integrations.distributed import guard_for
from bisect_nan.integrations.replaced import replaced
from bisect_nan.loop.guard import Guard


class GuardCallback(transformers.TrainerCallback):
    """Watches `trainer.train` with a `Guard`.

        trainer = transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=[GuardCallback()])

    The first step that comes out non-finite is written to a crash snapshot, and `trainer.train` raises `NonFiniteStep`. Gradient
    accumulation, gradient clipping, label smoothing and mixed precision need nothing special. Evaluation is not watched.
    """

    def __init__(self, directory: str | Path = "crashes", **options: Any) -> None:
        """Choose what the guard does.

        Args:
            directory: Where snapshots go.
            options: Further arguments of `Guard`.
        """
        self._options = {"directory": directory, **options}
        self._guard: Guard | None = None
        self._undo = contextlib.ExitStack()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Arm the trainer, whose optimizer is there by now."""
        self._undo.close()
        trainer = _running_trainer()
        model, optimizer = trainer.model, trainer.optimizer
        assert model is not None
        assert optimizer is not None
        options = {"scaler": trainer.accelerator.scaler, "scheduler": trainer.lr_scheduler, **self._options}
        guard = self._guard = guard_for(model, optimizer_in(optimizer), **options)
        self._undo.callback(guard.close)
        self._undo.enter_context(replaced(trainer, compute_loss=_watched(trainer, guard)))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Look once more, and disarm."""
        if self._guard is not None:
            self._guard.check()
        self._undo.close()
        self._guard = None


def _watched(trainer: transformers.Trainer, guard: Guard) -> Any:
    """Return the trainer's `compute_loss` under watch."""
    plain = trainer.compute_loss

    @functools.wraps(plain)
    def compute_loss(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(model, inputs, *args, **kwargs)  # an evaluation
        step = guard.watch(lambda _, batch: plain(model, batch, *args, **kwargs))
        return step(trainer.model, inputs)

    return compute_loss


def _running_trainer() -> transformers.Trainer:
    """Return the trainer that calls its callbacks now; it hands them everything but itself."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, transformers.Trainer):
            return owner
        frame = frame.f_back
    raise TargetError(
        "no transformers.Trainer has called on_train_begin", "a callback of a Trainer", "pass it in callbacks=[...]"
    )
