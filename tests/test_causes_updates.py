"""What is told of the updates of torch's optimizers, one parameter at a time and all at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn, optim

from bisect_nan import Snapshot, locate

INF, NAN = math.inf, math.nan
F16, F32 = torch.float16, torch.float32
Make = Callable[..., optim.Optimizer]


def with_rate(rate: float) -> Make:
    """Make gradient descent whose rate a schedule has spoiled."""

    def make(parameters: list[nn.Parameter], *, foreach: bool) -> optim.Optimizer:
        optimizer = optim.SGD(parameters, lr=1.0, foreach=foreach)
        optimizer.param_groups[0]["lr"] = rate
        return optimizer

    return make


def plain(kind: type[optim.Optimizer], **options: float) -> Make:
    """Make an optimizer with options."""
    return lambda parameters, foreach: kind(parameters, foreach=foreach, **options)  # type: ignore[call-arg]


UPDATES: dict[str, tuple[Make, float, torch.dtype, tuple[str, ...]]] = {
    "Adam without eps": (plain(optim.Adam, eps=0.0), 0.0, F32, ("zero_over_zero",)),
    "RMSprop without eps": (plain(optim.RMSprop, eps=0.0), 0.0, F32, ("zero_over_zero",)),
    "Adagrad without eps": (plain(optim.Adagrad, eps=0.0), 0.0, F32, ("zero_over_zero",)),
    "Adadelta without eps": (plain(optim.Adadelta, eps=0.0), 0.0, F32, ("zero_over_zero",)),
    "Adam in half precision": (plain(optim.Adam), 1e-5, F16, ("optimizer_eps_underflow",)),
    "AdamW in half precision": (plain(optim.AdamW), 0.0, F16, ("optimizer_eps_underflow",)),
    "RMSprop in half precision": (plain(optim.RMSprop), 1e-5, F16, ("optimizer_eps_underflow",)),
    "Adagrad in half precision": (plain(optim.Adagrad), 1e-5, F16, ("optimizer_eps_underflow",)),
    "Adamax in half precision": (plain(optim.Adamax), 0.0, F16, ("optimizer_eps_underflow",)),
    "Adam in bfloat16": (plain(optim.Adam), 0.0, torch.bfloat16, ()),
    "a squared gradient": (plain(optim.Adam), 1e25, F32, ("overflow",)),
    "a squared gradient in half precision": (plain(optim.Adam), 6e4, F16, ("fp16_overflow",)),
    "a step too far": (plain(optim.SGD, lr=1e30), 1e20, F32, ("overflow",)),
    "a step too far in half precision": (plain(optim.SGD, lr=10.0), 6e4, F16, ("fp16_overflow",)),
    "a rate that is NaN": (with_rate(NAN), 1.0, F32, ("learning_rate_nonfinite",)),
    "an infinite rate and no gradient": (with_rate(INF), 0.0, F32, ("learning_rate_nonfinite",)),
    "infinite decay": (plain(optim.AdamW, weight_decay=INF), 1.0, F32, ("learning_rate_nonfinite",)),
    "a gradient that is NaN": (plain(optim.SGD, lr=0.1), NAN, F32, ("gradient_nonfinite_applied",)),
    "an infinite gradient": (plain(optim.Adam), INF, F32, ("gradient_nonfinite_applied",)),
    "a healthy update": (plain(optim.Adam), 1.0, F32, ()),
}
"""An optimizer, the gradient of all elements, the type of the parameter, and the causes."""


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "at once"])
@pytest.mark.parametrize("name", UPDATES)
def test_the_cause_of_a_bad_update(name: str, *, foreach: bool) -> None:
    """Every fault of an update has its cause, and a healthy update has none."""
    make, gradient, dtype, causes = UPDATES[name]
    model = nn.Linear(3, 2, bias=False).to(dtype)
    optimizer = make(list(model.parameters()), foreach=foreach)
    model.weight.grad = torch.full_like(model.weight, gradient)
    finding = locate(Snapshot.capture_update(model, optimizer, 1.0))
    assert tuple(culprit.cause for culprit in finding.culprits) == causes


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "at once"])
def test_an_eps_that_half_precision_cannot_hold_is_mended(*, foreach: bool) -> None:
    """A larger eps is tried on the update, whether it goes through the parameters one by one or all at once."""
    model = nn.Linear(3, 2, bias=False).half()
    model.weight.grad = torch.full_like(model.weight, 1e-4)
    optimizer = optim.Adam(model.parameters(), foreach=foreach)
    (culprit,) = locate(Snapshot.capture_update(model, optimizer, 1.0)).culprits
    assert culprit.remedy is not None
    assert culprit.remedy.verified
