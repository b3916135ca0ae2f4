"""One network and its batches, with a fault where wanted; and what a snapshot says about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from bisect_nan import Finding, NonFiniteStep, Snapshot, locate

Batch = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two layers with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(3, 16), nn.Dropout(0.3), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def loss_of(scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return a loss with a logarithm and a root that a batch can make bad."""
    loss = functional.cross_entropy(scores, batch["y"])
    loss = loss + batch["positive"].log().mean()  # loss
    return loss + (scores * batch["gate"]).square().sum(-1).sqrt().mean()  # gradient


def batches(count: int, fault: str = "", at: int = 0, row: int = 2) -> list[Batch]:
    """Return batches of four samples, one row of one of them with a fault."""
    generator = torch.Generator().manual_seed(1)
    made = [
        {
            "x": torch.randn(4, 3, generator=generator),
            "y": torch.randint(0, 2, (4,), generator=generator),
            "positive": torch.ones(4),
            "gate": torch.ones(4, 1),
        }
        for _ in range(count)
    ]
    if fault:
        made[at][{"loss": "positive", "gradient": "gate"}[fault]][row] = 0.0
    return made


def raised(train: Callable[[], Any]) -> NonFiniteStep:
    """Run a training that ends with a fault, and return that."""
    with pytest.raises(NonFiniteStep) as caught:
        train()
    return caught.value


def located(fault: NonFiniteStep) -> Finding:
    """Return what the saved snapshot says."""
    assert fault.path is not None, str(fault)
    return locate(Snapshot.load(fault.path))


def blames(fault: NonFiniteStep, mark: str) -> bool:
    """Whether the culprit is the line that ends with a comment."""
    culprit = located(fault).culprit
    return culprit is not None and culprit.source is not None and culprit.source.text.endswith(f"# {mark}")
