"""Which rows of the batch blamed elements come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import stretch_of
from torch.nn import functional

from bisect_nan import Snapshot, locate
from bisect_nan.blaming.samples import Rows, Samples
from bisect_nan.replaying.reproduce import walk

NAN, INF = math.nan, math.inf
ROWS = 5


def rows_of(
    function: Callable[[dict[str, torch.Tensor]], torch.Tensor], op: str, place: int, **batch: Any
) -> tuple[int, ...]:
    """Return the rows of one element of the first result of a call."""
    snapshot = Snapshot.capture(None, batch, lambda _, b: function(b).sum())
    stretch = stretch_of(snapshot.program)
    passed = walk(stretch, stretch.start(snapshot.tensors()), len(stretch))
    node = next(n for n in snapshot.program.nodes if n.target._schema.name == f"aten::{op}")
    value = node.outputs[0]
    assert value is not None
    mask = torch.zeros(snapshot.program.values[value].shape, dtype=torch.bool)
    mask.flatten()[place] = True
    return (
        Samples(snapshot.program, stretch, passed.checkpoints, stretch.targets).of_result(node.index, value, mask).rows
    )


def test_the_shape_tells() -> None:
    """A result with the batch in its first dimension needs no walk."""
    assert rows_of(lambda b: b["x"].log(), "log", 7, x=torch.rand(ROWS, 3)) == (2,)


@pytest.mark.parametrize(
    ("function", "op", "place", "rows"),
    [
        (lambda b: b["x"].T.log(), "log", 8, (3,)),
        (lambda b: b["x"].flatten()[3:].exp(), "exp", 4, (2,)),
        (lambda b: b["x"][b["order"]][:2].exp(), "exp", 3, (4,)),
        (lambda b: b["x"].view(ROWS, 3, 1).expand(ROWS, 3, 2).reshape(ROWS * 3, 2).exp(), "exp", 10, (1,)),
        (lambda b: functional.embedding(b["ids"], torch.eye(4)).flatten(0, 1).exp(), "exp", 4 * 3, (1,)),
        (lambda b: torch.zeros(2, 3).index_add(0, b["group"], b["x"]).exp(), "exp", 3, (1, 3)),
        (lambda b: (b["x"] @ torch.rand(3, 2)).max(0).values.exp(), "exp", 0, None),
    ],
    ids=["transposed", "flattened", "reordered", "expanded", "embedded", "grouped", "selected"],
)
def test_else_elements_are_followed(
    function: Callable[[dict[str, torch.Tensor]], torch.Tensor], op: str, place: int, rows: tuple[int, ...] | None
) -> None:
    """Through reshaping, selection, lookup and sums, back to rows of the batch."""
    x = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(0))
    batch = {
        "x": x,
        "order": torch.tensor([2, 4, 0, 1, 3]),
        "ids": torch.tensor([[0, 1], [2, 3], [0, 0], [1, 1], [2, 2]]),
        "group": torch.tensor([0, 1, 0, 1, 0]),
    }
    found = rows_of(function, op, place, **batch)
    if rows is None:
        assert len(found) == 1
    else:
        assert found == rows


def test_bad_elements_are_followed_to_bad_elements() -> None:
    """A mean over the batch depends on all rows, and is bad because of one."""
    x = torch.rand(ROWS, 3)
    x[3, 1] = 0
    assert rows_of(lambda b: b["x"].log().mean(), "mean", 0, x=x) == (3,)


def test_no_rows_where_all_are_meant() -> None:
    """What depends on every row alike names none."""
    assert rows_of(lambda b: b["x"].mean().log(), "log", 0, x=torch.rand(ROWS, 3)) == ()
    assert rows_of(lambda b: b["x"].log(), "log", 0, x=torch.rand(1, 3)) == ()


def test_rows_of_an_input() -> None:
    """A bad element of the batch belongs to its own row."""
    snapshot = Snapshot.capture(None, torch.rand(ROWS, 2), lambda _, x: x.sum())
    stretch = stretch_of(snapshot.program)
    samples = Samples(snapshot.program, stretch, [stretch.start(snapshot.tensors())], [])
    mask = torch.zeros(ROWS, 2, dtype=torch.bool)
    mask[4, 1] = mask[1, 0] = True
    assert samples.of_input(mask) == Rows((1, 4), confirmed=True)
    assert samples.of_input(mask[0]) == Rows()


def located(batch: torch.Tensor, step: Any) -> tuple[tuple[int, ...], bool]:
    """Return the samples of a step's culprit, and whether they were confirmed."""
    (culprit,) = locate(Snapshot.capture(None, batch, lambda _, b: step(b))).culprits
    return culprit.samples, culprit.samples_confirmed


def test_rows_are_confirmed_by_a_run_without_them() -> None:
    """A healthy row in the place of the bad one heals the call."""
    x = torch.rand(ROWS, 3) + 1
    x[3] = 0
    assert located(x, lambda b: b.sum(1).log().sum()) == ((3,), True)


def test_an_equal_size_is_no_evidence() -> None:
    """A head, a class or a column whose number could be that of a row is not told as one."""
    weight = torch.ones(2, 3)
    weight[1] = 0
    x = torch.rand(2, 3) + 1
    assert located(x, lambda b: (weight @ b.T).T.sum(0).log().sum()) == ((), False)


def test_rows_of_a_lookup() -> None:
    """Bad elements of a table belong to the rows that look them up."""
    numbers = torch.tensor([1, 2, 0, 1])

    def looked_up(rows: torch.Tensor) -> torch.Tensor:
        table = (torch.tensor([1.0, 2.0, 0.0]) / torch.tensor([1.0, 1.0, 0.0]))[:, None]
        return functional.embedding(rows % 3, table).sum()

    assert located(numbers + 1, looked_up) == ((0, 3), True)
