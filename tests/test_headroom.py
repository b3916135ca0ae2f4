"""Headroom against a brute force over every call of the step, and what counts as close."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bisect_nan import BisectNanError, Phase, headroom
from bisect_nan.prevention.headroom import Headroom, magnitudes


class Brute(TorchDispatchMode):
    """Keeps the largest finite magnitude of whatever each call returns in new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: list[float] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel() and not view:
                self.largest.append(float(tensor.detach().double().abs().nan_to_num(posinf=0).max()))
        return result


class Network(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first, self.last, self.scale = nn.Linear(3, 4), nn.Linear(4, 2), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.scale
        hidden = hidden.exp() if self.scale < 20 else hidden.relu_()
        y: torch.Tensor = self.last(hidden)
        return y


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of the network."""
    return F.mse_loss(model(batch["x"]), batch["y"])


BATCH = {"x": torch.linspace(-2, 2, 12).reshape(4, 3), "y": torch.ones(4, 2)}


def measured(scale: float, dtype: torch.dtype = torch.float16, within: float = 16.0) -> Headroom:
    """Return the headroom of a network whose values grow with `scale`."""
    torch.manual_seed(0)
    return headroom(Network(scale), BATCH, step, dtype, within=within)


@given(st.floats(0.01, 1e4))
@settings(max_examples=25)
def test_the_largest_magnitudes_are_those_of_a_brute_force(scale: float) -> None:
    """Every call that makes values is listed when everything counts as close, with the largest magnitude that it really made."""
    torch.manual_seed(0)
    model = Network(scale)
    with Brute() as brute:
        torch.autograd.backward(step(model, BATCH))
    expected = sorted(size for size in brute.largest if size > 0)
    everything = measured(scale, within=1e45)
    assert sorted(row.largest for row in everything.near("overflow")) == expected
    close = measured(scale)
    limit = torch.finfo(torch.float16).max
    assert sorted(row.largest for row in close.near("overflow")) == [s for s in expected if limit / s <= 16]
    factors = [row.factor for row in close.near("overflow")]
    assert factors == sorted(factors)
    assert all(row.factor == pytest.approx(limit / row.largest) for row in close.near("overflow"))


@given(st.lists(st.floats(1e-12, 1e6), min_size=1, max_size=9))
def test_underflow_agrees_with_the_type_itself(values: list[float]) -> None:
    """A row is listed when the median magnitude nears the smallest normal number; lost are those that the type makes 0."""
    weight = torch.tensor(values, dtype=torch.float64)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    found = headroom(model, weight, lambda m, b: ((m.weight + b) * 1).sum(), within=16.0)
    rows = [row for row in found.near("underflow") if row.op == "add"]
    median = float(weight.median())
    assert bool(rows) == (median / 2**-14 <= 16)
    for row in rows:
        assert row.median == pytest.approx(median)
        assert row.lost == pytest.approx(float((weight.half() == 0).double().mean()))


def test_lines_modules_and_phases() -> None:
    """A row names the line, the module and the phase; a derivative the line of its forward pass."""
    everything = measured(12.0, within=1e45)
    (exponential,) = [row for row in everything.near("overflow") if row.op == "exp"]
    assert exponential.source is not None
    assert exponential.source.text == "hidden = hidden.exp() if self.scale < 20 else hidden.relu_()"
    (derivative,) = [row for row in everything.near("overflow") if row.shape == (4, 3) and row.phase is Phase.BACKWARD]
    assert derivative.source is not None
    assert (derivative.source.text, derivative.module) == ("hidden = self.first(x) * self.scale", "")
    assert "hidden.exp()" in str(everything)
    assert "within a factor of 16" in str(measured(12.0))


def test_the_wider_type_has_room() -> None:
    """What is close in float16 is not in bfloat16, and the sentence alone is printed then."""
    assert measured(12.0).near("overflow")
    wide = measured(12.0, torch.bfloat16)
    assert wide.near("overflow") == ()
    assert str(measured(1.0, torch.bfloat16)) == measured(1.0, torch.bfloat16).describe()


def test_masks_do_not_count() -> None:
    """Neither -Inf nor the lowest number of the type is close to anything, however it is put in."""

    def masked(model: nn.Module, batch: Any) -> torch.Tensor:
        scores = model(batch["x"])
        hidden = torch.eye(4, 2).bool()
        first = scores.masked_fill(hidden, -math.inf).softmax(0)
        second = (scores + hidden.float() * torch.finfo(torch.float32).min).softmax(0)
        return (first + second).square().sum()

    torch.manual_seed(0)
    found = headroom(nn.Linear(3, 2), BATCH, masked)
    assert found.near("overflow") == ()


def test_a_step_in_the_type_itself() -> None:
    """Under autocast only what is in half precision is looked at."""

    def autocast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch["x"])
        return (output.float() * 1e15).square().mean() * 1e-20

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    found = headroom(model, BATCH, autocast, torch.bfloat16)
    assert found.mixed
    assert {row.dtype for row in found.rows} <= {torch.bfloat16}
    assert found.near("overflow") == ()
    as_if = headroom(model, BATCH, autocast, torch.float16)
    assert not as_if.mixed
    assert as_if.near("overflow")


def test_nothing_is_left_changed() -> None:
    """Weights, gradients, statistics and generators are as they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    before = [tensor.clone() for tensor in model.state_dict().values()], torch.get_rng_state()
    headroom(model, BATCH, step)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before[0], strict=True))
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_refused() -> None:
    """A step that is bad already, and a type of integers, are told with what to do."""
    with pytest.raises(BisectNanError, match=r"not healthy: the loss is "):
        measured(1e30)
    with pytest.raises(BisectNanError, match=r"torch\.float16 or"):
        measured(1.0, torch.int8)


def test_magnitudes_of_odd_tensors() -> None:
    """Sparse, nested, small and empty tensors have magnitudes, too."""
    assert magnitudes(torch.tensor([[0.0, -3.0], [math.inf, 0.0]]).to_sparse()).tolist() == [3.0]
    assert magnitudes(torch.tensor([2.0, -4.0]).to(torch.float8_e4m3fn)).tolist() == [2.0, 4.0]
    assert magnitudes(torch.zeros(0)).tolist() == []
