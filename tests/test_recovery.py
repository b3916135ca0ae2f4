"""A training goes on after a fault as if the bad batch had not been there, or returns to a healthy state."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import random
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_guard import BAD, KINDS, Batch, Loop, Make, adam, batch_of, lbfgs, sgd
from test_guard import step as plain_step
from torch import nn

from bisect_nan import Guard, NonFiniteStep, Phase, Snapshot, Verdict, locate
from bisect_nan.loop.mistakes import LoopMistake

MODES = "skip", "rollback"


class Training(Loop):
    """The loop of the guard's tests, going on after faults by the guard's doing; without a directory the bad batches are left out."""

    def __init__(self, make: Make, directory: Path | None = None, **options: Any) -> None:
        super().__init__(make)
        self.options = options
        if directory is not None:
            self.guard = Guard(self.model, self.optimizer, directory=directory, **options)
            self.step = self.guard.watch(plain_step)

    def run(self, batches: Iterable[Batch]) -> None:
        """Train on each batch; a loop that knows nothing of faults."""
        for batch in batches:
            self.optimizer.zero_grad()
            self.step(self.model, batch).backward()
            self.optimizer.step()


def stream(kind: str, places: Sequence[int], length: int = 8) -> list[Batch]:
    """Return batches with bad ones in some places."""
    return [BAD[kind][1] if place in places else batch_of(place) for place in range(length)]


def ended(make: Make, batches: Iterable[Batch], directory: Path | None = None, **options: Any) -> Any:
    """Return the trained numbers of a run, under a guard where a directory is given."""
    training = Training(make, directory, **options)
    training.run(batches)
    return training.end()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "parameter"])
def test_a_bad_batch_is_as_if_it_had_not_been_there(kind: str, mode: str, tmp_path: Path) -> None:
    """Weights, moments, statistics, counters and generators end bit by bit as in a run without that batch."""
    make, batches = BAD[kind][0], stream(kind, [3])
    assert ended(make, batches, tmp_path, on_fault=mode) == ended(make, [*batches[:3], *batches[4:]])
    (path,) = tmp_path.iterdir()
    assert path.name == "step_3.safetensors"
    assert locate(Snapshot.load(path)).verdict is Verdict.LOCATED


def test_an_injected_fault_at_step_50(tmp_path: Path) -> None:
    """A hundred steps with dropout, momentum and a schedule, rolled back once, end as without that batch."""

    def run(directory: Path | None) -> Any:
        training = Loop(sgd)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 100)
        if directory is not None:
            guard = Guard(
                training.model, training.optimizer, scheduler=schedule, directory=directory, on_fault="rollback"
            )
            training.step = guard.watch(plain_step)
        for place in range(100):
            if place == 50 and directory is None:
                continue
            batch = BAD["gradient"][1] if place == 50 else batch_of(place)
            training.optimizer.zero_grad()
            training.step(training.model, batch).backward()
            nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.optimizer.step()
            schedule.step()
        return training.end(), schedule.state_dict()["last_epoch"], training.optimizer.param_groups[0]["lr"]

    assert run(tmp_path) == run(None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_bad_micro_batch(kind: str, mode: str, tmp_path: Path) -> None:
    """Of accumulated calls a bad loss leaves out its own; gradients are bad together, and all of them are left out."""

    def run(directory: Path | None) -> Any:
        training = Training(adam, directory, on_fault=mode) if directory is not None else Training(adam)
        for group in range(6):
            training.optimizer.zero_grad()
            for place in range(3):
                bad = (group, place) == (2, 1)
                if directory is None and (bad or (group == 2 and kind == "gradient")):
                    continue
                training.step(training.model, BAD[kind][1] if bad else batch_of(3 * group + place)).backward()
            if directory is not None or group != 2 or kind == "loss":
                training.optimizer.step()
        return training.end()

    assert run(tmp_path) == run(None)


@pytest.mark.parametrize("mode", MODES)
def test_a_closure(mode: str, tmp_path: Path) -> None:
    """An update that evaluates a bad batch inside is undone."""

    def run(directory: Path | None) -> Any:
        training = Training(lbfgs, directory, on_fault=mode) if directory is not None else Training(lbfgs)
        for place, batch in enumerate(stream("loss", [3])):
            if place == 3 and directory is None:
                continue

            def closure(batch: Batch = batch) -> torch.Tensor:
                training.optimizer.zero_grad()
                loss: torch.Tensor = training.step(training.model, batch)
                loss.backward()
                return loss

            training.optimizer.step(closure)
        return [p.tolist() for p in training.model.parameters()], training.model.calls

    assert run(tmp_path) == run(None)


def test_the_bad_loss_is_returned_as_it_was(tmp_path: Path) -> None:
    """What a loop logs is what the step computed; its backward pass does nothing."""
    training = Training(adam, tmp_path, on_fault="skip")
    loss = training.step(training.model, BAD["loss"][1])
    assert math.isinf(loss.item())
    assert loss.requires_grad
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in training.model.parameters())


def test_several_losses_are_returned_in_their_form(tmp_path: Path) -> None:
    """A mapping of losses stays one, and what is no loss stays as it was."""
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=tmp_path, on_fault="skip")
    step = guard.watch(lambda m, b: {"loss": m(b).log().mean(), "rows": len(b)})
    result = step(model, torch.full((3, 2), math.inf))
    assert result["rows"] == 3
    assert math.isnan(result["loss"].item()) or math.isinf(result["loss"].item())
    result["loss"].backward()
    assert not model.weight.grad.any()


def test_faults_in_a_row_go_back_to_an_earlier_state(tmp_path: Path) -> None:
    """Weights that every batch is bad with are not kept: the second fault in a row returns to the kept state."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    guard = Guard(model, optimizer, directory=tmp_path, on_fault="rollback", healthy_every=4)
    step = guard.watch(lambda m, b: (m(b).mean() + 50.0).log())
    kept: dict[int, torch.Tensor] = {}
    weights = []
    for place in range(8):
        if place == 6:  # what the loop does to the weights makes every step bad from here on
            with torch.no_grad():
                model.weight.fill_(-100.0)
        kept[place] = model.weight.detach().clone()
        optimizer.zero_grad()
        step(model, torch.ones(3, 2)).backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(weights[6], torch.full((1, 2), -100.0))
    assert torch.equal(weights[7], kept[4])


