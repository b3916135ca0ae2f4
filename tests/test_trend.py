"""The history of a culprit within an update goes on with what the update has done so far."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from bisect_nan.blaming.trend import within
from bisect_nan.recording.capture import record_update
from bisect_nan.recording.program import Program
from bisect_nan.replaying.stretch import Env


def recorded() -> tuple[Program, Env]:
    """Return the update of two parameters of norm 3 and 4, and the values before it."""
    model = nn.Module()
    model.a, model.b = nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([4.0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones(1)
    recording = record_update(model, optimizer, 1.0)
    return recording.program, dict(recording.tensors)


def values(program: Program, **content: float) -> Env:
    """Return values of the parameters somewhere in the update."""
    numbers = {p.name: p.value for p in program.placeholders}
    return {numbers[name]: torch.tensor([value]) for name, value in content.items()}


def test_without_a_history_it_begins_with_the_update() -> None:
    """The norm before the update and the one now."""
    program, start = recorded()
    assert within((), program, start, values(program, a=12.0, b=5.0)) == (
        {"parameter_norm": 5.0},
        {"parameter_norm": 13.0},
    )


def test_the_norm_of_all_goes_on() -> None:
    """Parameters that the update does not touch, or not any more, keep their part of the norm."""
    program, start = recorded()
    history = ({"step": 0, "parameter_norm": 13.0},)
    *before, now = within(history, program, start, values(program, a=0.0))
    assert tuple(before) == history
    assert now == {"parameter_norm": pytest.approx(math.sqrt(13.0**2 - 3.0**2))}


def test_an_update_that_is_infinite_already_says_nothing() -> None:
    """What is not finite has no place in a trend."""
    program, start = recorded()
    assert within((), program, start, values(program, a=math.inf)) == ()
