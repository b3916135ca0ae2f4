"""Following bad elements back to where they were born, through views, in-place calls and memory without a storage."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import run_all, stretch_of
from torch import nn

from bisect_nan import Snapshot, finite
from bisect_nan.blaming.trace import Birth, Marks, Origin, Trail
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.intent import Intent
from bisect_nan.replaying.reproduce import walk

NAN, INF = math.nan, math.inf


def trail_of(
    step: Callable[[Any, Any], torch.Tensor], batch: Any, model: nn.Module | None = None
) -> tuple[Trail, Snapshot]:
    """Follow a step's loss back."""
    snapshot = Snapshot.capture(model, batch, step)
    stretch = stretch_of(snapshot.program)
    passed = walk(stretch, stretch.start(snapshot.tensors()), len(stretch))
    trail = Trail(stretch, passed.checkpoints, Intent(snapshot.program, Dependence(snapshot.program)))
    loss = snapshot.program.targets.loss
    trail.marks.add(loss, finite.mask(passed.run.env[loss]))
    trail.follow(len(stretch))
    return trail, snapshot


def seen(trail: Trail, snapshot: Snapshot) -> list[tuple[str, list[list[int]], Origin]]:
    """Return the births as name, elements and origin, the latest first."""

    def name(birth: Birth) -> str:
        if birth.placeholder is not None:
            return birth.placeholder.name
        return snapshot.program.nodes[birth.node].target._schema.name.removeprefix("aten::")

    return [(name(birth), birth.mask.nonzero().tolist(), birth.origin) for birth in trail.births]


def test_only_what_reaches_the_end_is_born() -> None:
    """Of two infinities that one call makes, the one that is cut off is no birth on the way back."""
    trail, snapshot = trail_of(lambda _, x: x.log()[1:].sum(), torch.tensor([0.0, 2.0, 0.0]))
    assert seen(trail, snapshot) == [("log", [[2]], Origin.MADE)]


def test_views_and_in_place_calls() -> None:
    """A fault written through one view is found from another one of the same memory, and what was overwritten is not."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(2, 3, 2)
        cache[0] = (x / x)[:, None].expand(3, 2)
        cache.transpose(0, 1)[1].zero_()
        return cache.flatten()[3:].view(3, 3).sum()

    trail, snapshot = trail_of(step, torch.tensor([0.0, 0.0, 0.0]))
    assert seen(trail, snapshot) == [("div", [[2]], Origin.MADE)]


def test_parts_of_complex_numbers() -> None:
    """A complex element and the real view of its parts are the same memory."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        whole = torch.complex(x, x.log())
        return torch.view_as_real(whole)[:, 1].sum()

    trail, snapshot = trail_of(step, torch.tensor([2.0, 0.0]))
    assert seen(trail, snapshot) == [("log", [[1]], Origin.MADE)]


def test_sparse_tensors_have_no_memory_and_are_followed_all_the_same() -> None:
    """An infinity passes through a sparse matrix."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([[0, 1], [1, 2]])
        matrix = torch.sparse_coo_tensor(places, 1 / x, (3, 3), check_invariants=True)
        return torch.sparse.mm(matrix, torch.ones(3, 1)).sum()

    trail, snapshot = trail_of(step, torch.tensor([0.0, 2.0]))
    assert seen(trail, snapshot) == [("reciprocal", [[0]], Origin.MADE)]


def test_an_infinity_is_the_root_of_a_nan() -> None:
    """The difference inf - inf is noted as made of infinities, and the call that made them as their birth."""
    trail, snapshot = trail_of(lambda _, x: (x.exp() - x.exp()).sum(), torch.tensor([1.0, 1000.0]))
    origins = {origin for _, _, origin in seen(trail, snapshot)}
    assert origins == {Origin.TURNED, Origin.MADE}
    assert {name for name, _, origin in seen(trail, snapshot) if origin is Origin.MADE} == {"exp"}


def test_written_infinities_are_told_from_made_ones() -> None:
    """A mask's literal is no fault, though the NaN that the same call makes elsewhere is."""
    trail, snapshot = trail_of(lambda _, x: (x * INF).sum(), torch.tensor([0.0, 1.0]))
    assert sorted((places, origin.name) for _, places, origin in seen(trail, snapshot)) == [
        ([[0]], "MADE"),
        ([[1]], "WRITTEN"),
    ]


def test_a_mean_that_takes_in_a_mask_is_the_admission() -> None:
    """Where only intended infinities are found, the first call that folds them into others is named; a selection folds nothing."""

    def step(_: None, x: torch.Tensor) -> torch.Tensor:
        masked = x.masked_fill(x > 1, -INF)
        return masked.amin(1)[1:].sum() + 1

    trail, snapshot = trail_of(step, torch.tensor([[0.0, 2.0], [2.0, 0.0], [0.0, 1.0]]))
    (admitted,) = trail.admissions()
    assert snapshot.program.nodes[admitted.node].target._schema.name == "aten::sum"
    assert admitted.origin is Origin.ADMITTED


def test_bad_inputs_are_births_of_their_own() -> None:
    """A NaN of the batch, and a mask in it, are told apart."""
    batch = {"mask": torch.tensor([0.0, -INF]), "x": torch.tensor([NAN, 1.0])}
    trail, snapshot = trail_of(lambda _, b: (b["mask"] + b["x"]).sum(), batch)
    assert sorted((name, origin.name) for name, _, origin in seen(trail, snapshot)) == [
        ("batch['mask']", "WRITTEN"),
        ("batch['x']", "MADE"),
    ]


@pytest.mark.parametrize("since", [0, 2])
def test_a_walk_can_stop_early(since: int) -> None:
    """Calls before the cut are not asked."""
    snapshot = Snapshot.capture(None, torch.tensor([0.0]), lambda _, x: (x.log() + 1).neg().sum())
    stretch = stretch_of(snapshot.program)
    passed = walk(stretch, stretch.start(snapshot.tensors()), len(stretch))
    trail = Trail(stretch, passed.checkpoints, Intent(snapshot.program, Dependence(snapshot.program)))
    loss = snapshot.program.targets.loss
    trail.marks.add(loss, torch.tensor(data=True))
    trail.follow(len(stretch), since)
    assert len(trail.births) == (1 if since == 0 else 0)


def test_marks_are_taken_once() -> None:
    """What was marked through one view is found through another and is then gone."""
    calls, stretch, _ = run_all(Snapshot.capture(None, torch.rand(2, 3), lambda _, x: x.clone().T.sum()))
    marks = Marks(stretch.program)
    (base,), (turned,) = (list(executed.content) for executed in calls[:2])
    marks.add(base, torch.tensor([[False, True, False], [False, False, True]]))
    found = marks.take(turned)
    assert found is not None
    assert found.tolist() == [[False, False], [True, False], [False, True]]
    assert marks.take(base) is None
    assert not marks.memories()
