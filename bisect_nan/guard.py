"""Arms a training loop: the first non-finite step is written to a crash snapshot, then raised."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bisect_nan import finite
from bisect_nan.capture import Observed, Step, scalar_loss
from bisect_nan.errors import BisectNanError, NonFiniteStep
from bisect_nan.finding import Symptom
from bisect_nan.snapshot import Snapshot
from bisect_nan.state import Surroundings, optimizer_tensors

_HISTORY = 200
"""Steps whose loss is kept as evidence."""


@dataclass(frozen=True, slots=True)
class _Call:
    """One watched call of the step, with the state before it."""

    step: Step
    model: Any
    batch: Any
    before: Surroundings


class Guard:
    """Watches one model and its optimizer.

    It looks at the loss when the watched step returns, at the gradients right before `optimizer.step()` and at parameters, buffers
    and optimizer state right after. The first time that one of them is non-finite, the state before the step is restored, the
    step is run again under the recorder, the snapshot is written, and `NonFiniteStep` is raised with its path.

    Before every `optimizer.step()` the parameters and the optimizer's state are copied, so that the update can be taken back.

        guard = Guard(model, optimizer, directory="crashes")
        step = guard.watch(step)
        for batch in loader:
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
        guard.check()
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, directory: str | Path = "crashes") -> None:
        """Hook into the optimizer.

        Args:
            model: The module that is trained.
            optimizer: Its optimizer.
            directory: Where snapshots go; made when the first one is written.
        """
        self._model, self._optimizer, self._directory = model, optimizer, Path(directory)
        self._calls: list[_Call] = []
        self._update: Surroundings | None = None
        self._known: set[str] = set()
        self._depth, self._busy = 0, False
        self._steps, self._loss = 0, float("nan")
        self._history: deque[Mapping[str, float]] = deque(maxlen=_HISTORY)
        optimizer.register_step_pre_hook(lambda *_: self._before_update())
        optimizer.register_step_post_hook(lambda *_: self._after_update())

    def watch(self, step: Step) -> Step:
        """Return `step` under watch: same arguments, same result.

        Args:
            step: `step(model, batch) -> loss`, the forward pass and the loss of one training step.
        """

        @functools.wraps(step)
        def watched(model: Any, batch: Any) -> Any:
            if self._busy:
                return step(model, batch)
            call = _Call(step, model, batch, Surroundings(model, buffers=True))
            self._calls.append(call)
            self._depth = 0
            result = step(model, batch)
            loss = scalar_loss(result).detach()
            if finite.probe([loss]):
                self._crash([call], "loss", {"loss": loss})
            self._loss = loss
            return result

        return watched

    def check(self) -> None:
        """Look at gradients, parameters, buffers and optimizer state now, as at the end of training.

        Raises:
            NonFiniteStep: One of them is non-finite.
        """
        if self._calls:
            self._crash_if(self._calls, "gradient", self._gradients())
        self._crash_if(self._calls, "parameter", self._parameters())
        self._crash_if(self._calls, "buffer", self._model.named_buffers())

    def _before_update(self) -> None:
        """Check the gradients; a subclass that calls `super().step()` gets here once for every level."""
        self._depth += 1
        if self._busy or self._depth > 1:
            return
        self._crash_if(self._calls, "gradient", self._gradients())
        self._update = Surroundings(self._model, self._optimizer, contents=True)
        self._known = {name for name, tensor in optimizer_tensors(self._optimizer) if finite.probe([tensor])}

    def _after_update(self) -> None:
        self._depth -= 1
        if self._busy or self._depth > 0:
            return
        state = [(name, tensor) for name, tensor in optimizer_tensors(self._optimizer) if name not in self._known]
        self._crash_if(None, "parameter", self._parameters())
        self._crash_if(None, "optimizer", state)
        self._crash_if(self._calls, "buffer", self._model.named_buffers())
        self._history.append({"step": self._steps, "loss": float(self._loss)})
        self._steps += 1
        self._calls.clear()
        self._update = None

    def _gradients(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, p.grad) for name, p in self._model.named_parameters() if p.grad is not None)

    def _parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        return ((name, parameter.detach()) for name, parameter in self._model.named_parameters())

    def _crash_if(self, calls: list[_Call] | None, kind: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = dict(tensors)
        if finite.probe(named.values()):
            self._crash(calls, kind, {name: tensor for name, tensor in named.items() if finite.probe([tensor])})

    def _crash(self, calls: list[_Call] | None, kind: str, bad: Mapping[str, torch.Tensor]) -> None:
        """Write the snapshot of the step that came out bad and raise.

        Args:
            calls: The watched calls since the latest update, one of which is at fault; None for the update itself.
            kind: Kind of the symptom.
            bad: The non-finite tensors of that kind.

        Raises:
            NonFiniteStep: Always.
        """
        first = next(iter(bad))
        labels = tuple(finite.labels(finite.kinds(bad[first])))
        symptom = Symptom(kind, first, labels, len(bad) - 1)
        seen = Observed(symptom, tuple(bad), bad[first].detach().clone())
        self._busy = True
        try:
            path, problem = self._save(calls, seen), ""
        except (BisectNanError, OSError, RuntimeError) as error:
            path, problem = None, f"no snapshot was written: {error}"
        finally:
            self._busy = False
        self._calls.clear()
        raise NonFiniteStep(path, symptom, problem)

    def _save(self, calls: list[_Call] | None, seen: Observed) -> Path:
        snapshot = self._capture_update() if calls is None else self._capture_call(calls)
        if snapshot.observed is None:
            snapshot = replace(snapshot, observed=seen)  # the run again was clean: the search will say so
        self._directory.mkdir(parents=True, exist_ok=True)
        return snapshot.save(self._directory / f"step_{self._steps}.safetensors")

    def _capture_update(self) -> Snapshot:
        assert self._update is not None
        self._update.restore()
        return Snapshot.capture_update(
            self._model, self._optimizer, float(self._loss), history=tuple(self._history), step_number=self._steps
        )

    def _capture_call(self, calls: list[_Call]) -> Snapshot:
        """Run the calls again, the latest first, until one shows a fault (gradients add up over several)."""
        for call in reversed(calls):
            call.before.restore()
            snapshot = Snapshot.capture(
                call.model, call.batch, call.step, history=tuple(self._history), step_number=self._steps
            )
            if snapshot.observed is not None:
                break
        return snapshot
