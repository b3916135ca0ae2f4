"""The watch over a training, step by step.

On a healthy step one number is read when the step returns (the loss) and one before the update (the norm of the gradients): a
norm is finite exactly when all elements are. What the update makes is read after it only where no bound shows it to be finite.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves

from bisect_nan.loop.alarm import Alarm, capturing
from bisect_nan.loop.assurance import Assurance
from bisect_nan.loop.attributes import Attributes
from bisect_nan.loop.copies import Copies
from bisect_nan.loop.frames import runs
from bisect_nan.loop.harmless import LeftOut, zeros_for
from bisect_nan.loop.incident import Call, Update, copied_update, shows_again
from bisect_nan.loop.journal import Journal, finite_only, learning_rate
from bisect_nan.loop.mistakes import Mistake, watch_saving
from bisect_nan.loop.scaler import ScalerWatch
from bisect_nan.loop.sight import Sight
from bisect_nan.loop.training import Training
from bisect_nan.norms import norms
from bisect_nan.recording.capture import Step, scalar_loss
from bisect_nan.recording.live import counts
from bisect_nan.recording.state import Standing


class Vigil:
    """Sees every call of the watched step and every update of the optimizer, and sounds the alarm."""

    def __init__(self, training: Training, alarm: Alarm, history: int) -> None:
        """Hook into the optimizer and the model.

        Args:
            training: The model and its optimizer.
            alarm: What answers a fault.
            history: How many updates are remembered.
        """
        self.training, self.alarm, self.sight = training, alarm, Sight(training)
        self.journal, self._numbers = Journal(history), itertools.count()
        self.calls: list[Call] = []  # those whose gradients the next update uses
        self.steps, self.begun = 0, 0  # updates that were made, and that were begun
        self.scaling: ScalerWatch | None = None
        self._left = LeftOut(training)  # calls whose gradients it does not use
        self._standing, self._copies, self._attributes = Standing(training.model), Copies(), Attributes()
        self._update: Update | None = None
        # Whether steps write to their batch, and updates to gradients, which are copied then; None: not known yet.
        self._writes_batch: bool | None = None
        self._writes_gradients: bool | None = None
        optimizer = training.optimizer
        hooks = optimizer.register_step_pre_hook, optimizer.register_step_post_hook
        self._hooks: list[Any] = [hooks[0](self._before_update), hooks[1](self._after_update)]
        self._hooks.append(watch_saving(training.model, self._before_saving))
        self._assurance = Assurance(training)

    def watch_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Hook into a `GradScaler` as well."""
        written = functools.partial(self.alarm.mistakes.tell, Mistake.CLIPPED_WHILE_SCALED)
        self.scaling = ScalerWatch(scaler, self.training.optimizer, lambda: self.begun, self._judge_left_out, written)
        self._hooks.append(self.scaling)

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._update = [], None
        self.calls.clear()

    # --- the watched step ---------------------------------------------------------------------------------------------

    def call(self, step: Step, model: Any, batch: Any) -> Any:
        """Call the step and look at its loss."""
        if self._stands_aside():
            return step(model, batch)
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        call, before = self._begin(step, model, batch, tensors), counts(tensors)
        try:
            result = step(model, batch)
        except Exception as error:
            self.alarm.explain(error, call, **self._evidence())
            raise
        self._writes_batch = bool(self._writes_batch) or counts(tensors) != before
        with torch.no_grad():
            loss = scalar_loss(result).detach()
        if not self.is_fine(call, loss):
            self.sound("loss", {"loss": loss}, [call])
            if self.alarm.leaves_out:
                return self._left.harmless(result)
        self._keep_if_used(call, result)
        return result

    def is_fine(self, call: Call, loss: torch.Tensor) -> bool:
        """Read the loss of a call, and return whether it is finite."""
        call.loss = float(loss)
        return math.isfinite(call.loss)

    def _stands_aside(self) -> bool:
        """Whether a call is not to be watched: after `close`, when run again, or when an optimizer tries out parameters."""
        if not self._hooks or capturing.get():
            return True
        self._forget_broken_update()
        update = self._update
        return update is not None and (update.left_out or update.writes != counts(self.training.parameters()))

    def _forget_broken_update(self) -> None:
        if self._update is not None and not runs(self._update.frame):
            self._update = None

    def _begin(self, step: Step, model: Any, batch: Any, tensors: list[torch.Tensor]) -> Call:
        """Remember the state before a call."""
        if self._update is None:
            self._begin_step()
        self.sight.first()
        contents = () if self._writes_batch is False else tensors
        before = self._standing.now(batch=batch, others=self.training.parameters(), contents=contents)
        before.keep([*self._copies.now(self._standing.buffers()), *self._attributes.now(self._standing.plain())])
        return Call(next(self._numbers), step, model, batch, before)

    def _begin_step(self) -> None:
        """Between two updates: finish what the last one left, and keep a healthy state where that is due."""
        self.alarm.recovery.settle()
        if not self.training.gradients():  # they were thrown away without an update
            self.calls.clear()
            self._left.throw_away()
        self.look_back()
        if not self.calls and self.alarm.recovery.due(self.steps) and self.sight.look((), None) is None:
            self.alarm.recovery.keep(self.steps)

    def look_back(self) -> None:
        """Look at what was left to be read later."""

    def _keep_if_used(self, call: Call, result: Any) -> None:
        """Keep a call from its backward pass to the update; until then the graph of its loss holds it, and dies with it."""
        waiting = [call]

        def used(_: torch.Tensor) -> None:
            if waiting and not self.calls:  # what is there now is added to, in place
                gradients = self.training.gradients()
                self.alarm.mistakes.backward_begins(gradients)
                call.before.copy(gradients)
            self.calls += waiting
            waiting.clear()

        for part in [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result):
            if isinstance(part, torch.Tensor) and part.requires_grad and part.numel() == 1 and not part.is_leaf:
                part.register_hook(used)  # type: ignore[no-untyped-call]

    # --- the update ---------------------------------------------------------------------------------------------------

    def _before_update(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._forget_broken_update()
        if capturing.get() or self._update is not None:
            return  # run again, or called by a subclass through `super().step()`
        if self.begun == 0:
            self.alarm.recovery.resumed(self.alarm.mistakes)
        self.begun += 1
        frame = sys._getframe(1)
        # Wrappers hand on the closure that they did not get: `optimizer.step(None)`.
        args = tuple(arg for arg in args[1:] if arg is not None)
        kwargs = {name: arg for name, arg in kwargs.items() if arg is not None}
        left, closes_over = self._left.some, bool(args or kwargs)  # a closure computes the gradients that count, later
        if closes_over:
            self._begin_step()
        if left:
            self._left.settle()
        if left and not self.calls and not closes_over:
            self._update = self._left_out_update(frame)
        else:
            self._update = self.prepare(frame, args, kwargs)

    def prepare(self, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Update:
        """Look at the gradients, and copy what the update can change where it might not stay finite."""
        training, scaling = self.training, [] if self.scaling is None else [self.scaling.scale()]
        changed = self._copies.changed(self._standing.buffers()) if self.calls else ()
        norm, rest, scale = norms(training.gradients(), changed, scaling)
        scale = scale if scaling else math.nan
        bad: Mapping[str, torch.Tensor] = {} if math.isfinite(norm) else training.bad_gradients()
        kind = "gradient" if bad else "buffer"
        if not math.isfinite(rest) and not bad:
            bad = self.sight.new(kind, self.calls, None)
        if kind == "gradient" and bad and self.scaling is not None and self.scaling.leaves_out():
            self.scaling.judge(scale)
            return Update(next(self._numbers), frame, training, left_out=True)
        if bad:
            self.sound(kind, bad, self.calls)
            if self.alarm.leaves_out:
                return self._left_out_update(frame)
        if not (args or kwargs) and self._assurance.holds(norm):
            if self.journal.due(self._loss(), norm):
                self.sight.measure()
            update = Update(next(self._numbers), frame, training)
        else:
            update = self._careful_update(frame, args, kwargs)
        update.gradient_norm, update.scale = norm, scale
        return update

    def _careful_update(self, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Update:
        self.sight.first()
        gradients = self._writes_gradients is not False
        return copied_update(self.training, next(self._numbers), frame, args, kwargs, gradients=gradients)

    def _left_out_update(self, frame: FrameType) -> Update:
        """Let the optimizer run on gradients of zeros; whatever that changes is put back after it."""
        update = self._careful_update(frame, (), {})
        update.left_out = True
        for parameter in self.training.parameters():
            parameter.grad = zeros_for(parameter, self.training.optimizer)
        return update

    def _after_update(self, _: torch.optim.Optimizer, __: tuple[Any, ...], ___: dict[str, Any]) -> None:
        update = self._update
        if update is None or update.frame is not sys._getframe(1):
            return
        if not update.left_out:
            self.finish(update)
        elif update.before is not None:
            update.before.restore()
        self.steps += 1
        self.calls.clear()
        self._left.forget()
        self._update = None

    def finish(self, update: Update) -> None:
        """Look at what an update made, unless that is known."""
        numbers = self._numbers_now()
        if update.before is None:
            self.sight.norm = math.nan
            self._assurance.advance()
        else:
            if bad := self.sight.look(self.calls, update):
                self.sound(*bad, self.calls)
                return
            gradients = counts(self.training.gradients())
            self._writes_gradients = bool(self._writes_gradients) or gradients != update.gradient_writes
        self.healthy(numbers)

    def healthy(self, numbers: Mapping[str, float]) -> None:
        """Note an update that came out finite."""
        self.journal.add(numbers)
        self.alarm.healthy()
        self.alarm.mistakes.updated(self.training.gradients())

    # --- what there is to tell ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Look at everything now."""
        self._forget_broken_update()
        self.alarm.recovery.settle()
        self.look_back()
        (norm,) = norms(self.training.gradients())
        if self.calls and not math.isfinite(norm) and self._shows_unscaled():
            self.sound("gradient", self.training.bad_gradients(), self.calls)
        if bad := self.sight.look(self.calls, None):
            self.sound(*bad, self.calls)

    def sound(self, kind: str, bad: Mapping[str, torch.Tensor], calls: Iterable[Call], **known: Any) -> None:
        """Sound the alarm about the step as far as it has come.

        Raises:
            NonFiniteStep: The training is not to go on.
        """
        update = self._update
        if update is None and math.isnan(self.sight.norm):
            self.sight.measure()
        try:
            self.alarm.sound(kind, bad, list(calls), update, thrown=self._left.thrown, **self._evidence(), **known)
        except BaseException:
            self._update = None
            raise
        finally:
            if kind != "loss" or update is not None:
                self.calls.clear()
        if update is not None:
            update.left_out = self.alarm.leaves_out

    def _judge_left_out(self, scale: float, *, collapses: bool) -> None:
        """Tell a fault from the search for a scale: without any scale, the step is bad or not."""
        if bad := self.training.bad_gradients() if self.calls else {}:
            if self._shows_unscaled():
                self.sound("gradient", bad, self.calls)
            elif collapses:
                self.sound("gradient", bad, self.calls, scale=scale)
        self.calls.clear()

    def _shows_unscaled(self) -> bool:
        """Whether the calls since the last update come out bad when they are run again, without any scale."""
        token = capturing.set(True)
        try:
            return shows_again(self.calls, self.training)
        finally:
            capturing.reset(token)

    def _before_saving(self) -> None:
        if not capturing.get():
            self.alarm.mistakes.saving(self.sight.look((), None))

    def _loss(self) -> float:
        return sum(call.loss for call in self.calls) / len(self.calls) if self.calls else math.nan

    def _evidence(self) -> dict[str, Any]:
        """Return what a snapshot of the present step is to say of it."""
        return {"step": self.steps, "history": (*self.journal.entries, self._numbers_now())}

    def _numbers_now(self) -> dict[str, float]:
        """Return the numbers of this step, as far as it has come."""
        gradients, scale = (math.nan, math.nan) if (now := self._update) is None else (now.gradient_norm, now.scale)
        loss, norm, rate = self._loss(), self.sight.norm, learning_rate(self.training.optimizer)
        numbers = {"step": self.steps, "loss": loss, "gradient_norm": gradients, "parameter_norm": norm}
        return finite_only(numbers | {"learning_rate": rate, "scale": scale})
