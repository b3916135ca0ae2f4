"""From a symptom to the births that make it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bisect_nan import Snapshot
from bisect_nan.blaming.inquest import Inquest, is_known, without
from bisect_nan.blaming.trace import Birth, Origin
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.intent import Intent
from bisect_nan.replaying.reproduce import walk
from bisect_nan.replaying.stretch import Stretch


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
    assert judge.runs == 2  # the first round reads the pass that showed the symptom


def test_what_the_same_kernel_makes_later_is_suspected_at_once() -> None:
    """Layer after layer makes the same fault: one run more shows all of them, and what does no harm is released."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        y = (x * 0).log() * 0 + x
        y = (y * 0).log() * 0 + x
        y = (y * 0).log() * 0 + x
        y = (y * 0).log() * 0 + x
        return y.sum() + torch.nan_to_num(x.log(), neginf=0.0).sum()

    judge, snapshot = inquest(step, nn.Identity(), torch.zeros(1))
    logs = [n for n in snapshot.program.nodes if n.target._schema.name == "aten::log"]
    first = Birth(logs[0].index, logs[0].outputs[0] or 0, torch.tensor([True]), Origin.MADE)
    assert judge.judge([first]) is None
    judge._in_vain.clear()
    guilty = judge.judge([first], elsewhere=True)
    assert guilty is not None
    assert sorted(birth.node for birth in guilty) == [node.index for node in logs[:4]]


def test_what_turns_infinities_is_not_blamed_while_one_who_makes_them_is_hidden() -> None:
    """A sum of opposite infinities heals alone, but not the fault that shows only when the NaN before it is gone."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        hidden, seen = ((x / x) * 0 + x).log(), x.reciprocal()
        return torch.stack([hidden, seen, -seen]).sum()

    judge, snapshot = inquest(step, nn.Identity(), torch.tensor([0.0, 2.0]))
    guilty, _ = judge.collect()
    assert sorted(names(snapshot, guilty)) == ["div", "log", "reciprocal"]


def test_of_several_each_keeps_what_it_does_alone() -> None:
    """Of two infinities that cancel each other, one does no harm by itself, so that element is not its fault."""

    def step(_: Any, x: torch.Tensor) -> torch.Tensor:
        low, high = x.log(), x.reciprocal()
        return low.sum() + high[0] + (low + high).tanh().sum()

    judge, snapshot = inquest(step, nn.Identity(), torch.zeros(2))
    guilty, _ = judge.collect()
    masks = {name: birth.mask.tolist() for name, birth in zip(names(snapshot, guilty), guilty, strict=True)}
    assert masks == {"log": [True, True], "reciprocal": [True, False]}


def test_of_several_each_gets_what_the_others_hide() -> None:
    """A gradient that a clamped infinity keeps from spreading spreads as soon as the infinity is mended."""

    class Floor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.0, 4.0]))

    def step(model: Any, _: Any) -> torch.Tensor:
        floor = model.w.log().clamp(-2, 2)
        result: torch.Tensor = (torch.minimum(model.w, floor) * 0).sqrt().sum()
        return result

    judge, snapshot = inquest(step, Floor(), None)
    guilty, _ = judge.collect()
    autograd = [snapshot.program.nodes[birth.node].autograd for birth in guilty]
    masks = {name: birth.mask.tolist() for name, birth in zip(autograd, guilty, strict=True)}
    assert masks == {"SqrtBackward0": [True, True], "LogBackward0": [True, False]}


def test_the_same_births_are_tried_once() -> None:
    """What has not healed once is not tried again."""
    judge, _ = inquest(lambda _, x: (x / x).sum() + x.log().sum(), nn.Identity(), torch.zeros(1))
    guilty, _ = judge.collect()
    assert judge.judge(guilty[:1]) is None
    runs = judge.court.runs
    assert judge.judge(guilty[:1]) is None
    assert judge.court.runs == runs


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
