"""Arms a training loop: the first non-finite step is written to a crash snapshot, then raised.

What happens on a healthy step, and what of it is kept until the update: before the watched call the Python side of the model and
its buffers; before `optimizer.step()` the parameters and the optimizer's state. One number is read when the step returns (the loss),
one before the update (the norm of the gradients), two after it (of the parameters, and of buffers and optimizer state): a norm is
finite exactly when all elements are.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves

from bisect_nan import finite
from bisect_nan.capture import Observed, Step, scalar_loss
from bisect_nan.errors import NonFiniteStep, RecordingError
from bisect_nan.finding import Symptom
from bisect_nan.live import writes
from bisect_nan.modes import Modes
from bisect_nan.norms import norms
from bisect_nan.snapshot import Snapshot
from bisect_nan.state import Surroundings, named_parameters, optimizer_tensors

_HISTORY = 200
"""Updates whose numbers are kept as evidence."""

_capturing: ContextVar[bool] = ContextVar("_capturing", default=False)
"""Whether a guard is running something again; all guards stand aside meanwhile."""


@dataclass(slots=True, eq=False)
class _Call:
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
        """Run it under the recorder."""
        self.before.restore()
        with self.modes.again():
            return Snapshot.capture(self.model, self.batch, self.step, **known)


@dataclass(slots=True, eq=False)
class _Update:
    """A running `optimizer.step`.

    Attributes:
        number: Its place in the order of calls and updates.
        frame: The frame of torch that calls the hooks around it.
        args: Its arguments: a closure, usually nothing.
        kwargs: Its keyword arguments.
        before: The state before it.
        writes: How often the parameters had been written to.
        gradient_writes: How often the gradients had been written to.
        gradient_norm: Norm of the gradients.
    """

    number: int
    frame: FrameType
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Surroundings
    writes: list[int]
    gradient_writes: list[int]
    gradient_norm: float

    @property
    def runs(self) -> bool:
        """Whether it is still running; one that an exception ended tells nobody."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


