"""The heat map of a culprit's output: where its bad elements lie, and whose they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bisect_nan.finding import Culprit
from bisect_nan.pictures import BadElements

_SHADES = 4
"""Shades of a colour: a cell is the darker the more of its elements are bad."""

_WIDE, _HIGH = 640, 400
"""Pixels of a map, unless its cells become too small or too large."""

_APART = 14.0
"""Pixels between the middles of two names."""

_PARTED = 8.0
"""Pixels of a band, at least, where bands are parted by lines."""


@dataclass(frozen=True, slots=True)
class Shade:
    """Cells of one colour as one path, a unit a cell."""

    kind: str
    level: int
    path: str


@dataclass(frozen=True, slots=True)
class Band:
    """The rows of one index of the first dimension.

    Attributes:
        index: The index.
        start: Its first row of cells.
        stop: The one behind its last.
        bad: How many of its elements are bad.
    """

    index: int
    start: int
    stop: int
    bad: int


@dataclass(frozen=True, slots=True)
class Name:
    """How a band is called, beside the map: its height in pixels, the text, and whether elements are bad there."""

    y: float
    text: str
    bad: bool


@dataclass(frozen=True, slots=True)
class HeatMap:
    """What the map shows.

    Attributes:
        shape: Of the output.
        rows: Names of the dimensions that are rows: `0 to 2`; empty where there is one row.
        columns: Likewise for columns; empty where there is one column.
        grid: Columns and rows of cells.
        size: Width and height in pixels.
        block: Elements in a cell: rows and columns.
        shades: The cells that hold bad elements.
        lines: Rows of cells at which bands begin, where bands are high enough to be told apart.
        names: Of those bands for that there is room.
        told: The bad bands in words.
        nan: How many elements are NaN.
        inf: How many are infinite.
    """

    shape: tuple[int, ...]
    rows: str
    columns: str
    grid: tuple[int, int]
    size: tuple[int, int]
    block: tuple[int, int]
    shades: tuple[Shade, ...]
    lines: tuple[int, ...]
    names: tuple[Name, ...]
    told: str
    nan: int
    inf: int

    @property
    def bad(self) -> str:
        """How many elements are bad, in words."""
        return " and ".join(f"{count} {kind}" for count, kind in ((self.nan, "NaN"), (self.inf, "infinite")) if count)


def heat_map(bad: BadElements, culprit: Culprit) -> HeatMap:
    """Lay out the map of a culprit's bad elements."""
    dims = [str(dim) for dim in range(len(bad.shape))]
    bands = tuple(_bands(bad))
    guilty = tuple(band.index for band in bands if band.bad)
    # Only where the bad indices are exactly the samples that carry the fault is the first dimension the batch for sure.
    word = "sample" if guilty and guilty == tuple(culprit.samples) else "index"
    width, height = len(bad.columns), len(bad.rows)
    cell = min(max(_WIDE / width, 5.0), 22.0), min(max(_HIGH / height, 4.0), 16.0)
    return HeatMap(
        shape=bad.shape,
        rows=_span(dims[: bad.split]),
        columns=_span(dims[bad.split :]),
        grid=(width, height),
        size=(round(width * cell[0]), round(height * cell[1])),
        block=(_size(bad.rows), _size(bad.columns)),
        shades=tuple(_shades(bad)),
        lines=tuple(band.start for band in bands[1:] if (band.stop - band.start) * cell[1] >= _PARTED),
        names=tuple(_names(bands, word, cell[1])),
        told="".join(f"{word} {band.index}: {band.bad} bad. " for band in bands if band.bad),
        nan=sum(map(sum, bad.nan)),
        inf=sum(map(sum, bad.inf)),
    )


def _names(bands: Sequence[Band], word: str, cell: float) -> Iterator[Name]:
    """Yield names that do not overlap, the bad ones first."""
    taken: list[float] = []
    for band in sorted(bands, key=lambda band: not band.bad):
        y = (band.start + band.stop) / 2 * cell
        if all(abs(y - other) >= _APART for other in taken):
            taken.append(y)
            yield Name(round(y + 4, 1), f"{word} {band.index}" if band.bad else str(band.index), band.bad > 0)


def _span(dims: Sequence[str]) -> str:
    return f"{dims[0]} to {dims[-1]}" if len(dims) > 1 else "".join(dims)


def _size(blocks: Sequence[tuple[int, int]]) -> int:
    return max(stop - start for start, stop in blocks)


def _bands(bad: BadElements) -> Iterator[Band]:
    """Yield the indices of the first dimension with their rows of cells, unless a cell holds several."""
    if not bad.split:
        return
    each = bad.rows[-1][1] // bad.shape[0]
    owners = [(start // each, (stop - 1) // each) for start, stop in bad.rows]
    if any(first != last for first, last in owners):
        return
    for index, rows in groupby(range(len(owners)), key=lambda row: owners[row][0]):
        places = list(rows)
        count = sum(sum(bad.nan[row]) + sum(bad.inf[row]) for row in places)
        yield Band(index, places[0], places[-1] + 1, count)


def _shades(bad: BadElements) -> Iterator[Shade]:
    """Yield the cells with bad elements, those of one colour in one path, neighbours in a row as one rectangle."""
    paths: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for y, (low, high) in enumerate(bad.rows):
        cells = [
            _colour(nan, inf, (high - low) * (stop - start))
            for nan, inf, (start, stop) in zip(bad.nan[y], bad.inf[y], bad.columns, strict=True)
        ]
        for colour, run in groupby(range(len(cells)), key=cells.__getitem__):
            places = list(run)
            if colour is not None:
                paths[colour].append(f"M{places[0]} {y}h{len(places)}v1h-{len(places)}z")
    for (kind, level), pieces in sorted(paths.items()):
        yield Shade(kind, level, "".join(pieces))


def _colour(nan: int, inf: int, count: int) -> tuple[str, int] | None:
    if not nan + inf:
        return None
    return "nan" if nan >= inf else "inf", min(_SHADES, 1 + (nan + inf) * _SHADES // count)
