"""A watch that reads the numbers of a step one step later, so that an accelerator is never waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from bisect_nan.loop.incident import Call, Update
from bisect_nan.loop.journal import learning_rate
from bisect_nan.loop.vigil import Vigil
from bisect_nan.norms import total_norm
from bisect_nan.recording.live import counts


class Reading:
    """A number on its way from where it was computed to the host."""

    def __init__(self, number: torch.Tensor) -> None:
        """Send it off.

        Args:
            number: A tensor with one element, on any device.
        """
        number = number.detach().reshape(()).to(torch.float64)
        self._arrived: Any = None
        if number.device.type == "cpu":
            self._number = number.clone()
            return
        self._number = torch.empty((), dtype=torch.float64, pin_memory=True)
        self._number.copy_(number, non_blocking=True)
        self._arrived = torch.Event(number.device)
        self._arrived.record()

    def value(self) -> float:
        """Return it; a step later it has arrived long ago."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._number)


@dataclass(frozen=True, slots=True)
class LateStep:
    """An update whose numbers nobody has looked at yet.

    Attributes:
        calls: The watched calls that its gradients came from.
        gradient_norm: Norm of its gradients.
        learning_rate: Rate of the first group of parameters.
    """

    calls: Sequence[Call]
    gradient_norm: Reading
    learning_rate: float


class LateVigil(Vigil):
    """Lets every step pass, and looks at it when the next one begins; a fault takes the training back to a healthy state."""

    _past: LateStep | None = None

    def is_fine(self, call: Call, loss: torch.Tensor) -> bool:
        """Send the loss off; that of an evaluation, which no update will ask for, is read."""
        if not torch.is_grad_enabled():
            return super().is_fine(call, loss)
        call.reading = Reading(loss)
        return True

    def prepare(self, frame: FrameType, *_: Any) -> Update:
        """Copy nothing, since there is a healthy state to go back to."""
        return Update(0, frame, self.training, writes=counts(self.training.parameters()))

    def finish(self, _: Update) -> None:
        """Send the norm of the gradients off, and leave the rest to the next step."""
        norm = Reading(total_norm(self.training.gradients()))
        self._past = LateStep(tuple(self.calls), norm, learning_rate(self.training.optimizer))

    def look_back(self) -> None:
        """Read the numbers of the step before.

        Raises:
            NonFiniteStep: They are not finite, and the training is not to go on; it is in the last healthy state.
        """
        past, self._past = self._past, None
        if past is None:
            return
        for call in past.calls:
            call.loss = call.reading.value()
        norm = past.gradient_norm.value()
        bad = [call for call in past.calls if not math.isfinite(call.loss)]
        if not bad and math.isfinite(norm):
            loss = sum(call.loss for call in past.calls) / len(past.calls) if past.calls else math.nan
            numbers = {"step": self.steps - 1, "loss": loss, "gradient_norm": norm, "learning_rate": past.learning_rate}
            self.healthy(numbers)
            return
        number = torch.tensor(bad[0].loss if bad else norm)
        kind, name = ("loss", "loss") if bad else ("gradient", "of an unknown parameter")
        self.sound(kind, {name: number}, bad or past.calls)

    def sound(self, kind: str, bad: Mapping[str, torch.Tensor], calls: Iterable[Call], **known: Any) -> None:
        """Sound the alarm; whatever was bad, parameters have changed since, and only the healthy state is what it was."""
        super().sound(kind, bad, calls, base=self.alarm.recovery.state, **known)
