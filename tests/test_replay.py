"""The replay of a recorded step is bit-exact, from wherever it starts."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import STEPS, Case

from bisect_nan.errors import ReplayError
from bisect_nan.finite import same
from bisect_nan.recording.capture import record, scalar_loss
from bisect_nan.recording.outcome import Recording
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Executed, Run, as_recorded, own_generator
from bisect_nan.replaying.stretch import Stretch


def all_targets(recording: Recording) -> list[int]:
    """Return the numbers of the loss, the gradients and the buffers."""
    targets = recording.program.targets
    assert targets.loss is not None
    return [targets.loss, *targets.gradients.values(), *targets.buffers.values()]


def stretch_of(recording: Recording, targets: list[int]) -> Stretch:
    """Return the calls that some targets need."""
    return Stretch(recording.program, Dependence(recording.program).slice(targets), targets)


def replayed(recording: Recording, targets: list[int]) -> dict[int, torch.Tensor]:
    """Run a recording from its start and return the targets' tensors."""
    stretch = stretch_of(recording, targets)
    with own_generator():
        run = Run(stretch, stretch.start(recording.tensors))
        run.advance(len(stretch))
    return run.env


def run_eagerly(model: Any, batch: Any, step: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    """Run a step and its backward pass as a training loop does."""
    loss = scalar_loss(step(model, batch))
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check(case: Case) -> Recording:
    """Record a step, replay it and compare with an eager run from the same state."""
    model, batch, step = case
    recording = record(model, batch, step)
    env = replayed(recording, all_targets(recording))
    loss, gradients = run_eagerly(model, batch, step)
    targets = recording.program.targets
    assert recording.loss == float(loss)
    assert same(env[targets.loss].reshape(loss.shape), loss)
    assert {name for name in targets.gradients if not name.startswith(("batch", "parameter "))} == set(gradients)
    for name, gradient in gradients.items():
        assert same(env[targets.gradients[name]], gradient), name
    for name, number in targets.buffers.items():
        assert same(env[number], model.get_buffer(name)), name
    return recording


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # Dynamo's own, where it compiles torch.cond in eager mode
)
@pytest.mark.parametrize("name", STEPS)
def test_replay_is_bit_exact(name: str) -> None:
    """Loss, gradients and buffers of a replay are those of an eager run from the same state."""
    torch.manual_seed(1)
    check(STEPS[name]())


RESUMED = ["convolutions_with_batch_norm", "in_place_on_views", "reseeding", "explicit_generators", "checkpointing"]


@functools.cache
def recorded(name: str) -> Recording:
    """Record a step of the table once."""
    torch.manual_seed(1)
    return record(*STEPS[name]())


@settings(max_examples=10)
@given(data=st.data())
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumed_at_any_cut_gives_the_same_bits(name: str, data: st.DataObject) -> None:
    """Checkpoints at random cuts, resumed in any order and more than once, end as the run from the start does."""
    recording = recorded(name)
    targets = all_targets(recording)
    stretch = stretch_of(recording, targets)
    expected = replayed(recording, targets)
    cuts = data.draw(st.lists(st.integers(0, len(stretch)), min_size=1, max_size=4), label="cuts")
    with own_generator():
        run = Run(stretch, stretch.start(recording.tensors))
        checkpoints = []
        for cut in sorted(cuts):
            run.advance(cut)
            checkpoints.append(run.checkpoint())
        run.advance(len(stretch))
        ends = [run.env]
        for checkpoint in data.draw(st.permutations(checkpoints * 2), label="order"):
            torch.manual_seed(data.draw(st.integers(0, 9), label="seed"))
            run = Run(stretch, checkpoint)
            for cut in sorted(cuts):
                if cut > run.cut:
                    run.advance(cut)
                    run.probe(0)
            run.advance(len(stretch))
            ends.append(run.env)
    for env in ends:
        assert all(same(env[number], expected[number]) for number in targets)


@pytest.mark.parametrize("name", [*RESUMED, "gradient_penalty", "transformer_with_dropout", "foreach_operations"])
def test_one_gradient_alone_equals_the_full_run(name: str) -> None:
    """The stretch of a single gradient computes the same bits with no more calls."""
    recording = recorded(name)
    whole = replayed(recording, all_targets(recording))
    everything = len(stretch_of(recording, all_targets(recording)))
    for number in [*recording.program.targets.gradients.values()][::5]:
        stretch = stretch_of(recording, [number])
        with own_generator():
            run = Run(stretch, stretch.start(recording.tensors))
            run.advance(len(stretch))
        assert same(run.env[number], whole[number])
        assert len(stretch) <= everything


