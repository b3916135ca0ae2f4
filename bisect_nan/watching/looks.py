"""A script that looks at its own numbers, and may end before an optimizer would use them: `if not isfinite(loss): sys.exit(1)`."""

from __future__ import annotations

from collections.abc import Callable

from bisect_nan import finite
from bisect_nan.recording.outcome import Recording, outcome_of_value
from bisect_nan.recording.raised import read
from bisect_nan.recording.recorder import Recorder
from bisect_nan.snapshots.snapshot import Snapshot
from bisect_nan.watching.suspects import Suspect, kept

_UNSCALES = "aten._amp_foreach_non_finite_check_and_unscale_.default"
"""What a `GradScaler` calls, which looks after infinities itself (torch 2.6 to 2.13)."""


class Looks:
    """What the script has looked at since the latest update.

    Attributes:
        nan: The step up to the first look at a NaN; None while there was none. An infinity may be meant: a perplexity is one soon.
    """

    def __init__(self, snapshot: Callable[[Recording], Snapshot]) -> None:
        """Nothing was looked at yet.

        Args:
            snapshot: Makes a snapshot.
        """
        self.nan: Snapshot | None = None
        self._snapshot = snapshot

    def note(self, recorder: Recorder, suspect: Suspect | None) -> None:
        """Look at what the script has read right now.

        Args:
            recorder: What records; its latest call is the one that reads.
            suspect: The backward pass before it, where that came out bad: then its end is what the script looks at.
        """
        found = None if self.nan is not None else read(recorder, recorder.calls[-1])
        if found is None or not finite.has([found[1]], finite.NonFinite.NAN):
            return
        if suspect is not None:
            scaled = any(str(call.target) == _UNSCALES for call in recorder.calls)
            self.nan = None if scaled else suspect.snapshot
        elif recorder.values.makers[recorder.number(found[1])] >= 0:
            self.nan = self._snapshot(kept(recorder, outcome_of_value(recorder, *found)))
