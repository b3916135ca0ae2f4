"""The first checkpoint of a folder whose numbers are spoilt, by bisection."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from bisect_nan.checkpoints.order import SUFFIXES, ordered
from bisect_nan.checkpoints.reading import CheckpointError, read
from bisect_nan.errors import TargetError
from bisect_nan.prevention.check import Check, Spoiled, spoiled_table
from bisect_nan.prevention.printed import Printed, line
from bisect_nan.search import Answer, Bracket, bisect

Progress = Callable[[str, int, int], None]
"""Told what is being read, how many were read before, and how many may be read at most."""

_SHOWN = 12
"""So many names of a long list are printed."""


@dataclass(frozen=True, slots=True)
class FirstBad(Printed):
    """What a folder of checkpoints shows.

    Attributes:
        folder: The folder.
        checkpoints: Names of all checkpoints in their order, relative to the folder.
        order: What the order is by.
        first: Name of the first bad checkpoint; None when none is, or none can be read.
        healthy: Name of the last checkpoint that was read and is healthy; None when the first is bad already.
        bad: The tensors of `first` that are not finite; `optimizer` is the kind of those that are the optimizer's.
        meant: Its tensors with infinities that look meant.
        read: Names of the checkpoints that were read, in the order of reading.
        unreadable: Names of those that could not be read, with the reason.
        left_out: Names that have no number where the others have one.
    """

    folder: str
    checkpoints: tuple[str, ...]
    order: str
    first: str | None
    healthy: str | None
    bad: tuple[Spoiled, ...] = ()
    meant: tuple[Spoiled, ...] = ()
    read: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether the answer is one: no unreadable checkpoint lies where the first bad one could be."""
        return not self.between and (self.first is not None or self.healthy == self.checkpoints[-1])

    @property
    def between(self) -> tuple[str, ...]:
        """Names between the last healthy checkpoint and the first bad one, all of them unreadable: one of them may be the first."""
        if self.first is None:
            return ()
        start = -1 if self.healthy is None else self.checkpoints.index(self.healthy)
        return self.checkpoints[start + 1 : self.checkpoints.index(self.first)]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: plain dictionaries, lists, strings and numbers, all finite."""
        tensors = {
            key: [{"kind": spoiled.kind, **spoiled.values.to_dict()} for spoiled in found]
            for key, found in (("bad", self.bad), ("meant", self.meant))
        }
        unreadable = [{"name": name, "reason": reason} for name, reason in self.unreadable]
        return {"version": 1, **asdict(self), **tensors, "unreadable": unreadable, "certain": self.certain}

    def __rich__(self) -> RenderableType:
        """Return the report: what was found, where, which tensors, what to do."""
        parts: list[RenderableType] = []
        number = {name: place for place, name in enumerate(self.checkpoints, 1)}
        total = len(self.checkpoints)
        if self.first is not None:
            parts += [
                line(
                    f"error: {self.first} is the first{' readable' if self.between else ''} checkpoint with bad numbers: {self._count()}",
                    "bold red",
                ),
                line(
                    f"  --> {Path(self.folder) / self.first}   (number {number[self.first]} of {total}, by {self.order})"
                ),
                line(
                    f"   = the one before it, {self.healthy}, is healthy"
                    if not self.between and self.healthy
                    else self._before()
                ),
                spoiled_table(self.bad[:_SHOWN]),
            ]
            if len(self.bad) > _SHOWN:
                parts.append(line(f"   and {len(self.bad) - _SHOWN} more (--json lists all)"))
        elif self.healthy is not None:
            sure = self.certain
            parts.append(
                line(
                    f"{'clean' if sure else 'cannot tell'}: {self.healthy} holds no bad numbers"
                    f" (number {number[self.healthy]} of {total}, by {self.order})"
                    + ("" if sure else "; those behind it cannot be read"),
                    "bold green" if sure else "bold yellow",
                )
            )
        else:
            parts.append(line(f"cannot tell: none of {total} checkpoints can be read", "bold yellow"))
        parts += [line(f"note: {note}") for note in self._notes()]
        if self.first is not None and self.healthy is not None:
            parts.append(
                line(
                    f"help: go on from {Path(self.folder) / self.healthy} with bisect_nan.Guard, which names the operation"
                )
            )
        parts.append(line(f"{len(self.read)} of {total} checkpoints read", "dim"))
        return Group(*parts)

    def _count(self) -> str:
        own = sum(spoiled.kind == "optimizer" for spoiled in self.bad)
        weights = len(self.bad) - own
        words = [f"{weights} tensor{'' if weights == 1 else 's'}"] if weights else []
        words += [f"{own} tensor{'' if own == 1 else 's'} of the optimizer's state"] if own else []
        return " and ".join(words)

    def _before(self) -> str:
        if not self.between:
            return "   = it is the earliest of the folder: the fault is older"
        back = (
            "no readable one before it"
            if self.healthy is None
            else f"the last readable one before it, {self.healthy}, is healthy"
        )
        return f"   = {back}; between them {len(self.between)} that cannot be read, of which one may be the first"

    def _notes(self) -> list[str]:
        notes = [f"skipped {reason}" for _, reason in self.unreadable[:_SHOWN]]
        if self.left_out:
            notes.append(f"left out, as no number tells their place: {', '.join(self.left_out[:_SHOWN])}")
        if self.meant:
            notes.append(f"infinities that look meant: {', '.join(spoiled.name for spoiled in self.meant[:_SHOWN])}")
        return notes


def first_bad_checkpoint(folder: str | os.PathLike[str], *, progress: Progress | None = None) -> FirstBad:
    """Find the first checkpoint of a folder that holds NaN or Inf, in its weights or its optimizer's state.

    What is spoilt stays spoilt in training, so the last checkpoint is read first, and the others are bisected: of K checkpoints that can
    be read, at most ceil(log2 K) + 1 are. Those that cannot be read are stepped around, as `git bisect skip` does.

        found = first_bad_checkpoint("runs/7")
        found.first, found.healthy, [spoiled.name for spoiled in found.bad]

    Args:
        folder: `torch.save` files, safetensors files, or folders of one checkpoint each (sharded ones with their index), such as
            `checkpoint-500/`. Pickled objects in them are not read.
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
