"""A remedy is called verified behind a decision of the step only where the step decides as it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from bisect_nan import Snapshot, locate
from bisect_nan.finding import Remedy

Decision = Callable[[torch.Tensor], torch.Tensor]


def validated(root: torch.Tensor) -> torch.Tensor:
    """Have a distribution look at its argument, which is a number before the change and after it."""
    return Normal(root, 1.0, validate_args=True).loc


def asserted(root: torch.Tensor) -> torch.Tensor:
    """Assert what stays true."""
    assert torch.isfinite(root).all()
    assert root < 1
    return root


def flipped(root: torch.Tensor) -> torch.Tensor:
    """Go another way when the root is no zero any more."""
    return root * 2 if root > 0 else root


def logged(root: torch.Tensor) -> torch.Tensor:
    """Compute with a number that Python has read, which the change changes."""
    return root + root.item()


def answered_and_logged(root: torch.Tensor) -> torch.Tensor:
    """Read two booleans in one call, which stay, and a number, which does not."""
    assert torch.equal(root < 1, torch.tensor(data=True))
    return root + root.item()


def remedy_of(decision: Decision) -> Remedy:
    """Return the remedy of the derivative of a root at 0, with a decision between the root and the loss."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        hidden = model(batch)
        return decision((hidden * 0).abs().sum().sqrt()) + hidden.mean()

    torch.manual_seed(0)
    (culprit,) = locate(Snapshot.capture(nn.Linear(4, 2), torch.rand(3, 4), step)).culprits
    assert culprit.cause == "sqrt_grad_at_zero"
    assert culprit.remedy is not None
    return culprit.remedy


@pytest.mark.parametrize("decision", [validated, asserted])
def test_the_same_answers(decision: Decision) -> None:
    """A check that holds before and after is no reason for doubt."""
    assert remedy_of(decision).verified


@pytest.mark.parametrize("decision", [flipped, logged, answered_and_logged])
def test_another_answer_or_a_number(decision: Decision) -> None:
    """An answer that the change turns round, and a number that Python computes with, leave it open what the step would do."""
    remedy = remedy_of(decision)
    assert not remedy.verified
    assert "decides on a number that the change has changed" in remedy.outcome
