"""Healthy values for the place of bad ones."""

from __future__ import annotations

import math

import pytest
import torch

from bisect_nan.replaying import neutral

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, NAN, 3.0, 2.0], 2.0), ([INF, NAN], 1.0), ([], 1.0), ([-5.0], -5.0)],
)
def test_the_typical_value(values: list[float], expected: float) -> None:
    """The median of the finite elements, and 1 when there is none."""
    assert neutral.typical(torch.tensor(values)) == expected


def test_a_value_beyond_single_precision_is_not_typical() -> None:
    """The median is taken in single precision; one that overflows there is no use."""
    assert neutral.typical(torch.tensor([1e300], dtype=torch.float64)) == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_distinct_values(dtype: torch.dtype) -> None:
    """Between 1/2 and 3/2, never constant, never singular, the same in every run, and without a trace in torch's generator."""
    before = torch.get_rng_state()
    first, second = neutral.distinct(torch.zeros(4, 4, dtype=dtype)), neutral.distinct(torch.ones(4, 4, dtype=dtype))
    assert first.dtype is dtype
    assert torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())
    wide = first.to(torch.complex128).abs()
    assert wide.min() >= 0.5
    assert wide.max() <= 1.5
    assert torch.linalg.matrix_rank(wide) == 4


@pytest.mark.parametrize("highest", [True, False])
def test_ordered_values(highest: bool) -> None:
    """Healthy, distinct and in the order of the originals; NaN stands at one end or the other."""
    x = torch.tensor([[0.3, NAN, -INF], [INF, 0.1, 7.0]])
    healthy = neutral.ordered(x, nan_highest=highest)
    assert healthy.shape == x.shape
    assert healthy.isfinite().all()
    assert len(healthy.unique()) == 6
    order = healthy.flatten().argsort().tolist()
    assert order == ([2, 4, 0, 5, 3, 1] if highest else [1, 2, 4, 0, 5, 3])


def test_tamed_values() -> None:
    """Neither squares nor sums of them overflow, and small ones stay as they are."""
    x = neutral.tamed(torch.tensor([3e38, -3e38, 1.5]))
    assert (x.square().sum() ** 1.5).isfinite()
    assert x[2] == 1.5


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("stand_in", neutral.NEUTRALS)
def test_types_without_kernels_have_stand_ins(stand_in: neutral.Neutral, dtype: torch.dtype) -> None:
    """Every neutral value can be had for float8, for which torch has hardly any kernels."""
    x = torch.tensor([1.0, NAN, -2.0]).to(dtype)
    found = stand_in(x, None, 0)
    assert torch.as_tensor(found).float().isfinite().all()


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_bad_elements_are_replaced(layout: torch.layout) -> None:
    """Only the marked elements change, in dense and in sparse tensors."""
    dense = torch.tensor([[0.0, NAN], [3.0, INF]])
    x = dense if layout is torch.strided else dense.to_sparse(layout=layout)
    found = neutral.neutralised(x, dense.isnan(), 2.0)
    assert found.layout == layout
    assert (found if layout is torch.strided else found.to_dense()).tolist() == [[0.0, 2.0], [3.0, INF]]
