"""The numbers of the training before the step, as small charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bisect_nan.reports.html.scale import Scale

_NAMES = {"loss": "Loss", "gradient_norm": "Gradient norm", "parameter_norm": "Parameter norm"}

_LATEST = 200
"""Steps that are drawn."""

_WIDE = 50.0
"""Numbers that differ by this factor are drawn over decades."""


@dataclass(frozen=True, slots=True)
class Trend:
    """One quantity over the steps.

    Attributes:
        name: What it is.
        scale: Its vertical axis.
        points: Places in percent.
        first: Number of the first step.
        last: Number of the last step.
        start: The quantity at the first step.
        latest: The quantity at the last one.
    """

    name: str
    scale: Scale
    points: tuple[tuple[float, float], ...]
    first: int
    last: int
    start: float
    latest: float


def trends(history: Sequence[Mapping[str, float]]) -> tuple[Trend, ...]:
    """Lay out one chart for each quantity that the history tells of."""
    return tuple(_trends(history[-_LATEST:]))


def _trends(history: Sequence[Mapping[str, float]]) -> Iterator[Trend]:
    for key, name in _NAMES.items():
        seen = [(numbers.get("step", place), numbers[key]) for place, numbers in enumerate(history) if key in numbers]
        if not seen:
            continue
        steps, values = zip(*seen, strict=True)
        low, high = min(values), max(values)
        scale = Scale.logarithm(low, high) if 0 < low < high / _WIDE else Scale.linear(low, high)
        length = (steps[-1] - steps[0]) or 1
        points = tuple((round(100 * (step - steps[0]) / length, 2), scale.y(value)) for step, value in seen)
        yield Trend(name, scale, points, int(steps[0]), int(steps[-1]), values[0], values[-1])
