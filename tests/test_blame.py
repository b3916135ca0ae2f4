"""Which bad elements of one call are its own, and which inputs made the others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from calls import call, numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bisect_nan import finite
from bisect_nan.replaying import blame
from bisect_nan.replaying.neutral import distinct, neutralised

NAN, INF = math.nan, math.inf


def places(mask: torch.Tensor) -> list[list[int]]:
    """Return the indices that a mask marks."""
    found: list[list[int]] = mask.nonzero().tolist()
    return found


def test_elementwise_calls_are_answered_by_position() -> None:
    """A quotient by zero is born where its own operands are finite, whatever its neighbours are."""
    executed, number = call(torch.div, torch.tensor([1.0, INF, NAN, 1.0]), torch.tensor([0.0, 2.0, 0.0, 2.0]), op="div")
    parts = blame.split(executed, number, finite.mask(executed.content[number]))
    assert parts.born.tolist() == [True, False, False, False]
    assert parts.inherited.tolist() == [False, True, True, False]
    assert not parts.converted.any()


def test_infinities_that_become_nan_are_converted() -> None:
    """The difference inf - inf is NaN made of infinities; NaN - 1 is not."""
    executed, number = call(torch.sub, torch.tensor([INF, NAN, INF]), torch.tensor([INF, 1.0, 1.0]), op="sub")
    parts = blame.split(executed, number, finite.mask(executed.content[number]))
    assert parts.converted.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("function", "read"),
    [
        (
            lambda x, y: torch.where(torch.tensor([True, False, True]), x, y),
            [[True, False, False], [False, True, False]],
        ),
        (lambda x, y: x.masked_fill(torch.tensor([True, False, True]), NAN) + 0 * y, None),
        (lambda x, y: x.clone().copy_(y), [[False, False, False], [True, True, False]]),
    ],
    ids=["where", "masked_fill", "copy_"],
)
def test_what_is_not_selected_is_not_read(function: Callable[..., torch.Tensor], read: list[list[bool]] | None) -> None:
    """An operand that a call does not look at explains nothing."""
    x, y = torch.tensor([NAN, NAN, 1.0]), torch.tensor([NAN, INF, 1.0])
    op = "where" if read and read[0][0] else "masked_fill" if read is None else "copy_"
    executed, number = call(function, x, y, op=op)
    bad = finite.mask(executed.content[number])
    parts = blame.split(executed, number, bad)
    if read is None:  # NaN is written where the mask is set, and the NaN beneath it is not read
        assert parts.born.tolist() == [True, False, True]
        return
    found = blame.responsible(executed, number, bad)
    assert [found[n].tolist() for n in numbers(executed) if n in found] == read
    assert not parts.born.any()


def test_in_place_calls_are_asked_about_what_was_there_before() -> None:
    """After `y.log_()` the input is the result; before it was healthy."""
    executed, number = call(lambda x: x.clone().log_(), torch.tensor([0.0, 1.0, NAN]), op="log")
    parts = blame.split(executed, number, finite.mask(executed.content[number]))
    assert parts.born.tolist() == [True, False, False]
    assert parts.inherited.tolist() == [False, False, True]


def test_an_overflow_beside_a_bad_element_is_its_own() -> None:
    """A product overflows in row 0 whether or not row 1 holds NaN."""
    x = torch.tensor([[3e38, 3e38], [NAN, 1.0]])
    executed, number = call(lambda a, b: a @ b, x, torch.ones(2, 2), op="mm")
    parts = blame.split(executed, number, finite.mask(executed.content[number]))
    assert places(parts.born) == [[0, 0], [0, 1]]
    assert places(parts.inherited) == [[1, 0], [1, 1]]


def test_a_singular_stand_in_is_no_fault_of_the_call() -> None:
    """A matrix of equal numbers has no inverse, so another stand-in for NaN must be tried before `logdet` is blamed."""
    x = torch.eye(3).repeat(2, 1, 1)
    x[1] = NAN
    executed, _ = call(torch.logdet, x, op="_linalg_slogdet")
    number = list(executed.content)[1]
    assert not blame.split(executed, number, finite.mask(executed.content[number])).born.any()


def test_the_huge_neighbours_of_an_overflow_are_the_same_fault() -> None:
    """An infinity among numbers near the end of the range: their sum overflows on the neighbours alone, and is still inherited."""
    executed, number = call(lambda x: x.sum(-1), torch.tensor([[INF, 3e38, 3e38], [1.0, 1.0, 1.0]]), op="sum")
    parts = blame.split(executed, number, finite.mask(executed.content[number]))
    assert parts.inherited.tolist() == [True, False]


def test_softmax_blames_its_row() -> None:
    """All elements of a masked row, and no other row, make it NaN, though a softmax sums to the constant 1."""
    x = torch.tensor([[-INF, -INF], [-INF, 1.0], [0.0, 1.0]])
    executed, number = call(lambda x: x.softmax(-1), x, op="_softmax")
    bad = finite.mask(executed.content[number])
    assert places(bad) == [[0, 0], [0, 1]]
    assert blame.split(executed, number, bad).converted.equal(bad)
    (found,) = blame.responsible(executed, number, bad).values()
    assert places(found) == [[0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x.max(-1).values, "max"),
        (lambda x: x.amin(-1), "amin"),
        (lambda x: x.sort(-1).values[:, 3], "sort"),
        (lambda x: x.topk(2, -1).values, "topk"),
        (lambda x: x.cummax(-1).values, "cummax"),
        (lambda x: functional.max_pool1d(x, 2), "max_pool"),
    ],
    ids=["max", "amin", "sort", "topk", "cummax", "max_pool"],
)
def test_selections_point_at_what_they_selected(function: Callable[..., torch.Tensor], op: str) -> None:
    """NaN is taken for the largest or the smallest value; the NaN of other rows is none of this row's business."""
    x = torch.tensor([[0.4, NAN, 0.1, 0.3], [0.2, 0.9, 0.5, 0.1], [NAN, 0.1, 0.2, 0.3]])
    executed, number = call(function, x, op=op)
    bad = finite.mask(executed.content[number])
    bad[0] = False
    found = blame.responsible(executed, number, bad)
    assert [[(place[0], place[-1]) for place in places(mask)] for mask in found.values()] == [[(2, 0)]]