def test_steps_that_stay_bad_raise_in_the_end(tmp_path: Path) -> None:
    """A training in which nothing is healthy any more does not go on leaving out steps for ever."""
    training = Training(adam, tmp_path, on_fault="skip")
    with pytest.raises(NonFiniteStep):
        training.run(itertools.repeat(BAD["loss"][1], 100))
    assert len(list(tmp_path.iterdir())) == 3


def test_warning_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on with NaN, as it would have without a guard; it is told once, and again after a recovery."""
    batches = [batch_of(0), BAD["loss"][1], batch_of(1)]

    with caplog.at_level(logging.WARNING, "bisect_nan"), pytest.warns(LoopMistake, match="state_dict"):
        assert repr(ended(adam, batches, tmp_path, on_fault="warn")) == repr(ended(adam, batches))  # NaN is not NaN
    assert [record.name for record in caplog.records] == ["bisect_nan"]
    (path,) = tmp_path.iterdir()
    assert locate(Snapshot.load(path)).verdict is Verdict.LOCATED


def test_a_healthy_state_on_disk(tmp_path: Path) -> None:
    """The file is a usual checkpoint that loads without pickle, and a training that resumes from it is the same."""
    file = tmp_path / "states" / "healthy.pt"
    training = Training(adam, tmp_path, healthy_every=3, healthy_file=file)
    training.run(batch_of(place) for place in range(5))
    state = torch.load(file, weights_only=True)
    assert state["step"] == 3
    other = Training(adam)
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["generators"]["torch"])
    random.setstate(state["generators"]["python"])
    name, keys, *rest = state["generators"]["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    other.model.calls, other.model.seen = 3, [1, 2, 3]
    other.run(batch_of(place) for place in (3, 4))
    assert other.end() == training.end()


@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_deferred(kind: str, mode: str, tmp_path: Path) -> None:
    """Nothing is read before the next step begins; then the training returns to the last healthy state, and the fault is saved."""
    training = Training(adam, tmp_path, on_fault=mode, deferred=True, healthy_every=3)
    kept = None
    batches = stream(kind, [4], 6)
    for place, batch in enumerate(batches):
        if place == 3:
            kept = [p.tolist() for p in training.model.parameters()]
        if place == 5:
            assert not all(p.isfinite().all() for p in training.model.parameters())
            if mode == "raise":
                with pytest.raises(NonFiniteStep):
                    training.run([batch])
                assert [p.tolist() for p in training.model.parameters()] == kept
                break
        training.run([batch])
    (path,) = tmp_path.iterdir()
    finding = locate(Snapshot.load(path))
    assert finding.verdict is Verdict.LOCATED
    assert finding.culprit is not None
    assert finding.culprit.phase is (Phase.FORWARD if kind == "loss" else Phase.BACKWARD)
    assert all(p.isfinite().all() for p in training.model.parameters())


def test_a_healthy_state_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on, the state is kept in memory, and what is wrong with the file is told."""
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    training = Training(adam, tmp_path, on_fault="rollback", healthy_file=tmp_path / "file" / "healthy.pt")
    training.run([batch_of(0), BAD["loss"][1], batch_of(1)])
    assert "cannot be written" in caplog.text


