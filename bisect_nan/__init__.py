"""Finds the one operation that made a training step non-finite.

The names are loaded at their first use (PEP 562), so that `import bisect_nan.cli` needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bisect_nan.answer.driver import locate
    from bisect_nan.errors import (
        BisectNanError,
        NonFiniteStep,
        RecordingError,
        ReplayError,
        SnapshotError,
        TargetError,
    )
    from bisect_nan.finding import Culprit, Finding, Phase, Verdict
    from bisect_nan.loop.guard import Guard
    from bisect_nan.loop.mistakes import LoopMistake
    from bisect_nan.snapshots.snapshot import Snapshot

__all__ = [
    "BisectNanError",
    "Culprit",
    "Finding",
    "Guard",
    "LoopMistake",
    "NonFiniteStep",
    "Phase",
    "RecordingError",
    "ReplayError",
    "Snapshot",
    "SnapshotError",
    "TargetError",
    "Verdict",
    "locate",
]

_HOMES = {
    "locate": "answer.driver",
    "Guard": "loop.guard",
    "LoopMistake": "loop.mistakes",
    "Snapshot": "snapshots.snapshot",
    **dict.fromkeys(("Culprit", "Finding", "Phase", "Verdict"), "finding"),
}
"""Where the names live that are in no other module than `errors`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
