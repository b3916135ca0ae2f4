"""A step that raises because of what it has seen of a NaN or an infinity is recorded as far as it came."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, MultivariateNormal, Normal

from bisect_nan import Guard, Snapshot, Verdict, locate

HEALTHY = torch.tensor([[1.0, 2.0, 0.5, 3.0], [1.0, 1.0, 1.0, 1.0]])
FAULTY = torch.tensor([[1.0, 2.0, 0.0, 3.0], [1.0, 1.0, 1.0, 1.0]])

Check = Callable[[torch.Tensor], Any]


def fault(x: torch.Tensor) -> torch.Tensor:
    """Return logarithms, one of them of 0."""
    return torch.log(x)  # the fault


def line_of(mark: str) -> int:
    """Return the line of this file that ends with a comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"  # {mark}"))


def sure(condition: object) -> None:
    """Raise unless a condition holds."""
    if not condition:
        raise ArithmeticError("a number is not what it should be")


CHECKS: dict[str, Check] = {
    "distribution": lambda h: Categorical(logits=h, validate_args=True),  # compilation turns it off for the process
    "distribution of several": lambda h: MultivariateNormal(
        torch.zeros(3), torch.eye(3) * h.exp().mean(), validate_args=True
    ),
    "location of a distribution": lambda h: Normal(h - h, 1.0, validate_args=True),
    "isnan": lambda h: sure(not torch.isnan(h - h).any()),
    "isfinite": lambda h: sure(torch.isfinite(h).all()),
    "isinf of a number": lambda h: sure(not torch.isinf(h.sum())),
    "isinf of elements": lambda h: sure(not h.isinf().sum()),
    "item": lambda h: sure(math.isfinite(h.mean().item())),
    "float": lambda h: sure(not math.isnan(float((h - h).detach().sum()))),
    "int": lambda h: int((h - h).sum()),
    "comparison": lambda h: sure((h + 1 >= h).all() and ((h - h) >= 0).all()),
    "allclose": lambda h: sure(torch.allclose(h - h, torch.zeros(()))),
    "equal": lambda h: sure(torch.equal(h - h, torch.zeros_like(h))),
    "multinomial": lambda h: torch.multinomial(h.softmax(-1), 1),
    "cholesky": lambda h: torch.linalg.cholesky(torch.eye(3) + (h - h).T @ (h - h)),
    "binary cross-entropy": lambda h: torch.nn.functional.binary_cross_entropy((h - h).sigmoid(), torch.ones(2, 3)),
    "eigh": lambda h: torch.linalg.eigh(h.T @ h - h.T @ h),
    "index": lambda h: torch.arange(5)[(h - h).long()],
    "tolist": lambda h: sure((h - h).detach().tolist()[0][0] == 0),
    "numpy": lambda h: sure((kept := (h - h).detach()) is not None and (kept.numpy() == 0).all()),
}
"""What steps, libraries and torch do with a tensor that they refuse when it is not finite."""


def step_with(check: Check) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Return a step that checks a tensor on its way."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        h = model(fault(batch))
        check(h)
        return h.sum()

    return step


def network() -> nn.Module:
    """Return a small model."""
    torch.manual_seed(0)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("kind", CHECKS)
def test_whatever_refuses_it(kind: str, tmp_path: Path) -> None:
    """The operation that made the fault is found behind each check, in this process and from the file."""
    step, model = step_with(CHECKS[kind]), network()
    snapshot = Snapshot.capture(model, FAULTY, step)
    assert snapshot.observed is not None
    assert snapshot.observed.symptom.kind == "value"
    assert " at tests/test_raised.py:" in snapshot.observed.symptom.name
    for one in (snapshot, Snapshot.load(snapshot.save(tmp_path / "crash.safetensors"))):
        finding = locate(one)
        assert (finding.verdict, finding.loss) == (Verdict.LOCATED, None)
        (culprit,) = finding.culprits
        assert culprit.cause == "log_of_zero"
        assert culprit.samples == (0,)
        assert culprit.source is not None
        assert culprit.source.line == line_of("the fault")
        assert culprit.remedy is not None
        assert culprit.remedy.verified
        assert culprit.remedy.loss is None
        assert culprit.remedy.outcome.endswith("is finite, and the step has not been followed beyond it")


@pytest.mark.parametrize("kind", CHECKS)
def test_healthy_numbers_pass_every_check(kind: str) -> None:
    """The same steps on a healthy batch come to a loss."""
    healthy = step_with(CHECKS[kind])
    if kind == "eigh":  # of zeros, which have no derivative
        assert Snapshot.capture(network(), HEALTHY, healthy, backward=False).observed is None
    else:
        assert Snapshot.capture(network(), HEALTHY, healthy).observed is None


class OfTheStep(Exception):  # noqa: N818
    """Raised by a step for its own reasons."""


OTHER: dict[str, Callable[[torch.Tensor], Any]] = {
    "a wrong dimension beside a mask": lambda h: h.masked_fill(torch.ones(3) > 0, -torch.inf).softmax(7),
    "wrong shapes": lambda h: h @ h,
    "wrong shapes of what is no number": lambda h: (h * torch.nan) @ h,
    "a wrong index": lambda h: h[5],
    "its own": lambda h: (_ for _ in ()).throw(OfTheStep(f"{h.sum().item():.2f}")),
    "memory": lambda h: (_ for _ in ()).throw(torch.OutOfMemoryError(f"{fault(h * 0).sum().item():.2f}")),
}


