"""The finiteness checks against numpy, over dtypes, layouts and bit patterns."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bisect_nan.finite import NonFinite, TensorSummary, has, kinds, labels, mask, probe, same, summarise

NAN, POS, NEG = NonFinite.NAN, NonFinite.POS_INF, NonFinite.NEG_INF
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.uint16, torch.uint64]
INF = math.inf
VALUES = st.sampled_from([0.0, -0.0, 1.0, -2.5, 65504.0, 3e38, -3e38, math.nan, INF, -INF])


@st.composite
def tensors(draw: st.DrawFn, values: st.SearchStrategy[float] = VALUES) -> Tensor:
    """Real and complex tensors of up to three dimensions: contiguous, transposed, strided, conjugated, empty ..."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape)
    dtype = draw(st.sampled_from([*FLOATS, torch.complex64, torch.complex128]))
    flat = draw(st.lists(values, min_size=2 * size, max_size=2 * size))
    # float64 to a narrower dtype overflows to infinity, which is as good a value as any.
    real, imaginary = torch.tensor(flat, dtype=torch.float64).reshape(2, *shape)
    tensor = torch.complex(real, imaginary).to(dtype) if dtype.is_complex else real.to(dtype)
    view = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "conjugated", "imaginary"]))
    if view == "transposed":
        tensor = tensor.permute(tuple(reversed(range(tensor.dim()))))
    if view == "strided" and tensor.dim():
        tensor = tensor[..., ::2]
    if view == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if view in ("conjugated", "imaginary") and dtype.is_complex:
        tensor = tensor.conj() if view == "conjugated" else tensor.conj().imag
    return tensor


def parts(tensor: Tensor) -> np.ndarray:
    """The oracle's view of a tensor: float64 values, with real and imaginary parts along a last axis of their own."""
    array = tensor.resolve_conj().resolve_neg()
    array = torch.view_as_real(array) if array.is_complex() else array[..., None]
    return array.to(torch.float64).numpy()


def found_in(array: np.ndarray) -> NonFinite:
    """The kinds that numpy sees."""
    tests = {NAN: np.isnan, POS: np.isposinf, NEG: np.isneginf}
    found = NonFinite(0)
    for kind, test in tests.items():
        if test(array).any():
            found |= kind
    return found


@given(tensor=tensors())
def test_kinds_and_mask_agree_with_numpy(tensor: Tensor) -> None:
    """Kinds are exact, and the mask marks the elements with a part of the kind."""
    array = parts(tensor)
    assert kinds(tensor) == found_in(array)
    assert np.array_equal(mask(tensor).numpy(), ~np.isfinite(array).all(-1))
    assert np.array_equal(mask(tensor, NAN).numpy(), np.isnan(array).any(-1))
    assert np.array_equal(mask(tensor, NonFinite.INF).numpy(), np.isinf(array).any(-1))
    assert np.array_equal(mask(tensor, NEG).numpy(), np.isneginf(array).any(-1))
    assert not mask(tensor, NonFinite(0)).any()


@given(group=st.lists(tensors(), max_size=4), which=st.sampled_from([NAN, POS, NEG, NonFinite.INF, NonFinite.ANY]))
def test_probe_and_has_agree_with_numpy(group: list[Tensor], which: NonFinite) -> None:
    """The probe is exact up to infinities beside a NaN of the same tensor; `has` is exact."""
    each = [found_in(parts(tensor)) for tensor in group]
    expected, every = NonFinite(0), NonFinite(0)
    for found in each:
        every |= found
        expected |= NAN if NAN in found else found
    assert probe(group) == expected
    assert has(iter(group), which) == bool(every & which)


@given(tensor=tensors())
def test_summary_agrees_with_numpy(tensor: Tensor) -> None:
    """Counts, finite range and first index are numpy's, and the JSON form brings the summary back."""
    array = parts(tensor)
    summary = summarise(tensor, "scores")
    assert (summary.nan, summary.pos_inf, summary.neg_inf) == (
        np.isnan(array).sum(),
        np.isposinf(array).sum(),
        np.isneginf(array).sum(),
    )
    finite = array[np.isfinite(array)]
    assert (summary.low, summary.high) == ((finite.min(), finite.max()) if finite.size else (None, None))
    bad = np.argwhere(~np.isfinite(array).all(-1))
    assert summary.first == (tuple(bad[0]) if len(bad) else None)
    assert summary.nonfinite == (~np.isfinite(array)).sum()
    assert summary.numel == tensor.numel()
    assert TensorSummary.from_dict(json.loads(json.dumps(summary.to_dict(), allow_nan=False))) == summary


