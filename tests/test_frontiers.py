"""Frontiers kept while recording: a search that starts at them finds the same, and executes less."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_programs import Plan, RandomProgram, programs
from torch import nn

from bisect_nan import Finding, Snapshot, Verdict, finite, locate
from bisect_nan.recording import frontiers
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Run
from bisect_nan.replaying.stretch import Stretch


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep frontiers of the smallest steps, too."""
    monkeypatch.setattr(frontiers, "_UNIT", 1)


def captured(program: RandomProgram, *, kept: bool = True) -> Snapshot:
    """Record a random program."""
    model, batch = program.build()
    torch.manual_seed(program.seed)
    return Snapshot.capture(model, batch, program.step(), frontiers=kept)


def said(finding: Finding) -> dict[str, Any]:
    """Return a finding without what it took."""
    return {key: item for key, item in finding.to_dict().items() if key != "search"}


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(Plan(most=4, length=14, least=1, backward=True, state=True)))
def test_the_same_is_found(program: RandomProgram) -> None:
    """With and without frontiers the finding is the same, in every word."""
    assert said(locate(captured(program))) == said(locate(captured(program, kept=False)))


@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(Plan(most=3, length=14, least=1, backward=True)))
def test_a_frontier_holds_what_a_replay_has_there(program: RandomProgram) -> None:
    """Every value of every frontier is that of a run from the start, bit for bit, and no run changes it."""
    snapshot = captured(program)
    targets = [*snapshot.program.targets.of("gradient").values(), snapshot.program.targets.loss]
    stretch = Stretch(snapshot.program, Dependence(snapshot.program).slice(targets), targets)
    start = stretch.start(snapshot.tensors())
    for _ in range(2):
        checkpoints = stretch.resume(snapshot.frontiers(), start)
        assert len(checkpoints) == len(snapshot.frontiers())
        for checkpoint in checkpoints:
            run = Run(stretch, start)
            run.advance(checkpoint.cut)
            assert all(finite.same(tensor, run.env[number]) for number, tensor in checkpoint.env.items())
            Run(stretch, checkpoint).advance(len(stretch))


class InPlace(nn.Module):
    """Writes to activations, to a buffer and to its input, and draws random numbers, on its way to a logarithm of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(8))
        self.norm, self.layers = nn.BatchNorm1d(8), nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: torch.Tensor, hole: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        for layer in self.layers:
            x = nn.functional.dropout(self.norm(layer(x)).relu_(), 0.2)
            x[0] += 1
            torch.mul(self.state, x.detach().tanh().mean(0), out=self.state)
            x = x + self.state
        return (x.sigmoid() * hole).log().mean() + x.mean()


def in_place(hole: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return such a model with a batch."""
    torch.manual_seed(0)
    return InPlace(), {"x": torch.randn(4, 8), "hole": torch.tensor([1.0, 1.0, hole, 1.0])[:, None]}


def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The step."""
    loss: torch.Tensor = model(batch["x"], batch["hole"])
    return loss


def test_a_search_starts_at_the_latest_frontier() -> None:
    """The symptom is shown again from the last clean frontier on, and not from the start; memory that was written to is as it was."""
    model, batch = in_place(0.0)
    with torch.random.fork_rng():  # the capture gives the generator back, so that the same numbers are dropped twice
        torch.manual_seed(0)
        snapshot = Snapshot.capture(model, batch, run)
        finding, whole = locate(snapshot), locate(Snapshot.capture(model, batch, run, frontiers=False))
    assert said(finding) == said(whole)
    assert [culprit.cause for culprit in finding.culprits] == ["log_of_zero"]
    assert finding.culprits[0].samples == (2,)
    assert finding.search.replays == whole.search.replays
    latest = snapshot.frontiers()[-1].calls
    assert latest > len(snapshot.program.nodes) / 2
    assert finding.search.replayed <= whole.search.replayed - latest / 2


def test_what_does_not_show_the_symptom_is_no_start() -> None:
    """Where a frontier has been spoilt, the step is run from the start."""
    snapshot = Snapshot.capture(*in_place(0.0), run)
    for frontier in snapshot.frontiers():
        for storage in frontier.storages.values():
            storage.fill_(255)  # the bits of a NaN
    finding, whole = locate(snapshot), locate(Snapshot.capture(*in_place(0.0), run, frontiers=False))
    assert finding.verdict is Verdict.LOCATED
    assert finding.search.replays == whole.search.replays + 1


def test_none_is_kept_behind_a_fault() -> None:
    """Nothing in a frontier is non-finite, and there are at most sixteen."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = batch["x"]
        for layer in [*model.layers, *model.layers]:  # type: ignore[misc, union-attr]
            x = layer(x).tanh()
        return ((x.sigmoid() * batch["hole"]).log() + model.layers[0](x)).mean()  # type: ignore[index, operator]

    snapshot = Snapshot.capture(*in_place(0.0), step)
    (culprit,) = locate(snapshot).culprits
    program, kept = snapshot.program, snapshot.frontiers()
    assert 8 <= len(kept) <= 16
    assert all(early.calls < late.calls <= culprit.node for early, late in itertools.pairwise(kept))
    stretch = Stretch(program, range(len(program.nodes)), [program.targets.loss])
    for checkpoint in stretch.resume(kept, stretch.start(snapshot.tensors())):
        assert not finite.probe(checkpoint.env.values())


def test_none_is_kept_of_a_clean_step_or_of_another_program() -> None:
    """A clean step holds no memory, and frontiers do not outlive a change of the program."""
    assert not Snapshot.capture(*in_place(1.0), run).frontiers()
    snapshot = Snapshot.capture(*in_place(0.0), run)
    assert snapshot.frontiers()
    assert not dataclasses.replace(snapshot, program=dataclasses.replace(snapshot.program)).frontiers()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the budget the oldest are let go; without any left the step is run from the start."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = model.layers[0](batch["x"])  # type: ignore[index, operator]
        for layer in model.layers:  # type: ignore[union-attr]
            x = layer(x).tanh()
        return (x * 0).sqrt().sum() + x.mean()

    model, batch = in_place(0.0)
    for budget, some in ((math.inf, True), (4000, True), (0, False)):
        monkeypatch.setattr(frontiers, "_BUDGET", budget)
        snapshot = Snapshot.capture(model, batch, step)
        kept = {id(storage): storage.nbytes() for f in snapshot.frontiers() for storage in f.storages.values()}
        assert sum(kept.values()) <= budget
        assert bool(kept) is some
        assert [culprit.cause for culprit in locate(snapshot).culprits] == ["sqrt_grad_at_zero"]
