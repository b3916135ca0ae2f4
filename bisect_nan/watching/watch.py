"""Watches a training script that knows nothing of it: records every step as it runs, and tells the first that is non-finite.

A step is what happens from one `optimizer.step` to the next. Nothing is run a second time, so a fault that would not come again
is caught all the same.

A backward pass that comes out bad makes a suspect: the program up to there. It is a fault once an optimizer is about to use its
gradients; a scaler that skips the update, or a script that throws the gradients away, acquits it. The update is a program of its
own, unless a graph waits for its backward pass: then it is a part of the program before it.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.loop.frames import runs
from bisect_nan.norms import norms
from bisect_nan.recording.outcome import Recording, Update, outcome_of_value
from bisect_nan.recording.raised import reason
from bisect_nan.recording.recorder import Recorder
from bisect_nan.recording.state import optimizer_tensors
from bisect_nan.snapshots.snapshot import Snapshot
from bisect_nan.watching.suspects import kept
from bisect_nan.watching.tape import Tape

_HISTORY = 200
"""Updates whose numbers are kept as evidence."""


@dataclass(frozen=True, slots=True, eq=False)
class Fault:
    """A step came out non-finite.

    Attributes:
        step: Its number: how many updates had been made before.
        snapshot: The recorded step; None where the step was not recorded.
        problem: Why it could not be recorded; None where it was, or where nobody tried.
    """

    step: int
    snapshot: Snapshot | None
    problem: RecordingError | None = None


@dataclass(slots=True, eq=False)
class _Running:
    """An `optimizer.step` that runs.

    Attributes:
        frame: The frame of torch that calls the hooks around it.
        phase: The phase that it interrupts.
        joint: Whether it is part of the program that was recorded before it.
        update: Its recording; None while nothing is recorded.
    """

    frame: FrameType
    phase: Phase = Phase.FORWARD
    joint: bool = False
    update: Update | None = None


class Watch:
    """Watches the optimizers and backward passes of the thread that starts it.

    Attributes:
        steps: How many updates have been made.
        unrecorded: How many of them could not be recorded, from the first to be recorded on.
        problem: Why the latest of these could not.
    """

    def __init__(self, *, from_step: int, caught: Callable[[Fault], object]) -> None:
        """Prepare.

        Args:
            from_step: The first step to be recorded; before it only the parameters are looked at, after every update.
            caught: Called with the first fault, when nothing is watched any more; may raise, to end the script.
        """
        self.steps = self.unrecorded = 0
        self.problem: RecordingError | None = None
        self._from_step, self._caught, self._thread = from_step, caught, threading.get_ident()
        self._tape = Tape(self._forget_broken_update, self._snapshot, self._end)
        self._open, self._recording = contextlib.ExitStack(), contextlib.ExitStack()
        self._over = False
        self._running: _Running | None = None
        self._gradient_norm = self._norm = math.nan
        self._history: deque[Mapping[str, float]] = deque(maxlen=_HISTORY)
        self._looks = True  # whether the parameters are looked at while nothing is recorded

    def start(self) -> None:
        """Watch from now on."""
        self._open.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._open.callback(register_optimizer_step_post_hook(self._after_update).remove)
        here = weakref.ref(self)  # a forked worker of a data loader has nothing to watch
        os.register_at_fork(after_in_child=lambda: None if (watch := here()) is None else watch.close())
        if self._from_step == 0:
            self._recording.enter_context(self._tape.open())

    def ended(self, error: BaseException | None) -> Fault | None:
        """Return the fault that the script has ended at by itself; None where nothing tells of one.

        Many scripts look at their loss and stop; libraries raise when they are given a NaN.

        Args:
            error: What the script raised, while that is handled; None when it came to its end, also by `sys.exit(0)`.
        """
        tape, recorder, snapshot = self._tape, self._tape.recorder, None
        if self._over or self._forget_broken_update() or recorder is None:
            return None
        if isinstance(error, Exception | SystemExit):
            with tape.working():
                if tape.suspect is not None and tape.suspect.stands():
                    snapshot = tape.suspect.snapshot
                elif (found := reason(recorder, error)) is not None:
                    snapshot = self._snapshot(kept(recorder, outcome_of_value(recorder, *found)))
        snapshot = snapshot or tape.looks.nan
        self._stop()
        return None if snapshot is None else Fault(self.steps, snapshot)

    def close(self) -> None:
        """Watch no longer, and leave nothing behind."""
        self._stop()
        self._open.close()

    def _stop(self) -> None:
        """Watch no longer. The hooks stay: torch may be going through them."""
        self._over, self._running = True, None
        self._recording.close()

    # --- before an update -----------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        """Look at what the update is going to use, and record it."""
        self._forget_broken_update()
        if self._over or self._running is not None or threading.get_ident() != self._thread:
            return  # called by a subclass through `super().step()`, or by an optimizer around this one
        tape, recorder = self._tape, self._tape.recorder
        self._running, tape.updating = _Running(sys._getframe(1)), True
        if recorder is None:
            if self.steps == 0:
                (self._norm,) = norms(_parameters(optimizer))
                self._looks = math.isfinite(self._norm)
            return
        fault = None
        with tape.working():
            tape.names.use(optimizer)
            fault = None if _skips(optimizer) else self._fault_before(recorder, optimizer)
        if fault is not None:
            self._end(fault)
            return
        self._running.joint, self._running.phase = tape.goes_on, recorder.phase
        recorder = recorder if self._running.joint else tape.new_recorder()
        with tape.working():
            self._running.update = Update(recorder, optimizer, tape.names.parameters(), tape.names.buffers())
        if self._running.update is not None and not self._running.joint:
            tape.use(recorder)

    def _fault_before(self, recorder: Recorder, optimizer: torch.optim.Optimizer) -> Snapshot | None:
        parameters, suspect = _parameters(optimizer), self._tape.suspect
        (self._gradient_norm,) = norms([p.grad for p in parameters if p.grad is not None])
        if suspect is not None and suspect.stands(parameters):
            return suspect.snapshot
        if math.isfinite(self._gradient_norm):
            return None
        return self._snapshot(self._tape.judge_gradients(recorder, parameters))

    # --- after an update ------------------------------------------------------------------------------------------------

    def _after_update(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        """Look at what the update has made."""
        running, tape = self._running, self._tape
        if running is None or running.frame is not sys._getframe(1):
            return
        self._running, tape.updating, recorder, fault = None, False, tape.recorder, None
        if recorder is None or running.update is None:
            if self._look(optimizer):
                self._end(None)
                return
        else:
            with tape.working():
                fault = self._fault_after(recorder, optimizer, running.update)
            if fault is not None:
                self._end(fault)
                return
            recorder.phase = running.phase
        self._history.append(self._numbers())
        if self.steps >= self._from_step:
            if tape.problem is not None:
                self.unrecorded, self.problem = self.unrecorded + 1, tape.problem
            tape.updated(joint=running.joint and recorder is not None)
        self.steps += 1
        if self.steps == self._from_step:
            self._open.enter_context(tape.open())

    def _fault_after(self, recorder: Recorder, optimizer: torch.optim.Optimizer, update: Update) -> Snapshot | None:
        tape = self._tape
        buffers = [buffer for buffer in tape.names.buffers().values() if recorder.values.wrote(buffer)]
        state = [tensor for _, tensor in optimizer_tensors(optimizer)]
        norm, rest = norms(_parameters(optimizer), [*state, *buffers])
        if math.isfinite(norm) and math.isfinite(rest):
            self._norm = norm
            return None
        recording = update.outcome(tape.losses[-1] if tape.losses else math.nan, tape.names.buffers())
        if recording.observed is None:
            return None
        if tape.suspect is not None:  # a closure's loss or gradients came first
            return tape.suspect.snapshot
        return self._snapshot(kept(recorder, recording))

    def _look(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the parameters have become bad by an update that was not recorded."""
        if self._looks:
            (self._norm,) = norms(_parameters(optimizer))
        return self._looks and not math.isfinite(self._norm)

    def _end(self, snapshot: Snapshot | None) -> None:
        """Watch no longer, and tell the fault."""
        problem = self._tape.problem
        self._stop()
        self._caught(Fault(self.steps, snapshot, problem))

    def _forget_broken_update(self) -> bool:
        """Whether an update runs; one that an exception has ended is forgotten."""
        if self._running is not None and not runs(self._running.frame):
            self._running, self._tape.updating = None, False
            if self._tape.recorder is not None:
                self._tape.begin()
        return self._running is not None

    def _snapshot(self, recording: Recording) -> Snapshot:
        return Snapshot.of(recording, history=[*self._history, self._numbers()], step_number=self.steps)

    def _numbers(self) -> dict[str, float]:
        """Return the numbers of this step, as far as it has come."""
        losses = self._tape.losses
        loss = sum(losses) / len(losses) if losses else math.nan
        numbers = {"step": self.steps, "loss": loss, "gradient_norm": self._gradient_norm, "parameter_norm": self._norm}
        return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _skips(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scaler has told a fused optimizer to leave this update out."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0
