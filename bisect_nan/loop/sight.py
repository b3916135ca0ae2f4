"""What is non-finite in a training's state, and what of that is new: an infinity that was meant to be there is no fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from bisect_nan import finite
from bisect_nan.loop.incident import Call, Update
from bisect_nan.loop.training import Key, Training
from bisect_nan.norms import norms
from bisect_nan.recording.state import buffers

Bad = tuple[str, Mapping[str, torch.Tensor]]
"""Kind of what became non-finite, and the tensors of that kind by name."""


class Sight:
    """Looks at parameters, optimizer state and buffers."""

    def __init__(self, training: Training) -> None:
        """Nothing is known yet."""
        self._training = training
        self._known: set[Key] | None = None  # what is non-finite without being a fault
        self.norm = math.nan
        """Norm of the parameters when they were last looked at; NaN where they may have changed since."""

    def first(self) -> None:
        """Find out what is non-finite before the first step (a mask, say), and how large the parameters are."""
        if self._known is None:
            self._known = set(self._training.bad())
            self.measure()

    def measure(self) -> None:
        """Look at the parameters' norm alone."""
        (self.norm,) = norms(self._training.parameters())

    def look(self, calls: Sequence[Call], update: Update | None) -> Bad | None:
        """Return what became non-finite since the step began, parameters first.

        Args:
            calls: The watched calls of the step.
            update: Its update, as far as that has begun.
        """
        training = self._training
        if self._known:
            others = [t for key, t in training.named() if key not in self._known and key[0] != "parameter"]
        else:
            others = [*buffers(training.model), *training.state()]
        self.norm, rest = norms(training.parameters(), others)
        if math.isfinite(self.norm) and math.isfinite(rest):
            return None
        bad = training.bad()
        for kind in ("parameter", "optimizer", "buffer"):
            if new := self.new(kind, calls, update, bad):
                return kind, new
        self._known = set(bad)
        return None

    def new(
        self, kind: str, calls: Sequence[Call], update: Update | None, bad: Mapping[Key, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return what of one kind became non-finite since the step began, by name; `bad` is what is bad now, where known."""
        now = self._training.bad() if bad is None else bad
        return {n: t for (k, n), t in now.items() if k == kind and not self._was_bad((k, n), t, calls, update)}

    def _was_bad(self, key: Key, tensor: torch.Tensor, calls: Sequence[Call], update: Update | None) -> bool:
        """Whether it was non-finite before the step already: by its copy, or for a new tensor by its name."""
        ordered = sorted(calls, key=lambda call: call.number) if key[0] == "buffer" else []
        places = [call.before for call in ordered[:1]]
        places += [] if update is None or update.before is None else [update.before]
        copies = [copy for place in places if (copy := place.copy_of(tensor)) is not None]
        return bool(finite.probe(copies[:1])) if copies else key in (self._known or ())
