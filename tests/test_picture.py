"""What pictures are made of: counted bad elements, magnitudes, and where growth began."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bisect_nan import Finding, Snapshot, Verdict, locate, picture
from bisect_nan.answer.picture import _grid
from bisect_nan.pictures import Picture


def seen(
    step: Callable[[Any, Any], torch.Tensor], batch: Any, model: nn.Module | None = None, **more: Any
) -> tuple[Snapshot, Finding, Picture]:
    """Capture a step and return it with its finding and its picture."""
    snapshot = Snapshot.capture(model or nn.Identity(), batch, step, **more)
    finding = locate(snapshot, remedies=False)
    return snapshot, finding, picture(snapshot, finding)


@given(st.lists(st.integers(1, 7), max_size=4), st.integers(1, 200), st.integers(0, 99), st.data())
def test_a_grid_counts_every_bad_element_once(small: list[int], large: int, seed: int, data: st.DataObject) -> None:
    """The cells of a grid part the tensor, each counts what is bad in it, and none holds two of a few leading indices."""
    place = data.draw(st.integers(0, len(small)))
    shape = (*small[:place], large, *small[place:])
    drawn = torch.randint(0, 12, shape, generator=torch.Generator().manual_seed(seed))
    tensor = torch.where(drawn == 0, torch.nan, torch.where(drawn == 1, -torch.inf, 1.0))
    grid = _grid(0, tensor)
    rows, columns = math.prod(shape[: grid.split]), math.prod(shape[grid.split :])
    assert [index for block in grid.rows for index in range(*block)] == list(range(rows))
    assert [index for block in grid.columns for index in range(*block)] == list(range(columns))
    assert max(len(grid.rows), len(grid.columns)) <= 96
    flat = tensor.reshape(rows, columns)
    for y, (top, bottom) in enumerate(grid.rows):
        for x, (left, right) in enumerate(grid.columns):
            block = flat[top:bottom, left:right]
            assert (grid.nan[y][x], grid.inf[y][x]) == (int(block.isnan().sum()), int(block.isinf().sum()))
    if grid.split and shape[0] <= 96:
        each = rows // shape[0]
        assert all(top // each == (bottom - 1) // each for top, bottom in grid.rows)


def test_magnitudes_are_those_of_the_values() -> None:
    """Each call is told with the largest finite magnitude that it makes, its limit, and how many values are not finite."""
    x = torch.tensor([3.0, 0.0, -50.0])
    _, _, drawn = seen(lambda _, batch: (batch["x"] * 2).log().sum(), {"x": x})
    told = [(one.op, one.largest, one.nonfinite) for one in drawn.magnitudes]
    logarithm = float(torch.tensor(6.0).log())
    assert told == [("aten.mul.Tensor", 100.0, 0), ("aten.log.default", logarithm, 2), ("aten.sum.default", 0.0, 1)]
    assert {one.limit for one in drawn.magnitudes} == {torch.finfo(torch.float32).max}


def test_growth_is_followed_back_along_the_batch() -> None:
    """The way back from an overflow ends where the values were smallest, and does not turn off to a larger weight."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 1e6)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        hidden = torch.tanh(batch["x"] * 1000)  # 1: smaller than what it is made of
        for _ in range(6):
            hidden = model(hidden)
        return hidden.mean()

    _, finding, drawn = seen(step, {"x": torch.ones(3, 4)}, model)
    ops = {one.node: one.op for one in drawn.magnitudes}
    sizes = {one.node: one.largest for one in drawn.magnitudes}
    assert finding.culprit is not None
    assert drawn.growth[-1] == finding.culprit.node
    assert ops[drawn.growth[0]] == "aten.tanh.default"
    path = [sizes[node] for node in drawn.growth[:-1]]
    assert path == sorted(path)


def test_no_growth_where_nothing_grew() -> None:
    """A logarithm of 0 has no growth behind it, however large the values on the way are."""
    _, _, drawn = seen(lambda _, batch: (batch["x"] * 1e6 * 0).log().mean(), {"x": torch.ones(2)})
    assert drawn.growth == ()


def test_bad_elements_are_those_of_the_finding() -> None:
    """A culprit's grid counts what the finding's summary counts; a culprit that another one spoils in the same run has none."""

    def step(_: Any, batch: Any) -> torch.Tensor:
        root = batch["x"].sqrt()  # NaN in sample 1
        return (root - batch["y"].log()).log1p().nan_to_num(nan=1.0).sum() + root.sum() + batch["y"].log().sum()

    _, finding, drawn = seen(step, {"x": torch.tensor([1.0, -1.0]), "y": torch.tensor([0.0, 1.0])})
    assert drawn.bad
    for bad in drawn.bad:
        summary = next(summary for summary in finding.culprits[bad.culprit].outputs if summary.nonfinite)
        assert bad.shape == summary.shape
        assert (sum(map(sum, bad.nan)), sum(map(sum, bad.inf))) == (summary.nan, summary.pos_inf + summary.neg_inf)


def test_state_has_bad_elements_too() -> None:
    """A weight that was bad before the step is drawn as it is."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight[1, 2] = torch.nan
    _, finding, drawn = seen(lambda model, batch: model(batch["x"]).sum(), {"x": torch.ones(4, 3)}, model)
    assert finding.culprit is not None
    assert finding.culprit.name == "weight"
    assert [bad.nan for bad in drawn.bad] == [((0, 0, 0), (0, 0, 1))]


def test_a_clean_step_is_not_run_again() -> None:
    """Where nothing was found there is nothing to draw but the training before."""
    history = [{"step": 0, "loss": 2.0}]
    _, finding, drawn = seen(lambda _, batch: batch["x"].mean(), {"x": torch.ones(2)}, history=history)
    assert finding.verdict is Verdict.CLEAN
    assert drawn == Picture(history=({"step": 0, "loss": 2.0},))


def test_the_generators_stay_as_they_are() -> None:
    """A random step is run again with its own numbers, and those of this process go on as if nothing had been."""
    step = lambda _, batch: (torch.rand(3) - 2).log().sum() + batch["x"].sum()  # noqa: E731
    snapshot = Snapshot.capture(nn.Identity(), {"x": torch.ones(2)}, step)
    finding = locate(snapshot, remedies=False)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    assert picture(snapshot, finding).bad[0].nan == ((1,), (1,), (1,))
    assert torch.equal(torch.rand(2), expected)