@pytest.mark.parametrize("kind", OTHER)
def test_exceptions_for_another_reason_pass(kind: str) -> None:
    """What has nothing to do with NaN or infinity is the step's own affair, and everything is as it was before."""
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.weight.data.add_(1)
        OTHER[kind](model(batch))
        raise AssertionError("unreachable")

    with pytest.raises((OfTheStep, IndexError, RuntimeError)) as caught:
        Snapshot.capture(model, HEALTHY, step)
    assert not hasattr(caught.value, "__notes__")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_state_is_put_back_after_a_step_that_raised() -> None:
    """Parameters that the step wrote to before it raised are as they were, and generators, too."""
    model = network()
    before, generator = model.weight.detach().clone(), torch.get_rng_state()

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.weight.data.mul_(2)
        noise = torch.rand(2, 4)
        sure(torch.isfinite(fault(batch) * noise).all())
        return noise.sum()

    snapshot = Snapshot.capture(model, FAULTY, step)
    assert torch.equal(model.weight, before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert locate(snapshot).culprits[0].cause == "log_of_zero"


def test_an_input_that_is_refused() -> None:
    """A NaN in the batch is named, where a check of the step's meets it at once."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        sure(torch.isfinite(batch["depth"]).all())
        return model(batch["depth"]).sum()  # type: ignore[no-any-return]

    finding = locate(Snapshot.capture(network(), {"depth": FAULTY.log()}, step))
    (culprit,) = finding.culprits
    assert (culprit.cause, culprit.name) == ("input_nonfinite", "batch['depth']")


def test_a_script_that_exits() -> None:
    """`sys.exit` in a step counts as an exception of it."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(fault(batch)).sum()
        if not math.isfinite(loss.item()):
            raise SystemExit(1)
        return loss  # type: ignore[no-any-return]

    observed = Snapshot.capture(network(), FAULTY, step).observed
    assert observed is not None
    assert observed.symptom.name.startswith("behind the SystemExit at ")


def test_anomaly_mode_does_not_end_the_backward_pass() -> None:
    """Under `detect_anomaly` the recording sees the whole backward pass, and mode and step are left as they were."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * 0).sqrt().sum()  # type: ignore[no-any-return]

    torch.autograd.set_detect_anomaly(mode=True)
    try:
        finding = locate(Snapshot.capture(network(), HEALTHY, step))
        assert torch.is_anomaly_enabled()
    finally:
        torch.autograd.set_detect_anomaly(mode=False)
    assert finding.symptom is not None
    assert finding.symptom.kind == "gradient"
    assert finding.culprits[0].cause == "sqrt_grad_at_zero"


@pytest.mark.parametrize("on_fault", ["raise", "skip", "rollback", "warn"])
def test_a_guard_lets_the_exception_pass_with_a_note(on_fault: str, tmp_path: Path) -> None:
    """The loop gets its own exception, which names the snapshot of the step."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, directory=tmp_path, on_fault=on_fault)
    step = guard.watch(step_with(CHECKS["distribution"]))
    step(model, HEALTHY).backward()
    optimizer.step()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="found invalid values") as caught:
        step(model, FAULTY)
    (note,) = caught.value.__notes__
    assert "bisect_nan: the value behind the ValueError at tests/test_raised.py:" in note
    assert f"do this: bisect-nan run {tmp_path / 'step_1.safetensors'}" in note
    assert torch.equal(model.weight, before)
    culprit = locate(Snapshot.load(tmp_path / "step_1.safetensors")).culprits[0]
    assert (culprit.cause, culprit.samples) == ("log_of_zero", (0,))
    guard.close()


@pytest.mark.parametrize("kind", OTHER)
def test_a_guard_writes_nothing_for_other_exceptions(kind: str, tmp_path: Path) -> None:
    """An exception for another reason has no note and no file, though the step holds infinities."""
    model = network()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=tmp_path / "crashes")

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mask = torch.full((3,), -torch.inf)
        OTHER[kind](model(batch))
        return mask.sum()

    with pytest.raises((OfTheStep, IndexError, RuntimeError)) as caught:
        guard.watch(step)(model, HEALTHY)
    assert not hasattr(caught.value, "__notes__")
    assert not list(tmp_path.rglob("*.safetensors"))
    guard.close()


def test_a_limit_is_meant_and_a_number_beside_it_is_not() -> None:
    """An infinity to start with is no reason; one that the step computed is, also where finite literals went into it."""
    model = network()

    def best(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        least, loss = torch.tensor(torch.inf), model(batch).square().mean()
        if loss < least:
            raise OfTheStep("for another reason")
        return loss  # type: ignore[no-any-return]

    def weighted(_: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = (fault(batch) * torch.tensor([1.0, 2.0, 1.0, 1.0])).sum()
        if loss.item() < -1e9:
            raise OfTheStep("because of that")
        return loss

    with pytest.raises(OfTheStep, match="another"):
        Snapshot.capture(model, HEALTHY, best)
    assert locate(Snapshot.capture(model, FAULTY, weighted)).culprits[0].cause == "log_of_zero"


def test_memory_that_was_given_back() -> None:
    """A tensor whose memory the step has released is not made to grow again; what it was computed from is looked at."""
    released = []

    def step(_: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        h = fault(batch) * 1
        bad = not torch.isfinite(h).all()
        h.untyped_storage().resize_(0)
        released.append(h)
        sure(not bad)
        return batch.sum()

    assert locate(Snapshot.capture(network(), FAULTY, step)).culprits[0].cause == "log_of_zero"
    assert released[0].untyped_storage().nbytes() == 0
