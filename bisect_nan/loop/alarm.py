"""What happens at a fault: the guilty part is run again and saved, and the training is put where it can go on from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path

import torch

from bisect_nan import finite
from bisect_nan.errors import BisectNanError, NonFiniteStep
from bisect_nan.finding import Symptom
from bisect_nan.loop.healthy import HealthyState
from bisect_nan.loop.incident import Call, Incident, Update
from bisect_nan.loop.mistakes import Mistake, Mistakes
from bisect_nan.loop.recovery import OnFault, Recovery, logger
from bisect_nan.loop.shelf import Shelf
from bisect_nan.loop.training import Training
from bisect_nan.recording.live import uncounted
from bisect_nan.recording.outcome import Observed
from bisect_nan.recording.raised import suspicion
from bisect_nan.recording.state import Surroundings, buffers, remembered

capturing: ContextVar[bool] = ContextVar("capturing", default=False)
"""Whether a guard is running something again; all guards stand aside meanwhile."""

_DONE = {
    OnFault.SKIP: "the step is left out, and the training goes on",
    OnFault.ROLLBACK: "the step is left out, and the training goes on from the state before it",
    OnFault.WARN: "the training goes on with what is not finite",
}


class Alarm:
    """Answers the faults of one training."""

    def __init__(
        self, training: Training, shelf: Shelf, recovery: Recovery, mistakes: Mistakes, on_fault: OnFault
    ) -> None:
        """Be ready.

        Args:
            training: The model and its optimizer.
            shelf: Where snapshots go.
            recovery: How the training goes on.
            mistakes: Where mistakes of the loop are told.
            on_fault: What to do once the snapshot is written.
        """
        self._training, self._shelf = training, shelf
        self.recovery, self.mistakes = recovery, mistakes
        self._on_fault = on_fault
        self._rings = False  # a fault has been told, and no healthy step was seen since

    @property
    def leaves_out(self) -> bool:
        """Whether a bad step is left out, and the training goes on."""
        return self._on_fault in (OnFault.SKIP, OnFault.ROLLBACK)

    def healthy(self) -> None:
        """Note an update that came out finite."""
        self._rings = False
        self.recovery.update()

    def sound(
        self,
        kind: str,
        bad: Mapping[str, torch.Tensor],
        calls: Sequence[Call],
        update: Update | None,
        *,
        step: int,
        thrown: int,
        history: Sequence[Mapping[str, float]],
        scale: float = 1.0,
        base: HealthyState | None = None,
    ) -> None:
        """Save a fault, put everything back as it was before the step unless the training is to go on with it, and tell.

        Args:
            kind: Kind of the symptom.
            bad: The non-finite tensors of that kind, by name.
            calls: The calls that may have made them.
            update: The update that runs, or None.
            step: Number of the step: how many updates were made before.
            thrown: How often the loop has thrown gradients away that a call was left out of.
            history: Numbers of the steps up to it.
            scale: What a `GradScaler` multiplied the loss with, where that is what made the fault.
            base: The state to go back to, where the fault is told one step late.

        Raises:
            NonFiniteStep: The training is not to go on.
        """
        if self._rings and self._on_fault is OnFault.WARN:
            return  # what is bad stays bad: one message is enough
        self._rings = True
        clipped = kind == "gradient" and zeros_beside(bad, self._training.gradients())
        first = next(iter(bad))
        symptom = Symptom(kind, first, tuple(finite.labels(finite.kinds(bad[first]))), len(bad) - 1)
        seen = Observed(symptom, tuple(bad), bad[first].detach().clone())
        ordered = sorted(calls, key=lambda call: call.number)
        path, problem, again = self._save(Incident(seen, ordered, update, scale, base), step, history)
        if base is not None and again is not None:
            symptom = again.symptom  # told late, when what was seen is gone
        fault = NonFiniteStep(path, symptom, problem)
        if clipped or (again is not None and spread(seen.names, again)):
            fault.add_note(f"note: {Mistake.NORM_IGNORED}")
        if self._on_fault is OnFault.RAISE or self.recovery.exhausted:
            raise fault
        done = _DONE[self._on_fault]
        if self._on_fault is not OnFault.WARN:
            self.recovery.fault(step, thrown, ordered[-1].batch if ordered else None)
            if self._on_fault is OnFault.ROLLBACK and self.recovery.go_back():
                done = "the training goes on from an earlier healthy state"
        logger.warning("step %d: %s\n%s", step, "\n".join([str(fault), *getattr(fault, "__notes__", [])]), done)

    def explain(self, error: Exception, call: Call, *, step: int, history: Sequence[Mapping[str, float]]) -> None:
        """Save a call that raised because of what is not finite; the exception, which the loop gets, is given a note of it.

        Args:
            error: What it raised.
            call: The call.
            step: Number of the step.
            history: Numbers of the steps up to it.
        """
        if (seen := suspicion(error)) is None:
            return
        name, tensor = seen
        found = Observed(Symptom("value", name, tuple(finite.labels(finite.kinds(tensor)))), (name,), tensor)
        path, _, again = self._save(Incident(found, [call], None), step, history)
        if path is not None and again is not None:
            error.add_note(f"bisect_nan: {NonFiniteStep(path, again.symptom)}")

    def _save(
        self, incident: Incident, step: int, history: Sequence[Mapping[str, float]]
    ) -> tuple[Path | None, str, Observed | None]:
        """Run a step again, save it, and put everything back; return the path, what to know about it, and what was seen again."""
        path, problem, again = None, self._shelf.refusal(), None
        with self._aside(incident):
            try:
                if not problem:
                    snapshot, problem = incident.capture(history=history, step_number=step)
                    again = snapshot.observed
                    path = self._shelf.put(snapshot, step)
            except Exception as error:  # noqa: BLE001  (whatever keeps it from being written, the fault has to be told)
                problem = error.got if isinstance(error, BisectNanError) else f"{type(error).__name__}: {error}"
        return path, problem, again

    @contextlib.contextmanager
    def _aside(self, incident: Incident) -> Iterator[None]:
        """Let guards stand aside, and put everything back in the end, however it ends."""
        now = self._everything() if self._on_fault is OnFault.WARN else None
        token = capturing.set(True)
        try:
            with uncounted([*self._training.parameters(), *buffers(self._training.model)]):
                try:
                    yield
                finally:
                    incident.take_back() if now is None else now.restore()
        finally:
            capturing.reset(token)

    def _everything(self) -> Surroundings:
        training = self._training
        contents = [*training.parameters(), *remembered(training.model), *training.state(), *training.gradients()]
        return Surroundings(training.model, training.optimizer, contents=contents)


def zeros_beside(bad: Mapping[str, torch.Tensor], gradients: Sequence[torch.Tensor]) -> bool:
    """Whether all gradients beside the bad ones are zero, as clipping to an infinite norm leaves them."""
    others = [gradient for gradient in gradients if not any(gradient is one for one in bad.values())]
    return bool(others) and not any(bool(gradient.any()) for gradient in others)


def spread(seen: Sequence[str], again: Observed) -> bool:
    """Whether more gradients were bad in the loop than in the step alone: clipping multiplies all of them with a NaN."""
    return again.symptom.kind == "gradient" and set(again.names) < set(seen)
