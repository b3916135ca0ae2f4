"""Interventions: who is guilty is shown by what happens without them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import stretch_of
from hypothesis import given, settings
from hypothesis import strategies as st

from bisect_nan import Snapshot, finite
from bisect_nan.blaming.confirm import NEUTRALS, Interventions
from bisect_nan.blaming.trace import Birth, Origin
from bisect_nan.recording.program import Program
from bisect_nan.replaying.replay import Run
from bisect_nan.replaying.reproduce import walk

NAN, INF = math.nan, math.inf


def court(step: Callable[[Any, Any], torch.Tensor], batch: Any) -> tuple[Interventions, Program]:
    """Return interventions on a step's loss."""
    snapshot = Snapshot.capture(None, batch, step)
    stretch = stretch_of(snapshot.program)
    passed = walk(stretch, stretch.start(snapshot.tensors()), len(stretch))
    return Interventions(stretch, passed.checkpoints, [snapshot.program.targets.loss]), snapshot.program


def birth(program: Program, op: str, *places: int, origin: Origin = Origin.MADE) -> Birth:
    """Return a birth at the first call of a name, in some elements of its flattened result."""
    node = next(n for n in program.nodes if n.target._schema.name == f"aten::{op}")
    value = node.outputs[0]
    assert value is not None
    mask = torch.zeros(program.values[value].shape, dtype=torch.bool)
    mask.flatten()[list(places)] = True
    return Birth(node.index, value, mask, origin)


def two_faults(_: None, x: torch.Tensor) -> torch.Tensor:
    """A logarithm and a quotient that both reach the loss, and a root that does not."""
    return x.log().sum() + (1 / x).sum() + torch.nan_to_num((x - 1).sqrt()).sum()


def test_all_independent_faults_are_needed() -> None:
    """Either fault alone keeps the loss bad; the innocent one is released."""
    inter, program = court(two_faults, torch.tensor([0.0, 2.0]))
    log, quotient, root = birth(program, "log", 0), birth(program, "reciprocal", 0), birth(program, "sqrt", 0)
    assert not inter.heals([log])
    assert not inter.heals([quotient])
    assert inter.heals([log, quotient, root])
    assert inter.reduce([log, quotient, root]) == [log, quotient]


def test_the_earlier_of_two_is_the_root() -> None:
    """Where either of two births heals, the earlier one is kept."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y - y).sum()

    inter, program = court(step, torch.tensor([1000.0, 1.0]))
    both = [birth(program, "sub", 0, origin=Origin.TURNED), birth(program, "exp", 0)]
    assert inter.heals(both)
    (kept,) = inter.reduce(both)
    assert kept.node == both[1].node


@given(harmless=st.lists(st.booleans(), min_size=1, max_size=20))
@settings(max_examples=30)
def test_those_are_kept_that_do_harm(harmless: list[bool]) -> None:
    """Runs without some of the births go on from the run with all of them, and release what does no harm, wherever it stands."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for masked in harmless:
            bad = (x * 1).log()
            total = total + (torch.nan_to_num(bad, neginf=0.0) if masked else bad).sum()
        return total

    inter, program = court(step, torch.tensor([0.0, 2.0]))
    made = [(n.index, n.outputs[0]) for n in program.nodes if n.target._schema.name == "aten::log"]
    births = [
        Birth(index, value, torch.tensor([True, False]), Origin.MADE) for index, value in made if value is not None
    ]
    guilty = [birth for birth, masked in zip(births, harmless, strict=True) if not masked]
    assert inter.heals(births)
    kept = inter.reduce(births)
    if guilty and len(births) <= 16:
        assert kept == guilty
    else:  # all are on one line and stand together, and one is kept where none does harm
        assert kept == births[: len(kept)]


def test_only_own_elements_are_neutralised() -> None:
    """What a call hands on from others stays bad, so that it cannot acquit them."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        return (x[0].log() / x[1]).sum()

    inter, program = court(step, torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
    everything = birth(program, "div", 0, 1)
    assert not inter.heals([everything])
    assert inter.heals([everything, birth(program, "log", 0)])


@pytest.mark.parametrize("neutral", NEUTRALS, ids=lambda neutral: neutral.__name__)
def test_no_neutral_value_touches_what_others_made(neutral: Callable[..., Any]) -> None:
    """Whatever is put in the place of bad elements, bad elements of other births stay."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        return (x[0].log() / x[1]).sum()

    snapshot = Snapshot.capture(None, torch.tensor([[0.0, 2.0, 3e38], [1.0, 0.0, 1.0]]), step)
    stretch = stretch_of(snapshot.program)
    start = stretch.start(snapshot.tensors())
    inter = Interventions(stretch, [start], [snapshot.program.targets.loss])
    made = birth(snapshot.program, "div", 0, 1)
    kept = made.mask.clone()
    run = Run(stretch, start, inter.edits([made], neutral))
    run.advance(stretch.cut_after(made.node))
    assert finite.mask(run.env[made.value]).tolist() == [True, False, False]
    assert made.mask.equal(kept)


@pytest.mark.parametrize(
    "healthy_only_with",
    [
        lambda x: (x.log() - x.log().mean()).std().log(),  # a constant has no deviation
        lambda x: torch.logdet(x.log().reshape(2, 2) @ x.log().reshape(2, 2).T + 1e-3 * torch.eye(2)),
        lambda x: 1 / x.log().abs(),
    ],
    ids=["deviation", "determinant", "divisor"],
)
def test_a_neutral_value_that_makes_a_fault_of_its_own_is_no_evidence(
    healthy_only_with: Callable[..., torch.Tensor],
) -> None:
    """Several neutral values are tried, and one that heals is enough."""
    inter, program = court(lambda _, x: healthy_only_with(x).sum(), torch.zeros(4))
    assert inter.heals([*(birth_of(program, index) for index in range(len(program.nodes)) if is_log(program, index))])


