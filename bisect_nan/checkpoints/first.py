"""The first checkpoint of a folder whose numbers are spoilt, by bisection."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bisect_nan.checkpoints.answer import FirstBad
from bisect_nan.checkpoints.order import SUFFIXES, ordered
from bisect_nan.checkpoints.reading import CheckpointError, read
from bisect_nan.errors import TargetError
from bisect_nan.prevention.check import Check

Progress = Callable[[str, int, int], None]
"""Told what is being read, how many were read before, and how many may be read at most."""


def first_bad_checkpoint(folder: str | os.PathLike[str], *, progress: Progress | None = None) -> FirstBad:
    """Find the first checkpoint of a folder that holds NaN or Inf, in its weights or its optimizer's state.

    What is spoilt stays spoilt in training, so the last checkpoint is read first, and the others are bisected: of K checkpoints that can
    be read, at most ceil(log2 K) + 1 are. Those that cannot be read are stepped around, as `git bisect skip` does.

        found = first_bad_checkpoint("runs/7")
        found.first, found.healthy, [spoiled.name for spoiled in found.bad]

    Args:
        folder: `torch.save` files, safetensors files, or folders of one checkpoint each (sharded ones with their index), such as
            `checkpoint-500/`. Nothing in them is executed.
        progress: Told about every checkpoint before it is read.

    Raises:
        TargetError: There is no checkpoint in the folder.
    """
    folder = Path(folder)
    try:
        found = ordered(folder)
    except OSError as problem:
        got = f"got {folder}, which is no folder that can be read: {problem.strerror}"
        raise TargetError(got, "a folder of checkpoints", "check the path") from problem
    if not found.paths:
        kinds = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        got = f"got {folder}, which holds no checkpoint"
        raise TargetError(got, f"{kinds}, or folders with such files", "name the folder that they lie in")
    looked = _Looked(found.paths, progress or (lambda *_: None))
    names = tuple(path.relative_to(folder).as_posix() for path in found.paths)
    healthy, first = looked.last_and_first()
    check = looked.checks.get(first, Check("", 0))
    return FirstBad(
        folder=str(folder),
        checkpoints=names,
        order=found.order,
        first=names[first - 1] if first else None,
        healthy=names[healthy - 1] if healthy else None,
        bad=check.bad,
        meant=check.meant,
        read=tuple(names[cut - 1] for cut in looked.checks),
        unreadable=tuple((names[cut - 1], looked.problems[cut]) for cut in sorted(looked.problems)),
        left_out=found.left_out,
    )


@dataclass(slots=True)
class _Looked:
    """Reads checkpoints for the search: behind cut k lie the first k of them, and the k-th tells whether those are healthy.

    Attributes:
        paths: The checkpoints.
        progress: As in `first_bad_checkpoint`.
        checks: By cut: what was found.
        problems: By cut: why it could not be read.
    """

    paths: tuple[Path, ...]
    progress: Progress
    checks: dict[int, Check] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    def last_and_first(self) -> tuple[int, int]:
        """Return the last healthy cut and the first bad one, 0 for none of them.

        The last checkpoint is read first, then the middle one of those that may still be the first bad one. One that cannot be
        read is none of them any more, so that the middle stays the middle: otherwise each would cost a further read.
        """
        end = next((cut for cut in range(len(self.paths), 0, -1) if self._read(cut)), 0)
        if not end or self.checks[end].ok:
            return end, 0
        healthy, first, candidates = 0, end, list(range(1, end))
        while candidates:
            cut = candidates[len(candidates) // 2]
            if not self._read(cut):
                candidates.remove(cut)
            elif self.checks[cut].ok:
                healthy, candidates = cut, [other for other in candidates if other > cut]
            else:
                first, candidates = cut, [other for other in candidates if other < cut]
        return healthy, first

    def _read(self, cut: int) -> bool:
        """Read the checkpoint in front of a cut, and return whether it can be read."""
        path = self.paths[cut - 1]
        most = (len(self.paths) - 1).bit_length() + 1
        self.progress(f"reading {path.name}", len(self.checks) + len(self.problems), most + len(self.problems))
        try:
            self.checks[cut] = read(path)
        except CheckpointError as problem:
            reason = problem.got.removeprefix("got ")
            self.problems[cut] = reason if reason.startswith(path.name) else f"{path.name}: {reason}"
            return False
        return True
