"""Finds the one operation that made a training step non-finite."""

from bisect_nan.errors import (
    BisectNanError,
    NonFiniteStep,
    RecordingError,
    ReplayError,
    SnapshotError,
    TargetError,
)
from bisect_nan.finding import Culprit, Finding, Phase, Verdict
from bisect_nan.guard import Guard
from bisect_nan.locate import locate
from bisect_nan.snapshot import Snapshot

__all__ = [
    "BisectNanError",
    "Culprit",
    "Finding",
    "Guard",
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
