"""What a guard has seen since the latest update, and how to run it again when something came out bad."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch

from bisect_nan.errors import RecordingError
from bisect_nan.loop.healthy import HealthyState
from bisect_nan.loop.modes import Modes
from bisect_nan.loop.training import Training
from bisect_nan.recording.capture import Step, scalar_loss
from bisect_nan.recording.live import counts
from bisect_nan.recording.outcome import Observed
from bisect_nan.recording.state import Surroundings, remembered
from bisect_nan.snapshots.snapshot import Snapshot


@dataclass(slots=True, eq=False)
class Call:
    """One watched call of the step.

    Attributes:
        number: Its place in the order of calls and updates.
        step: What was called.
        model: Its first argument.
        batch: Its second argument.
        before: The state before it.
        modes: What torch was switched to.
        loss: What it returned.
        reading: The loss on its way to the host, where it is read a step later.
    """

    number: int
    step: Step
    model: Any
    batch: Any
    before: Surroundings
    modes: Modes = field(default_factory=Modes)
    loss: float = math.nan
    reading: Any = None

    def again(self, scale: float = 1.0, **known: Any) -> Snapshot:
        """Run it under the recorder, from the state before it, the loss multiplied with a scale as a `GradScaler` does."""
        self.before.restore()
        with self.modes.again():
            step = self.step if scale == 1.0 else functools.partial(_scaled, self.step, scale)
            return Snapshot.capture(self.model, self.batch, step, frontiers=False, **known)


@dataclass(slots=True, eq=False)
class Update:
    """A running `optimizer.step`.

    Attributes:
        number: Its place in the order of calls and updates.
        frame: The frame of torch that calls the hooks around it.
        training: Whose it is.
        args: Its arguments: a closure, usually nothing.
        kwargs: Its keyword arguments.
        before: The state before it; None where the update is known to be healthy.
        writes: How often the parameters had been written to.
        gradient_writes: How often the gradients had been written to.
        gradient_norm: Norm of the gradients.
        scale: What a `GradScaler` multiplies losses with.
        left_out: Whether it is to be undone.
    """

    number: int
    frame: FrameType
    training: Training
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    before: Surroundings | None = None
    writes: list[int] = field(default_factory=list)
    gradient_writes: list[int] = field(default_factory=list)
    gradient_norm: float = math.nan
    scale: float = math.nan
    left_out: bool = False

    def again(self, loss: float, **known: Any) -> Snapshot:
        """Run it under the recorder, from the state before it."""
        assert self.before is not None
        self.before.restore()
        return Snapshot.capture_update(
            self.training.model, self.training.optimizer, loss, *self.args, **known, **self.kwargs
        )


def copied_update(
    training: Training,
    number: int,
    frame: FrameType,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    gradients: bool,
) -> Update:
    """Return an update with a copy of all that it can change; of the gradients only where asked for."""
    parameters, given = training.parameters(), training.gradients()
    contents = [*parameters, *remembered(training.model), *training.state(), *(given if gradients else ())]
    before = Surroundings(training.model, training.optimizer, contents=contents)
    return Update(number, frame, training, args, kwargs, before, counts(parameters), counts(given))


@dataclass(frozen=True, slots=True)
class Incident:
    """Something came out non-finite.

    Attributes:
        seen: What.
        calls: The calls that may have made it, in their order.
        update: The update that runs, or None.
        scale: What the loss was multiplied with.
        base: A state to start from, where parameters have changed since the calls; None where they have not.
    """

    seen: Observed
    calls: Sequence[Call]
    update: Update | None
    scale: float = 1.0
    base: HealthyState | None = None

    def capture(self, **known: Any) -> tuple[Snapshot, str]:
        """Run again what may be at fault, the likeliest first, until a fault shows.

        Args:
            known: What the snapshot is to say about the step.

        Returns:
            The snapshot, and what to know about it. Where no fault shows again it is a run that computes what was seen to be bad,
            together with what was seen; locating it will say that it is not reproduced.

        Raises:
            RecordingError: There is nothing to run again.
        """
        fitting = snapshot = None
        for run in self._suspects():
            snapshot = self._from_the_start(run, known)
            if snapshot.observed is not None:
                return snapshot, ""
            names = snapshot.program.targets.of(self.seen.symptom.kind)
            if fitting is None and all(name in names for name in self.seen.names):
                fitting = run, snapshot
        if fitting is None:
            got = "nothing that the guard can run again computes it"
            do = "look at what else writes to it, or watch the step that does"
            raise RecordingError(got, "a fault of a watched step or of optimizer.step()", do)
        run, clean = fitting
        if clean is not snapshot:  # it refers to tensors that the runs after it have written to
            clean = self._from_the_start(run, known)
        return replace(clean, observed=self.seen), "it came out finite when it was run again"

    def _from_the_start(self, run: Callable[..., Snapshot], known: Mapping[str, Any]) -> Snapshot:
        if self.base is not None:
            self.base.restore()
        if self.update is not None and self.update.before is not None:
            self.update.before.restore()
        return run(**known)

    def _suspects(self) -> Iterator[Callable[..., Snapshot]]:
        """Yield what may have made the fault, each as a function that runs it again."""
        update, calls = self.update, self.calls
        if self.seen.symptom.kind in (
            "parameter",
            "optimizer",
        ):  # those calls that `optimizer.step` made, through a closure
            calls = [call for call in calls if update is not None and call.number > update.number]
        yield from (functools.partial(call.again, self.scale) for call in reversed(calls))
        if update is not None and update.before is not None and self.seen.symptom.kind != "loss":
            loss = self.calls[-1].loss if self.calls else math.nan
            yield functools.partial(update.again, loss)
        if self.base is not None and calls:
            yield functools.partial(_update_again, self.base.training, calls)

    def take_back(self) -> None:
        """Put everything back to where it was before the first of the calls, or before the update where that came first."""
        moments: list[Call | Update] = [*self.calls[:1], *([] if self.update is None else [self.update])]
        for moment in sorted(moments, key=lambda moment: -moment.number):
            if moment.before is not None:
                moment.before.restore()
        if self.base is not None:
            self.base.restore()


def _update_again(training: Training, calls: Sequence[Call], **known: Any) -> Snapshot:
    """Make the gradients of some calls anew, and run an update with them under the recorder."""
    training.optimizer.zero_grad()
    for call in calls:
        with call.modes.again():
            loss = scalar_loss(call.step(call.model, call.batch))
        loss.backward()  # type: ignore[no-untyped-call]
    return Snapshot.capture_update(training.model, training.optimizer, float(loss), **known)


def _scaled(step: Step, scale: float, model: Any, batch: Any) -> torch.Tensor:
    return scalar_loss(step(model, batch)) * scale


def shows_again(calls: Sequence[Call], training: Training) -> bool:
    """Whether one of the calls comes out bad when it is run again; everything is left as it is now."""
    contents = [*training.parameters(), *remembered(training.model), *training.state(), *training.gradients()]
    now = Surroundings(training.model, training.optimizer, contents=contents)
    try:
        return any(call.again().observed is not None for call in calls)
    except RecordingError:
        return True
    finally:
        now.restore()
