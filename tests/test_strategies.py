"""Hostile tensors: legal ones only, and the hostile kinds among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bisect_nan import BisectNanError
from bisect_nan.strategies import distributions, labels, lengths, masks, probabilities, tensors
from bisect_nan.stressing.deriving import derive

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
RANGES = st.tuples(st.floats(-6e4, 6e4), st.floats(-6e4, 6e4)).map(sorted)


@given(st.data(), DTYPES, RANGES)
def test_values_are_legal(data: st.DataObject, dtype: torch.dtype, ends: list[float]) -> None:
    """Every value lies in the stated range after rounding to the dtype; a range that holds no such value is refused."""
    low, high = ends
    try:
        strategy = tensors((3, 4), dtype, min_value=low, max_value=high)
    except BisectNanError:
        assert not low <= torch.tensor(low, dtype=dtype).item() <= high
        assert not low <= torch.tensor(high, dtype=dtype).item() <= high
        return
    tensor = data.draw(strategy)
    assert (tensor.dtype, tensor.shape) == (dtype, (3, 4))
    assert low <= tensor.double().min()
    assert tensor.double().max() <= high


@given(
    distributions((st.integers(1, 3), st.integers(1, 5))),
    labels((9,), 4, ignore_index=-1),
    lengths((9,), 7, min_value=2),
)
def test_kinds_are_legal(distribution: Tensor, label: Tensor, length: Tensor) -> None:
    """Distributions sum up to one, labels are classes or the mark, lengths keep their range."""
    torch.testing.assert_close(distribution.sum(-1), torch.ones(len(distribution)))
    assert set(label.tolist()) <= {-1, 0, 1, 2, 3}
    assert 2 <= length.min() <= length.max() <= 7


HOSTILE: dict[str, tuple[st.SearchStrategy[Tensor], Callable[[Tensor], Tensor]]] = {
    "all zero": (tensors((3, 4)), lambda x: (x == 0).all()),
    "huge": (tensors((3, 4)), lambda x: (x >= 1e4).any()),
    "denormal": (tensors((3, 4)), lambda x: ((x.abs() < torch.finfo().tiny) & (x != 0)).any()),
    "constant row among others": (tensors((3, 4)), lambda x: (x[0] == x[0, 0]).all() & (x[0] != x[1]).any()),
    "duplicate rows": (tensors((3, 4)), lambda x: (x[0] == x[1]).all() & (x[0, 0] != x[0, 1])),
    "saturated": (probabilities((3, 4)), lambda x: (x == 1).any() & (x == 0).any()),
    "nearly saturated": (probabilities((3, 4)), lambda x: ((x > 0.999) & (x < 1)).any()),
    "one-hot": (distributions((3, 4)), lambda x: (x.max(-1).values == 1).all()),
    "uniform": (distributions((3, 4)), lambda x: (x == 0.25).all()),
    "all ignored": (labels((4,), 3, ignore_index=-100), lambda x: (x == -100).all()),
    "some ignored": (labels((4,), 3, ignore_index=-100), lambda x: (x == -100).any() & (x != -100).any()),
    "a masked row": (masks((3, 4)), lambda x: ~x[0].any() & x[1].any()),
    "a single row": (tensors(("rows", 4)), lambda x: torch.tensor(len(x) == 1)),
    "several rows": (tensors(("rows", 4)), lambda x: torch.tensor(len(x) > 2)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_kinds_occur(kind: str) -> None:
    """Each kind of hostile tensor is drawn within the number of examples that a search has."""
    strategy, holds = HOSTILE[kind]
    found = find(strategy, lambda tensor: bool(holds(tensor)), settings=settings(max_examples=300, database=None))
    assert holds(found)


@given(st.tuples(tensors(("rows", 2)), labels(("rows",), 5), masks(("columns", "rows"))))
def test_a_name_is_one_size(drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    """Sizes of one name agree within an example."""
    scores, classes, mask = drawn
    assert len(scores) == len(classes) == mask.shape[1]


def test_whole_numbers_have_strategies_of_their_own() -> None:
    """A dtype without fractions is refused with the strategies that take it."""
    with pytest.raises(BisectNanError, match=r"got torch.int64\nexpected: a floating-point dtype\ndo this: use labels"):
        tensors((3,), torch.int64)


EXAMPLES: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "signed": (torch.tensor([[-1.0, 3.0]]), lambda x: x.abs().max() <= 1e4),
    "large": (torch.tensor([[-1.0, 3e9]]), lambda x: x.abs().max() <= 3e9),
    "never negative": (torch.tensor([[0.0, 3.0]]), lambda x: x.min() >= 0),
    "half": (torch.tensor([[-1.0, 3.0]], dtype=torch.float16), lambda x: torch.tensor(x.dtype == torch.float16)),
    "probability": (torch.tensor([[0.2, 0.3]]), lambda x: (x.min() >= 0) & (x.max() <= 1)),
    "distribution": (torch.tensor([[0.2, 0.8]]), lambda x: (x.sum(-1) - 1).abs().max() < 1e-5),
    "binary": (torch.tensor([[1.0, 1.0, 0.0]]), lambda x: ((x == 0) | (x == 1)).all()),
    "one-hot": (torch.eye(3)[:2], lambda x: (x.sum(-1) == 1).all() & (x.max(-1).values == 1).all()),
    "classes": (torch.tensor([2, 0, 5]), lambda x: (x.min() >= 0) & (x.max() <= 5)),
    "ignored": (torch.tensor([2, -100, 5]), lambda x: ((x == -100) | ((x >= 0) & (x <= 5))).all()),
    "offsets": (torch.tensor([-2, -1, 5]), lambda x: (x.min() >= -2) & (x.max() <= 5)),
    "mask": (torch.tensor([True, False]), lambda x: torch.tensor(x.dtype == torch.bool)),
    "number": (torch.tensor(0.07), lambda x: torch.tensor(x.dim() == 0)),
    "empty": (torch.zeros(0, 3), lambda x: torch.tensor(x.shape == (0, 3))),
    "complex": (torch.zeros(2, 3, dtype=torch.complex64), lambda x: torch.tensor(x.dtype == torch.complex64)),
}


@pytest.mark.parametrize("kind", EXAMPLES)
@given(data=st.data())
@settings(max_examples=30)
def test_examples_stand_for_their_kind(kind: str, data: st.DataObject) -> None:
    """What an example tensor shows of what is legal is kept: dtype, sign, range, whole numbers, marks."""
    example, legal = EXAMPLES[kind]
    (drawn,) = data.draw(derive([example], accepts=lambda _: True))
    assert drawn.shape[1:] == example.shape[1:]
    assert drawn.dtype == example.dtype
    assert legal(drawn)


@given(data=st.data(), bears=st.booleans())
def test_rows_of_examples_vary_together(data: st.DataObject, bears: bool) -> None:
    """Where the loss runs on one row of each, all tensors have the same number of rows, up to that of the examples."""
    example = [{"x": torch.tensor([[-1.0, 2.0]] * 3), "y": [torch.tensor([1, 0, 2])]}, torch.tensor(0.5), "mean"]
    batch, _, word = data.draw(derive(example, accepts=lambda _: bears))
    assert len(batch["x"]) == len(batch["y"][0]) <= 3
    assert bears or len(batch["x"]) == 3
    assert word == "mean"
