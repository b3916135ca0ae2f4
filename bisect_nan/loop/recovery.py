"""How a training goes on after a fault: the update is left out, or the training returns to its last healthy state."""

from __future__ import annotations

import copy
import enum
import logging
from pathlib import Path
from typing import Any

from bisect_nan.loop.healthy import HealthyState, write_healthy
from bisect_nan.loop.mistakes import Mistakes
from bisect_nan.loop.training import Training

logger = logging.getLogger("bisect_nan")

_PATIENCE = 10
"""Bad steps in a row after which leaving out one more is no training any more."""


class OnFault(enum.StrEnum):
    """What a guard does once the snapshot of a fault is written."""

    RAISE = "raise"
    SKIP = "skip"
    ROLLBACK = "rollback"
    WARN = "warn"


class Recovery:
    """Keeps what a training needs to go on.

    A fault is noticed before it has reached the parameters, or they are put back to where they were before the update: then the
    state before the step is the last healthy one. Only where faults follow each other without an update in between, the weights
    themselves are what is wrong, and an earlier state is gone back to.
    """

    def __init__(
        self, training: Training, scaler: Any, scheduler: Any, *, keeps: bool, every: int, file: Path | None
    ) -> None:
        """Nothing has happened yet.

        Args:
            training: The model and its optimizer.
            scaler: Its `GradScaler`, or None.
            scheduler: Its learning rate schedule, or None.
            keeps: Whether to keep healthy states at all.
            every: Updates from one to the next.
            file: Where to write each of them, too; None for nowhere.
        """
        self._training, self._scaler, self._scheduler = training, scaler, scheduler
        self._keeps, self._every, self._file = keeps, every, file
        self.state: HealthyState | None = None
        self._kept_at = -1
        self._bad_in_a_row = 0
        self._bad_steps = 0
        self._latest: tuple[int, int, object] | None = None  # the latest bad step, see `fault`
        # What the loop goes on to change after a fault, and how it was before.
        self._left: list[tuple[Any, Any]] = []
        self._rates: list[dict[str, Any]] = []

    def due(self, step: int) -> bool:
        """Whether a healthy state should be kept before this step."""
        return self._keeps and not self._bad_in_a_row and step % self._every == 0 and step != self._kept_at

    def keep(self, step: int) -> None:
        """Keep the present state, which is finite; a file that cannot be written does not end the training."""
        self.state = HealthyState(self._training, self._scaler, self._scheduler)
        self._kept_at = step
        if self._file is None:
            return
        try:
            write_healthy(self._file, self._training, self._scaler, self._scheduler, step)
        except (OSError, RuntimeError) as problem:  # torch.save tells a full disk as a RuntimeError
            logger.warning("the healthy state of step %d cannot be written to %s: %s", step, self._file, problem)

    @property
    def exhausted(self) -> bool:
        """Whether so many steps have been bad in a row that going on makes no sense."""
        return self._bad_in_a_row >= _PATIENCE

    def fault(self, step: int, thrown: int, batch: object) -> None:
        """Note a fault, now that the state is that before the step. A step of several calls may have several.

        Args:
            step: How many updates were made before.
            thrown: How often the loop has thrown gradients away that a call was left out of; it does so within a step, too, when it
                looks at one batch twice.
            batch: What the bad call was given.
        """
        self._bad_in_a_row += 1
        before, self._latest = self._latest, (step, thrown, batch)
        again = before is not None and before[0] == step and (before[1] == thrown or before[2] is batch)
        self._bad_steps += not again
        parts = [part for part in (self._scheduler, self._scaler) if part is not None]
        self._left = [(part, copy.deepcopy(part.state_dict())) for part in parts]
        groups = [] if self._scheduler is None else self._training.optimizer.param_groups
        self._rates = [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def go_back(self) -> bool:
        """Return to the kept state, if there is one and the state before the step has turned out bad, too."""
        if self.state is None or self._bad_steps <= 1:
            return False
        self.state.restore()
        return True

    def settle(self) -> None:
        """Take back what the loop did for a step that was left out: its schedule and its scale have not moved on."""
        for part, state in self._left:
            part.load_state_dict(state)
        for group, rates in zip(self._training.optimizer.param_groups, self._rates, strict=False):
            group.update(rates)
        self._left, self._rates = [], []

    def resumed(self, mistakes: Mistakes) -> None:
        """Look at a training that begins."""
        mistakes.resumed(self._training.optimizer, self._scaler, self._scheduler)

    def update(self) -> None:
        """Note a healthy update."""
        self._bad_in_a_row = 0
        self._bad_steps, self._latest = 0, None
        self._left, self._rates = [], []
