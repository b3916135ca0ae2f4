"""What the processes of a data parallel training tell each other about a fault that all of them see."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_PATIENCE = dt.timedelta(minutes=5)
"""How long a rank waits for the others to run their step again."""

_LONGEST = 4096
"""Bytes of a path."""


class Found(enum.IntEnum):
    """What a rank finds when it runs its own step again."""

    UNKNOWN = 0
    NOTHING = 1
    FAULT = 2


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank tells.

    Attributes:
        found: What it has found.
        path: Its snapshot, or None.
    """

    found: Found
    path: Path | None = None


class Ranks:
    """A process group beside the training's own, with a timeout: it may break where a rank is missing, and nothing else does."""

    def __init__(self) -> None:
        """Make the group, on every rank."""
        self.mine, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def exchange(self, word: Word) -> list[Word]:
        """Tell the others, and return what every rank says, by rank; a rank that does not answer in time does not know."""
        path = b"" if word.path is None else str(word.path).encode()
        sent = torch.tensor(list(bytes([word.found]) + path.ljust(_LONGEST, b"\0")), dtype=torch.uint8)
        received = [torch.zeros_like(sent) for _ in range(self.count)]
        try:
            dist.all_gather(received, sent, group=self._group)
        except RuntimeError:  # gloo's, when time is up or a process has ended
            return [word if rank == self.mine else Word(Found.UNKNOWN) for rank in range(self.count)]
        return [_word(bytes(data.tolist())) for data in received]


def _word(data: bytes) -> Word:
    path = data[1:].rstrip(b"\0").decode()
    return Word(Found(data[0]), Path(path) if path else None)


def named(ranks: Sequence[int]) -> str:
    """Return ranks in words: `ranks 0, 2 and 3`."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