def test_deferred_evaluations_are_not_kept(tmp_path: Path) -> None:
    """Batches of an evaluation between two updates are let go, and its bad losses are told at once."""
    training = Training(adam, tmp_path, deferred=True)
    training.run([batch_of(0)])
    batches = [batch_of(1) for _ in range(3)]
    kept = [weakref.ref(batch["x"]) for batch in batches]
    with torch.no_grad():
        for batch in batches:
            training.step(training.model, batch)
        with pytest.raises(NonFiniteStep):
            training.step(training.model, BAD["loss"][1])
    batch = None
    batches.clear()
    gc.collect()
    assert [ref() for ref in kept] == [None] * 3


def test_two_faults_of_one_step_are_one(tmp_path: Path) -> None:
    """Two looks at a bad batch, or two bad micro-batches, are left out; the state of many steps ago is not gone back to."""

    def train(batches: Iterable[Batch], calls: int, zeroes: bool, directory: Path | None) -> Any:
        training = Training(adam, directory, on_fault="rollback")
        for batch in batches:
            training.optimizer.zero_grad()
            for _ in range(calls):
                if zeroes:
                    training.optimizer.zero_grad()
                training.step(training.model, batch).backward()
            training.optimizer.step()
        return training.end()

    for number, (calls, zeroes) in enumerate(itertools.product((2, 3), (False, True))):
        under = train(stream("loss", [3]), calls, zeroes, tmp_path / str(number))
        without = train([batch_of(place) for place in range(8) if place != 3], calls, zeroes, None)
        assert repr(under) == repr(without)


def test_an_optimizer_of_sparse_gradients(tmp_path: Path) -> None:
    """It takes no others, so those that stand for a step that is left out are sparse, too."""

    def train(batches: Sequence[float], directory: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())

        def step(model: nn.Module, batch: float) -> torch.Tensor:
            return (model(torch.tensor([1, 3])) * batch).square().mean()

        if directory is not None:
            step = Guard(model, optimizer, directory=directory, on_fault="skip").watch(step)
        for batch in batches:
            optimizer.zero_grad()
            step(model, batch).backward()
            optimizer.step()
        return [*model.parameters(), *optimizer.state_dict()["state"][0].values()]

    for place, bad in enumerate(([math.nan, 1.0, 2.0], [1.0, math.nan, 2.0])):
        under, without = train(bad, tmp_path / str(place)), train([1.0, 2.0], None)
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(under, without, strict=True))
