"""What the search executes: runs from its checkpoint to a cut, and what the frontier gained on the way."""

from __future__ import annotations

from dataclasses import dataclass

from bisect_nan import finite
from bisect_nan.errors import ReplayError
from bisect_nan.finite import NonFinite
from bisect_nan.replaying.replay import Run
from bisect_nan.replaying.stretch import Checkpoint, Stretch
from bisect_nan.search import Answer

_KEPT = 8
"""Checkpoints that a search leaves: the last ones, which lie nearest to what it found."""


@dataclass(slots=True)
class Runner:
    """Executes what a search asks for (`bisect_nan.search.Runner`).

    Attributes:
        stretch: The calls.
        checkpoints: Where runs have started from, the latest last.
        kinds: What to look for.
    """

    stretch: Stretch
    checkpoints: list[Checkpoint]
    kinds: NonFinite
    _latest: Run | None = None

    def run_to(self, cut: int) -> Answer:
        """Run from the latest checkpoint to a cut and say what its frontier gained."""
        checkpoint = self.checkpoints[-1]
        try:
            run = Run(self.stretch, checkpoint)
            run.advance(cut)
        except ReplayError:
            return Answer.UNKNOWN
        self._latest = run
        return Answer.NONFINITE if finite.has(run.frontier(checkpoint.cut), self.kinds) else Answer.FINITE

    def keep(self, cut: int) -> None:
        """Make the cut of the latest run the one that the next run starts from."""
        assert self._latest is not None
        assert self._latest.cut == cut
        self.checkpoints = [*self.checkpoints[1 - _KEPT :], self._latest.checkpoint()]
