"""What is told of the calls around a culprit: the terms of the loss, and how an overflow came about."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bisect_nan import Snapshot, locate


def notes(model: nn.Module, step: Any) -> str:
    """Return all notes of a step's only culprit."""
    (culprit,) = locate(Snapshot.capture(model, torch.ones(4, 3), step), remedies=False).culprits
    return "; ".join(culprit.notes)


def test_the_term_that_carries_the_fault_is_told_beside_the_others() -> None:
    """Weighted, subtracted and summed up in a list: each term with its line and value."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        terms = [(y - y.detach() + 1).square().mean(), 0.5 * y.detach().mul(0).add(3).mean()]
        kl = (y.relu() * 0).log().mean()
        return torch.stack(terms).sum() - 2 * kl

    told = notes(nn.Linear(3, 2), step)
    assert "of the 3 terms of the loss one is bad: -inf (tests/test_story.py:25); the others are 3, 1" in told
    assert told.count("tests/test_story.py:24") == 1


def test_no_number_is_told_that_the_step_has_not() -> None:
    """Of several culprits the earlier ones are neutralised to look at the later: terms made of neutral values are none of the loss."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return (y - y).log().mean() + (-y.abs() - 1).sqrt().mean() + (y / (y - y)).sum()

    culprits = locate(Snapshot.capture(nn.Linear(3, 2), torch.ones(4, 3), step), remedies=False).culprits
    assert len(culprits) == 3
    assert not any("terms of the loss" in note for culprit in culprits for note in culprit.notes)


def test_a_loss_of_one_term_has_no_others() -> None:
    """Nothing is told then."""
    assert "terms" not in notes(nn.Linear(3, 2), lambda model, x: (model(x).relu() * 0).log().mean() * 2)


def test_an_overflow_is_told_with_the_magnitudes_before_it() -> None:
    """Where growth began can be read from the calls before."""
    model = nn.Linear(3, 2).half()
    with torch.no_grad():
        model.weight.fill_(1)
        model.bias.fill_(0)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x.half()) * 100).square().mean().float()

    told = notes(model, step)
    assert "in float32 the element is 90000" in told
    assert "largest magnitudes of the calls before it: addmm 3, mul 300" in told
