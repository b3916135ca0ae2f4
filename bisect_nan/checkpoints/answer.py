"""Which checkpoint of a folder is the first with bad numbers: the answer, its report and its JSON form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from bisect_nan.prevention.check import Spoiled, spoiled_table
from bisect_nan.prevention.printed import Printed, line

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
        last = f"{len(self.read)} of {len(self.checkpoints)} checkpoints read"
        return Group(
            *self._found(), *(line(f"note: {note}") for note in self._notes()), *self._help(), line(last, "dim")
        )

    def _found(self) -> Iterator[RenderableType]:
        if self.first is not None:
            word = "first readable checkpoint" if self.between else "first checkpoint"
            yield line(f"error: {self.first} is the {word} with bad numbers: {self._count()}", "bold red")
            yield line(f"  --> {Path(self.folder) / self.first}   ({self._place(self.first)})")
            yield line(f"   = {self._before()}")
            yield spoiled_table(self.bad[:_SHOWN])
            if len(self.bad) > _SHOWN:
                yield line(f"   and {len(self.bad) - _SHOWN} more (--json lists all)")
        elif self.healthy is None:
            yield line(f"cannot tell: none of {len(self.checkpoints)} checkpoints can be read", "bold yellow")
        elif self.certain:
            yield line(f"clean: {self.healthy} holds no bad numbers ({self._place(self.healthy)})", "bold green")
        else:
            text = f"cannot tell: {self.healthy} holds no bad numbers ({self._place(self.healthy)}); those behind it cannot be read"
            yield line(text, "bold yellow")

    def _place(self, name: str) -> str:
        return f"number {self.checkpoints.index(name) + 1} of {len(self.checkpoints)}, by {self.order}"

    def _count(self) -> str:
        own = sum(spoiled.kind == "optimizer" for spoiled in self.bad)
        counts = {"": len(self.bad) - own, " of the optimizer's state": own}
        words = [f"{count} tensor{'' if count == 1 else 's'}{whose}" for whose, count in counts.items() if count]
        return " and ".join(words)

    def _before(self) -> str:
        if not self.between:
            return (
                f"the one before it, {self.healthy}, is healthy" if self.healthy else "it is the earliest of the folder"
            )
        skipped = f"{len(self.between)} before it cannot be read, and the first bad one may be among those"
        return skipped if self.healthy is None else f"{self.healthy} is healthy; {skipped}"

    def _notes(self) -> Iterator[str]:
        yield from (f"skipped {reason}" for _, reason in self.unreadable[:_SHOWN])
        if self.left_out:
            yield f"left out, as no number tells their place: {', '.join(self.left_out[:_SHOWN])}"
        if self.meant:
            yield f"infinities that look meant: {', '.join(spoiled.name for spoiled in self.meant[:_SHOWN])}"

    def _help(self) -> Iterator[RenderableType]:
        if self.first is not None and self.healthy is not None:
            start = Path(self.folder) / self.healthy
            yield line(f"help: go on from {start} with bisect_nan.Guard, which names the operation")
