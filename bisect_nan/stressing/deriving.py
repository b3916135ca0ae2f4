"""Turns the arguments of a loss, examples among them, into one strategy: what is legal is read off the examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves, tree_map_only

from bisect_nan import strategies
from bisect_nan.strategies import Size

Accepts = Callable[[Sequence[Any]], bool]
"""Told arguments, says whether the loss runs on them."""

_RANGE = 1e4
"""As in `strategies.tensors`; examples with larger values have them."""


def derive(arguments: Sequence[Any], accepts: Accepts) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return a strategy of arguments.

    Args:
        arguments: Strategies, which stand for themselves; tensors, which stand for all of their kind; lists, tuples and mappings
            of these; anything else stays what it is.
        accepts: Whether the loss runs on some arguments. Where all tensors have the same number of rows and the loss also
            runs on one row of each, the number of rows is drawn as well.
    """
    return st.tuples(*(_strategy(argument, _rows(arguments, accepts)) for argument in arguments))


def _rows(arguments: Sequence[Any], accepts: Accepts) -> st.SearchStrategy[int] | None:
    """Return how many rows all tensors have in an example; None where they keep those that they have."""
    leaves = pytree.tree_leaves(list(arguments))
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if any(isinstance(leaf, st.SearchStrategy) for leaf in leaves) or len(sizes) != 1 or max(sizes) == 0:
        return None
    first = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor[:1] if tensor.dim() else tensor, list(arguments))
    return st.shared(st.integers(1, max(sizes)), key="bisect_nan rows") if accepts(first) else None


def _strategy(value: Any, rows: st.SearchStrategy[int] | None) -> st.SearchStrategy[Any]:
    if isinstance(value, st.SearchStrategy):
        return value
    if isinstance(value, torch.Tensor):
        shape = (rows, *value.shape[1:]) if rows is not None and value.dim() else tuple(value.shape)
        return _like(value.detach(), shape, requires_grad=value.requires_grad)
    if isinstance(value, Mapping):
        return st.fixed_dictionaries({key: _strategy(item, rows) for key, item in value.items()})
    if isinstance(value, list | tuple):
        made = st.tuples(*(_strategy(item, rows) for item in value))
        if isinstance(value, list):
            return made.map(list)
        return made.map(lambda items: type(value)(*items)) if hasattr(value, "_fields") else made
    return st.just(value)


def _like(example: torch.Tensor, shape: Sequence[Size], *, requires_grad: bool) -> st.SearchStrategy[torch.Tensor]:
    """Return the strategy of tensors of an example's kind.

    Numbers that are all 0 and 1 stay so, and one-hot; so do probabilities, distributions, and numbers that are never negative. Whole
    numbers keep their range, and a single negative one among them is a mark (`ignore_index`).
    """
    dtype = example.dtype
    if example.numel() == 0 or example.is_complex():
        return st.builds(torch.zeros, st.tuples(*map(strategies.size_of, shape)), dtype=st.just(dtype))
    if dtype == torch.bool:
        return strategies.masks(shape)
    if not dtype.is_floating_point:
        return _whole(example, shape)
    low, high = float(example.min()), float(example.max())
    if low < high and bool(((example == 0) | (example == 1)).all()):
        binary = _one_hot(shape, dtype) if _sums_to_one(example) else strategies.masks(shape, dtype)
        return binary.map(lambda tensor: tensor.requires_grad_(requires_grad))
    if low >= 0 and high <= 1:
        kind = strategies.distributions if _sums_to_one(example) else strategies.probabilities
        return kind(shape, dtype, requires_grad=requires_grad)
    largest = max(_RANGE, high, -low)
    least = 0.0 if low >= 0 else -largest
    return strategies.tensors(shape, dtype, min_value=least, max_value=largest, requires_grad=requires_grad)


def _sums_to_one(example: torch.Tensor) -> bool:
    """Whether the last dimension holds distributions, as far as the dtype can tell."""
    if example.dim() < 2 or example.shape[-1] == 1:  # noqa: PLR2004  (numbers of a batch add up to anything)
        return False
    sums = example.double().sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-2)


def _one_hot(shape: Sequence[Size], dtype: torch.dtype) -> st.SearchStrategy[torch.Tensor]:
    *rows, classes = shape
    assert isinstance(classes, int)  # only the number of rows is ever drawn
    return strategies.labels(rows, classes).map(lambda label: functional.one_hot(label, classes).to(dtype))


def _whole(example: torch.Tensor, shape: Sequence[Size]) -> st.SearchStrategy[torch.Tensor]:
    marks = set(example[example < 0].tolist())
    high = int(example.max())
    if len(marks) == 1 and high >= 0:
        return strategies.labels(shape, high + 1, ignore_index=marks.pop(), dtype=example.dtype)
    return strategies.lengths(shape, high, min_value=min(0, int(example.min())), dtype=example.dtype)
