"""Faults that the program does not make: calls that are not repeatable, replays that come and go, compiled code."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from bisect_nan import Snapshot, Verdict, locate
from bisect_nan.finding import Symptom
from bisect_nan.recording.outcome import Observed
from bisect_nan.recording.setting import is_compiled
from bisect_nan.replaying import stability
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.stretch import Stretch

TURNS = itertools.count()


@torch.library.custom_op("bisect_nan_tests::every_third", mutates_args=())
def every_third(x: torch.Tensor) -> torch.Tensor:
    """A kernel that gives NaN every third time."""
    return x * (math.nan if next(TURNS) % 3 == 0 else 1.0)


def unstable_node(snapshot: Snapshot) -> str:
    """Return the name of the call that is not repeatable; "" when all are."""
    program = snapshot.program
    assert program.targets.loss is not None
    stretch = Stretch(program, Dependence(program).slice([program.targets.loss]), [program.targets.loss])
    node = stability.unstable(stretch, stretch.start(snapshot.tensors()))
    return "" if node is None else str(node.target)


def test_a_call_that_is_not_repeatable_is_named() -> None:
    """The same inputs give another result: a race, or a faulty device."""
    snapshot = Snapshot.capture(nn.Linear(3, 2), torch.ones(2, 3), lambda m, x: every_third(m(x)).sum())
    found = {unstable_node(snapshot) for _ in range(3)}
    assert found - {""} == {"bisect_nan_tests.every_third.default"}


def test_random_calls_are_repeatable() -> None:
    """Each starts from the state of its generator."""

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.dropout(model(x)) + torch.rand(2, 2) + torch.empty(2, 2).fill_(1)).sum()

    assert unstable_node(Snapshot.capture(nn.Linear(3, 2), torch.ones(2, 3), step)) == ""


def test_views_of_memory_beyond_their_base_are_repeatable() -> None:
    """A view that the dispatcher did not see may show more of a memory than the tensor that was met first."""
    whole = torch.ones(8)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).sum() * whole[:1].data.sum() * whole.data.sum()

    assert unstable_node(Snapshot.capture(nn.Linear(3, 2), torch.ones(2, 3), step)) == ""


def test_a_fault_that_comes_and_goes_is_told_with_its_kernel() -> None:
    """Nothing is blamed; how often the fault showed is said, and which call is not repeatable."""
    while True:
        snapshot = Snapshot.capture(
            nn.Linear(3, 2), torch.ones(2, 3), lambda m, x: every_third(m(x)).sum(), backward=False
        )
        if snapshot.observed is not None:
            break
    finding = locate(snapshot)
    assert finding.verdict in (Verdict.FLAKY, Verdict.NOT_REPRODUCED)
    assert "of 3 replays" in finding.notes[0]


@pytest.mark.filterwarnings("ignore")
def test_compiled_code_is_suspected_where_eager_execution_is_clean() -> None:
    """A fault seen in a compiled model, whose eager recording is clean, is told as that."""
    model = nn.Linear(3, 2)
    model.compile(backend="eager")
    assert is_compiled(model)
    assert is_compiled(nn.Sequential(model))
    assert not is_compiled(nn.Linear(3, 2))
    snapshot = Snapshot.capture(model, torch.ones(2, 3), lambda m, x: m(x).sum())
    assert snapshot.observed is None
    seen = Observed(Symptom("loss", "loss", ("nan",)), ("loss",), torch.tensor(math.nan))
    finding = locate(Snapshot(snapshot.program, seen, math.nan, snapshot.environment, snapshot.tensors()))
    assert finding.verdict is Verdict.NOT_REPRODUCED
    assert any("torch.compile" in note for note in finding.notes)
