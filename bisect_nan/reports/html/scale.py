"""Positions in a chart, in percent of its width or height, so that it fits any page while its text stays as large as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass

_DECADES = 6
"""Gridlines of a logarithmic axis, at most."""

_TOP = 10.0
"""Percent of the height that a label takes."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A gridline: its position from the top in percent, and its label."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """A vertical axis; `low` is at the bottom.

    Attributes:
        low: Smallest number; where the axis is logarithmic, its decimal logarithm.
        high: Largest, likewise.
        logarithmic: Whether decades are equally high.
    """

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def logarithm(cls, low: float, high: float) -> Scale:
        """Return an axis of whole decades that holds two positive numbers."""
        bottom = math.floor(math.log10(low))
        return cls(bottom, max(math.ceil(math.log10(high)), bottom + 1), logarithmic=True)

    @classmethod
    def linear(cls, low: float, high: float) -> Scale:
        """Return an axis that holds two numbers, with some room."""
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        return cls(low - room, high + room, logarithmic=False)

    def y(self, number: float) -> float:
        """Return the position of a number, from the top; what lies outside is put at the edge."""
        if self.logarithmic:
            number = math.log10(number) if number > 0 else self.low
        return round(100 * (1 - min(max((number - self.low) / (self.high - self.low), 0.0), 1.0)), 2)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """The gridlines, none so near to the top that its label would not fit."""
        if not self.logarithmic:
            inner = [self.low + (self.high - self.low) * part for part in (0.1, 0.5, 0.9)]
            return tuple(Tick(self.y(number), f"{number:.3g}") for number in inner)
        step = max(1, math.ceil((self.high - self.low) / _DECADES))
        decades = range(math.ceil(self.low / step) * step, int(self.high) + 1, step)
        lines = [Tick(self.y(10.0**decade), power(decade)) for decade in decades]
        return tuple(line for line in lines if _TOP <= line.y < 100)  # noqa: PLR2004  (the ground)


def power(decade: int) -> str:
    """Return a power of ten as people write it: `1`, `100`, `1e6`."""
    return f"{10**decade:g}" if -3 <= decade <= 3 else f"1e{decade}"  # noqa: PLR2004
