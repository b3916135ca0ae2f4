"""Arms a training loop: the first non-finite step is written to a crash snapshot, then raised.

On a healthy step one number is read when the step returns (the loss), one before the update (the norm of the gradients), and two
after it (of the parameters, and of optimizer state and buffers): a norm is finite exactly when all elements are.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves

from bisect_nan import finite
from bisect_nan.errors import BisectNanError, NonFiniteStep
from bisect_nan.finding import Symptom
from bisect_nan.loop.incident import Call, Incident, Update, free_path, shows_again
from bisect_nan.loop.training import Key, Training
from bisect_nan.norms import norms
from bisect_nan.recording.capture import Observed, Step, scalar_loss
from bisect_nan.recording.live import writes
from bisect_nan.recording.state import Surroundings, buffers

_HISTORY = 200
"""Updates whose numbers are kept as evidence."""

_capturing: ContextVar[bool] = ContextVar("_capturing", default=False)
"""Whether a guard is running something again; all guards stand aside meanwhile."""


class Guard:
    """Watches one model and one optimizer of its parameters.

    It looks at the loss when the watched step returns, at the gradients right before `optimizer.step()`, and at parameters,
    optimizer state and buffers right after. The first time that one of them is non-finite, the state before is put back, the
    guilty part is run again under the recorder, its snapshot is written, and `NonFiniteStep` is raised with the path. Model,
    optimizer, gradients, batch and random generators are then as they were before the step, so a loop that catches it can go on.

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

    Gradient accumulation, closures, schedulers, `GradScaler`, autocast around the call, evaluation through the watched step under
    `torch.no_grad()` and several guards on one model need nothing special. An infinity that was there before the step (a mask
    among the buffers) is no fault. A healthy training gives the same numbers as without a guard, bit by bit.

    The price is a copy of the buffers (and of gradients that the backward pass adds to) from the call to the update, and of
    parameters, buffers and optimizer state while `optimizer.step()` runs; batches and gradients are copied where steps or updates
    write to them. Of attributes that the step changes, containers are put back one level deep.
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
        self._training, self._directory = Training(model, optimizer), Path(directory)
        self._numbers = itertools.count()
        self._calls: list[Call] = []  # those whose gradients the next update uses
        self._update: Update | None = None
        self._known: set[Key] | None = None  # what is non-finite without being a fault; None: not looked yet
        # Whether steps write to their batch, and updates to gradients, which are copied then; None: not known yet.
        self._writes_batch: bool | None = None
        self._writes_gradients: bool | None = None
        self._steps, self._norm = 0, math.nan  # number of the step, and norm of the parameters before its update
        self._history: deque[Mapping[str, float]] = deque(maxlen=_HISTORY)
        hooks = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks = [hooks[0](self._before_update), hooks[1](self._after_update)]

    def watch(self, step: Step) -> Step:
        """Return `step` under watch: same arguments, same result.

        Args:
            step: `step(model, batch) -> loss`, the forward pass and the loss of one training step. The loss is a scalar tensor,
                or a mapping or sequence of them (a mapping's `"loss"`, else their sum).

        Raises:
            NonFiniteStep: By the returned function: the loss is non-finite.
            RecordingError: By the returned function: `step` returned no loss.
        """

        @functools.wraps(step)
        def watched(model: Any, batch: Any) -> Any:
            if self._stands_aside():
                return step(model, batch)
            call, before = self._begin(step, model, batch), _writes(_tensors(batch))
            result = step(model, batch)
            self._writes_batch = bool(self._writes_batch) or _writes(_tensors(batch)) != before
            with torch.no_grad():
                loss = scalar_loss(result).detach()
            call.loss = float(loss)
            if not math.isfinite(call.loss):
                self._crash("loss", {"loss": loss}, [call])
            self._keep_if_used(call, result)
            return result

        return watched

    def check(self) -> None:
        """Look at gradients, parameters, optimizer state and buffers now, as at the end of training.

        Raises:
            NonFiniteStep: One of them is non-finite.
        """
        self._forget_broken_update()
        (norm,) = norms(self._training.gradients())
        if self._calls and not math.isfinite(norm) and not self._was_scaled():
            self._crash("gradient", self._training.bad_gradients(), self._calls)
        self._inspect()

    def close(self) -> None:
        """Take the hooks out of the optimizer; what is watched is from now on called as if it were not."""
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
        """Whether a call is not to be watched: after `close`, when run again, or when an optimizer tries out parameters."""
        if not self._hooks or _capturing.get():
            return True
        self._forget_broken_update()
        return self._update is not None and self._update.writes != _writes(self._training.parameters())

    def _forget_broken_update(self) -> None:
        if self._update is not None and not self._update.runs:
            self._update = None

    def _begin(self, step: Step, model: Any, batch: Any) -> Call:
        """Remember the state before a call."""
        if not self._training.gradients():
            self._calls.clear()  # they were thrown away without an update
        self._look_once()
        contents = [*buffers(model), *([] if self._writes_batch is False else _tensors(batch))]
        before = Surroundings(model, batch=batch, others=self._training.parameters(), contents=contents)
        return Call(next(self._numbers), step, model, batch, before)

    def _keep_if_used(self, call: Call, result: Any) -> None:
        """Keep a call from its backward pass to the update; until then the graph of its loss holds it, and dies with it."""
        waiting = [call]

        def used(_: torch.Tensor) -> None:
            if waiting and not self._calls:  # what is there now is added to, in place
                call.before.copy(self._training.gradients())
            self._calls += waiting
            waiting.clear()

        for part in _tensors(result):
            if part.requires_grad and part.numel() == 1 and not part.is_leaf:
                part.register_hook(used)  # type: ignore[no-untyped-call]

    def _before_update(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forget_broken_update()
        if _capturing.get() or self._update is not None:
            return  # run again, or called by a subclass through `super().step()`
        gradients, parameters = self._training.gradients(), self._training.parameters()
        (norm,) = norms(gradients)
        if not math.isfinite(norm):
            self._crash("gradient", self._training.bad_gradients(), self._calls)
        self._look_once()
        contents = [*parameters, *buffers(self._training.model), *self._training.state()]
        contents += [] if self._writes_gradients is False else gradients
        self._update = Update(
            number=next(self._numbers),
            frame=sys._getframe(1),
            training=self._training,
            args=args[1:],
            kwargs=kwargs,
            before=Surroundings(self._training.model, self._training.optimizer, contents=contents),
            writes=_writes(parameters),
            gradient_writes=_writes(gradients),
            gradient_norm=norm,
        )

    def _after_update(self, _: torch.optim.Optimizer, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        update = self._update
        if update is None or update.frame is not sys._getframe(1):
            return
        norm = self._inspect()
        self._history.append(self._numbers_now())
        self._norm = norm
        self._writes_gradients = (
            bool(self._writes_gradients) or _writes(self._training.gradients()) != update.gradient_writes
        )
        self._steps += 1
        self._calls.clear()
        self._update = None

    def _numbers_now(self) -> dict[str, float]:
        """Return the numbers of this step, as far as it has come."""
        loss = sum(call.loss for call in self._calls) / len(self._calls) if self._calls else math.nan
        gradients = math.nan if self._update is None else self._update.gradient_norm
        numbers = {"step": self._steps, "loss": loss, "gradient_norm": gradients, "parameter_norm": self._norm}
        return {name: number for name, number in numbers.items() if math.isfinite(number)}

    def _inspect(self) -> float:
        """Look at parameters, optimizer state and buffers, and return the norm of the parameters.

        Raises:
            NonFiniteStep: One of them became non-finite since the step began.
        """
        if self._known:
            others = [t for key, t in self._training.named() if key not in self._known and key[0] != "parameter"]
        else:
            others = [*buffers(self._training.model), *self._training.state()]
        norm, rest = norms(self._training.parameters(), others)
        if math.isfinite(norm) and math.isfinite(rest):
            return norm
        bad = self._training.bad()
        for kind in ("parameter", "optimizer", "buffer"):
            new = {name: t for (k, name), t in bad.items() if k == kind and not self._was_bad((k, name), t)}
            if new:
                self._crash(kind, new, self._calls)
        self._known = set(bad)
        return norm

    def _look_once(self) -> None:
        """Find out what is non-finite before the first step (a mask, say), and how large the parameters are."""
        if self._known is None:
            self._known = set(self._training.bad())
            (self._norm,) = norms(self._training.parameters())

    def _was_bad(self, key: Key, tensor: torch.Tensor) -> bool:
        """Whether it was non-finite before the step already: by its copy, or for a new tensor by its name."""
        calls = sorted(self._calls, key=lambda call: call.number) if key[0] == "buffer" else []
        places = [call.before for call in calls[:1]]
        places += [] if self._update is None else [self._update.before]
        copies = [copy for place in places if (copy := place.copy_of(tensor)) is not None]
        return bool(finite.probe(copies[:1])) if copies else key in (self._known or ())

    def _was_scaled(self) -> bool:
        """Whether gradients that no update has used are a scaler's doing, which has left them out: without it they are finite."""
        token = _capturing.set(True)
        try:
            return not shows_again(self._calls, self._training)
        finally:
            _capturing.reset(token)

    # --- a step that came out bad -------------------------------------------------------------------------------------

    def _crash(self, kind: str, bad: Mapping[str, torch.Tensor], calls: Iterable[Call]) -> NoReturn:
        """Write the snapshot of the step that came out bad, put everything back as it was before, and raise.

        Args:
            kind: Kind of the symptom.
            bad: The non-finite tensors of that kind, by name.
            calls: The calls that may have made them.

        Raises:
            NonFiniteStep: Always.
        """
        first = next(iter(bad))
        symptom = Symptom(kind, first, tuple(finite.labels(finite.kinds(bad[first]))), len(bad) - 1)
        seen = Observed(symptom, tuple(bad), bad[first].detach().clone())
        incident = Incident(seen, sorted(calls, key=lambda call: call.number), self._update)
        path, problem = None, ""
        token = _capturing.set(True)
        try:
            history = *self._history, self._numbers_now()
            snapshot, problem = incident.capture(history=history, step_number=self._steps)
            path = snapshot.save(free_path(self._directory, self._steps))
        except Exception as error:  # noqa: BLE001  (whatever keeps it from being written, the fault itself has to be told)
            problem = error.got if isinstance(error, BisectNanError) else f"{type(error).__name__}: {error}"
        finally:
            incident.take_back()
            _capturing.reset(token)
            if kind != "loss" or self._update is not None:
                self._calls.clear()
            self._update = None
        raise NonFiniteStep(path, symptom, problem)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _writes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written to; torch does not count it for those made in inference mode."""
    return [0 if tensor.is_inference() else writes(tensor) for tensor in tensors]
