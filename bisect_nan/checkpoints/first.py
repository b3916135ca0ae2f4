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
from bisect_nan.search import Answer, Bracket, bisect

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
    cuts = range(len(names), 0, -1)
    end = next((cut for cut in cuts if looked.run_to(cut) is not Answer.UNKNOWN), 0)
    healthy, first = end, 0
    if end and not looked.checks[end].ok:
        healthy, first = 0, end
        if end > 1:
            outcome = bisect(looked, [1.0] * end, Bracket(0, end), pivot=0.5)
            healthy, first = outcome.bracket.lo, outcome.bracket.hi
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

    def run_to(self, cut: int) -> Answer:
        """Read the checkpoint in front of a cut."""
        path = self.paths[cut - 1]
        most = (len(self.paths) - 1).bit_length() + 1
        self.progress(f"reading {path.name}", len(self.checks) + len(self.problems), most + len(self.problems))
        try:
            check = read(path)
        except CheckpointError as problem:
            reason = problem.got.removeprefix("got ")
            self.problems[cut] = reason if reason.startswith(path.name) else f"{path.name}: {reason}"
            return Answer.UNKNOWN
        self.checks[cut] = check
        return Answer.FINITE if check.ok else Answer.NONFINITE

    def keep(self, cut: int) -> None:
        """Do nothing: each checkpoint stands for itself."""