class Guard:
    """Watches one model and one optimizer of its parameters.

    It looks at the loss when the watched step returns, at the gradients right before `optimizer.step()`, and at parameters, optimizer
    state and buffers right after. The first time that one of them is non-finite, the state before is put back, the guilty part is
    run again under the recorder, its snapshot is written, and `NonFiniteStep` is raised with the path. Model, optimizer, gradients,
    the batch and the random generators are then as they were before the step, so a loop that catches the error can go on.

        guard = Guard(model, optimizer, directory="crashes")
        step = guard.watch(step)
        for batch in loader:
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            optimizer.step()
        guard.check()

    An infinity that was there before the step (a mask among the buffers) is no fault. Gradient accumulation, closures, schedulers,
    `GradScaler`, autocast around the call, evaluation under `torch.no_grad()` through the watched step, and several guards on one
    model need nothing special. A healthy training gives the same numbers, bit by bit, as without a guard.

    A guard costs memory for a copy of the parameters and the optimizer's state while an update runs, and of the buffers from the
    call to the update. Of attributes that the step changes, containers are put back one level deep.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, directory: str | Path = "crashes"
    ) -> None:
        """Hook into the optimizer.

        Args:
            model: The module that is trained.
            optimizer: Its optimizer. For a second one, make a second guard and watch the step with both.
            directory: Where snapshots go, as `step_812.safetensors`; made when the first one is written.
        """
        self._model, self._optimizer, self._directory = model, optimizer, Path(directory)
        self._numbers = itertools.count()
        self._calls: list[_Call] = []
        self._update: _Update | None = None
        self._known: set[tuple[str, str]] | None = None
        self._writes_batch: bool | None = (
            None  # whether steps write to their batch, which is copied then; None: not known yet
        )
        self._writes_gradients: bool | None = None  # the same of updates and gradients
        self._steps = 0
        self._history: deque[Mapping[str, float]] = deque(maxlen=_HISTORY)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_update),
            optimizer.register_step_post_hook(self._after_update),
        ]

    def watch(self, step: Step) -> Step:
        """Return `step` under watch: same arguments, same result.

        Args:
            step: `step(model, batch) -> loss`, the forward pass and the loss of one training step. The loss is a scalar tensor, or a
                mapping or sequence of them (a mapping's `"loss"`, else their sum).

        Raises:
            NonFiniteStep: By the returned function: the loss is non-finite.
            RecordingError: By the returned function: `step` returned no loss.
        """

        @functools.wraps(step)
        def watched(model: Any, batch: Any) -> Any:
            if self._stands_aside():
                return step(model, batch)
            call, before = self._call(step, model, batch), _writes(_tensors(batch))
            result = step(model, batch)
            self._writes_batch = bool(self._writes_batch) or _writes(_tensors(batch)) != before
            with torch.no_grad():
                loss = scalar_loss(result).detach()
            call.loss = float(loss)
            if not math.isfinite(call.loss):
                self._crash("loss", {"loss": loss}, call)
            self._keep_if_used(call, result)
            return result

        return watched

    def check(self) -> None:
        """Look at gradients, parameters, optimizer state and buffers now, as at the end of training.

        Raises:
            NonFiniteStep: One of them is non-finite.
        """
        (norm,) = norms(self._gradients())
        if self._calls and not math.isfinite(norm):
            self._crash("gradient", self._bad_gradients())
        self._inspect()

    def close(self) -> None:
        """Take the hooks out of the optimizer; what is watched is called as if it were not."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._update = [], None
        self._calls.clear()

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

    # --- a healthy step -----------------------------------------------------------------------------------------------

    def _stands_aside(self) -> bool:
        """Whether a call is not to be watched: closed, run again by a guard, or made by an optimizer that tries out parameters."""
        if not self._hooks or _capturing.get():
            return True
        if self._update is not None and not self._update.runs:
            self._update = None
        return self._update is not None and self._update.writes != _writes(self._trained())

    def _call(self, step: Step, model: Any, batch: Any) -> _Call:
        """Remember the state before a call."""
        gradients = list(self._gradients())
        if not gradients:
            self._calls.clear()  # they were thrown away without an update
        buffers = list(model.buffers()) if isinstance(model, nn.Module) else []
        if self._known is None:
            self._known = set(self._bad_now())
        copied = [] if self._writes_batch is False else _tensors(batch)
        contents = [*buffers, *([] if self._calls else gradients), *copied]
        before = Surroundings(model, batch=batch, others=self._trained(), contents=contents)
        return _Call(next(self._numbers), step, model, batch, before)

    def _keep_if_used(self, call: _Call, result: Any) -> None:
        """Keep a call from its backward pass to the update; until then the graph of its loss holds it, and dies with it."""
        waiting = [call]

        def used(_: torch.Tensor) -> None:
            if waiting:
                self._calls.append(waiting.pop())

        for part in _tensors(result):
            if part.requires_grad and part.numel() == 1 and not part.is_leaf:
                part.register_hook(used)

    def _before_update(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _capturing.get() or (self._update is not None and self._update.runs):
            return  # run again, or by a subclass that calls `super().step()`
        self._update = None
        gradients = list(self._gradients())
        (norm,) = norms(gradients)
        if not math.isfinite(norm):
            self._crash("gradient", self._bad_gradients())
        if self._known is None:
            self._known = set(self._bad_now())
        parameters, state = self._trained(), [tensor for _, tensor in optimizer_tensors(self._optimizer)]
        contents = [
            *parameters,
            *self._model.buffers(),
            *state,
            *([] if self._writes_gradients is False else gradients),
        ]
        before = Surroundings(self._model, self._optimizer, contents=contents)
        self._update = _Update(
            next(self._numbers),
            sys._getframe(1),
            args[1:],
            kwargs,
            before,
            _writes(parameters),
            _writes(gradients),
            norm,
        )

    def _after_update(self, _: torch.optim.Optimizer, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        update = self._update
        if update is None or update.frame is not sys._getframe(1):
            return
        norm = self._inspect()
        self._writes_gradients = bool(self._writes_gradients) or _writes(self._gradients()) != update.gradient_writes
        loss = sum(call.loss for call in self._calls) / len(self._calls) if self._calls else math.nan
        numbers = {"step": self._steps, "loss": loss, "gradient_norm": update.gradient_norm, "parameter_norm": norm}
        self._history.append({name: number for name, number in numbers.items() if math.isfinite(number)})
        self._steps += 1
        self._calls.clear()
        self._update = None

    def _inspect(self) -> float:
        """Look at parameters, optimizer state and buffers, and return the norm of the parameters.

        Raises:
            NonFiniteStep: One of them became non-finite since the step began.
        """
        known = self._known or set()
        buffers = [b for name, b in self._model.named_buffers() if ("buffer", name) not in known]
        state = [tensor for name, tensor in optimizer_tensors(self._optimizer) if ("optimizer", name) not in known]
        norm, others = norms(self._trained(), [*state, *buffers])
        if math.isfinite(norm + others):
            return norm
        bad = self._bad_now()
        for kind in ("parameter", "optimizer", "buffer"):
            fresh = {
                name: tensor for (of, name), tensor in bad.items() if of == kind and not self._was_bad(of, name, tensor)
            }
            if fresh:
                self._crash(kind, fresh)
        self._known = set(bad)
        return norm

    # --- what there is to look at -------------------------------------------------------------------------------------

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    def _gradients(self) -> Iterator[torch.Tensor]:
        return (parameter.grad for parameter in self._trained() if parameter.grad is not None)

    def _bad_gradients(self) -> dict[str, torch.Tensor]:
        gradients = {id(gradient) for gradient in self._gradients()}
        named = named_parameters(self._model, self._optimizer).items()
        return {
            n: p.grad for n, p in named if p.grad is not None and id(p.grad) in gradients and finite.probe([p.grad])
        }

    def _bad_now(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the non-finite parameters, state and buffers, by kind and name."""
        trained = {id(parameter) for parameter in self._trained()}
        parameters = named_parameters(self._model, self._optimizer).items()
        named = {("parameter", name): p.detach() for name, p in parameters if id(p) in trained}
        named |= {("optimizer", name): tensor for name, tensor in optimizer_tensors(self._optimizer)}
        named |= {("buffer", name): buffer for name, buffer in self._model.named_buffers()}
        return (
            {key: tensor for key, tensor in named.items() if finite.probe([tensor])}
            if finite.probe(named.values())
            else {}
        )

    def _was_bad(self, kind: str, name: str, tensor: torch.Tensor) -> bool:
        """Whether it was non-finite before the step already, by its copy, or where it is a new tensor by its name."""
        places = [call.before for call in self._calls[:1] if kind == "buffer"]
        places += [self._update.before] if self._update is not None else []
        copies = [copy for place in places if (copy := place.copy_of(tensor)) is not None]
        return bool(finite.probe(copies[:1])) if copies else (kind, name) in (self._known or ())

    # --- a step that came out bad -------------------------------------------------------------------------------------

    def _crash(self, kind: str, bad: Mapping[str, torch.Tensor], call: _Call | None = None) -> NoReturn:
        """Write the snapshot of the step that came out bad, put everything back as it was before, and raise.

        Args:
            kind: Kind of the symptom.
            bad: The non-finite tensors of that kind, by name.
            call: The call that returned the loss, for a loss.

        Raises:
            NonFiniteStep: Always.
        """
        first = next(iter(bad))
        symptom = Symptom(kind, first, tuple(finite.labels(finite.kinds(bad[first]))), len(bad) - 1)
        seen = Observed(symptom, tuple(bad), bad[first].detach().clone())
        path, problem = None, ""
        token = _capturing.set(True)
        try:
            snapshot, problem = self._capture(seen, call)
            path = snapshot.save(_free(self._directory, self._steps))
        except Exception as error:  # noqa: BLE001  (whatever the step raises when it runs again: the fault itself must be told)
            problem = str(error) or type(error).__name__
        finally:
            self._take_back(call)
            _capturing.reset(token)
        raise NonFiniteStep(path, symptom, problem)

    def _capture(self, seen: Observed, call: _Call | None) -> tuple[Snapshot, str]:
        """Run again what may be at fault, the likeliest first, until a fault shows.

        Args:
            seen: What came out non-finite.
            call: The call that returned the loss, for a loss.

        Returns:
            The snapshot, and what to know about it. Where no fault shows again it is the latest run that computes what was seen to
            be bad, together with that: locating it will say that it is not reproduced.

        Raises:
            RecordingError: There is nothing to run again.
        """
        known: dict[str, Any] = {"history": tuple(self._history), "step_number": self._steps}
        fitting = None
        for run in self._suspects(seen.symptom.kind, call):
            if self._update is not None:
                self._update.before.restore()
            snapshot = run(**known)
            if snapshot.observed is not None:
                return snapshot, ""
            names = snapshot.program.targets.of(seen.symptom.kind)
            fitting = fitting or (snapshot if all(name in names for name in seen.names) else None)
        if fitting is None:
            got = "nothing that a guard could run again shows the fault"
            raise RecordingError(
                got, "a fault of a watched step or of optimizer.step()", "look at what else writes to it"
            )
        return replace(fitting, observed=seen), "the step was finite when it ran again"

    def _suspects(self, kind: str, call: _Call | None) -> Iterator[Callable[..., Snapshot]]:
        """Yield what may have made a fault, each as a function that runs it again, the likeliest first."""
        calls = sorted([call] if call is not None else self._calls, key=lambda c: -c.number)
        update = self._update
        if kind in (
            "parameter",
            "optimizer",
        ):  # of calls only those that `optimizer.step` made itself, through a closure
            calls = [c for c in calls if update is not None and c.number > update.number]
        yield from (c.again for c in calls)
        if update is not None and call is None:
            loss = self._calls[-1].loss if self._calls else math.nan
            yield functools.partial(
                Snapshot.capture_update, self._model, self._optimizer, loss, *update.args, **update.kwargs
            )

    def _take_back(self, call: _Call | None) -> None:
        """Put everything back to where it was before the call that returned a bad loss, or before the whole step."""
        calls = sorted([call] if call is not None else self._calls, key=lambda c: c.number)
        moments: list[_Call | _Update] = [*calls[:1], *([] if self._update is None else [self._update])]
        for moment in sorted(moments, key=lambda m: -m.number):
            moment.before.restore()
        if call is None or self._update is not None:
            self._calls.clear()
        self._update = None


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _writes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written to; torch does not count it for those made in inference mode."""
    return [0 if tensor.is_inference() else writes(tensor) for tensor in tensors]


def _free(directory: Path, step: int) -> Path:
    """Return a path that no file has yet: `step_812.safetensors`, `step_812_2.safetensors` ..."""
    endings = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    paths = (directory / f"step_{step}{ending}.safetensors" for ending in endings)
    return next(path for path in paths if not path.exists())
