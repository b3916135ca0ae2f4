"""Whether a call of torch that hooks were told of still runs."""

from __future__ import annotations

import sys
from types import FrameType


def runs(frame: FrameType) -> bool:
    """Whether a frame is on this thread's stack; torch calls no hook when an exception ends an update."""
    current: FrameType | None = sys._getframe()
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None
