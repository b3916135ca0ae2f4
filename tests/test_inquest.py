"""From a symptom to the births that make it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bisect_nan import Snapshot
from bisect_nan.dependence import Dependence
from bisect_nan.inquest import Inquest, is_known, without
from bisect_nan.intent import Intent
from bisect_nan.reproduce import walk
from bisect_nan.stretch import Stretch
from bisect_nan.trace import Birth, Origin


def inquest(step: Callable[[Any, Any], torch.Tensor], model: nn.Module, batch: Any) -> tuple[Inquest, Snapshot]:
    """Return an inquest on what a step shows."""
    snapshot = Snapshot.capture(model, batch, step)
    assert snapshot.observed is not None
    numbers = snapshot.program.targets.of(snapshot.observed.symptom.kind)
    targets = [numbers[name] for name in snapshot.observed.names]
    dependence = Dependence(snapshot.program)
    stretch = Stretch(snapshot.program, dependence.slice(targets), targets)
    done = walk(stretch, stretch.start(snapshot.tensors()), len(stretch))
    return Inquest(stretch, done, targets, Intent(snapshot.program, dependence), dependence), snapshot


def names(snapshot: Snapshot, births: list[Birth]) -> list[str]:
    """Return the calls of births."""
    return [snapshot.program.nodes[birth.node].target._schema.name.removeprefix("aten::") for birth in births]


def test_births_that_show_only_later_are_found() -> None:
    """A NaN hides two more faults in the same element; each shows when the one before it is neutralised."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        return (((x / x) * 0 + x).log() * 0 + x).rsqrt().sum()

    judge, snapshot = inquest(step, nn.Identity(), torch.zeros(1))
    guilty, _ = judge.collect()
    assert sorted(names(snapshot, guilty)) == ["div", "log", "rsqrt"]
    assert judge.runs == 3


def test_the_innocent_are_acquitted() -> None:
    """A NaN that meets the loss only through a comparison makes no difference."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x / x).nan_to_num(), x.log()]).sum()

    judge, snapshot = inquest(step, nn.Identity(), torch.zeros(2))
    guilty, _ = judge.collect()
    assert names(snapshot, guilty) == ["log"]


def test_a_written_infinity_that_nothing_takes_in_is_named_at_last() -> None:
    """An infinite start value that no maximum replaced is all there is to blame."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        best = torch.tensor(float("-inf"))
        return torch.where(x[0] > 5, x[0], best)

    judge, _ = inquest(step, nn.Identity(), torch.ones(2))
    guilty, _ = judge.collect()
    assert [birth.origin for birth in guilty] == [Origin.WRITTEN]


def test_one_tensor_that_came_in_bad_does_harm_in_two_ways() -> None:
    """A NaN of the batch reaches the loss, and an infinity beside it leaves a zero that does."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.log(1 / (1 + x.abs())).sum()

    judge, _ = inquest(step, nn.Identity(), torch.tensor([math.inf, 1.0, math.nan]))
    guilty, _ = judge.collect()
    (root,) = judge.roots(guilty)
    assert root.placeholder is not None
    assert root.mask.tolist() == [True, False, True]


def test_one_fault_is_named_once() -> None:
    """The derivative of x / x has two parts that are both 0 / 0; a blamed forward call needs no derivative beside it."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model.weight[0] * x
        return torch.where(x > 0, y / y, y).sum()

    judge, snapshot = inquest(step, nn.Linear(2, 1), torch.tensor([0.0, 1.0]))
    guilty, _ = judge.collect()
    assert len(guilty) > 1
    (only,) = judge.one_each(guilty)
    assert snapshot.program.origin(snapshot.program.nodes[only.node]).target._schema.name == "aten::div"


def test_elements_that_reach_nothing_are_taken_off() -> None:
    """Of all that a call made bad, what is on the way to the symptom is kept."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        return (1 / x)[1:].sum()

    judge, snapshot = inquest(step, nn.Identity(), torch.tensor([0.0, 1.0, 0.0]))
    (node,) = [n for n in snapshot.program.nodes if n.target._schema.name == "aten::reciprocal"]
    value = node.outputs[0]
    assert value is not None
    whole = Birth(node.index, value, torch.tensor([True, False, True]), Origin.MADE)
    assert judge.court.heals([whole])
    (kept,) = judge.narrowed([whole])
    assert kept.mask.tolist() == [False, False, True]


def test_births_are_compared_by_place_and_elements() -> None:
    """A birth is known when another one at its place covers its elements."""
    small, large = (Birth(1, 2, torch.tensor([True, marked]), Origin.MADE) for marked in (False, True))
    assert is_known(small, [large])
    assert not is_known(large, [small])
    assert not is_known(Birth(1, 2, small.mask, Origin.TURNED), [large])
    elsewhere = Birth(2, 3, small.mask, Origin.MADE)
    (left,) = without([small, large, elsewhere], [small])
    assert left is elsewhere
