"""Tensors and arguments as Python: what is read back is what was written, and text cannot break out."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bisect_nan import ReproductionError, finite
from bisect_nan.reproduction.literals import LARGEST, Var, argument_text, number_text, tensor_text

NAMES = {"torch": torch, "inf": inf, "nan": nan}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@given(st.floats(), st.sampled_from(FLOATS))
def test_numbers_are_exact_and_short(value: float, dtype: torch.dtype) -> None:
    """A number of any type is read back bit for bit, in no more digits than Python needs."""
    held = torch.tensor(value, dtype=dtype)
    text = number_text(held.item(), dtype)
    assert finite.same(torch.tensor(eval(text, NAMES), dtype=dtype).nan_to_num(7.0), held.nan_to_num(7.0))  # noqa: S307  (our text)
    assert len(text) <= len(repr(held.item()))


@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([*FLOATS, torch.int64, torch.int32, torch.bool, torch.complex64]),
    same=st.booleans(),
    grad=st.booleans(),
    seed=st.integers(0, 99),
)
def test_tensors_are_read_back(shape: list[int], dtype: torch.dtype, same: bool, grad: bool, seed: int) -> None:
    """A tensor comes back with its numbers, type, shape and whether it asks for a gradient."""
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator) * 3).to(dtype)
    tensor = torch.full_like(tensor, seed % 3) if same else tensor
    grad = grad and (dtype.is_floating_point or dtype.is_complex)
    back = eval(tensor_text(tensor, grad=grad), NAMES)  # noqa: S307  (our own text)
    assert (back.dtype, back.shape, back.requires_grad) == (tensor.dtype, tensor.shape, grad)
    assert finite.same(back.detach(), tensor)


def test_large_tensors_are_refused() -> None:
    """More numbers than one can read are no script, and the error says so."""
    with pytest.raises(ReproductionError, match="cut down"):
        tensor_text(torch.arange(LARGEST + 1.0), grad=False)


@given(st.text())
def test_text_that_is_no_word_is_refused(text: str) -> None:
    """Only a single word of letters gets into the code, in quotes."""
    try:
        shown = argument_text(text)
    except ReproductionError:
        return
    assert eval(shown, {}) == text  # noqa: S307  (that it is harmless is what is shown)
    assert text.replace("_", "a").isalpha()


@pytest.mark.parametrize("item", ["x)\nimport os", 'a"b', "from file", b"bytes", object(), torch.device("meta")])
def test_anything_else_is_refused(item: Any) -> None:
    """Objects, bytes and devices that no script can use are refused."""
    with pytest.raises(ReproductionError):
        argument_text(item)


def test_arguments() -> None:
    """Variables, numbers, lists, types and words are written as Python."""
    items = [Var("y", 1), None, True, 2, 0.5, -inf, [3, Var("x")], torch.float16, torch.device("cpu"), "floor"]
    shown = ["y[1]", "None", "True", "2", "0.5", "-inf", "[3, x]", "torch.float16", '"cpu"', '"floor"']
    assert [argument_text(item) for item in items] == shown
