"""The scale of a loss, and gradients that were bad before an update."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from bisect_nan import Phase, Snapshot, locate
from bisect_nan.blaming.scaling import loss_scale

SCALE = torch.tensor(65536.0)


def half_model() -> nn.Module:
    """Make a model whose gradient goes through float16."""
    return nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.float16))])


def gradient_of(factor: float) -> Callable[[nn.ParameterList], torch.Tensor]:
    """Return a loss whose gradient is a number."""
    return lambda model: (model[0].float() * factor).sum()


@pytest.mark.parametrize("scaled", [lambda loss: loss * 65536.0, lambda loss: loss * SCALE, lambda loss: SCALE * loss])
def test_the_scale_is_blamed_where_the_gradient_fits_without_it(scaled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A gradient that only the scale makes too large is told with the scale; one that is too large anyway without it."""
    for factor, fits in ((2.0, True), (1e6, False)):
        loss = gradient_of(factor)
        finding = locate(Snapshot.capture(half_model(), {}, lambda model, _, loss=loss: scaled(loss(model))))
        assert finding.culprit is not None
        assert finding.culprit.cause == "grad_overflow_fp16"
        assert any("the loss is multiplied by 65536" in note for note in finding.culprit.notes) == fits
        assert ("loss scale" in finding.culprit.help and "or run" not in finding.culprit.help) == fits


@pytest.mark.parametrize(
    ("step", "scale"),
    [
        (lambda model, _: gradient_of(1e6)(model), 1.0),
        (lambda model, _: gradient_of(1e6)(model) * 3.0, 1.0),
        (lambda model, _: gradient_of(1e6)(model) * 0.5, 1.0),
        (lambda model, _: gradient_of(1e6)(model) * 8, 8.0),
        (lambda model, _: gradient_of(1e6)(model) / 8, 1.0),
    ],
)
def test_a_scale_is_a_power_of_two(step: Callable[..., torch.Tensor], scale: float) -> None:
    """Other factors are a part of the loss."""
    snapshot = Snapshot.capture(half_model(), {}, step)
    assert loss_scale(snapshot.program, {}) == scale


def test_an_update_with_a_bad_gradient() -> None:
    """A gradient that was bad before the update is named, and no operation of the update is."""
    model = nn.Linear(8, 2)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.weight.grad[1] = float("nan")  # type: ignore[index]
    finding = locate(Snapshot.capture_update(model, optimizer, 1.0))
    (culprit,) = finding.culprits
    assert (culprit.cause, culprit.phase, culprit.name) == (
        "gradient_nonfinite_applied",
        Phase.INPUT,
        "gradient of weight",
    )
    assert culprit.notes[0].startswith("the bad elements all lie in [1, :]")
