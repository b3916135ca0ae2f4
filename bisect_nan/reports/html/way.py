"""The way of a fault from its culprit to the symptom, line by line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from bisect_nan.finding import Culprit, Link, SourceLine
from bisect_nan.reports import words

_SHOWN = 14
"""Stops of a way that are drawn; of a longer one the middle is left out."""

_LISTED = 60
"""Calls in the table below, likewise."""


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Stop:
    """Calls of one line, one after the other.

    Attributes:
        ops: Their names.
        source: The line.
        first: Index of the first call.
        last: Index of the last one.
        bad: What the values are behind it: `nan` or `inf`.
        turns: Whether Inf turns into NaN here.
        left_out: How many stops are left out in front of it.
    """

    ops: str
    source: SourceLine | None
    first: int
    last: int
    bad: str
    turns: bool
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Way:
    """The stops, the calls themselves, and how many of those are left out."""

    stops: tuple[Stop, ...]
    links: tuple[Link, ...]
    left_out: int


def way(culprit: Culprit) -> Way | None:
    """Lay out a culprit's chain; None where it shows in the symptom itself."""
    if (len(culprit.chain) < 2 and culprit.node >= 0) or not culprit.chain:  # noqa: PLR2004
        return None
    start = words.first_bad(culprit)
    bad = "nan" if start is not None and start.nan else "inf"
    stops: list[Stop] = []
    for _, run in groupby(culprit.chain, key=lambda link: (link.source, link.node == culprit.node, link.turns_nan)):
        links = list(run)
        turns = any(link.turns_nan for link in links)
        bad = "nan" if turns else bad
        stops.append(Stop(_names(links), links[0].source, links[0].node, links[-1].node, bad, turns))
    kept, without = ends(stops, _SHOWN)
    if without:
        kept[_SHOWN // 2] = replace(kept[_SHOWN // 2], left_out=without)
    listed, more = ends(culprit.chain, _LISTED)
    return Way(tuple(kept), tuple(listed), more)


def _names(links: Sequence[Link]) -> str:
    names = [words.short(link.op) for link in links]
    return words.cut([name for name, _ in groupby(names)])


def ends(items: Sequence[_Item], most: int) -> tuple[list[_Item], int]:
    """Return the first and the last of many items, and how many are left out between them."""
    if len(items) <= most:
        return list(items), 0
    half = most // 2
    return [*items[:half], *items[len(items) - (most - half) :]], len(items) - most
