"""What a guard costs a healthy training: steps with and without one, in turn."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bisect_nan import Guard
from bisect_nan.norms import norms

Optimizers = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Setup:
    """A training to measure: its model, its batch, its optimizer and what its guard is told."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Any]
    optimizer: Optimizers
    options: dict[str, Any]


class Training:
    """One of the two trainings that take turns."""

    def __init__(self, setup: Setup, folder: str, *, guarded: bool) -> None:
        torch.manual_seed(0)
        self.model, self.batch = setup.model(), setup.batch()
        self.optimizer = setup.optimizer(self.model.parameters())
        self.step = loss_of
        if guarded:
            self.step = Guard(self.model, self.optimizer, directory=folder, **setup.options).watch(loss_of)

    def run(self) -> float:
        """Make one step and return its seconds."""
        start = time.process_time()
        self.optimizer.zero_grad()
        self.step(self.model, self.batch).backward()
        self.optimizer.step()
        return time.process_time() - start


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of a classifier."""
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def encoder(layers: int, width: int) -> Callable[[], nn.Module]:
    """Return what builds a transformer encoder with a head."""

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 16))

    return build


def perceptron() -> nn.Module:
    """Return a small network with running statistics."""
    return nn.Sequential(
        nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)
    )


def tokens(batch: int, length: int, width: int) -> Callable[[], Any]:
    """Return what makes a batch of sequences."""
    return lambda: {"x": torch.randn(batch, length, width), "y": torch.randint(0, 16, (batch, length))}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return the usual optimizer."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def lbfgs_like(parameters: Any) -> torch.optim.Optimizer:
    """Return one whose update nothing is known of, so that everything is copied and read."""
    return torch.optim.RMSprop(parameters, lr=1e-4, centered=True)


SETUPS = (
    Setup(
        "small network, batch 64",
        perceptron,
        lambda: {"x": torch.randn(64, 64), "y": torch.randint(0, 16, (64,))},
        adamw,
        {},
    ),
    Setup("6 layers of width 256, 4 x 128", encoder(6, 256), tokens(4, 128, 256), adamw, {}),
    Setup("12 layers of width 256, 8 x 128", encoder(12, 256), tokens(8, 128, 256), adamw, {}),
    Setup("the same, rollback every 100", encoder(12, 256), tokens(8, 128, 256), adamw, {"on_fault": "rollback"}),
    Setup("the same, deferred", encoder(12, 256), tokens(8, 128, 256), adamw, {"deferred": True}),
    Setup("6 layers, an optimizer without bounds", encoder(6, 256), tokens(4, 128, 256), lbfgs_like, {}),
)


def measure_guard(repeats: int) -> None:
    """Print a table: the ratio of the two steps, what the guard adds, and one read of the gradients for comparison."""
    print(f"{'':40} {'step':>10} {'ratio':>7} {'added':>10} {'one read of the gradients':>26}")
    for setup in SETUPS:
        with tempfile.TemporaryDirectory() as folder:
            plain, guarded = (Training(setup, folder, guarded=flag) for flag in (False, True))
            for _ in range(15):
                plain.run()
                guarded.run()
            pairs = [(plain.run(), guarded.run()) for _ in range(repeats)]
            gradients = [parameter.grad for parameter in plain.model.parameters() if parameter.grad is not None]
            read = statistics.median(timed(lambda g=gradients: norms(g)) for _ in range(repeats))
        step = statistics.median(one for one, _ in pairs)
        ratio = statistics.median(two / one for one, two in pairs)
        added = statistics.median(two - one for one, two in pairs)
        print(f"{setup.name:40} {step * 1e3:7.2f} ms {ratio:7.3f} {added * 1e6:7.0f} us {read * 1e6:23.0f} us")


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds of one run."""
    start = time.process_time()
    run()
    return time.process_time() - start