def is_log(program: Program, index: int) -> bool:
    """Whether a call is a logarithm of the zeros."""
    return (
        program.nodes[index].target._schema.name == "aten::log"
        and len(program.values[program.nodes[index].outputs[0] or 0].shape) == 1
    )


def birth_of(program: Program, index: int) -> Birth:
    """Return the birth of all elements of a call."""
    value = program.nodes[index].outputs[0]
    assert value is not None
    return Birth(index, value, torch.ones(program.values[value].shape, dtype=torch.bool), Origin.MADE)


def test_an_overflow_in_half_precision_is_replaced_by_the_precise_value_clipped() -> None:
    """The neighbours of the overflow matter, too: with the median in its place their sum would overflow next."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        return (x.half() - 1).float().sum()

    inter, program = court(step, torch.tensor([1e5, 6e4]))
    assert inter.heals([birth(program, "_to_copy", 0)])


def chosen_by_value(_: None, x: torch.Tensor) -> torch.Tensor:
    """How many elements are chosen depends on the quotient, innocent though it is."""
    ratio = 1 / x[0]
    return x[1][torch.where(ratio > 3, 1.0, 0.0).bool()].sum() + x[1].log().sum()


def test_an_intervention_that_leads_elsewhere_proves_nothing() -> None:
    """Where the recorded calls cannot follow the changed values, a fault that comes later is not healed by it."""
    inter, program = court(chosen_by_value, torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    quotient, log = birth(program, "reciprocal", 0), birth(program, "log", 0)
    assert not inter.heals([quotient])
    assert inter.heals([log])
    assert [kept.node for kept in inter.reduce([quotient, log])] == [log.node]


def test_a_choice_by_value_can_be_kept() -> None:
    """The largest finite value in the place of an infinity is chosen where the infinity was."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        ratio = 1 / x
        return ratio[ratio > 3].sum()

    inter, program = court(step, torch.tensor([0.0, 0.2, 1.0, 1.0, 1.0]))
    assert inter.heals([birth(program, "reciprocal", 0)])


def test_bad_tensors_from_outside_are_neutralised_in_a_copy() -> None:
    """The captured tensors themselves stay as they are."""
    x = torch.tensor([NAN, 1.0])
    snapshot = Snapshot.capture(None, x, lambda _, b: b.sum())
    stretch = stretch_of(snapshot.program)
    start = stretch.start(snapshot.tensors())
    inter = Interventions(stretch, [start], [snapshot.program.targets.loss])
    (placeholder,) = snapshot.program.placeholders
    assert inter.heals([Birth(-1, placeholder.value, torch.tensor([True, False]), Origin.MADE, placeholder)])
    assert finite.same(x, torch.tensor([NAN, 1.0]))


def test_unwritten_memory_is_replaced_even_where_it_is_finite() -> None:
    """Garbage is garbage, whatever it reads as."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        return (x / x.clone()).sum()

    inter, program = court(step, torch.tensor([0.0, 1.0]))
    assert inter.heals([birth(program, "clone", 0, origin=Origin.UNWRITTEN)])
    assert not inter.heals([birth(program, "clone", 0)])


def test_two_ways_of_healing_can_differ() -> None:
    """Whether the rest of a tensor's infinities matter shows when they are neutralised as well."""
    snapshot = Snapshot.capture(
        None, torch.tensor([[INF, 1.0], [INF, INF]]), lambda _, b: (-b).softmax(1).square().sum()
    )
    stretch = stretch_of(snapshot.program)
    inter = Interventions(stretch, [stretch.start(snapshot.tensors())], [snapshot.program.targets.loss])
    (placeholder,) = snapshot.program.placeholders
    some, rest = torch.tensor([[False, False], [True, True]]), torch.tensor([[True, False], [True, True]])
    births = [Birth(-1, placeholder.value, mask, Origin.MADE, placeholder) for mask in (some, rest)]
    assert inter.differ(births[:1], births[1:])
    assert not inter.differ(births[:1], births[:1])


def test_only_own_elements_are_left_to_a_birth() -> None:
    """Inf - inf of a mask is the call's own; inf - inf of an overflow is that of the overflow."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        y = x.exp().masked_fill(x < 0, INF)
        return (y - y).sum()

    inter, program = court(step, torch.tensor([1000.0, -1.0, 1.0]))
    overflow, difference = birth(program, "exp", 0), birth(program, "sub", 0, 1, origin=Origin.TURNED)
    assert inter.heals([overflow, difference])
    masks = {made.node: made.mask.tolist() for made in inter.own}
    assert masks == {overflow.node: [True, False, False], difference.node: [False, True, False]}


def test_the_turns_of_a_loop_stand_or_fall_together() -> None:
    """Of very many births those of one line are released at once, so that the runs do not grow with the turns."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        for _turn in range(60):
            total = total + x.log().sum() + torch.nan_to_num(x / x).sum()
        return total

    inter, program = court(step, torch.zeros(2))
    logs, quotients = (
        [birth_of(program, n.index) for n in program.nodes if n.target._schema.name == name]
        for name in ("aten::log", "aten::div")
    )
    assert inter.heals([*quotients, *logs])
    assert {program.nodes[b.node].target._schema.name for b in inter.reduce([*quotients, *logs])} == {"aten::log"}
    assert inter.runs < 20
