"""Checks of models, tensors and anything with names: what is bad, what is meant, and how it is told."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bisect_nan import BisectNanError, NonFiniteValues, check_model, check_tensor
from bisect_nan.prevention.check import examine
from bisect_nan.prevention.meant import is_meant

NUMBERS = st.sampled_from([0.0, 1.0, -2.5, math.nan, math.inf, -math.inf])
VALUES = st.lists(NUMBERS, min_size=1, max_size=6)


class Holder(nn.Module):
    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)


@given(st.dictionaries(st.sampled_from("abcd"), VALUES, min_size=1))
def test_parameters_agree_with_numpy(weights: dict[str, list[float]]) -> None:
    """Names, kinds and counts of bad parameters are those that NumPy counts, whatever they hold."""
    check = check_model(Holder(**{name: nn.Parameter(torch.tensor(values)) for name, values in weights.items()}))
    bad = {name: np.array(values) for name, values in weights.items() if not np.isfinite(values).all()}
    assert (check.names, check.ok, check.tensors) == (list(bad), not bad, len(weights))
    for spoiled, values in zip(check.bad, bad.values(), strict=True):
        counts = spoiled.values.nan, spoiled.values.pos_inf, spoiled.values.neg_inf
        assert counts == (np.isnan(values).sum(), np.isposinf(values).sum(), np.isneginf(values).sum())
        assert spoiled.share == pytest.approx((~np.isfinite(values)).mean())
        assert spoiled.kind == "parameter"


@given(VALUES, st.sampled_from([torch.float16, torch.bfloat16, torch.float64, torch.complex64]))
def test_one_tensor_agrees_with_numpy(values: list[float], dtype: torch.dtype) -> None:
    """A tensor is bad when an element is, and the share counts real and imaginary parts one by one."""
    check = check_tensor(torch.tensor(values, dtype=dtype), "logits")
    bad = int((~np.isfinite(values)).sum())
    assert [spoiled.values.nonfinite for spoiled in check.bad] == ([bad] if bad else [])
    if bad:
        assert check.bad[0].share == pytest.approx(bad / len(values) / (2 if dtype.is_complex else 1))


CAUSAL = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)


@pytest.mark.parametrize(
    ("tensor", "kind", "name", "meant"),
    [
        (CAUSAL, "buffer", "mask", True),
        (CAUSAL + torch.arange(3.0), "buffer", "mask_with_slopes", True),
        (torch.tensor(math.inf), "buffer", "lowest_so_far", True),
        (torch.tensor([0.0, -math.inf, 0.0]), "buffer", "suppressed_words", True),
        (torch.tensor([0.1, math.inf, 0.7]), "buffer", "average", False),
        (torch.tensor([1.0, math.inf]), "buffer", "bn.running_var", False),
        (torch.tensor([1.0, -math.inf]), "buffer", "model['bn.running_mean']", False),
        (CAUSAL.where(CAUSAL == 0, math.nan), "buffer", "mask", False),
        (CAUSAL, "constant", "frozen", True),
        (CAUSAL, "parameter", "weight", False),
        (CAUSAL, "input", "batch['mask']", True),
        (torch.full((2, 2), -math.inf), "input", "batch['mask']", False),
        (torch.tensor([[0.3], [-math.inf]]), "input", "batch['x']", False),
        (CAUSAL, "weight", "attention.mask", True),
        (torch.tensor(math.inf), "weight", "best", True),
        (torch.tensor([math.inf]), "weight", "head.bias", False),
        (CAUSAL, "optimizer", "state.0.exp_avg", False),
        (CAUSAL.to(torch.float8_e5m2), "buffer", "mask", True),
        (CAUSAL.to_sparse(), "buffer", "mask", False),
    ],
)
def test_which_infinities_are_meant(tensor: torch.Tensor, kind: str, name: str, meant: bool) -> None:
    """Masks and starts of running minima are meant, what was learned or measured is not, and a NaN never is."""
    assert is_meant(tensor, kind, name) is meant


def test_a_meant_infinity_is_told_apart() -> None:
    """A mask among the buffers leaves the model in order, and is listed all the same."""
    check = check_model(Holder(mask=CAUSAL, weight=nn.Parameter(torch.ones(2))))
    assert check.ok
    assert [spoiled.name for spoiled in check.meant] == ["mask"]
    assert "buffer, meant" in str(check)
    check.require("nothing")


def test_shared_lazy_and_integer_tensors() -> None:
    """A tied weight is named once, and what has no values yet, or no floating ones, is passed over."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "lazy": nn.LazyLinear(3), "norm": nn.BatchNorm1d(2)})
    model["b"] = model["a"]
    with torch.no_grad():
        model["a"].weight[1, 0] = math.nan
    assert check_model(model).names == ["a.weight"]


def test_the_error_carries_the_check() -> None:
    """The message names tensors with counts, and the error has the check for programs."""
    with pytest.raises(NonFiniteValues, match=r"logits \(f32\[2\]  nan 1") as raised:
        check_tensor(torch.tensor([1.0, math.nan]), "logits", 7, raise_on_bad=True)
    assert "step 7" in str(raised.value)
    assert raised.value.check is not None
    assert raised.value.check.names == ["logits"]


def test_a_bad_tensor_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Without raising, name, step, counts and share go to the log, and nothing does for a good tensor."""
    with caplog.at_level(logging.WARNING):
        check_tensor(torch.tensor([1.0, math.inf]), "logits", 7)
        check_tensor(torch.ones(2), "logits", 8)
    assert [record.getMessage() for record in caplog.records] == [
        "logits in step 7: f32[2]  +inf 1  finite [1, 1] (50%)"
    ]


def test_a_check_prints_as_a_table() -> None:
    """Text, notebook and repr name the tensor; markup and control characters of a name stay harmless text."""
    check = examine("model", [("parameter", "[red]a\x1b[0m", torch.tensor([math.nan, 2.0]))])
    assert "[red]a [0m" in str(check)
    assert "50.0%" in str(check)
    assert "\x1b" not in str(check)
    assert check._repr_html_().startswith("<pre>1 of 1 tensor of the model not finite")
    assert str(examine("model", [])) == "0 tensors of the model: all finite"


def test_what_can_be_checked() -> None:
    """Arrays and numbers are tensors as well; all else is refused with what to use instead."""
    assert check_tensor(np.array([1.0, math.nan])).bad[0].values.nan == 1
    assert not check_tensor(math.inf).ok
    with pytest.raises(BisectNanError, match="got list as x"):
        check_tensor([math.nan], "x")
    with pytest.raises(BisectNanError, match="got dict as the model"):
        check_model({})  # type: ignore[arg-type]
