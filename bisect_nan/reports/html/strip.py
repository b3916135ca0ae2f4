"""The strip of magnitudes: how large the values of each call are, along the program, against the limits of their types."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bisect_nan.pictures import Magnitude, Picture
from bisect_nan.reports.html.scale import Scale
from bisect_nan.reports.html.way import ends

_BARS = 400
"""Bars, at most: a longer program is shown with the call of each piece that is nearest to its limit."""

_REACH = 1e-8
"""A limit is drawn where some value comes as near to it as this; else it would press everything else against the ground."""

_GROUND = 1e-4
"""The ground is at the smallest value, or here where there are smaller ones: a few tiny values would press everything together."""

_POINTS = 40
"""Points of a growth that are drawn, the first and the last among them."""

_LISTED = 16
"""Calls of a growth in the table below; of a longer one the middle is left out."""

_NEAREST = 8
"""Calls in the table of those that come nearest to their limit."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One call, or the call of a piece that is nearest to its limit: place and height in percent, and what its values are.

    Attributes:
        x: Its left edge.
        width: How wide it is.
        y: Its top; that of the strip where no value is finite.
        kind: `finite`, `wrong` where some values are not, `none` where none is.
    """

    x: float
    width: float
    y: float
    kind: str


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest number of a type: its height, the name of the type; `above` where it lies beyond the strip."""

    dtype: str
    number: float
    y: float
    above: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the program in one phase."""

    name: str
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class Strip:
    """What the strip shows.

    Attributes:
        scale: Its vertical axis.
        bars: One for each call, or for each piece of a long program.
        limits: Of the types that the step computes in.
        parts: The phases.
        culprits: Where the culprits are.
        growth: The calls over which the values grew, as points.
        grown: The same calls, for a table.
        left_out: How many are left out in the middle of that.
        nearest: The calls that come nearest to their limit.
        calls: How many calls there are.
    """

    scale: Scale
    bars: tuple[Bar, ...]
    limits: tuple[Limit, ...]
    parts: tuple[Part, ...]
    culprits: tuple[tuple[int, float], ...]
    growth: tuple[tuple[float, float], ...]
    grown: tuple[Magnitude, ...]
    left_out: int
    nearest: tuple[Magnitude, ...]
    calls: int


def strip(picture: Picture, culprits: Sequence[int]) -> Strip | None:
    """Lay out the strip; None where there are no magnitudes.

    Args:
        picture: The counted numbers.
        culprits: Program indices of the culprits.
    """
    seen = [one for one in picture.magnitudes if one.largest > 0 or one.nonfinite]
    largest = max((one.largest for one in seen), default=0.0)
    if not largest:
        return None
    limits = dict(sorted({one.dtype: one.limit for one in seen}.items(), key=lambda item: item[1]))
    near = [limit for dtype, limit in limits.items() if _comes_near(seen, dtype, limit)]
    low = max(min(one.largest for one in seen if one.largest), min(_GROUND, largest * _GROUND))
    top = max(largest, *near) if near else largest
    scale = Scale.logarithm(low, top * 2)
    first, last = seen[0].node, seen[-1].node
    length = last - first + 1

    def x(node: int) -> float:
        return round(100 * (node - first + 0.5) / length, 2)

    by_node = {one.node: one for one in seen}
    path = [by_node[node] for node in picture.growth if node in by_node]
    drawn = [path[round(place * (len(path) - 1) / (_POINTS - 1))] for place in range(_POINTS)] if path else []
    grown, left_out = ends(path, _LISTED)
    return Strip(
        scale=scale,
        bars=tuple(_bars(seen, first, length, scale)),
        limits=tuple(Limit(dtype, limit, scale.y(limit), limit > top) for dtype, limit in limits.items()),
        parts=tuple(_parts(seen, first, length)),
        culprits=tuple((node, x(node)) for node in culprits if first <= node <= last),
        growth=tuple((x(one.node), scale.y(one.largest or one.limit)) for one in dict.fromkeys(drawn)),
        grown=tuple(grown),
        left_out=left_out,
        nearest=tuple(sorted(seen, key=lambda one: -one.largest / one.limit)[:_NEAREST]),
        calls=len(seen),
    )


def _comes_near(seen: Sequence[Magnitude], dtype: str, limit: float) -> bool:
    return any(one.dtype == dtype and one.largest > limit * _REACH for one in seen)


def _bars(seen: Sequence[Magnitude], first: int, length: int, scale: Scale) -> Iterator[Bar]:
    size = max(1, -(-length // _BARS))
    for piece, group in groupby(seen, key=lambda one: (one.node - first) // size):
        calls = list(group)
        tallest = max(calls, key=lambda one: one.largest / one.limit)
        width = min(size, length - piece * size)
        place = round(100 * piece * size / length, 3)
        kind = "none" if not tallest.largest else "wrong" if any(one.nonfinite for one in calls) else "finite"
        yield Bar(place, round(100 * width / length, 3), scale.y(tallest.largest) if tallest.largest else 0.0, kind)


def _parts(seen: Sequence[Magnitude], first: int, length: int) -> Iterator[Part]:
    runs = [(phase.value, [one.node for one in group]) for phase, group in groupby(seen, key=lambda one: one.phase)]
    starts = [nodes[0] for _, nodes in runs]
    for (name, _), start, stop in zip(runs, starts, [*starts[1:], first + length], strict=True):
        yield Part(name, round(100 * (start - first) / length, 2), round(100 * (stop - start) / length, 2))