@pytest.mark.parametrize("kind", [None, math.nan, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_large_tensors_in_every_memory_order(dtype: torch.dtype, kind: float | None) -> None:
    """One bad value is found in each layout that has its own way through memory, and none beside it."""
    expected = NonFinite(0) if kind is None else found_in(np.array(kind))
    base = torch.zeros(130, 2, 130, dtype=dtype)
    views = [base, base.transpose(0, 2), base[:, :, :-1], base[..., ::2], base[:, :1].expand(-1, 7, -1), base[:, 0]]
    views += [base.permute(2, 1, 0)[:-1], base.as_strided((300, 129), (64, 1)), base[..., :8]]
    if kind is not None:
        base[64, 0, 4] = kind
    for view in views:
        assert probe([view]) == kinds(view) == expected
        bad = summarise(view)
        assert bad.nonfinite == (~np.isfinite(view.numpy())).sum()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_float8_bit_pattern(dtype: torch.dtype) -> None:
    """All 256 patterns of the float8 types, some without kernels of their own, are told apart."""
    patterns = torch.arange(256, dtype=torch.uint8).view(dtype)
    expected = patterns.float().numpy()
    assert kinds(patterns) == found_in(expected)
    assert np.array_equal(mask(patterns).numpy(), ~np.isfinite(expected))
    assert summarise(patterns).nonfinite == (~np.isfinite(expected)).sum()
    assert same(patterns, patterns.clone())


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_hold_nothing_nonfinite(dtype: torch.dtype) -> None:
    """Integer tensors are skipped by the checks and still have a range."""
    tensor = torch.tensor([0, 1], dtype=dtype)
    assert probe([tensor]) == NonFinite(0)
    assert not mask(tensor).any()
    assert (summarise(tensor).low, summarise(tensor).high) == (0, 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0),
        torch.empty(3, 0, dtype=torch.complex64),
        torch.empty(2, device="meta"),
        torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    ],
    ids=["empty", "empty complex", "meta", "float4"],
)
def test_tensors_without_values_to_look_at(tensor: Tensor) -> None:
    """Empty and meta tensors, and dtypes without NaN, are finite and have no range."""
    assert probe([tensor]) == kinds(tensor) == NonFinite(0)
    assert not has([tensor], NonFinite.ANY)
    assert mask(tensor).shape == tensor.shape
    assert summarise(tensor).low is None
    assert same(tensor, tensor.clone())


def test_stored_values_of_other_layouts_are_looked_at() -> None:
    """Sparse, nested and mkldnn tensors are checked by the values that they store."""
    rows = torch.tensor([[0.0, math.nan], [INF, 0.0]])
    coo = torch.sparse_coo_tensor([[1, 1, 0]], [1.0, -INF, 2.0], (3,), check_invariants=True)
    nested = torch.nested.nested_tensor([rows[0], rows[1, :1]], layout=torch.jagged)
    assert kinds(rows.to_sparse()) == NAN | POS
    assert kinds(coo) == NEG
    assert mask(coo).tolist() == [False, True, False]
    assert summarise(coo).describe() == "f32[3]  -inf 1  finite [0, 2]"
    assert kinds(nested) == NAN | POS
    assert summarise(nested).nonfinite == 2
    assert kinds(rows.to_mkldnn()) == NAN | POS
    assert same(coo, coo.clone())
    assert not same(coo, coo.coalesce())


def test_checks_record_no_gradient() -> None:
    """A parameter can be checked without leaving anything in the autograd graph."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, INF]))
    assert kinds(parameter) == POS
    assert not mask(parameter).requires_grad
    assert same(parameter, parameter.clone())


@given(tensor=tensors())
def test_same_needs_every_bit(tensor: Tensor) -> None:
    """A copy in another memory order is the same; one flipped bit is not."""
    copy = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    assert same(tensor, copy)
    if tensor.numel():
        copy.view(-1).view(torch.uint8)[0] ^= 1
        assert not same(tensor, copy)


def test_same_tells_nan_payloads_and_zeros_apart() -> None:
    """Equal is not enough: the sign of zero and the payload of a NaN count, and a NaN is the same as itself."""
    quiet, payload = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same(quiet, quiet.clone())
    assert not same(quiet, payload)
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))


@pytest.mark.parametrize("other", [torch.zeros(2, 2), torch.zeros(4).half(), torch.zeros(4).to_sparse()])
def test_same_needs_shape_dtype_and_layout(other: Tensor) -> None:
    """Tensors of different form are never the same."""
    assert not same(torch.zeros(4), other)


def test_labels_come_in_a_fixed_order() -> None:
    """The kinds are named as in reports."""
    assert labels(NonFinite.ANY) == ["nan", "+inf", "-inf"]
    assert labels(NonFinite.INF) == ["+inf", "-inf"]
    assert labels(NonFinite(0)) == []


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.full((2, 5), -INF).index_fill(1, torch.tensor([0]), 2.25), "f32[2, 5]  -inf 8  finite [2.25, 2.25]"),
        (torch.tensor([math.nan, INF], dtype=torch.bfloat16), "bf16[2]  nan 1  +inf 1"),
        (torch.tensor(65504.0, dtype=torch.float16), "f16[]  finite [65504, 65504]"),
        (torch.tensor([1 + 2j]), "c64[1]  finite [1, 2]"),
        (torch.tensor([3, 9]), "i64[2]  range [3, 9]"),
        (torch.tensor([True]), "bool[1]  range [1, 1]"),
        (torch.zeros(0, 3), "f32[0, 3]"),
    ],
)
def test_description(tensor: Tensor, text: str) -> None:
    """A summary is one line: form, counts, range."""
    assert summarise(tensor).describe() == text
