"""Telling infinities that a program wrote on purpose from those that it made by accident."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from calls import run_all
from torch import nn

from bisect_nan import Phase, Snapshot
from bisect_nan.recording.program import Placeholder
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.intent import Intent, is_mask

NAN, INF = math.nan, math.inf


def wrote(function: Callable[[nn.Module, torch.Tensor], torch.Tensor], op: str) -> bool:
    """Say whether the infinities that the first call of a name made are meant."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.eye(2))
    snapshot = Snapshot.capture(model, torch.tensor([[0.0, 1.0], [1.0, 1.0]]), lambda m, x: function(m, x).sum())
    calls, *_ = run_all(snapshot)
    intent = Intent(snapshot.program, Dependence(snapshot.program))
    return intent.wrote(next(c for c in calls if c.node.target._schema.name == f"aten::{op}"))


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda _, x: x.masked_fill(x > 0, -INF), "masked_fill"),
        (lambda _, x: torch.full((2,), INF) + x, "full"),
        (lambda _, x: torch.where(x > 0, x, INF), "scalar_tensor"),
        (lambda _, x: x.clone().fill_diagonal_(-INF), "fill_"),
        (lambda _, x: x.log(), "log"),
    ],
    ids=["masked_fill", "full", "where", "fill_diagonal", "log of a mask"],
)
def test_literals_are_meant(function: Callable[[nn.Module, torch.Tensor], torch.Tensor], op: str) -> None:
    """An infinity that stands in the program is meant, and so is the logarithm of a 0/1 mask."""
    assert wrote(function, op)


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda _, x: 1 / x, "reciprocal"),
        (lambda _, x: (2 * x).log(), "log"),
        (lambda _, x: (0 * x).log(), "log"),
        (lambda m, x: (m.weight * x).log(), "log"),
    ],
    ids=["quotient", "log of numbers", "log of nothing but 0", "log of what was learned"],
)
def test_accidents_are_not(function: Callable[[nn.Module, torch.Tensor], torch.Tensor], op: str) -> None:
    """Arithmetic on healthy values makes no intended infinity, and what depends on a parameter is no mask."""
    assert not wrote(function, op)


@pytest.mark.parametrize(
    ("values", "mask"),
    [
        ([0.0, -INF, 0.0], True),
        ([-INF, -INF], True),
        ([1.0, INF, 1.0, -INF], True),
        ([0.5, -INF, 0.7], False),
        ([0.0, -INF, NAN], False),
    ],
)
def test_what_looks_like_a_mask(values: list[float], mask: bool) -> None:
    """Infinities, no NaN, and one other value at most."""
    assert is_mask(torch.tensor(values)) is mask


def test_tensors_from_outside() -> None:
    """A literal's infinities are meant and its NaN are not; those of data are only after the step was seen to bear them."""
    snapshot = Snapshot.capture(None, torch.ones(2), lambda _, x: x.sum())
    intent = Intent(snapshot.program, Dependence(snapshot.program))
    data, literal = Placeholder(0, Phase.INPUT, "batch"), Placeholder(1, Phase.INPUT, "constant", constant=True)
    bounds, broken = torch.tensor([0.5, 1.0, INF]), torch.tensor([0.5, NAN, INF])
    assert intent.means(literal, bounds)
    assert not intent.means(literal, broken)
    assert not intent.means(data, bounds)
    assert not intent.means(data, broken)
    intent.accept(0)
    assert intent.means(data, bounds)
    assert intent.means(data, broken)
