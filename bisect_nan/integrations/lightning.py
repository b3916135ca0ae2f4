"""A callback that watches the training of a `lightning.Trainer`.

What is run again after a fault is the module's `training_step`. Under manual optimization it is run up to the `manual_backward` that
brought the fault, without the backward passes and updates before that one: the parameters are already as those updates left them,
as they were in the training; only tensors that were computed before such an update and used after it come out a little different.
Meanwhile `self.log` does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer

from bisect_nan.errors import RecordingError
from bisect_nan.integrations.closures import ClosureFirst
from bisect_nan.integrations.distributed import guard_for
from bisect_nan.integrations.replaced import replaced
from bisect_nan.loop.alarm import capturing
from bisect_nan.loop.guard import Guard
from bisect_nan.recording.capture import Step
from bisect_nan.recording.state import Surroundings


class GuardCallback(lightning.Callback):
    """Watches `trainer.fit` with a `Guard` for each optimizer.

        trainer = lightning.Trainer(callbacks=[GuardCallback()])

    The first step that comes out non-finite is written to a crash snapshot, and `trainer.fit` raises `NonFiniteStep`. Automatic
    and manual optimization, several optimizers, gradient accumulation, gradient clipping and mixed precision need nothing special.
    Validation is not watched.
    """

    def __init__(self, directory: str | Path = "crashes", **options: Any) -> None:
        """Choose what the guards do.

        Args:
            directory: Where snapshots go.
            options: Further arguments of `Guard`.
        """
        self._options = {"directory": directory, **options}
        self._guards: list[Guard] = []
        self._undo = contextlib.ExitStack()

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Arm the module and its optimizers, which are there by now."""
        self._close()
        for optimizer in trainer.optimizers:
            closures = ClosureFirst(optimizer)
            guard = guard_for(pl_module, optimizer, **{**_mates(trainer, optimizer), **self._options})
            closures.follow()
            self._undo.callback(closures.remove)
            self._undo.callback(guard.close)
            self._guards.append(guard)
        if pl_module.automatic_optimization:
            armed = _Automatic(pl_module, self._guards).armed()
        else:
            armed = _Manual(pl_module, self._guards, trainer).armed()
        self._undo.enter_context(armed)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:  # noqa: ARG002
        """Look once more, and disarm."""
        for guard in self._guards:
            guard.check()
        self._close()

    def on_exception(
        self,
        trainer: lightning.Trainer,  # noqa: ARG002
        pl_module: lightning.LightningModule,  # noqa: ARG002
        exception: BaseException,  # noqa: ARG002
    ) -> None:
        """Disarm."""
        self._close()

    def _close(self) -> None:
        self._undo.close()
        self._guards = []


class _Automatic:
    """The `training_step` of a module under automatic optimization: it returns the loss."""

    def __init__(self, module: lightning.LightningModule, guards: Iterable[Guard]) -> None:
        self._module, self._guards, self._step = module, guards, module.training_step

    def armed(self) -> contextlib.AbstractContextManager[None]:
        """Put the watched step into the module's place."""
        return replaced(self._module, training_step=functools.wraps(self._step)(functools.partial(self._training_step)))

    def _training_step(self, batch: Any, *rest: Any) -> Any:
        nothing = False

        def step(module: Any, batch: Any) -> Any:
            nonlocal nothing
            with replaced(module, log=_nothing) if capturing.get() else contextlib.nullcontext():
                result = self._step(batch, *rest)
            nothing = result is None  # nothing to learn from this batch
            return torch.zeros(()) if nothing else result

        result = _watched_by(self._guards, step)(self._module, batch)
        return None if nothing else result


@dataclass(slots=True)
class _Running:
    """A running `training_step` under manual optimization: its arguments, the state before it, and its losses so far."""

    batch: Any
    rest: Sequence[Any]
    before: Surroundings
    losses: int = 0


class _Reached(BaseException):
    """Ends a `training_step` at the loss that it was run again for; no `except Exception` of the user's is to stop it."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class _Manual:
    """The `training_step` of a module under manual optimization: it hands each loss to `manual_backward`."""

    def __init__(self, module: lightning.LightningModule, guards: Iterable[Guard], trainer: lightning.Trainer) -> None:
        self._module, self._guards, self._trainer = module, guards, trainer
        self._step, self._backward = module.training_step, module.manual_backward
        self._running: _Running | None = None

    def armed(self) -> contextlib.AbstractContextManager[None]:
        """Put the watched step and backward pass into the module's place."""
        step, backward = functools.wraps(self._step)(functools.partial(self._training_step)), self._manual_backward
        return replaced(self._module, training_step=step, manual_backward=backward)

    def _training_step(self, batch: Any, *rest: Any) -> Any:
        self._running = _Running(batch, rest, Surroundings(None, batch=batch))
        try:
            return self._step(batch, *rest)
        finally:
            self._running = None

    def _manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        running = self._running
        if running is not None:
            number = running.losses
            running.losses += 1

            def step(module: Any, batch: Any) -> torch.Tensor:
                return self._again(running, number, module, batch) if capturing.get() else loss

            loss = _watched_by(self._guards, step)(self._module, running.batch)
        self._backward(loss, *args, **kwargs)

    def _again(self, running: _Running, number: int, module: Any, batch: Any) -> torch.Tensor:
        """Run the step up to the loss with this number."""
        losses = 0

        def backward(loss: torch.Tensor, *_: Any, **__: Any) -> None:
            nonlocal losses
            if losses == number:
                raise _Reached(loss)
            losses += 1

        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(module, log=_nothing, manual_backward=backward))
            stack.enter_context(replaced(LightningOptimizer, step=_only_closure))
            for optimizer in self._trainer.optimizers:
                stack.enter_context(
                    replaced(optimizer, step=functools.partial(_only_closure, optimizer), zero_grad=_nothing)
                )
            for config in self._trainer.lr_scheduler_configs:
                stack.enter_context(replaced(config.scheduler, step=_nothing))
            running.before.restore()
            try:
                self._step(batch, *running.rest)
            except _Reached as reached:
                return reached.loss
        got = f"run again, training_step made {losses} calls of manual_backward, and {number + 1} before"
        raise RecordingError(got, "a step that does the same when it is run again")


def _watched_by(guards: Iterable[Guard], step: Step) -> Step:
    """Return a step under the watch of several guards, one for each optimizer."""
    for guard in guards:
        step = guard.watch(step)
    return step


def _mates(trainer: lightning.Trainer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the scaler and the schedule of an optimizer, as arguments of `Guard`."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    fitting = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
    return {"scaler": getattr(trainer.precision_plugin, "scaler", None), "scheduler": next(iter(fitting), None)}


def _nothing(*_: Any, **__: Any) -> None:
    """Stand in for what must not happen a second time."""


def _only_closure(_: Any, closure: Callable[[], Any] | None = None, **__: Any) -> Any:
    """Stand in for `optimizer.step`."""
    return None if closure is None else closure()
