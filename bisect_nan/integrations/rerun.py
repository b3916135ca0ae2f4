"""A step that does something else when a guard runs it again than when the training ran it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bisect_nan.loop.guard import Guard
from bisect_nan.recording.capture import Step


class Rerun:
    """One call of a step: the training makes the first run of it, guards make all further ones.

    A framework's step logs, counts, or talks to other processes on its way; run again for the recorder it must not.
    """

    def __init__(self, first: Step, again: Step) -> None:
        """Take both ways to run the step; they return the same loss."""
        self._run, self._again = first, again

    def __call__(self, model: Any, batch: Any) -> Any:
        """Run the step."""
        run, self._run = self._run, self._again
        return run(model, batch)


def watched_by(guards: Iterable[Guard], step: Step) -> Step:
    """Return a step under the watch of several guards, one for each optimizer."""
    for guard in guards:
        step = guard.watch(step)
    return step
