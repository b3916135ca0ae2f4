"""A closure that is evaluated ahead leaves every optimizer's training as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Net, batches, blames, loss_of, raised
from torch import nn

from bisect_nan import Guard
from bisect_nan.integrations.closures import ClosureFirst


class Ascending(torch.optim.SGD):
    """Goes a little uphill and takes the gradient there, as sharpness-aware minimization does; it cannot do without a closure."""

    def step(self, closure: Callable[[], Any]) -> Any:
        with torch.enable_grad():
            closure()
        shifts = [(p, 0.05 * p.grad) for group in self.param_groups for p in group["params"]]
        with torch.no_grad():
            for parameter, shift in shifts:
                parameter.add_(shift)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter, shift in shifts:
                parameter.sub_(shift)
        super().step()
        return loss


class Shifting(torch.optim.SGD):
    """Moves its parameters before it evaluates the closure at all, and evaluates it there."""

    def step(self, closure: Callable[[], Any]) -> Any:
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.9)
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.Adam, torch.optim.LBFGS, Ascending, Shifting]


def train(
    make: Callable[..., torch.optim.Optimizer], directory: Path | None = None, fault: str = "", **options: Any
) -> tuple[nn.Module, list[Any]]:
    """Train with closures alone; with a directory, under a guard. Return the model and what the updates returned."""
    torch.manual_seed(0)
    model = Net()
    model.drop.p = 0.0  # an evaluation more takes other random numbers
    optimizer = make(model.parameters(), lr=0.01)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model(batch["x"]), batch)

    if directory is not None:
        first = ClosureFirst(optimizer)
        step = Guard(model, optimizer, directory=directory, **options).watch(step)
        first.follow()
    returned = []
    for batch in batches(5, fault, at=2):

        def closure(batch: Any = batch) -> torch.Tensor:
            loss = step(model, batch)
            optimizer.zero_grad()
            loss.backward()
            return loss

        returned.append(optimizer.step(closure))
    return model, returned


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_healthy_training_is_the_same(make: Callable[..., torch.optim.Optimizer], tmp_path: Path) -> None:
    """The parameters are those without a guard, bit by bit."""
    states = [train(make, directory)[0].state_dict() for directory in (None, tmp_path)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("make", [torch.optim.LBFGS, Ascending, Shifting])
def test_an_optimizer_gets_the_loss(make: Callable[..., torch.optim.Optimizer], tmp_path: Path) -> None:
    """One that needs the closure is given what it returned."""
    plain, guarded = ([loss.item() for loss in train(make, directory)[1]] for directory in (None, tmp_path))
    assert plain == guarded


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_fault_is_found(make: Callable[..., torch.optim.Optimizer], kind: str, tmp_path: Path) -> None:
    """It is told before the update."""
    fault = raised(lambda: train(make, tmp_path, kind))
    assert fault.symptom.kind == kind
    assert blames(fault, kind)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_bad_step_is_left_out(make: Callable[..., torch.optim.Optimizer], kind: str, tmp_path: Path) -> None:
    """Under `skip` the parameters stay finite, whatever the optimizer does with the closure."""
    model, _ = train(make, tmp_path, kind, on_fault="skip")
    assert all(value.isfinite().all() for value in model.state_dict().values())
