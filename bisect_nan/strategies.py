"""Hypothesis strategies for tensors that losses stumble over: zeros, ties, extremes, saturation, masks and labels of nothing.

Each strategy says what inputs are *legal*; `bisect_nan.stress` looks for those among them that make a loss non-finite. They
are plain hypothesis strategies: `.map`, `.filter`, `st.tuples` and the like work on them.

A shape is a tuple of sizes. A size is a number, a strategy of numbers, or a name: the same name is the same size, 1 to 4, in all
tensors of one example, as in `tensors(("rows", 10))` and `labels(("rows",), classes=10)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from bisect_nan.errors import BisectNanError

try:
    from hypothesis import strategies as st
except ImportError as missing:
    raise BisectNanError(
        "got no hypothesis, with which inputs are made up and shrunk",
        "the extra `stress`",
        "pip install 'bisect_nan[stress]'",
    ) from missing

__all__ = ["distributions", "labels", "lengths", "masks", "probabilities", "tensors"]

Size = int | str | st.SearchStrategy[int]
"""A number, a name, or a strategy."""

_NAMED = st.integers(1, 4)
_EXCEPTIONS = 12
"""Elements of a tensor that differ from the rest at most; more would only make examples slow to draw and hard to read."""

_CONSTANT, _CONSTANT_ROWS, _SAME_ROWS, _SCATTERED = range(4)


def tensors(
    shape: Sequence[Size],
    dtype: torch.dtype = torch.float32,
    *,
    min_value: float = -1e4,
    max_value: float = 1e4,
    requires_grad: bool = False,
) -> st.SearchStrategy[torch.Tensor]:
    """Return floating-point tensors within a range: constant ones, constant rows, equal rows, a few odd elements.

    The elements are 0, 1, powers of ten, the neighbours of 1, tiny numbers and denormals, the ends of the range, and anything
    between.

    Args:
        shape: The sizes; see above.
        dtype: float16, bfloat16, float32 or float64.
        min_value: The smallest legal value. A loss that squares its input overflows at 1e20, and rightly: say what is real.
        max_value: The largest legal value.
        requires_grad: Whether gradients with respect to it are looked at; see `bisect_nan.stress`.

    Raises:
        BisectNanError: The dtype is no floating-point one, or has no value in the range.
    """
    if not dtype.is_floating_point:
        raise BisectNanError(f"got {dtype}", "a floating-point dtype", "use labels, lengths or masks for whole numbers")
    odd = [
        value for value in map(_rounded(dtype), _odd(dtype, min_value, max_value)) if min_value <= value <= max_value
    ]
    if not odd:
        raise BisectNanError(
            f"got the range {min_value} to {max_value}, in which {dtype} has no value", "a wider one", "change it"
        )
    between = st.floats(min_value, max_value, allow_nan=False).map(_rounded(dtype))
    elements = st.sampled_from(list(dict.fromkeys(odd))) | between.filter(lambda value: min_value <= value <= max_value)
    return _arranged(shape, elements, dtype).map(lambda tensor: tensor.requires_grad_(requires_grad))


def probabilities(
    shape: Sequence[Size], dtype: torch.dtype = torch.float32, *, requires_grad: bool = False
) -> st.SearchStrategy[torch.Tensor]:
    """Return tensors of probabilities from 0 to 1, both ends included; see `tensors`."""
    return tensors(shape, dtype, min_value=0.0, max_value=1.0, requires_grad=requires_grad)


def distributions(
    shape: Sequence[Size], dtype: torch.dtype = torch.float32, *, requires_grad: bool = False
) -> st.SearchStrategy[torch.Tensor]:
    """Return tensors whose last dimension sums up to 1: uniform, one-hot, nearly one-hot and others; see `tensors`."""

    def normalised(weights: torch.Tensor) -> torch.Tensor:
        total = weights.sum(-1, keepdim=True)
        uniform = torch.full_like(weights, 1 / max(weights.shape[-1], 1))
        return torch.where(total > 0, weights / total, uniform).to(dtype).requires_grad_(requires_grad)

    return tensors(shape, torch.float64, min_value=0.0, max_value=1.0).map(normalised)


def labels(
    shape: Sequence[Size], classes: int, *, ignore_index: int | None = None, dtype: torch.dtype = torch.int64
) -> st.SearchStrategy[torch.Tensor]:
    """Return class numbers from 0 to `classes - 1`.

    Args:
        shape: The sizes; see above.
        classes: How many classes there are.
        ignore_index: A further value that marks what is not scored; all of a row and all of a batch may be marked.
        dtype: An integer dtype.
    """
    ignored = st.nothing() if ignore_index is None else st.just(ignore_index)
    return _arranged(shape, st.integers(0, classes - 1) | ignored, dtype)


def masks(shape: Sequence[Size], dtype: torch.dtype = torch.bool) -> st.SearchStrategy[torch.Tensor]:
    """Return masks, those of rows and batches without anything included; with a floating-point dtype, binary targets.

    Where each row has something: `masks(shape).filter(lambda mask: mask.any(-1).all())`.
    """
    return _arranged(shape, st.booleans(), dtype)


def lengths(
    shape: Sequence[Size], max_value: int, *, min_value: int = 0, dtype: torch.dtype = torch.int64
) -> st.SearchStrategy[torch.Tensor]:
    """Return whole numbers from `min_value` to `max_value`, such as the lengths of sequences."""
    return _arranged(shape, st.integers(min_value, max_value), dtype)


@st.composite
def _arranged(
    draw: st.DrawFn, shape: Sequence[Size], elements: st.SearchStrategy[Any], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor in one of four arrangements, the plainest first, for to that hypothesis shrinks."""
    sizes = [size if isinstance(size, int) else draw(size_of(size)) for size in shape]
    arrangement = draw(st.sampled_from([_CONSTANT, _CONSTANT_ROWS, _SAME_ROWS, _SCATTERED])) if sizes else _CONSTANT
    if arrangement == _CONSTANT:
        return torch.full(sizes, draw(elements), dtype=dtype)
    if arrangement == _CONSTANT_ROWS:
        return _scattered(draw, [*sizes[:-1], 1], elements, dtype).expand(sizes).clone()
    if arrangement == _SAME_ROWS:
        return _scattered(draw, sizes[1:], elements, dtype).expand(sizes).clone()
    return _scattered(draw, sizes, elements, dtype)


