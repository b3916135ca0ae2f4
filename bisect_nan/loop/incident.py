"""What a guard has seen since the latest update, and how to run it again when something came out bad."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from bisect_nan.errors import RecordingError
from bisect_nan.loop.modes import Modes
from bisect_nan.loop.training import Training
from bisect_nan.recording.capture import Observed, Step
from bisect_nan.recording.state import Surroundings, buffers
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
    """

    number: int
    step: Step
    model: Any
    batch: Any
    before: Surroundings
    modes: Modes = field(default_factory=Modes)
    loss: float = math.nan

    def again(self, **known: Any) -> Snapshot:
        """Run it under the recorder, from the state before it."""
        self.before.restore()
        with self.modes.again():
            return Snapshot.capture(self.model, self.batch, self.step, frontiers=False, **known)


@dataclass(slots=True, eq=False)
class Update:
    """A running `optimizer.step`.

    Attributes:
        number: Its place in the order of calls and updates.
        frame: The frame of torch that calls the hooks around it.
        training: Whose it is.
        args: Its arguments: a closure, usually nothing.
        kwargs: Its keyword arguments.
        before: The state before it.
        writes: How often the parameters had been written to.
        gradient_writes: How often the gradients had been written to.
        gradient_norm: Norm of the gradients.
    """

    number: int
    frame: FrameType
    training: Training
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Surroundings
    writes: list[int]
    gradient_writes: list[int]
    gradient_norm: float

    @property
    def runs(self) -> bool:
        """Whether it is still running; torch calls no hook when an exception ends it."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None

    def again(self, loss: float, **known: Any) -> Snapshot:
        """Run it under the recorder, from the state before it."""
        self.before.restore()
        return Snapshot.capture_update(
            self.training.model, self.training.optimizer, loss, *self.args, **known, **self.kwargs
        )


@dataclass(frozen=True, slots=True)
class Incident:
    """Something came out non-finite.

    Attributes:
        seen: What.
        calls: The calls that may have made it, in their order.
        update: The update that runs, or None.
    """

    seen: Observed
    calls: Sequence[Call]
    update: Update | None

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
        fitting = None
        for run in self._suspects():
            if self.update is not None:
                self.update.before.restore()
            snapshot = run(**known)
            if snapshot.observed is not None:
                return snapshot, ""
            names = snapshot.program.targets.of(self.seen.symptom.kind)
            if fitting is None and all(name in names for name in self.seen.names):
                fitting = snapshot
        if fitting is None:
            got = "nothing that the guard can run again computes it"
            do = "look at what else writes to it, or watch the step that does"
            raise RecordingError(got, "a fault of a watched step or of optimizer.step()", do)
        return replace(fitting, observed=self.seen), "it came out finite when it was run again"

    def _suspects(self) -> Iterator[Callable[..., Snapshot]]:
        """Yield what may have made the fault, each as a function that runs it again."""
        update, calls = self.update, self.calls
        if self.seen.symptom.kind in (
            "parameter",
            "optimizer",
        ):  # those calls that `optimizer.step` made, through a closure
            calls = [call for call in calls if update is not None and call.number > update.number]
        yield from (call.again for call in reversed(calls))
        if update is not None and self.seen.symptom.kind != "loss":
            loss = self.calls[-1].loss if self.calls else math.nan
            yield functools.partial(update.again, loss)

    def take_back(self) -> None:
        """Put everything back to where it was before the first of the calls, or before the update where that came first."""
        moments: list[Call | Update] = [*self.calls[:1], *([] if self.update is None else [self.update])]
        for moment in sorted(moments, key=lambda moment: -moment.number):
            moment.before.restore()


def shows_again(calls: Sequence[Call], training: Training) -> bool:
    """Whether one of the calls comes out bad when it is run again; everything is left as it is now."""
    contents = [*training.parameters(), *buffers(training.model), *training.state(), *training.gradients()]
    now = Surroundings(training.model, training.optimizer, contents=contents)
    try:
        return any(call.again().observed is not None for call in calls)
    except RecordingError:
        return True
    finally:
        now.restore()


def free_path(directory: Path, step: int) -> Path:
    """Return a path that no file has yet: `step_812.safetensors`, `step_812_2.safetensors` ..."""
    endings: Iterable[str] = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    paths = (directory / f"step_{step}{ending}.safetensors" for ending in endings)
    return next(path for path in paths if not path.exists())
