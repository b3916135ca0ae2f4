"""How the numbers of a training went up to a culprit: in the steps before, and within its own update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bisect_nan.finding import Phase
from bisect_nan.norms import norms
from bisect_nan.recording.program import Program
from bisect_nan.replaying.stretch import Env


def within(
    history: Sequence[Mapping[str, float]], program: Program, start: Env, now: Env
) -> tuple[Mapping[str, float], ...]:
    """Return the history, and behind it the norm of the parameters in the middle of an update.

    Args:
        history: Numbers of the steps, the latest last; its last `parameter_norm` is that before the update.
        program: The recorded update.
        start: Values before the update.
        now: Values alive somewhere in it; a parameter that no later call needs counts as unchanged.
    """
    numbers = [
        p.value for p in program.placeholders if p.phase is Phase.PARAMETER and p.value in start and p.value in now
    ]
    before, after = norms([start[number] for number in numbers], [now[number] for number in numbers])
    if not (math.isfinite(before) and math.isfinite(after)):
        return tuple(history)
    known = [numbers["parameter_norm"] for numbers in history if "parameter_norm" in numbers]
    if not known:
        return *history, {"parameter_norm": before}, {"parameter_norm": after}
    others = math.sqrt(max(known[-1] ** 2 - before**2, 0.0))
    return *history, {"parameter_norm": math.hypot(others, after)}
