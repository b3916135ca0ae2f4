"""A recorded forward pass, run again under autograd, gives the loss and the gradients of the step itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import STEPS
from torch import nn

from bisect_nan.finding import Phase
from bisect_nan.finite import same
from bisect_nan.recording.capture import record
from bisect_nan.recording.outcome import Recording
from bisect_nan.recording.program import Node
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.differentiable import Rerun, Types
from bisect_nan.replaying.replay import Run, own_generator
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.replaying.tracking import saved

CUSTOM = {"hooks_that_change_gradients"}
"""Steps whose backward pass is not what autograd derives from their calls."""


def rerun_of(recording: Recording, types: Types | None = None) -> Rerun:
    """Return a run of all calls that the loss needs."""
    loss = recording.program.targets.loss
    assert loss is not None
    wanted = [loss, *saved(recording.program)]
    calls = [
        i for i in Dependence(recording.program).slice(wanted) if recording.program.nodes[i].phase is Phase.FORWARD
    ]
    with own_generator():
        rerun = Rerun(Stretch(recording.program, calls, wanted), recording.tensors, types=types)
        rerun.forward()
    return rerun


def loss_of(recording: Recording, rerun: Rerun) -> torch.Tensor:
    """Return the loss of a run."""
    assert recording.program.targets.loss is not None
    return rerun.env[recording.program.targets.loss]


def recorded_gradients(recording: Recording) -> dict[str, torch.Tensor]:
    """Run the recorded backward pass."""
    program = recording.program
    numbers = program.targets.gradients
    stretch = Stretch(program, Dependence(program).slice(numbers.values()), numbers.values())
    with own_generator():
        run = Run(stretch, stretch.start(recording.tensors))
        run.advance(len(stretch))
    return {name: run.env[number] for name, number in numbers.items()}


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)
@pytest.mark.parametrize("name", sorted(STEPS))
def test_loss_and_gradients_are_those_of_the_step(name: str) -> None:
    """Bit for bit, with checkpointing, views, conjugation, autocast, inner gradients and data behind autograd's back."""
    recording = record(*STEPS[name]())
    rerun = rerun_of(recording)
    loss = loss_of(recording, rerun)
    assert float(loss.detach()) == recording.loss
    values = {p.value: p.name for p in recording.program.placeholders}
    expected = recorded_gradients(recording)
    found = rerun.gradients(loss)
    by_name = {values[number]: gradient for number, gradient in found.items() if number in values}
    written = set(expected) - set(by_name)
    assert all(any(same(expected[missing], g) for g in found.values()) for missing in written)
    if name not in CUSTOM and not rerun.derived:
        assert all(same(expected[parameter], by_name[parameter]) for parameter in set(expected) & set(by_name))


def test_a_custom_function_keeps_its_backward_code() -> None:
    """It is run as recorded; where it was not, autograd derives the forward calls in its stead, and the run says so."""
    model, batch, step = STEPS["custom_function"]()
    assert not rerun_of(record(model, batch, step)).derived
    assert rerun_of(record(model, batch, step, backward=False)).derived
    assert not rerun_of(record(*STEPS["reentrant_checkpointing"]())).derived


def test_a_run_leaves_everything_as_it_was() -> None:
    """Placeholders keep their content, their gradients, and whether autograd tracks them."""
    model, batch, step = STEPS["parameters_through_data"]()
    recording = record(model, batch, step)
    before = {number: tensor.clone() for number, tensor in recording.tensors.items()}
    rerun = rerun_of(recording)
    rerun.gradients(loss_of(recording, rerun))
    assert all(same(tensor, before[number]) for number, tensor in recording.tensors.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_changed_call_changes_the_derivative() -> None:
    """What runs in the place of a call is differentiated in its place."""
    model = nn.Linear(3, 1)
    recording = record(model, torch.ones(2, 3), lambda m, x: m(x).square().sum())
    loss = recording.program.targets.loss
    assert loss is not None
    (square,) = [
        node.index for node in recording.program.nodes if "pow" in str(node.target) and node.phase is Phase.FORWARD
    ]
    stretch = Stretch(recording.program, Dependence(recording.program).slice([loss]), [loss])
    rerun = Rerun(stretch, recording.tensors, {square: lambda _, arguments: arguments["self"] * 3})
    rerun.forward()
    (bias,) = [p.value for p in recording.program.placeholders if p.name == "bias"]
    assert rerun.gradients(rerun.env[loss], scale=0.5)[bias].tolist() == [3.0]


def test_element_types_are_those_asked_for() -> None:
    """`Types` sees every placeholder and every call, and decides what is computed with."""

    class Double(Types):
        def placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if tensor.is_floating_point() else tensor

        def after(self, node: Node, result: Any) -> Any:
            assert not isinstance(result, torch.Tensor) or result.dtype is torch.float64, node.target
            return result

    recording = record(nn.Linear(3, 2), torch.ones(2, 3), lambda m, x: m(x).exp().mean())
    rerun = rerun_of(recording, Double())
    assert loss_of(recording, rerun).dtype is torch.float64
