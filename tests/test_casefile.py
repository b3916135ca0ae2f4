"""What is written down of a failing input is that input, bit for bit, and a loss is copied only with all that it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bisect_nan import finite
from bisect_nan.strategies import labels, masks, tensors
from bisect_nan.stressing.casefile import NoText, case_text, literal

ANY = st.one_of(
    tensors((2, 3)),
    tensors((3,), torch.float16, requires_grad=True),
    tensors((2, 2), torch.bfloat16),
    tensors((), torch.float64),
    labels((2, 0), 3),
    labels((1, 4), 3, ignore_index=-100, dtype=torch.int8),
    masks((2, 3)),
    st.just(torch.tensor([0.0, -0.0])),
    st.just(torch.tensor([float("nan"), float("-inf"), -0.0])),
)


@given(ANY)
def test_tensors_come_back(tensor: torch.Tensor) -> None:
    """A tensor's text makes the same tensor: dtype, shape, bits, and whether it requires a gradient."""
    again = eval(literal(tensor), {"torch": torch, "nan": float("nan"), "inf": float("inf")})  # noqa: S307  (our own text)
    assert finite.same(again, tensor)
    assert again.requires_grad == tensor.requires_grad


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(-1, 1) | st.text(),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_values_come_back(value: Any) -> None:
    """The text of plain values and containers makes the same value."""
    assert eval(literal(value)) == value  # noqa: S307  (as above)


def test_what_has_no_short_text() -> None:
    """Large tensors and objects have no text; a large constant has."""
    for value in (torch.arange(2000), {"model": torch.nn.ReLU()}, object()):
        with pytest.raises(NoText):
            literal(value)
    assert literal(torch.zeros(2000)) == "torch.full((2000,), 0.0, dtype=torch.float32)"


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return another function of the same name."""

    def wrapper(output: torch.Tensor) -> Any:
        return function(output)

    wrapper.__name__ = "loss"
    return wrapper


def losses() -> dict[str, Callable[..., Any]]:
    """Return losses that cannot be copied."""
    state = torch.nn.Linear(1, 1)

    def uses_a_model(output: torch.Tensor) -> Any:
        return state(output).sum()

    @decorated
    def loss(output: torch.Tensor) -> Any:
        return output.sum()

    return {
        "a model": uses_a_model,
        "a decorator": loss,
        "a lambda": lambda output: output.sum(),
        "a module": torch.nn.MSELoss(),
        "a method": torch.nn.MSELoss().forward,
    }


@pytest.mark.parametrize("kind", losses())
def test_what_cannot_be_copied(kind: str) -> None:
    """A loss that needs what has no text is not copied."""
    with pytest.raises(NoText):
        case_text(losses()[kind], {"output": torch.zeros(2)}, "title", 0, Path())
