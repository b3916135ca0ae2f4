"""The replay of a recorded step is bit-exact, from wherever it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import STEPS, Case

from bisect_nan.capture import Recording, record, scalar_loss
from bisect_nan.dependence import Dependence
from bisect_nan.replay import Run, Stretch, own_generator


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
    with torch.compiler.set_stance("force_eager"):
        loss = scalar_loss(step(model, batch))
        if loss.requires_grad:
            loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit."""
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return one.dtype == other.dtype and torch.equal(one, other)


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


@pytest.mark.parametrize("name", STEPS)
def test_replay_is_bit_exact(name: str) -> None:
    """Loss, gradients and buffers of a replay are those of an eager run from the same state."""
    torch.manual_seed(1)
    check(STEPS[name]())
