"""Norms of many tensors, and what they tell about finiteness."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bisect_nan.norms import norms

NUMBERS = (0.0, 1.0, -2.5, 3e4, 6e-8, math.inf, -math.inf, math.nan)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.int64)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.sampled_from(NUMBERS), max_size=5)), max_size=4),
)
def test_the_norm_is_that_of_all_elements_and_finite_when_they_are(
    parts: list[tuple[torch.dtype, list[float]]],
) -> None:
    """Whatever the types, the norm is the one that float64 gives, and NaN or infinite exactly when an element is."""
    tensors = [
        torch.tensor([0 if dtype is torch.int64 and not math.isfinite(v) else v for v in values], dtype=dtype)
        for dtype, values in parts
    ]
    elements = [
        float(v.abs()) for tensor in tensors if tensor.dtype is not torch.int64 for v in tensor.to(torch.complex128)
    ]
    (found,) = norms(tensors)
    assert math.isfinite(found) == all(math.isfinite(element) for element in elements)
    if math.isfinite(found):
        assert found == pytest.approx(math.hypot(*elements), rel=1e-5)


def test_several_groups() -> None:
    """Each group has its own norm, an empty one 0."""
    assert norms([torch.tensor([3.0, 4.0])], [], [torch.full((4,), 0.5), torch.tensor([math.nan])])[:2] == [5.0, 0.0]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.full((4,), 1e30), 2e30),  # its square is beyond float32
        (torch.full((4,), 6e4, dtype=torch.float16), 1.2e5),  # the norm is beyond float16
        (torch.full((4,), 1e300, dtype=torch.float64), sys.float_info.max),  # the square is beyond float64
        (torch.tensor([3.0, 4.0]).to_sparse(), 5.0),
        (torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn), 5.0),
        (torch.tensor([3.0 + 4.0j]), 5.0),
        (torch.empty(0), 0.0),
        (torch.empty(3, device="meta"), 0.0),
    ],
)
def test_large_and_odd_tensors(tensor: torch.Tensor, expected: float) -> None:
    """A norm whose square overflows is finite all the same, and every layout has one."""
    (found,) = norms([tensor])
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_compressed_rows() -> None:
    """A layout that coalesces nothing has a norm as well."""
    assert norms([torch.tensor([[3.0, 0.0], [0.0, 4.0]]).to_sparse_csr()]) == [5.0]


def test_gradients_of_the_norm_are_not_recorded() -> None:
    """Parameters can be handed in as they are."""
    weight = torch.ones(3, requires_grad=True)
    assert norms([weight]) == [pytest.approx(math.sqrt(3))]
    assert weight.grad is None
