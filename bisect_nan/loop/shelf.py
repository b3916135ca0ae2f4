"""Where the snapshots of a training go: few, none too large, each whole or not at all."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.snapshots.snapshot import Snapshot

_NAME = re.compile(r"(rank\d+_)?step_\d+(_\d+)?\.safetensors")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.tmp")
"""Names of snapshots of a training, and of files that a process began to write and was killed."""

_ABANDONED = 3600.0
"""Seconds without a write after which an unfinished file is taken for one that nobody will finish."""


class Shelf:
    """A folder for at most `keep` snapshots.

    The first faults of a run are kept: later ones are mostly their consequences. Files of earlier runs make room, oldest first.
    A snapshot may take half of the disk space that is free, so that one fault never fills the disk under a running training.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """Touch nothing yet.

        Args:
            directory: The folder; made when the first snapshot is written.
            keep: How many snapshots may lie there.
        """
        self._directory, self._keep = directory, keep
        self._opened, self._written = time.time(), 0

    def refusal(self) -> str:
        """Return why no further snapshot is kept; empty while there is room."""
        if self._written < self._keep:
            return ""
        return f"{self._written} snapshots of this run are in {self._directory} already (keep={self._keep})"

    def put(self, snapshot: Snapshot, step: int) -> Path:
        """Write a snapshot and return its path: `step_812.safetensors`, in a distributed run `rank3_step_812.safetensors`.

        Raises:
            SnapshotError: It cannot be written, or is too large.
        """
        free = shutil.disk_usage(_existing(self._directory)).free
        size = _size(snapshot)
        if size > free // 2:
            got = f"got a snapshot of {_readable(size)}, and {_readable(free)} free in {self._directory}"
            raise SnapshotError(got, "twice its size", "make room, or choose another directory")
        path = snapshot.save(self._free_path(step))
        self._written += 1
        self._tidy()
        return path

    def _free_path(self, step: int) -> Path:
        distributed = torch.distributed
        ranked = distributed.is_available() and distributed.is_initialized()
        stem = f"rank{distributed.get_rank()}_step_{step}" if ranked else f"step_{step}"
        path, number = self._directory / f"{stem}.safetensors", 1
        while path.exists():
            number += 1
            path = self._directory / f"{stem}_{number}.safetensors"
        return path

    def _tidy(self) -> None:
        """Remove what is too many, of earlier runs alone, and what killed processes left unfinished."""
        files = [(path.stat().st_mtime, path) for path in self._directory.iterdir() if path.is_file()]
        unfinished = [path for changed, path in files if _UNFINISHED.fullmatch(path.name) and _is_abandoned(changed)]
        kept = [(changed, path) for changed, path in files if _NAME.fullmatch(path.name)]
        earlier = [path for changed, path in sorted(kept) if changed < self._opened]
        for path in [*unfinished, *earlier[: max(len(kept) - self._keep, 0)]]:
            path.unlink(missing_ok=True)


def _is_abandoned(changed: float) -> bool:
    return time.time() - changed > _ABANDONED


def _existing(directory: Path) -> Path:
    """Return the innermost folder on the way to one that need not be there yet."""
    directory = directory.absolute()
    return next(folder for folder in (directory, *directory.parents) if folder.exists())


def _size(snapshot: Snapshot) -> int:
    """Return the bytes of all memories that a snapshot refers to, an upper bound for its file."""
    storages = [tensor.untyped_storage() for tensor in snapshot.tensors().values() if tensor.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _readable(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**29 else f"{size / 2**20:.1f} MiB"
