"""Finds the one operation that made a training step non-finite.

The names are loaded at their first use (PEP 562), so that `import bisect_nan.cli` needs no torch.

PYTEST_DONT_REWRITE: pytest need not rewrite the asserts in here, and would warn where this was imported before pytest started.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bisect_nan.answer.driver import locate
    from bisect_nan.answer.picture import picture
    from bisect_nan.checkpoints.answer import FirstBad
    from bisect_nan.checkpoints.first import first_bad_checkpoint
    from bisect_nan.errors import (
        BisectNanError,
        NonFiniteStep,
        NonFiniteValues,
        RecordingError,
        ReplayError,
        ReproductionError,
        SnapshotError,
        StressFailure,
        TargetError,
    )
    from bisect_nan.finding import Culprit, Finding, Phase, Verdict
    from bisect_nan.loop.guard import Guard
    from bisect_nan.loop.mistakes import LoopMistake
    from bisect_nan.prevention.batch import FiniteCollate, check_batch
    from bisect_nan.prevention.check import Check
    from bisect_nan.prevention.headroom import Headroom, headroom
    from bisect_nan.prevention.layers import LayerTable, layers
    from bisect_nan.prevention.model import check_model
    from bisect_nan.prevention.saving import save_checkpoint
    from bisect_nan.prevention.smoke import SmokeTest, smoke_test
    from bisect_nan.prevention.tensor import check_tensor
    from bisect_nan.reproduction.minimal import MinimalScript, minimal_script
    from bisect_nan.snapshots.snapshot import Snapshot
    from bisect_nan.stressing.search import stress

__all__ = [
    "BisectNanError",
    "Check",
    "Culprit",
    "Finding",
    "FiniteCollate",
    "FirstBad",
    "Guard",
    "Headroom",
    "LayerTable",
    "LoopMistake",
    "MinimalScript",
    "NonFiniteStep",
    "NonFiniteValues",
    "Phase",
    "RecordingError",
    "ReplayError",
    "ReproductionError",
    "SmokeTest",
    "Snapshot",
    "SnapshotError",
    "StressFailure",
    "TargetError",
    "Verdict",
    "check_batch",
    "check_model",
    "check_tensor",
    "first_bad_checkpoint",
    "headroom",
    "layers",
    "locate",
    "minimal_script",
    "picture",
    "save_checkpoint",
    "smoke_test",
    "stress",
]

_HOMES = {
    "locate": "answer.driver",
    "picture": "answer.picture",
    "Guard": "loop.guard",
    "LoopMistake": "loop.mistakes",
    "Snapshot": "snapshots.snapshot",
    "stress": "stressing.search",
    "Check": "prevention.check",
    "check_model": "prevention.model",
    "check_tensor": "prevention.tensor",
    "save_checkpoint": "prevention.saving",
    **dict.fromkeys(("FiniteCollate", "check_batch"), "prevention.batch"),
    **dict.fromkeys(("SmokeTest", "smoke_test"), "prevention.smoke"),
    **dict.fromkeys(("LayerTable", "layers"), "prevention.layers"),
    **dict.fromkeys(("Headroom", "headroom"), "prevention.headroom"),
    "FirstBad": "checkpoints.answer",
    "first_bad_checkpoint": "checkpoints.first",
    **dict.fromkeys(("MinimalScript", "minimal_script"), "reproduction.minimal"),
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
