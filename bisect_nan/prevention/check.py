"""What a check of many tensors found: frozen, without tensors, and printed as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from rich.console import Group, RenderableType
from torch.nn.parameter import is_lazy

from bisect_nan import finite
from bisect_nan.errors import NonFiniteValues
from bisect_nan.finite import TensorSummary
from bisect_nan.prevention.meant import is_meant
from bisect_nan.prevention.printed import Printed, line, share, table

_SHOWN = 6
"""So many names are in a message; the table has all."""


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A tensor that is not finite.

    Attributes:
        kind: What it is: `parameter`, `buffer`, `constant` (a parameter that is not trained), `input`,
            `sample`, `weight` (of a file), `optimizer`, `tensor`.
        values: How many of its values are NaN or infinite, the range of the others, the first bad element. Its `name` is the path.
    """

    kind: str
    values: TensorSummary

    @property
    def name(self) -> str:
        """Its path."""
        return self.values.name

    @property
    def share(self) -> float:
        """Share of its values that are not finite, from 0 to 1; real and imaginary parts are values of their own."""
        return self.values.nonfinite / parts(self.values)


@dataclass(frozen=True, slots=True)
class Check(Printed):
    """What a check found.

    Attributes:
        subject: What was looked at: `model`, `batch`, ...
        tensors: How many tensors were looked at.
        bad: Those with a NaN, or with an infinity that nothing explains.
        meant: Those whose only non-finite values are infinities that look meant (masks); they are no fault.
    """

    subject: str
    tensors: int
    bad: tuple[Spoiled, ...] = ()
    meant: tuple[Spoiled, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is bad."""
        return not self.bad

    @property
    def names(self) -> list[str]:
        """The paths of the bad tensors."""
        return [spoiled.name for spoiled in self.bad]

    def describe(self) -> str:
        """Return one line: `2 of 12 tensors of the model not finite: 0.weight (f32[8, 4]  nan 1  finite [-1, 1])`."""
        if self.ok:
            masks = ", ".join(spoiled.name for spoiled in self.meant[:_SHOWN])
            return f"{self._count()}: all finite" + (f"; infinities that look meant: {masks}" if masks else "")
        shown = ", ".join(f"{spoiled.name} ({spoiled.values.describe()})" for spoiled in self.bad[:_SHOWN])
        more = f", and {len(self.bad) - _SHOWN} more" if len(self.bad) > _SHOWN else ""
        return f"{len(self.bad)} of {self._count()} not finite: {shown}{more}"

    def _count(self) -> str:
        return f"{self.tensors} tensor{'' if self.tensors == 1 else 's'} of the {self.subject}"

    def require(self, do: str) -> None:
        """Raise if something is bad.

        Args:
            do: What the reader can do about it.

        Raises:
            NonFiniteValues: It is; the error carries this check.
        """
        if self.bad:
            raise NonFiniteValues(self.describe(), "finite numbers", do, check=self)

    def __rich__(self) -> RenderableType:
        """Return one row for each tensor that is not finite."""
        if not self.bad and not self.meant:
            return line(self.describe())
        return Group(
            line(self.describe().split(":")[0] if self.bad else self.describe()), spoiled_table(self.bad, self.meant)
        )


def spoiled_table(bad: Iterable[Spoiled], meant: Iterable[Spoiled] = ()) -> RenderableType:
    """Return a table of tensors that are not finite."""
    made = table("name", "kind", "values", "NaN", "Inf", "share", "finite", "first at", left=3)
    for spoiled, word, style in [*((s, "", "red") for s in bad), *((s, ", meant", "dim") for s in meant)]:
        values = spoiled.values
        made.add_row(
            line(spoiled.name),
            f"{spoiled.kind}{word}",
            line(f"{values.dtype}{list(values.shape)}"),
            line(f"{values.nan}", style if values.nan else ""),
            line(f"{values.pos_inf + values.neg_inf}", style if values.nonfinite > values.nan else ""),
            share(values.nonfinite, parts(values)),
            line(span(values)),
            line(f"{list(values.first or ())}"),
        )
    return made


def parts(values: TensorSummary) -> int:
    """Return how many numbers a tensor holds; a complex one holds two in each element."""
    return values.numel * (2 if values.dtype.startswith("c") else 1)


def span(values: TensorSummary) -> str:
    """Return the range of the finite values: `[-1.9, 2.3]`, or a dash where there are none."""
    return "-" if values.low is None or values.high is None else f"[{values.low:.4g}, {values.high:.4g}]"


def examine(subject: str, named: Iterable[tuple[str, str, torch.Tensor]]) -> Check:
    """Check tensors, with one synchronisation per device when all are finite.

    Args:
        subject: What they are the tensors of.
        named: Kind, path and tensor; those without memory yet (lazy parameters) hold nothing non-finite.
    """
    listed = [(kind, name, tensor.detach()) for kind, name, tensor in named if not is_lazy(tensor)]
    if not finite.probe(tensor for *_, tensor in listed):
        return Check(subject, len(listed))
    bad: list[Spoiled] = []
    meant: list[Spoiled] = []
    for kind, name, tensor in listed:
        if finite.probe([tensor]):
            (meant if is_meant(tensor, kind, name) else bad).append(Spoiled(kind, finite.summarise(tensor, name)))
    return Check(subject, len(listed), tuple(bad), tuple(meant))
