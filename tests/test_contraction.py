"""Matrix products and calls along rows tell by their shapes what the derivative would tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import call
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from bisect_nan.replaying import contraction, influence

SIZE = st.integers(2, 4)


@pytest.mark.parametrize(
    ("function", "op", "shapes"),
    [
        (lambda a, b: a @ b, "mm", lambda n, m, k: [(n, k), (k, m)]),
        (torch.bmm, "bmm", lambda n, m, k: [(2, n, k), (2, k, m)]),
        (torch.addmm, "addmm", lambda n, m, k: [(m,), (n, k), (k, m)]),
        (lambda a: a.softmax(1), "_softmax", lambda n, m, k: [(n, m, k)]),
        (lambda a: a.log_softmax(-1), "_log_softmax", lambda n, m, k: [(n, m, k)]),
        (
            lambda a, w, b: functional.layer_norm(a, tuple(w.shape), w, b),
            "native_layer_norm",
            lambda n, m, k: [(n, m, k), (m, k), (m, k)],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@given(n=st.integers(1, 4), m=SIZE, k=SIZE, data=st.data())
@settings(max_examples=25)
def test_it_is_what_the_derivative_tells(
    function: Callable[..., torch.Tensor],
    op: str,
    shapes: Callable[..., Any],
    n: int,
    m: int,
    k: int,
    data: st.DataObject,
) -> None:
    """For any sizes and any elements of the result."""
    executed, number = call(function, *(torch.randn(shape) for shape in shapes(n, m, k)), op=op)
    mask = torch.zeros(executed.content[number].shape, dtype=torch.bool)
    mask.flatten()[data.draw(st.lists(st.integers(0, mask.numel() - 1), max_size=4))] = True
    found, expected = contraction.contracted(executed, number, mask), influence._derivative(executed, number, mask)
    assert found is not None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.parametrize("mask", [torch.zeros(0), torch.zeros(2, 3), torch.eye(3), torch.eye(3).T[1:], torch.ones(())])
def test_some(mask: torch.Tensor) -> None:
    """The same as `any`, for any layout."""
    assert contraction.some(mask.bool()) == bool(mask.bool().any())
