"""Whether a draft shows the fault that was found, asked at most so many times."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

from bisect_nan.errors import BisectNanError
from bisect_nan.reproduction.draft import Draft
from bisect_nan.reproduction.recapture import Lines, Wanted, fails, located


class Oracle:
    """Runs drafts, and locates the faults in them.

    Attributes:
        asked: How many drafts were run.
        cause: What was located in the last one that shows the fault.
        wanted: What has to be located; where that may be any cause, the first that is.
    """

    def __init__(self, wanted: Wanted, budget: int, told: Callable[[int], None], skip: Container[int]) -> None:
        """Remember what has to be found.

        Args:
            wanted: What has to be located.
            budget: How many drafts may be run; whatever comes later is no.
            told: Told the number of each before it runs.
            skip: Numbers of drafts that end the process: they do not run, and the answer is no.
        """
        self.asked, self.cause = 0, ""
        self.wanted, self._budget, self._told, self._skip = wanted, budget, told, skip

    @property
    def spent(self) -> bool:
        """Whether no more drafts may be run."""
        return self.asked >= self._budget

    def shows(self, draft: Draft) -> bool:
        """Whether the same cause at the same operation is located in a draft, and nothing else."""
        if self.spent:
            return False
        self.asked += 1
        if self.asked in self._skip:
            return False
        self._told(self.asked)
        tensors = {known.name: known.tensor.clone().requires_grad_(known.grad) for known in draft.literals}
        try:
            lines = lines_of(draft)
            seen = self.wanted.located(located(lines, tensors)) if fails(lines, tensors) else None
        except BisectNanError:
            return False
        except Exception:  # noqa: BLE001  (operators refuse arguments with errors of any kind: this is no such script)
            return False
        if seen is not None:
            self.cause = seen.cause
            self.wanted = replace(self.wanted, causes=self.wanted.causes or frozenset({seen.cause}))
        return seen is not None


def lines_of(draft: Draft) -> Lines:
    """Return the lines of a draft's calls."""
    return Lines((), tuple(draft.calls()), draft.mode, str(draft.result or ""), draft.element)
