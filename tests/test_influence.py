"""Which input elements the elements of a call's result are computed from."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from calls import call, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bisect_nan.replaying.influence import depended_on


def sources(
    function: Callable[..., torch.Tensor], op: str, place: int, *tensors: torch.Tensor
) -> list[list[int] | None]:
    """Return, for each input of a call, the flat places that one element of its result depends on; None where that is unknown."""
    executed, number = call(function, *tensors, op=op)
    mask = torch.zeros(executed.content[number].shape, dtype=torch.bool)
    mask.flatten()[place] = True
    found = depended_on(executed, number, mask)
    return [found[n].flatten().nonzero().flatten().tolist() if n in found else None for n in numbers(executed)]


X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize(
    ("function", "op", "place", "expected"),
    [
        (lambda x: x.exp(), "exp", 5, [[5]]),
        (lambda x: x * x[0], "mul", 5, [[5], [1]]),
        (lambda x: torch.where(x > 4, x, -x), "where", 1, [[1], [], [1]]),
        (lambda x: x @ x.T, "mm", 1, [[0, 1, 2, 3], [1, 4, 7, 10]]),
        (lambda x: x.softmax(0), "_softmax", 1, [[1, 5, 9]]),
        (lambda x: x.cumsum(1), "cumsum", 6, [[4, 5, 6]]),
        (lambda x: x.max(1).values, "max", 1, [[7]]),
        (lambda x: x.min(0).values, "min", 2, [[2]]),
        (lambda x: functional.embedding(torch.tensor([2, 0]), x), "embedding", 1, [[9], [0]]),
        (lambda x: torch.fft.ifft(torch.complex(x, x + 1)).imag, "complex", 3, [[3], [3]]),
        (lambda x: functional.layer_norm(x, (4,)), "native_layer_norm", 5, [[4, 5, 6, 7]]),
        (lambda x: x.argmax(1) * 1.0, "argmax", 1, [None]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sources(function: Callable[..., torch.Tensor], op: str, place: int, expected: list[list[int] | None]) -> None:
    """Elementwise calls are answered by position, others by their derivative in the order of the actual values."""
    assert sources(function, op, place, X) == expected


COUNTS = torch.tensor([3, 0, 2])


@pytest.mark.parametrize(
    ("function", "op", "place", "expected"),
    [
        (lambda n: n[torch.tensor([2, 0])], "index", 0, [[2], None]),
        (lambda n: n[n > 0], "index", 1, [[2], None]),
        (lambda n: n.index_put((torch.tensor([1]),), torch.tensor(5)), "index_put", 2, [[2], None, []]),
        (lambda n: n.gather(0, torch.tensor([2, 2])), "gather", 1, [[2], None]),
        (lambda n: n.sum(), "sum", 0, [[0, 1, 2]]),
    ],
    ids=["indices", "mask", "index_put", "gather", "sum"],
)
def test_counts_are_followed_and_indices_are_not(
    function: Callable[..., torch.Tensor], op: str, place: int, expected: list[list[int] | None]
) -> None:
    """Integers are taken for numbers, but not where they say which elements are meant."""
    assert sources(function, op, place, COUNTS) == expected


def test_sparse_operands_are_left_out() -> None:
    """A product with a sparse matrix in coordinates can be asked, too."""
    matrix = torch.eye(3).to_sparse()
    executed, number = call(torch.sparse.mm, matrix, X, op="_sparse_addmm")
    assert isinstance(depended_on(executed, number, torch.ones(3, 4, dtype=torch.bool)), dict)


@settings(max_examples=40, derandomize=True)
@given(st.integers(0, 7), st.sampled_from(["mm", "cumsum", "conv", "sort", "norm", "gather", "logsumexp"]))
def test_changing_a_source_changes_the_result(place: int, name: str) -> None:
    """A source that is changed changes the element, and one that is none does not."""
    functions: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
        "mm": (lambda x: x @ torch.rand(4, 4, generator=torch.Generator().manual_seed(1)), "mm"),
        "cumsum": (lambda x: x.cumsum(0), "cumsum"),
        "conv": (lambda x: functional.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1), "convolution"),
        "sort": (lambda x: x.sort(1).values, "sort"),
        "norm": (lambda x: x.norm(dim=1), "linalg_vector_norm"),
        "gather": (lambda x: x.gather(0, torch.tensor([[0, 1, 2, 0], [2, 2, 2, 2], [1, 1, 0, 0]])), "gather"),
        "logsumexp": (lambda x: torch.logsumexp(x, 1), "logsumexp"),
    }
    function, op = functions[name]
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(place)) + 0.5
    executed, number = call(function, x, op=op)
    mask = torch.zeros(executed.content[number].shape, dtype=torch.bool)
    mask.flatten()[place % mask.numel()] = True
    source = numbers(executed)[0]
    needed = depended_on(executed, number, mask)[source].flatten()
    before = executed.content[number].flatten()[place % mask.numel()]
    for changed in range(needed.numel()):
        values = executed.inputs[source].clone()
        values.reshape(-1)[changed] += 1e-3
        after = executed.again({**executed.inputs, source: values})[number].flatten()[place % mask.numel()]
        assert bool(before != after) == bool(needed[changed])


def test_nan_is_selected_as_torch_selects_it() -> None:
    """A maximum takes NaN for the largest value, a minimum for the smallest."""
    x = torch.tensor([[0.1, math.nan, 0.3]])
    assert sources(lambda x: x.max(1).values, "max", 0, x) == [[1, 2]]  # the largest, and the largest without it
    assert sources(lambda x: x.amin(1), "amin", 0, x) == [[0, 1]]


def test_an_operand_without_derivative_hides_no_other() -> None:
    """The weights of a loss have no derivative; the scores and so the rows behind them are told all the same."""
    target, weight = torch.tensor([[[0, 1]]]), torch.tensor([0.0, 1.0])
    executed, number = call(
        lambda x: functional.nll_loss(x, target, weight), torch.rand(1, 2, 1, 2), op="nll_loss2d_forward"
    )
    found = depended_on(executed, number, torch.tensor(True))
    assert found[numbers(executed)[0]].flatten().tolist() == [True, False, False, True]


def test_a_sparse_derivative_is_read() -> None:
    """The table of an embedding may ask for a sparse gradient."""
    table = torch.rand(4, 2)
    executed, number = call(lambda x: functional.embedding(torch.tensor([3, 1]), x, sparse=True), table, op="embedding")
    mask = torch.tensor([[False, True], [False, False]])
    found = depended_on(executed, number, mask)
    assert [found[n].nonzero().tolist() for n in numbers(executed)] == [[[3, 1]], [[0]]]
