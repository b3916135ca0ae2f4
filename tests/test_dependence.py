"""Which call needs which."""

from __future__ import annotations

import functools
import itertools

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import STEPS, applied
from test_replay import all_targets, replayed, same, stretch_of

from bisect_nan.recording.capture import record
from bisect_nan.recording.outcome import Recording
from bisect_nan.replaying.dependence import Dependence


@functools.cache
def recorded(name: str) -> Recording:
    """Record a step of the table once."""
    torch.manual_seed(1)
    return record(*STEPS[name]())


@functools.cache
def everything(name: str) -> dict[int, torch.Tensor]:
    """Return all values of a step of the table, as they are at its end."""
    made = {
        value for node in recorded(name).program.nodes for value in [*node.outputs, *node.written] if value is not None
    }
    return replayed(recorded(name), sorted(made))


NAMES = ["in_place_on_views", "convolutions_with_batch_norm", "checkpointing", "gradient_penalty", "overlapping_batch"]


@pytest.mark.parametrize("name", NAMES)
def test_every_call_needs_what_made_its_arguments(name: str) -> None:
    """The graph points from earlier to later calls, and has an edge for every argument that a call made."""
    program = recorded(name).program
    graph = Dependence(program).graph
    assert list(graph) == list(range(len(program.nodes)))
    assert all(before < after for before, after in graph.edges)
    made: dict[int, int] = {}
    for node in program.nodes:
        assert all(graph.has_edge(made[value], node.index) for value in node.inputs() if value in made)
        for output in node.outputs:
            if output is not None:
                made.setdefault(output, node.index)


def test_a_reader_needs_the_latest_writer_of_its_memory() -> None:
    """Writes through a view reach readers of the whole, and readers before the write do not need it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        early = y.sin()
        y[1].mul_(2.0)
        return y.cos() + early

    program = record(*applied(function), backward=False).program
    index = {str(node.target): node.index for node in reversed(program.nodes)}
    graph = Dependence(program).graph
    assert graph.has_edge(index["aten.mul_.Tensor"], index["aten.cos.default"])
    assert not nx.has_path(graph, index["aten.mul_.Tensor"], index["aten.sin.default"])


def test_a_slice_holds_what_its_target_needs_and_no_dead_branch() -> None:
    """A branch that reaches no target is left out, all that reach it stay, in order."""

    def function(x: torch.Tensor) -> torch.Tensor:
        dead = x.exp().log()
        assert dead.shape == x.shape
        return x.tanh()

    recording = record(*applied(function))
    program = recording.program
    kept = Dependence(program).slice(all_targets(recording))
    names = {str(program.nodes[index].target) for index in kept}
    assert kept == sorted(kept)
    assert "aten.exp.default" not in names
    assert "aten.tanh.default" in names


@settings(max_examples=20)
@given(data=st.data())
@pytest.mark.parametrize("name", NAMES)
def test_the_slice_of_any_value_computes_it(name: str, data: st.DataObject) -> None:
    """Whatever the targets, running their slice alone gives what running everything gives."""
    recording = recorded(name)
    program = recording.program
    made = sorted({value for node in program.nodes for value in [*node.outputs, *node.written] if value is not None})
    targets = data.draw(st.lists(st.sampled_from(made), min_size=1, max_size=3), label="targets")
    expected = everything(name)
    alone = replayed(recording, targets)
    for number in targets:
        assert same(alone[number].nan_to_num(7.0), expected[number].nan_to_num(7.0))


def test_random_calls_before_a_random_call_belong_to_its_slice() -> None:
    """Each draw goes on where the one before stopped, also when nothing else connects them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        unused = torch.rand(3)
        assert unused.shape == (3,)
        return x * torch.rand(6)

    recording = record(*applied(function))
    stretch = stretch_of(recording, all_targets(recording))
    assert sum(node.random for node in stretch.nodes) == 2


def test_targets_are_finished_at_their_last_write() -> None:
    """`finished` counts the calls up to the one that completes the targets."""
    recording = recorded("convolutions_with_batch_norm")
    program = recording.program
    dependence = Dependence(program)
    loss = program.targets.loss
    assert loss is not None
    cut = dependence.finished([loss])
    assert loss in program.nodes[cut - 1].outputs
    assert dependence.finished(all_targets(recording)) > cut
    assert dependence.finished([program.placeholders[0].value]) == 0


def test_a_chain_leads_from_a_call_to_the_target() -> None:
    """The shortest path of calls, through given ones only where they are given; alone where there is none."""
    recording = record(*applied(lambda x: x.exp().tanh().sin()))
    program = recording.program
    dependence = Dependence(program)
    loss = program.targets.loss
    assert loss is not None
    start = next(node.index for node in program.nodes if str(node.target) == "aten.exp.default")
    chain = dependence.chain(start, [loss])
    assert (chain[0], chain[-1]) == (start, dependence.finished([loss]) - 1)
    assert all(dependence.graph.has_edge(one, two) for one, two in itertools.pairwise(chain))
    assert dependence.chain(start, [loss], through=chain[1:]) == chain
    assert dependence.chain(start, [loss], through=[]) == [start]
    gradient = program.targets.gradients["linear.weight"]
    assert dependence.chain(dependence.finished([gradient]) - 1, [loss]) == [dependence.finished([gradient]) - 1]
