"""Mistakes of a loop are told once, with what to do, and good loops are told nothing."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import pytest
import torch
from test_guard import located, raised
from torch import nn

from bisect_nan import Guard
from bisect_nan.loop.mistakes import LoopMistake

BATCH = torch.linspace(-1, 1, 12).reshape(3, 4)


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return a finite loss."""
    return model(batch).square().mean()


class Branches(nn.Module):
    """Two branches, of which one has a bad gradient for a batch of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Linear(4, 1), nn.Linear(4, 1, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.good(torch.ones(1, 4)).mean() + self.bad(batch).abs().sqrt().mean()


def test_gradients_that_are_never_zeroed(tmp_path: Path) -> None:
    """Two updates in a row that add to the gradients of the last are no accumulation."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Guard(model, optimizer, directory=tmp_path).watch(step)

    def train() -> None:
        watched(model, BATCH).backward()
        optimizer.step()

    train()
    train()
    with pytest.warns(LoopMistake, match="zero_grad"):
        train()
    train()  # told once


@pytest.mark.parametrize("place", ["first", "before backward", "after step"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zeroed_gradients(place: str, to_none: bool, tmp_path: Path) -> None:
    """Wherever a loop does it, nothing is told; accumulation is not told either."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Guard(model, optimizer, directory=tmp_path).watch(step)
    for _ in range(5):
        if place == "first":
            optimizer.zero_grad(set_to_none=to_none)
        for part in range(3):
            loss = watched(model, BATCH)
            if place == "before backward" and part == 0:
                optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
        optimizer.step()
        if place == "after step":
            optimizer.zero_grad(set_to_none=to_none)


def test_two_models_in_turns(tmp_path: Path) -> None:
    """The backward pass of a generator leaves gradients at the discriminator, which are thrown away before the latter's own."""
    models = [nn.Linear(4, 4), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    both = nn.Sequential(*models)
    watched = step
    for optimizer in optimizers:
        watched = Guard(both, optimizer, directory=tmp_path).watch(watched)
    for _ in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
            watched(both, BATCH).backward()
            optimizer.step()


@pytest.mark.parametrize("norm", ["nan", "inf"])
def test_a_norm_that_is_ignored(norm: str, tmp_path: Path) -> None:
    """Clipping that spreads one bad gradient to all is noted at the fault, and the guilty one is still found."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Guard(model, optimizer, directory=tmp_path).watch(lambda m, b: m(b))
    batch = torch.zeros(2, 4) if norm == "nan" else torch.tensor([[1e-45, 0.0, 0.0, 0.0]])
    if norm == "inf":
        nn.init.constant_(model.bad.weight, 0.0)

    def train() -> None:
        watched(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    fault = raised(train)
    assert any("clip_grad_norm_" in note for note in fault.__notes__)
    culprit = located(fault).culprit
    assert culprit is not None
    assert culprit.cause == "sqrt_grad_at_zero"


def test_a_resume_without_the_optimizers_state(tmp_path: Path) -> None:
    """A schedule in the middle of a training beside an optimizer without state."""
    model = nn.Linear(4, 1)
    for late in (False, True):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
        schedule.last_epoch = 5000 if late else 0
        guard = Guard(model, optimizer, scheduler=schedule, directory=tmp_path)
        guard.watch(step)(model, BATCH).backward()
        if not late:
            optimizer.step()
            continue
        with pytest.warns(LoopMistake, match="optimizer has no state"):
            optimizer.step()


def test_a_resume_without_the_scalers_state(tmp_path: Path) -> None:
    """An optimizer in the middle of a training beside a new scaler."""
    model = nn.Linear(4, 1)
    for late in (False, True):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        step(model, BATCH).backward()
        optimizer.step()
        for state in optimizer.state.values():
            state["step"].fill_(5000 if late else 1)
        scaler = torch.amp.GradScaler("cpu")
        guard = Guard(model, optimizer, scaler=scaler, directory=tmp_path)
        scaler.scale(guard.watch(step)(model, BATCH)).backward()
        if not late:
            scaler.step(optimizer)
            continue
        with pytest.warns(LoopMistake, match="GradScaler is new"):
            scaler.step(optimizer)


def test_a_bad_model_that_is_about_to_be_saved(tmp_path: Path) -> None:
    """It is told when the state is asked for; copies and pickles of the model do not know the guard."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, directory=tmp_path)
    watched = guard.watch(step)
    watched(model, BATCH).backward()
    optimizer.step()
    model.state_dict()
    clone, unpickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301  (our own bytes)
    with torch.no_grad():
        for one in (model, clone, unpickled):
            one.weight[0, 0] = torch.nan
    clone.state_dict()
    unpickled.state_dict()
    with pytest.warns(LoopMistake, match="weight"):
        model.state_dict()
    guard.close()


def test_anomaly_mode(tmp_path: Path) -> None:
    """It ends a backward pass before a guard can look at it, which is told before it does; without its check it is harmless."""
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watched = Guard(model, optimizer, directory=tmp_path).watch(lambda m, b: m(b))
    with torch.autograd.set_detect_anomaly(mode=True, check_nan=False):
        watched(model, BATCH).backward()
        optimizer.step()
    loss = watched(model, torch.zeros(2, 4))
    with torch.autograd.set_detect_anomaly(mode=True), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="returned nan values"):
            loss.backward()
    assert [one.category for one in told if "anomaly mode is on" in str(one.message)] == [LoopMistake]
