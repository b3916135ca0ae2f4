"""A script that sees by itself that something is bad, and stops before an update, is told where that comes from."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Categorical

from bisect_nan import Finding, Snapshot, Verdict, locate
from bisect_nan.watching.watch import Fault, Watch

LINE = "result: torch.Tensor = (1 + scores - scores.detach()) * scores / scores.sum(1, keepdim=True)"


def ends(script: Callable[[nn.Module], object]) -> tuple[Fault | None, BaseException | None]:
    """Train for two healthy steps, run a script under watch, and return what is told when it has ended, and by what it has."""

    def told(fault: Fault) -> None:
        raise AssertionError(fault)

    torch.manual_seed(0)
    model, watch = nn.Linear(3, 3), Watch(from_step=0, caught=told)
    problem: BaseException | None = None
    watch.start()
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.rand(4, 3)).square().mean().backward()
            optimizer.step()
        try:
            script(model)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever ends it)
            problem = error
        return watch.ended(problem), problem
    finally:
        watch.close()


def zero_over_zero(model: nn.Module) -> torch.Tensor:
    """Return NaN in every element but the first row's."""
    scores = model(torch.rand(4, 3)).relu() * torch.tensor([1.0, 0.0, 0.0, 0.0]).unsqueeze(1)
    result: torch.Tensor = (1 + scores - scores.detach()) * scores / scores.sum(1, keepdim=True)
    return result


def reads_the_loss(model: nn.Module) -> None:
    """Stop as many public training scripts do."""
    loss = zero_over_zero(model).mean()
    if not math.isfinite(loss.item()):
        raise SystemExit(1)


def asks_whether_it_is_nan(model: nn.Module) -> None:
    """Leave the loop without an error."""
    if torch.isnan(zero_over_zero(model).mean()):
        return


def asks_for_every_element(model: nn.Module) -> None:
    """Look at activations."""
    assert torch.isfinite(zero_over_zero(model)).all()


def looks_elsewhere_afterwards(model: nn.Module) -> None:
    """Look at something healthy last."""
    bad = torch.isnan(zero_over_zero(model).mean())
    fine = model(torch.rand(4, 3)).mean().item()
    raise ValueError(f"{fine} {bool(bad)}")


def hands_it_to_a_distribution(model: nn.Module) -> None:
    """Have a library look."""
    Categorical(probs=zero_over_zero(model), validate_args=True)


def hands_it_to_a_kernel(model: nn.Module) -> None:
    """Have a kernel refuse it."""
    torch.multinomial(zero_over_zero(model), 1)


def hands_it_to_lapack(model: nn.Module) -> None:
    """Have a decomposition fail on it."""
    values = zero_over_zero(model)
    torch.linalg.eigh(values.T @ values)


def validates(model: nn.Module) -> None:
    """Look at the loss of an evaluation."""
    with torch.no_grad():
        loss = zero_over_zero(model).mean()
    if loss != loss:  # noqa: PLR0124
        raise RuntimeError("diverged")


@pytest.mark.parametrize(
    "script",
    [
        reads_the_loss,
        asks_whether_it_is_nan,
        asks_for_every_element,
        looks_elsewhere_afterwards,
        hands_it_to_a_distribution,
        hands_it_to_a_kernel,
        hands_it_to_lapack,
        validates,
    ],
)
def test_what_a_script_saw_to_be_bad(script: Callable[[nn.Module], object], tmp_path: Path) -> None:
    """Whatever it asks, the division is found that made the numbers it looked at, from the file as well."""
    fault, _ = ends(script)
    assert fault is not None
    assert fault.step == 2
    assert fault.snapshot is not None
    assert fault.snapshot.observed is not None
    assert fault.snapshot.observed.symptom.kind == "value"
    reopened = locate(Snapshot.load(fault.snapshot.save(tmp_path / "seen.safetensors")), remedies=False)
    assert reopened.culprits == found(fault).culprits
    assert told(fault) == ("zero_over_zero", LINE)


def found(fault: Fault) -> Finding:
    """Locate a fault."""
    assert fault.snapshot is not None
    return locate(fault.snapshot, remedies=False)


def told(fault: Fault) -> tuple[str, str]:
    """Return cause and line."""
    finding = found(fault)
    assert finding.verdict is Verdict.LOCATED
    assert finding.culprit is not None
    assert finding.culprit.source is not None
    return finding.culprit.cause, finding.culprit.source.text


def test_a_gradient_that_is_refused() -> None:
    """Clipping raises at a norm that is not finite; the derivative is found, and no look is needed."""

    def script(model: nn.Module) -> None:
        (model(torch.rand(4, 3)) * 0).sqrt().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    fault, problem = ends(script)
    assert isinstance(problem, RuntimeError)
    assert fault is not None
    assert told(fault) == ("sqrt_grad_at_zero", "(model(torch.rand(4, 3)) * 0).sqrt().sum().backward()")


def masks(model: nn.Module) -> None:
    """Look at masks, and at scores where they hide something."""
    scores = model(torch.rand(4, 3)).masked_fill(torch.eye(4, 3).bool(), -torch.inf)
    assert (scores == -torch.inf).any()
    assert not torch.isposinf(scores).any()


def heals(model: nn.Module) -> None:
    """Look at a number that a NaN does not reach any more."""
    assert math.isfinite(torch.nan_to_num(zero_over_zero(model)).mean().item())


def keeps_the_best(model: nn.Module) -> None:
    """Compare with an infinity to start with."""
    best = torch.tensor(torch.inf)
    for _ in range(2):
        loss = model(torch.rand(4, 3)).square().mean().detach()
        best = min(best, loss)
    raise KeyError("something else")


def does_not_look(model: nn.Module) -> None:
    """Make a NaN, and fail for another reason."""
    zero_over_zero(model)
    raise KeyError("something else")


@pytest.mark.parametrize("script", [masks, heals, keeps_the_best, does_not_look])
def test_nothing_bad_was_seen(script: Callable[[nn.Module], Any]) -> None:
    """Masks, healed values, limits to start with and what nobody looked at are told of by nobody."""
    assert ends(script)[0] is None


def test_a_scale_that_falls_for_ever() -> None:
    """When no scale helps, and one backward pass after the other is thrown away, that is told while the script runs."""
    faults: list[Fault] = []

    def caught(fault: Fault) -> None:
        faults.append(fault)
        raise SystemExit(1)

    watch = Watch(from_step=0, caught=caught)
    model = nn.Linear(3, 3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def train() -> None:
        for _ in range(50):
            optimizer.zero_grad()
            scaler.scale(zero_over_zero(model).mean()).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    watch.start()
    try:
        with pytest.raises(SystemExit):
            train()
    finally:
        watch.close()
    assert told(faults[0])[0] == "zero_over_zero"
    assert 0 < scaler.get_scale() < 1
