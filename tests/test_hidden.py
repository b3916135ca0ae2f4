"""Faults behind a fault: what an infinity left behind is followed back to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from calls import stretch_of

from bisect_nan import Snapshot, finite
from bisect_nan.blaming.hidden import Census
from bisect_nan.blaming.trace import Birth, Origin
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.intent import Intent
from bisect_nan.replaying.reproduce import walk

INF = math.inf


def behind(function: Callable[[torch.Tensor], torch.Tensor], op: str, x: torch.Tensor) -> list[str]:
    """Return the names of the calls behind the last call of a name, whose bad elements are taken as a birth."""
    snapshot = Snapshot.capture(None, x, lambda _, batch: function(batch).sum())
    program, stretch = snapshot.program, stretch_of(snapshot.program)
    passed = walk(stretch, stretch.start(snapshot.tensors()), len(stretch))
    dependence = Dependence(program)
    census = Census(stretch, passed.checkpoints, Intent(program, dependence), dependence)
    node = [n for n in program.nodes if n.target._schema.name == f"aten::{op}"][-1]
    value = node.outputs[0]
    assert value is not None
    again = walk(stretch, stretch.start(snapshot.tensors()), stretch.cut_after(node.index))
    birth = Birth(node.index, value, finite.mask(again.run.env[value]), Origin.MADE)
    return [program.nodes[b.node].target._schema.name.removeprefix("aten::") for b in census.behind(birth)]


@pytest.mark.parametrize(
    ("function", "op", "expected"),
    [
        (lambda x: (1 + x) / ((2 + x) / (1 / x)), "div", ["reciprocal"]),
        (lambda x: 1 / x.log().exp(), "reciprocal", ["log"]),
        (lambda x: (1 - (1 / x).tanh()).log(), "log", ["reciprocal"]),
        (lambda x: torch.nan_to_num(1 / x) * 4, "mul", ["reciprocal"]),
        (lambda x: 1 / (1 / x).isfinite().float(), "reciprocal", ["reciprocal"]),
        (lambda x: 1 / (1 / x)[:1].isfinite().sum(), "reciprocal", ["reciprocal"]),
        (lambda x: 1 / (0 * x / x).nansum(), "reciprocal", ["div"]),
        (lambda _: 1 / torch.full((2,), -INF).softmax(0).nansum(), "reciprocal", ["_softmax"]),
    ],
    ids=["x / inf", "exp(-inf)", "1 - tanh(inf)", "the largest number", "a comparison", "a count", "a sum", "a mask"],
)
def test_infinities_are_found_behind_finite_values(
    function: Callable[[torch.Tensor], torch.Tensor], op: str, expected: list[str]
) -> None:
    """A zero, or the largest number, asks what made it."""
    assert behind(function, op, torch.tensor([0.0, 2.0])[: 1 if expected == ["div"] else 2]) == expected


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: 1 / (x * 2), "reciprocal"),
        (lambda x: torch.stack([1 / (x * 2), torch.nan_to_num(1 / x)]), "reciprocal"),
        (lambda x: 1 / x.masked_fill(x == 0, -INF).exp(), "reciprocal"),
        (lambda x: 1 / ((1 / x)[1] - 0.5) + x, "reciprocal"),
    ],
    ids=["no infinity", "one beside it", "one that was written", "another element"],
)
def test_nothing_is_found_where_no_infinity_had_a_hand(
    function: Callable[[torch.Tensor], torch.Tensor], op: str
) -> None:
    """A zero of the data has no infinity behind it, whatever else happens in the step."""
    assert behind(function, op, torch.tensor([0.0, 2.0])) == []