def test_without_a_derivative_the_bad_inputs_are_tried_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing tells which inputs matter, runs with a part of them do."""
    x = torch.rand(4, 5)
    x[1, 2], x[3, 0], x[3, 4] = NAN, INF, NAN
    executed, number = call(lambda x: x.sum(-1), x, op="sum")
    monkeypatch.setattr(blame, "influences", lambda *_: iter([{}]))
    bad = torch.tensor([False, False, False, True])
    (found,) = blame.responsible(executed, number, bad).values()
    assert places(found) == [[3, 0], [3, 4]]


CALLS: dict[str, tuple[Callable[..., torch.Tensor], str]] = {
    "mm": (lambda x, y: x @ y.T, "mm"),
    "add": (lambda x, y: x + y[0], "add"),
    "sum": (lambda x, y: (x * 1).sum(0) + 0 * y[0], "sum"),
    "mean": (lambda x, _: x.mean(1), "mean"),
    "layer_norm": (lambda x, _: functional.layer_norm(x, (5,)), "native_layer_norm"),
    "cumsum": (lambda x, _: x.cumsum(1), "cumsum"),
    "cat": (lambda x, y: torch.cat([x, y]), "cat"),
    "index_add": (lambda x, y: x.index_add(0, torch.tensor([0, 2, 0, 1]), y), "index_add"),
    "gather": (lambda x, _: x.gather(1, torch.tensor([[0, 4], [1, 1], [2, 3], [0, 0]])), "gather"),
    "flip": (lambda x, _: x.flip(0), "flip"),
    "logsumexp": (lambda x, _: torch.logsumexp(x, 1), "logsumexp"),
    "conv": (lambda x, y: functional.conv1d(x[:, None], y[:1, None, :2]), "convolution"),
    "bmm": (lambda x, y: torch.bmm(x[:, None], y[:, :, None]), "bmm"),
    "norm": (lambda x, _: x.norm(dim=1), "linalg_vector_norm"),
}


@settings(max_examples=60, derandomize=True)
@given(st.sampled_from(sorted(CALLS)), st.data())
def test_neutralising_the_responsible_inputs_heals(name: str, data: st.DataObject) -> None:
    """With the responsible inputs healthy the elements come out finite; with one of them bad again, some do not."""
    function, op = CALLS[name]
    cells = st.sets(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=3)
    tensors = []
    for seed in range(2):
        tensor = torch.rand(4, 5, generator=torch.Generator().manual_seed(seed)) + 0.5
        for row, column in sorted(data.draw(cells)):
            tensor[row, column] = data.draw(st.sampled_from([NAN, INF]))
        tensors.append(tensor)
    executed, number = call(function, *tensors, op=op)
    bad = finite.mask(executed.content[number])
    chosen = bad & torch.tensor(data.draw(st.lists(st.booleans(), min_size=bad.numel(), max_size=bad.numel()))).reshape(
        bad.shape
    )
    parts = blame.split(executed, number, chosen)
    assert not parts.born.any()
    assert parts.inherited.equal(chosen)
    if not chosen.any():
        return
    found = blame.responsible(executed, number, chosen)

    def left(spared: dict[int, torch.Tensor]) -> torch.Tensor:
        changed = {
            n: neutralised(t, found[n] & ~spared.get(n, torch.zeros_like(found[n])), distinct(t)) if n in found else t
            for n, t in executed.inputs.items()
        }
        return chosen & finite.mask(executed.again(changed)[number])

    assert not left({}).any()
    for n, mask in found.items():
        for place in mask.nonzero():
            alone = torch.zeros_like(mask)
            alone[tuple(place)] = True
            assert left({n: alone}).any()