def _scattered(draw: st.DrawFn, sizes: list[int], elements: st.SearchStrategy[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of one value with a few others in it."""
    flat = torch.full((math.prod(sizes),), draw(elements), dtype=dtype)
    count = min(len(flat), _EXCEPTIONS)
    if count:
        for index, value in draw(st.lists(st.tuples(st.integers(0, len(flat) - 1), elements), max_size=count)):
            flat[index] = value
    return flat.reshape(sizes)


def size_of(size: Size) -> st.SearchStrategy[int]:
    """Return the strategy of a size; a name is drawn once for an example."""
    if isinstance(size, str):
        return st.shared(_NAMED, key=f"bisect_nan size {size}")
    return st.just(size) if isinstance(size, int) else size


def _odd(dtype: torch.dtype, low: float, high: float) -> list[float]:
    """Return the values that formulas fail at, the plainest first."""
    info = torch.finfo(dtype)
    sizes = [1.0, 0.5, 10.0, 100.0, 1e3, 1e4, 1 - info.eps / 2, 1 + info.eps, info.eps, 1e-8, 1e-12, info.tiny**0.5]
    sizes += [info.tiny, info.smallest_normal * info.eps, info.max**0.5, info.max]
    ends = [end for end in (low, high) if math.isfinite(end)]
    return [0.0, *(signed for size in sizes for signed in (size, -size)), *ends]


def _rounded(dtype: torch.dtype) -> Any:
    """Return the function that rounds a number to a dtype."""
    return float if dtype == torch.float64 else lambda value: torch.tensor(value, dtype=dtype).item()
