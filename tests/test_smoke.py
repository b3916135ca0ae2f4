"""A smoke test tells what a few steps did and what went wrong first, and trains nothing."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bisect_nan import BisectNanError, Verdict, smoke_test

BATCH = {"x": torch.linspace(-1, 1, 8).reshape(4, 2), "y": torch.tensor([0, 1, 1, 0])}


def made(learning_rate: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with statistics and dropout, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    return model, torch.optim.Adam(model.parameters(), lr=learning_rate)


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[tuple[float, float]]:
    """Train plainly; return loss and norm of the gradient of each step."""
    numbers = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model, BATCH)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        numbers.append((loss.item(), norm.item()))
        optimizer.step()
    return numbers


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return a copy of all that a training changes."""
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict(), gradients, torch.get_rng_state()))


def same(a: Any, b: Any) -> bool:
    """Whether two states are the same bit by bit."""
    left, right = torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(left, right, strict=True))


def test_a_healthy_training_is_told_and_put_back() -> None:
    """The numbers are those of a plain training, dropout included, and afterwards everything is as it was."""
    model, optimizer = made()
    train(model, optimizer, 2)
    before = state(model, optimizer)
    result = smoke_test(model, [BATCH], step, optimizer, steps=5)
    assert same(state(model, optimizer), before)
    assert result.ok
    assert result.finding is None
    expected = train(model, optimizer, 5)
    assert [(s.loss, s.gradient_norm) for s in result.steps] == [pytest.approx(pair) for pair in expected]
    assert "5 steps, all finite" in str(result)


def test_a_fault_of_the_forward_pass_with_terms() -> None:
    """The bad term of the loss is named, the others with it, and the operation is located."""

    def terms(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        output = model(batch["x"])
        entropy = F.cross_entropy(output, batch["y"])
        penalty = (output * 0).log().mean()
        return {"loss": entropy + penalty, "entropy": entropy, "penalty": penalty}

    model, optimizer = made()
    before = state(model, optimizer)
    result = smoke_test(model, [BATCH], terms, optimizer)
    assert same(state(model, optimizer), before)
    assert not result.ok
    assert "step 0: the loss is -inf; of its terms penalty is -inf (entropy is " in result.fault
    assert result.finding is not None
    assert result.finding.culprit is not None
    assert result.finding.culprit.cause == "log_of_zero"
    (only,) = result.steps
    assert only.gradient_norm is None
    assert only.terms["penalty"] == -math.inf
    assert "penalty" in str(result).splitlines()[0]
    assert "error[log_of_zero]" in str(result)


def test_a_fault_of_the_backward_pass() -> None:
    """A finite loss with a bad gradient ends the test, and the gradient is named."""

    def rooted(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["x"]) * 0).square().sqrt().mean()

    model, optimizer = made()
    result = smoke_test(model, [BATCH], rooted, optimizer)
    assert result.fault.startswith("step 0: the gradient of ")
    assert result.finding is not None
    assert result.finding.verdict is Verdict.LOCATED
    assert result.steps[0].gradient_norm is not None


def test_a_fault_of_a_later_step_and_of_the_update() -> None:
    """A step that goes bad later is told with its number, and an update that spoils weights as that."""
    model, optimizer = made(learning_rate=1e36)
    optimizer.param_groups[0]["eps"] = 0.0
    before = state(model, optimizer)
    result = smoke_test(model, [BATCH], step, optimizer)
    assert same(state(model, optimizer), before)
    assert not result.ok
    assert result.finding is not None
    assert result.fault.startswith(f"step {len(result.steps) - 1}: ")

    class Spoiling(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.div_(0.0)
            return super().step(closure)

    model, _ = made()
    result = smoke_test(model, [BATCH], step, Spoiling(model.parameters(), lr=0.1))
    assert "step 0: after the update the parameter 0.weight is " in result.fault
    assert result.finding is not None
    assert result.finding.verdict is Verdict.LOCATED


def test_batches_are_begun_again_and_left_alone() -> None:
    """Fewer batches than steps are repeated, a step may take its batch apart, and a loader is read no further than needed."""

    def popping(model: nn.Module, batch: Any) -> torch.Tensor:
        target = batch.pop("y")
        batch["x"].add_(0.0)
        return F.cross_entropy(model(batch["x"]), target)

    model, optimizer = made()
    batch = dict(BATCH)
    assert len(smoke_test(model, [batch], popping, optimizer, steps=3).steps) == 3
    assert set(batch) == {"x", "y"}
    loader = iter([BATCH] * 4)
    smoke_test(model, loader, step, optimizer, steps=2)
    assert len(list(loader)) == 2


def test_no_batches_and_errors() -> None:
    """Nothing to train on is an error, and an error of the step leaves everything as it was."""
    model, optimizer = made()
    with pytest.raises(BisectNanError, match="got no batches"):
        smoke_test(model, [], step, optimizer)
    before = state(model, optimizer)
    calls = []

    def breaking(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("y")
        return step(model, batch)

    with pytest.raises(KeyError):
        smoke_test(model, [BATCH], breaking, optimizer)
    assert same(state(model, optimizer), before)


def test_a_step_that_raises_because_of_a_nan() -> None:
    """The exception of a library's check becomes a finding; an exception for another reason stays one, and all is put back."""
    model, optimizer = made()

    def checked(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["x"].log())
        return -torch.distributions.Categorical(logits=logits, validate_args=True).log_prob(batch["y"]).mean()

    batches = [{"x": torch.rand(4, 2) + 0.1, "y": torch.zeros(4)} for _ in range(3)]
    batches[1]["x"][2, 1] = 0
    before = state(model, optimizer)
    result = smoke_test(model, batches, checked, optimizer)
    assert result.finding is not None
    assert (result.finding.culprits[0].cause, result.finding.culprits[0].samples) == ("log_of_zero", (2,))
    assert result.fault.startswith("step 1: the value behind the ValueError at ")
    assert [one.number for one in result.steps] == [0, 1]
    assert math.isnan(result.steps[1].loss)
    assert same(state(model, optimizer), before)
    batches[1]["x"] = torch.full((5,), -torch.inf)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        smoke_test(model, batches, checked, optimizer)
    assert same(state(model, optimizer), before)


def test_an_optimizer_that_asks_for_a_closure() -> None:
    """L-BFGS is trained as by hand, and put back."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    before = state(model, optimizer)
    told = [row.loss for row in smoke_test(model, [BATCH], step, optimizer, steps=3).steps]
    assert same(state(model, optimizer), before)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = step(model, BATCH)
        loss.backward()
        return loss

    assert told == [torch.as_tensor(optimizer.step(closure)).item() for _ in range(3)]  # type: ignore[arg-type]


def test_what_is_no_training() -> None:
    """No optimizer, a single batch, and a step with other arguments are told with what to give instead."""
    model, optimizer = made()
    wrong: list[tuple[Any, ...]] = [
        (model, [BATCH], step, None, "got NoneType as the optimizer"),
        (model.state_dict(), [BATCH], step, optimizer, "got OrderedDict as the model"),
        (model, BATCH, step, optimizer, r"got one batch \(dict\)"),
        (model, [BATCH], lambda m, x, y: m(x) - y, optimizer, r"got a step <lambda>\(m, x, y\)"),
    ]
    for *arguments, words in wrong:
        with pytest.raises(BisectNanError, match=words):
            smoke_test(*arguments)