def test_a_replay_leaves_the_placeholders_alone() -> None:
    """Parameters, buffers and inputs that the program writes to hold the same after a replay."""
    for name in ("convolutions_with_batch_norm", "parameters_through_data", "overlapping_batch"):
        recording = recorded(name)
        before = {number: tensor.clone() for number, tensor in recording.tensors.items()}
        replayed(recording, all_targets(recording))
        assert all(torch.equal(tensor, before[number]) for number, tensor in recording.tensors.items())


def test_a_replay_leaves_the_generators_alone() -> None:
    """Inside `own_generator` the process's generator may be used, and afterwards it is where it was."""
    recording = recorded("reseeding")
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    replayed(recording, all_targets(recording))
    assert torch.equal(torch.rand(3), expected)


def test_a_visit_sees_every_call_and_keeps_what_it_saw() -> None:
    """The inputs and results shown to a visitor are those of the moment, whatever later calls overwrite."""
    recording = recorded("in_place_on_views")
    stretch = stretch_of(recording, all_targets(recording))
    seen: list[tuple[Executed, dict[int, torch.Tensor]]] = []
    run = Run(stretch, stretch.start(recording.tensors))
    run.advance(len(stretch), lambda call: seen.append((call, {n: t.clone() for n, t in call.content.items()})))
    assert [call.node.index for call, _ in seen] == [node.index for node in stretch.nodes]
    pairs = [(call.node.index, call.content[number], tensor) for call, kept in seen for number, tensor in kept.items()]
    changed = [(index, now, then) for index, now, then in pairs if not same(now, then)]
    assert not changed


@pytest.mark.parametrize("name", ["explicit_generators", "reseeding", "lstm_with_dropout"])
def test_a_random_call_can_be_run_again_by_itself(name: str) -> None:
    """`Executed.again` draws the numbers that the recording drew, also from a generator that the step passed."""
    recording = recorded(name)
    stretch = stretch_of(recording, all_targets(recording))
    seen: list[Executed] = []
    with own_generator():
        run = Run(stretch, stretch.start(recording.tensors))
        run.advance(len(stretch), lambda call: seen.append(call) if call.node.random else None)
        assert seen
        for call in seen:
            again = call.again(call.inputs)
            assert all(same(again[number], tensor) for number, tensor in call.content.items())


def test_replay_runs_where_autocast_and_gradients_are_on() -> None:
    """A replay runs the recorded calls, whatever casting and recording of gradients its caller has switched on."""
    recording = recorded("autocast_bfloat16")
    expected = replayed(recording, all_targets(recording))
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.enable_grad():
        again = replayed(recording, all_targets(recording))
    assert all(same(again[number], expected[number]) for number in all_targets(recording))
    assert not any(again[number].requires_grad for number in all_targets(recording))


def test_a_call_that_fails_is_named() -> None:
    """A call that cannot be executed here raises one error with its index and its line."""
    recording = recorded("custom_function")
    stretch = stretch_of(recording, all_targets(recording))
    start = stretch.start(recording.tensors)
    first = next(number for number in start.env if number in set(stretch.nodes[0].inputs()))
    start.env[first] = torch.zeros(1, 1, 1)
    with pytest.raises(ReplayError, match=r"node 0 .* at tests/steps.py") as caught:
        Run(stretch, start).advance(len(stretch))
    assert caught.value.node == 0


def test_the_hidden_context_managers_of_torch_are_as_known() -> None:
    """Below autograd no call builds a graph (`_AutoDispatchBelowAutograd`), and gradient mode can be set alone."""
    weight = torch.ones(2, requires_grad=True)
    with as_recorded():
        assert torch.ops.aten.mul.Tensor(weight, 2.0).grad_fn is None
        torch._C._set_grad_enabled(True)
        assert torch.is_grad_enabled()
        assert torch.ops.aten.mul.Tensor(weight, 2.0).grad_fn is None
    assert (weight * 2).grad_fn is not None
