"""The search as a picture: where the program was cut, and what was found there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bisect_nan.finding import SearchCost

_SHOWN = 64
"""Probes that are drawn; of more the middle is left out."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One look at a cut.

    Attributes:
        number: Which look it was, from 1.
        cut: Index of the node behind the cut.
        answer: `clean`, `dirty` or `unknown`.
        x: Place along the program, in percent.
        low: The latest cut known to be clean, in percent.
        high: The earliest cut behind it known to be dirty, in percent.
    """

    number: int
    cut: int
    answer: str
    x: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Search:
    """The probes in order, those that are left out in the middle, and the places of the culprits in percent."""

    probes: tuple[Probe, ...]
    left_out: int
    culprits: tuple[float, ...]


def search(cost: SearchCost, culprits: Sequence[int]) -> Search | None:
    """Lay out the probes; None where there were none."""
    if not cost.cuts or not cost.nodes:
        return None
    found: list[Probe] = []
    clean: list[int] = []
    dirty: list[int] = []
    for number, (cut, answer) in enumerate(cost.cuts, 1):
        {"clean": clean, "dirty": dirty}.get(answer, []).append(cut)
        high = min(dirty, default=cost.nodes)
        low = max((c for c in clean if c < high), default=0)
        place, left, right = (round(100 * c / cost.nodes, 2) for c in (cut, low, high))
        found.append(Probe(number, cut, answer, place, left, right))
    half = _SHOWN // 2
    kept = found if len(found) <= _SHOWN else [*found[:half], *found[-half:]]
    places = tuple(round(100 * (node + 0.5) / cost.nodes, 2) for node in culprits if node >= 0)
    return Search(tuple(kept), len(found) - len(kept), places)
