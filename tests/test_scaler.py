"""A guard and a GradScaler: its search for a scale is no fault; what is bad without a scale is, and so is one that collapses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_guard import blamed, located
from torch import nn

from bisect_nan import Guard, NonFiniteStep, Phase
from bisect_nan.loop.mistakes import LoopMistake

Step = Callable[[Any, Any], torch.Tensor]


class Scaled:
    """A training with a scaler, as torch's documentation writes it."""

    def __init__(
        self, step: Step, directory: Path, *, fused: bool = False, scale: float = 2.0**16, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.guard = Guard(self.model, self.optimizer, scaler=self.scaler, directory=directory, **options)
        self.step = self.guard.watch(step)

    def train(self, batches: Any, *, clip: str = "") -> None:
        """Train on each batch; gradients are clipped after `unscale_`, or before it."""
        for batch in batches:
            self.optimizer.zero_grad()
            self.scaler.scale(self.step(self.model, batch)).backward()
            if clip == "after":
                self.scaler.unscale_(self.optimizer)
            if clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss that is finite for every batch."""
    return model(batch).square().mean()


def roots(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient is infinite where a row is zero."""
    return model(batch).mean() + (batch * model[0].weight.sum()).square().sum(-1).sqrt().mean()  # roots


def narrow(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient passes through float16 on its way."""
    return (model(batch).half() * 60000).float().mean()  # narrow


BATCH = torch.linspace(-1, 1, 24).reshape(6, 4)


@pytest.mark.parametrize("fused", [False, True])
def test_the_search_for_a_scale_is_no_fault(fused: bool, tmp_path: Path) -> None:
    """Steps that overflow by their scale alone are left out by the scaler and nothing is told."""
    training = Scaled(squares, tmp_path, fused=fused, scale=2.0**127)
    training.train([BATCH * 100] * 20)
    training.guard.check()
    assert training.scaler.get_scale() < 2.0**127
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", ["", "after"])
def test_a_gradient_that_is_bad_without_a_scale_is_told_at_once(clip: str, fused: bool, tmp_path: Path) -> None:
    """The scaler would leave out this step and every other one like it."""
    training = Scaled(roots, tmp_path, fused=fused)
    training.train([BATCH], clip=clip)
    bad = BATCH.clone()
    bad[2] = 0.0
    with pytest.raises(NonFiniteStep) as caught:
        training.train([bad], clip=clip)
    assert caught.value.symptom.kind == "gradient"
    assert blamed(caught.value, "roots", __file__)


def test_a_training_goes_on_after_it(tmp_path: Path) -> None:
    """Statistics and the scale are as if the bad batch had not been there."""
    bad = BATCH.clone()
    bad[2] = 0.0
    ends = []
    for batches in ([BATCH, bad, BATCH * 2], [BATCH, BATCH * 2]):
        training = Scaled(roots, tmp_path / str(len(batches)), on_fault="skip")
        training.train(batches)
        ends.append((repr(training.model.state_dict()), training.scaler.state_dict()))
    assert ends[0] == ends[1]


def test_a_left_out_loss_passes_through_the_scaler(tmp_path: Path) -> None:
    """A bad loss leaves the scale as it was."""
    ends = []
    for batches in ([BATCH, BATCH * torch.inf, BATCH * 2], [BATCH, BATCH * 2]):
        training = Scaled(squares, tmp_path / str(len(batches)), on_fault="skip")
        training.train(batches, clip="after")
        ends.append((repr(training.model.state_dict()), training.scaler.state_dict()))
    assert ends[0] == ends[1]


def test_a_scale_that_collapses(tmp_path: Path) -> None:
    """When the scale has fallen far, the call is named that sets the limit, and the scale that it allows."""
    training = Scaled(narrow, tmp_path)
    with pytest.raises(NonFiniteStep) as caught:
        training.train([BATCH] * 30)
    finding = located(caught.value)
    assert finding.culprit is not None
    assert finding.culprit.phase is Phase.BACKWARD
    assert finding.culprit.cause == "grad_overflow_fp16"
    assert blamed(caught.value, "narrow", __file__)
    assert any("scale" in note for note in finding.culprit.notes)


def test_a_forward_overflow_under_autocast_is_a_fault(tmp_path: Path) -> None:
    """The loss is bad, whatever its scale."""

    def wide(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return (model(batch).square() * 1e8).half().mean().float()

    training = Scaled(wide, tmp_path)
    with pytest.raises(NonFiniteStep) as caught:
        training.train([BATCH])
    assert caught.value.symptom.kind == "loss"


def test_clipping_while_scaled(tmp_path: Path) -> None:
    """A limit that is compared with scaled gradients is told; after `unscale_` it is not."""
    Scaled(squares, tmp_path).train([BATCH] * 4, clip="after")
    with pytest.warns(LoopMistake, match="unscale_"):
        Scaled(squares, tmp_path).train([BATCH] * 4, clip="before")


def test_the_scale_is_in_the_history(tmp_path: Path) -> None:
    """A snapshot tells the scale of the steps before it."""
    training = Scaled(squares, tmp_path, scale=1024.0)
    training.train([BATCH] * 3)
    assert [entry["scale"] for entry in training.guard._vigil.journal.entries] == [1024.0] * 3


def test_closing_gives_the_scaler_back(tmp_path: Path) -> None:
    """Nothing of the guard is left on the scaler."""
    training = Scaled(squares, tmp_path)
    assert "step" in vars(training.scaler)
    training.guard.close()
    assert not {"step", "unscale_"} & set(vars(training.scaler))
