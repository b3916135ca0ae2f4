"""What a report draws of live values: plain numbers that were counted while the step ran, without tensors.

A finding says what was found. How large the values were on the way, and which elements came out bad, takes one more run of the
step (`bisect_nan.answer.picture`), so these numbers are a part of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bisect_nan.finding import Phase, SourceLine


@dataclass(frozen=True, slots=True)
class Magnitude:
    """How large the values are that one call made.

    Attributes:
        node: Index of the call in the program.
        op: ATen overload.
        phase: In which part of the step it ran.
        source: The line that made the call, or for a derivative the forward line.
        dtype: Short form: `f32`, `bf16` ...
        largest: The largest finite magnitude among them; 0 where there is none.
        limit: The largest number of that type.
        nonfinite: How many are NaN or infinite.
    """

    node: int
    op: str
    phase: Phase
    source: SourceLine | None
    dtype: str
    largest: float
    limit: float
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class BadElements:
    """Which elements of a culprit's first bad output are bad: counts in the cells of a grid.

    The leading dimensions are laid out as rows and the others as columns; a cell is a block of them. Where there are few enough
    indices of the first dimension, no cell holds elements of two of them.

    Attributes:
        culprit: Place of the culprit in `Finding.culprits`.
        shape: Of the output.
        split: How many leading dimensions are rows.
        rows: For each row of cells, the first row of elements in it, and the one behind its last.
        columns: Likewise for columns.
        nan: How many elements of each cell are NaN.
        inf: How many are infinite.
    """

    culprit: int
    shape: tuple[int, ...]
    split: int
    rows: tuple[tuple[int, int], ...]
    columns: tuple[tuple[int, int], ...]
    nan: tuple[tuple[int, ...], ...]
    inf: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """Everything that is drawn beside a finding.

    Attributes:
        magnitudes: Of the calls that the symptom needs, in order.
        growth: Indices of the calls over which the values grew up to the first culprit, itself last; empty where they did not.
        bad: The bad elements of culprits, for those that one run of the step shows as the finding tells them.
        history: Numbers of the training steps before, as in `Snapshot.history`.
    """

    magnitudes: tuple[Magnitude, ...] = ()
    growth: tuple[int, ...] = ()
    bad: tuple[BadElements, ...] = ()
    history: tuple[Mapping[str, float], ...] = ()
