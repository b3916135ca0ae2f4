"""Arms a training loop: the first non-finite step is written to a crash snapshot, and then what was asked for happens."""

from __future__ import annotations

import functools
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from bisect_nan.errors import BisectNanError
from bisect_nan.loop.alarm import Alarm
from bisect_nan.loop.late import LateVigil
from bisect_nan.loop.mistakes import Mistakes
from bisect_nan.loop.recovery import OnFault, Recovery
from bisect_nan.loop.shelf import Shelf
from bisect_nan.loop.training import Training
from bisect_nan.loop.vigil import Vigil
from bisect_nan.recording.capture import Step, require_step
from bisect_nan.recording.state import require


class Guard:
    """Watches one model and one optimizer of its parameters.

    It looks at the loss when the watched step returns, at the gradients right before `optimizer.step()`, and at parameters,
    optimizer state and buffers right after. The first time that one of them is non-finite, the state before is put back, the
    guilty part is run again under the recorder, and its snapshot is written. Then, as `on_fault` says:

    - `"raise"`: `NonFiniteStep` with the path is raised. Model, optimizer, gradients, batch and random generators are as they
      were before the step, so a loop that catches it can go on.
    - `"skip"`: the step is left out: the watched step returns the loss as it was, whose backward pass does nothing, and the
      update changes nothing. Of accumulated micro-batches only the bad one is left out.
    - `"rollback"`: likewise; and when the steps after it are bad as well, the training returns to an earlier healthy state.
    - `"warn"`: the training goes on with what is not finite.

    The last three tell the fault through the logger `bisect_nan`; ten bad steps in a row raise all the same.

        guard = Guard(model, optimizer, directory="crashes")
        step = guard.watch(step)
        for batch in loader:
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
        guard.check()

    As a context manager it checks at the end and takes its hooks out of the optimizer:

        with Guard(model, optimizer) as guard: ...

    Gradient accumulation, closures, clipping, autocast around the call, evaluation through the watched step under
    `torch.no_grad()`, compiled models and several guards on one model need nothing special. An infinity that was there before the
    step (a mask among the buffers) is no fault. A healthy training gives the same numbers as without a guard, bit by bit.

    The price is one read of the gradients and of small buffers a step. Where the optimizer is not one whose update is known to
    stay finite (see `assurance.py`), parameters and optimizer state are copied before and read after each update. Of the model's
    attributes that the step changes, tensors are put back with their elements, and containers one level deep; what only the step
    knows (a teacher that it updates, a generator in its closure) stays as the bad step left it.
    """

    _kinds: tuple[type[Alarm], type[Vigil], type[Vigil]] = Alarm, Vigil, LateVigil
    """What answers faults, what watches, and what watches where numbers are read late."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        directory: str | Path = "crashes",
        on_fault: str = "raise",
        keep: int = 3,
        history: int = 200,
        healthy_every: int = 100,
        healthy_file: str | Path | None = None,
        deferred: bool = False,
    ) -> None:
        """Hook into the optimizer, and into the scaler.

        Args:
            model: The module that is trained.
            optimizer: Its optimizer. For a second one, make a second guard and watch the step with both.
            scaler: Its `GradScaler`. A step that it leaves out because of its scale is no fault; one that is bad without any
                scale is, and so is a scale that has to fall further and further.
            scheduler: Its learning rate schedule, which then does not move on for a step that is left out.
            directory: Where snapshots go, as `step_812.safetensors`; made when the first one is written.
            on_fault: `"raise"`, `"skip"`, `"rollback"` or `"warn"`.
            keep: How many snapshots this run may leave there; those of earlier runs make room.
            history: Updates whose numbers go into a snapshot.
            healthy_every: Updates from one healthy state to the next; kept in host memory for `"rollback"` and `deferred`.
            healthy_file: Where to write each of them, too; `torch.load(path, weights_only=True)` opens it.
            deferred: Whether to read the numbers of a step one step later, so that an accelerator is never waited for. A fault is
                then told when its update is already made, and the training returns to the last healthy state.

        Raises:
            BisectNanError: An argument is not what it should be.
        """
        require(model, optimizer)
        _require(on_fault, {"keep": keep, "history": history, "healthy_every": healthy_every})
        training, mistakes, answer = Training(model, optimizer), Mistakes(), OnFault(on_fault)
        keeps = deferred or answer is OnFault.ROLLBACK or healthy_file is not None
        file = None if healthy_file is None else Path(healthy_file)
        recovery = Recovery(training, scaler, scheduler, keeps=keeps, every=healthy_every, file=file)
        alarm_kind, vigil, late_vigil = self._kinds
        alarm = alarm_kind(training, Shelf(Path(directory), keep), recovery, mistakes, answer)
        self._vigil = (late_vigil if deferred else vigil)(training, alarm, history)
        if scaler is not None:
            self._vigil.watch_scaler(scaler)

    def watch(self, step: Step) -> Step:
        """Return `step` under watch: same arguments, same result.

        Args:
            step: `step(model, batch) -> loss`, the forward pass and the loss of one training step. The loss is a scalar tensor,
                or a mapping or sequence of them (a mapping's `"loss"`, else their sum).

        Raises:
            BisectNanError: `step` takes other arguments than these two.
            NonFiniteStep: By the returned function: the loss is non-finite.
            RecordingError: By the returned function: `step` returned no loss.
        """
        require_step(step)

        @functools.wraps(step)
        def watched(model: Any, batch: Any) -> Any:
            return self._vigil.call(step, model, batch)

        return watched

    def check(self) -> None:
        """Look at gradients, parameters, optimizer state and buffers now, as at the end of training.

        Raises:
            NonFiniteStep: One of them is non-finite.
        """
        self._vigil.check()

    def close(self) -> None:
        """Take all hooks away; what is watched is from now on called as if it were not."""
        self._vigil.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Check, unless an exception is on its way, and close."""
        try:
            if kind is None:
                self.check()
        finally:
            self.close()


def _require(on_fault: str, counts: dict[str, int]) -> None:
    if on_fault not in set(OnFault):
        raise BisectNanError(f"got on_fault={on_fault!r}", " or ".join(OnFault), "choose one of them")
    for name, count in counts.items():
        if count < 1:
            raise BisectNanError(f"got {name}={count}", "a positive number", f"leave {name} out for its default")
