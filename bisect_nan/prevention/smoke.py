"""A few training steps before the long run: what the losses and gradients do, and where the first fault is made."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from torch import nn

from bisect_nan import finite
from bisect_nan.answer.driver import locate
from bisect_nan.errors import BisectNanError
from bisect_nan.finding import Finding, Symptom, Verdict
from bisect_nan.norms import norms
from bisect_nan.prevention import nested
from bisect_nan.prevention.printed import Printed, line, table
from bisect_nan.recording.capture import Step, require_step, scalar_loss
from bisect_nan.recording.raised import suspicion
from bisect_nan.recording.state import Surroundings, named_parameters, optimizer_tensors, remembered, require
from bisect_nan.reports.terminal import to_renderable
from bisect_nan.snapshots.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class SmokeStep:
    """The numbers of one step.

    Attributes:
        number: From 0 on.
        loss: The loss; NaN where the step raised because of one.
        terms: The other numbers that the step returned, by name, where it returned a mapping.
        gradient_norm: 2-norm of all gradients; None when the loss was bad already.
    """

    number: int
    loss: float
    terms: Mapping[str, float]
    gradient_norm: float | None


@dataclass(frozen=True, slots=True)
class SmokeTest(Printed):
    """What a few steps did.

    Attributes:
        steps: The steps, the faulty one included.
        fault: What was bad first, in a sentence; empty when every step was healthy.
        finding: What `locate` says of it; None when every step was healthy.
    """

    steps: tuple[SmokeStep, ...]
    fault: str = ""
    finding: Finding | None = None

    @property
    def ok(self) -> bool:
        """Whether every step was healthy."""
        return not self.fault

    def __rich__(self) -> RenderableType:
        """Return one row for each step, then the finding."""
        names = list(dict.fromkeys(name for step in self.steps for name in step.terms))
        made = table("step", "loss", *names, "gradient norm", left=0)
        for step in self.steps:
            cells = [step.loss, *(step.terms.get(name) for name in names), step.gradient_norm]
            made.add_row(str(step.number), *("" if cell is None else _number(cell) for cell in cells))
        if self.finding is None:
            return Group(made, line(f"{len(self.steps)} steps, all finite", "bold green"))
        parts: list[RenderableType] = [made, line(self.fault, "bold red"), to_renderable(self.finding)]
        if self.finding.verdict is Verdict.CLEAN:
            parts[2] = line("The step was run again and came out finite, so nothing is blamed.")
        return Group(*parts)


def smoke_test(
    model: nn.Module, batches: Iterable[Any], step: Step, optimizer: torch.optim.Optimizer, *, steps: int = 10
) -> SmokeTest:
    """Train for a few steps, stop at the first fault and locate it; then put everything back.

    Each step zeroes the gradients, calls `step`, runs the backward pass and updates. Afterwards model, optimizer, gradients, batches and
    random generators are as they were: a smoke test is no training.

        result = smoke_test(model, loader, step, optimizer)
        print(result)
        result.ok, result.finding

    Args:
        model: The module.
        batches: The batches; begun again where there are fewer than steps.
        step: `step(model, batch) -> loss`. Where it returns a mapping, its single numbers are the terms of the loss, told by name; the
            loss is `"loss"` of it, else their sum.
        optimizer: Its optimizer.
        steps: How many steps.

    Raises:
        BisectNanError: There are no batches, or one of the arguments is not what it should be.
        RecordingError: `step` returned no loss.
    """
    require(model, optimizer)
    require_step(step)
    if isinstance(batches, torch.Tensor | Mapping) or hasattr(batches, "_fields"):
        raise BisectNanError(f"got one batch ({type(batches).__name__})", "several", "give the loader, or [batch]")
    before = Surroundings(model, optimizer, contents=[*_state(model, optimizer), *_gradients(model, optimizer)])
    rehearsal = _Rehearsal(model, step, optimizer)
    try:
        for number, batch in zip(range(steps), itertools.cycle(batches), strict=False):
            finding = rehearsal.run(number, batch)
            if finding is not None:
                return SmokeTest(tuple(rehearsal.steps), rehearsal.fault, finding)
    finally:
        before.restore()
    if not rehearsal.steps and steps > 0:
        raise BisectNanError("got no batches", "at least one", "give the loader, or a list of batches")
    return SmokeTest(tuple(rehearsal.steps))


class _Rehearsal:
    """Runs single steps, each with all that is needed to run it again."""

    def __init__(self, model: nn.Module, step: Step, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._step, self._optimizer = model, step, optimizer
        self._known = set(self._bad())
        self.steps: list[SmokeStep] = []
        self.fault = ""

    def run(self, number: int, batch: Any) -> Finding | None:
        """Train on a copy of one batch; return what `locate` says when that went wrong."""
        model, optimizer = self._model, self._optimizer
        batch = nested.replaced(batch, _copied)
        inputs = [tensor for _, tensor in nested.tensors(batch)]
        optimizer.zero_grad()
        before = Surroundings(model, optimizer, batch=batch, contents=[*_state(model, optimizer), *inputs])
        try:
            result = self._step(model, batch)
        except Exception as error:
            before.restore()
            if suspicion(error) is not None and (finding := self._explained(number, batch)) is not None:
                return finding
            raise
        loss = scalar_loss(result)
        terms = _terms(result)
        value = float(loss.detach())
        norm = None
        if math.isfinite(value):
            loss.backward()  # type: ignore[no-untyped-call]
            (norm,) = norms(_gradients(model, optimizer))
        self.steps.append(SmokeStep(number, value, terms, norm))
        if norm is None or not math.isfinite(norm):
            self.fault = f"step {number}: {self._what(loss.detach(), norm)}{_which(terms)}"
            before.restore()
            return locate(Snapshot.capture(model, batch, self._step, step_number=number))
        return self._update(number, value, batch)

    def _explained(self, number: int, batch: Any) -> Finding | None:
        """Locate what made a step raise; None where that was no NaN and no infinity."""
        with contextlib.suppress(Exception):  # the step's own, once more
            snapshot = Snapshot.capture(self._model, batch, self._step, step_number=number)
            if snapshot.observed is not None:
                self.steps.append(SmokeStep(number, math.nan, {}, None))
                self.fault = f"step {number}: {snapshot.observed.symptom.describe()}"
                return locate(snapshot)
        return None

    def _update(self, number: int, loss: float, batch: Any) -> Finding | None:
        """Update, and locate what that spoilt."""
        model, optimizer = self._model, self._optimizer
        before = Surroundings(model, optimizer, contents=[*_state(model, optimizer), *_gradients(model, optimizer)])
        closure: list[Any] = [functools.partial(self._again, batch)] if _needs_closure(optimizer) else []
        optimizer.step(*closure)
        new = {key: tensor for key, tensor in self._bad().items() if key not in self._known}
        if not new:
            return None
        (kind, name), tensor = next(iter(new.items()))
        symptom = Symptom(kind, name, tuple(finite.labels(finite.kinds(tensor))), len(new) - 1)
        self.fault = f"step {number}: after the update {symptom.describe()}"
        before.restore()
        return locate(Snapshot.capture_update(model, optimizer, loss, *closure, step_number=number))

    def _again(self, batch: Any) -> torch.Tensor:
        """Return the loss, and leave its gradients, for an optimizer that asks for them."""
        self._optimizer.zero_grad()
        loss = scalar_loss(self._step(self._model, batch))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def _what(self, loss: torch.Tensor, norm: float | None) -> str:
        """Say what is bad before the update."""
        if norm is None:
            return Symptom("loss", "loss", tuple(finite.labels(finite.kinds(loss)))).describe()
        gradients = {name: p.grad for name, p in named_parameters(self._model, self._optimizer).items()}
        bad = {
            name: gradient for name, gradient in gradients.items() if gradient is not None and finite.probe([gradient])
        }
        first = next(iter(bad))
        labels = tuple(finite.labels(finite.kinds(bad[first])))
        return Symptom("gradient", first, labels, len(bad) - 1).describe()

    def _bad(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return parameters, optimizer state and buffers that are not finite now, by kind and name."""
        model, optimizer = self._model, self._optimizer
        named = {
            **{("parameter", name): tensor for name, tensor in named_parameters(model, optimizer).items()},
            **{("optimizer", name): tensor for name, tensor in optimizer_tensors(optimizer)},
            **{("buffer", name): tensor for name, tensor in model.named_buffers()},
        }
        if not finite.probe(named.values()):
            return {}
        return {key: tensor.detach() for key, tensor in named.items() if finite.probe([tensor])}


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors that training changes."""
    kept = [tensor for _, tensor in optimizer_tensors(optimizer)]
    return [*named_parameters(model, optimizer).values(), *remembered(model), *kept]


def _gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.grad for p in named_parameters(model, optimizer).values() if p.grad is not None]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _terms(result: Any) -> dict[str, float]:
    """Return the single numbers of a mapping that a step returned, without the loss."""
    if not isinstance(result, Mapping):
        return {}
    numbers = {str(key): nested.as_tensor(item) for key, item in result.items() if key != "loss"}
    single = {name: tensor for name, tensor in numbers.items() if tensor is not None and tensor.numel() == 1}
    return {name: float(tensor.detach().real) for name, tensor in single.items()}


def _which(terms: Mapping[str, float]) -> str:
    """Say which terms of the loss are bad, and what the others are."""
    bad = [f"{name} is {value:g}" for name, value in terms.items() if not math.isfinite(value)]
    good = [f"{name} is {value:.4g}" for name, value in terms.items() if math.isfinite(value)]
    if not bad:
        return ""
    return f"; of its terms {', '.join(bad)}" + (f" ({', '.join(good)})" if good else "")


def _number(value: float) -> str:
    return f"{value:.5g}"
