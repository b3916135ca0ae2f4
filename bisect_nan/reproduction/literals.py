"""Variables, numbers, tensors and arguments as Python.

Whatever gets into the code of a script from a recording comes through here, or is the name of an operator of torch: numbers,
types, devices and single words in quotes. No other text of a recording can be written.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch

from bisect_nan import finite
from bisect_nan.errors import ReproductionError

LARGEST = 128
"""Elements of a tensor that is still written down number by number."""

_FEW = 4
"""Elements that are written down even where all are the same."""

_WORD = re.compile(r"[A-Za-z_]{1,24}")
_DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")
_INSTEAD = "use the snapshot itself, which holds the whole step"


@dataclass(frozen=True, slots=True)
class Var:
    """An argument that is a variable of the script, or element `place` of one that holds a tuple."""

    name: str
    place: int | None = None

    def __str__(self) -> str:
        """Return it as Python."""
        return self.name if self.place is None else f"{self.name}[{self.place}]"


def number_text(value: Any, dtype: torch.dtype = torch.float64) -> str:
    """Return a number as Python, as short as its type allows; `inf` and `nan` are names there."""
    if isinstance(value, bool | int):
        return repr(value)
    if isinstance(value, complex):
        part = dtype.to_real() if dtype.is_complex else torch.float64
        return f"complex({number_text(value.real, part)}, {number_text(value.imag, part)})"
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    for digits in range(1, 17):
        short = float(f"{value:.{digits}g}")
        if torch.tensor(short, dtype=dtype).item() == value:
            return min(
                repr(short), repr(value), key=len
            )  # 9984.0 in bfloat16 is 1e4 as well, which Python writes as 10000.0
    return repr(value)


def tensor_text(tensor: torch.Tensor, *, grad: bool) -> str:
    """Return a tensor as Python that makes it again.

    Args:
        tensor: A strided tensor.
        grad: Whether it asks for its gradient.

    Raises:
        ReproductionError: It has more elements than can be read, or no plain memory.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise ReproductionError(f"got a tensor with the layout {tensor.layout}", "plain tensors", _INSTEAD)
    shape, dtype = tuple(tensor.shape), tensor.dtype
    if tensor.numel() == 0:
        return f"torch.zeros({shape}{options_text(tensor, grad=grad)})"
    first = tensor.flatten()[0].item()
    if tensor.numel() > _FEW and finite.same(tensor, torch.full_like(tensor, first)):
        if finite.same(tensor, torch.zeros_like(tensor)):
            return f"torch.zeros({shape}{options_text(tensor, grad=grad)})"
        return f"torch.full({shape}, {number_text(first, dtype)}{options_text(tensor, grad=grad, inferred=True)})"
    if tensor.numel() > LARGEST:
        got = f"got a tensor of shape {list(shape)} that the fault needs as it is"
        raise ReproductionError(got, f"tensors that can be cut down to {LARGEST} elements", _INSTEAD)
    return f"torch.tensor({_nested(tensor.tolist(), dtype)}{options_text(tensor, grad=grad, inferred=True)})"


def options_text(tensor: torch.Tensor, *, grad: bool, inferred: bool = False) -> str:
    """Return the options of a tensor's constructor, each behind a comma, without those that torch chooses by itself.

    Args:
        tensor: What is made.
        grad: Whether it asks for its gradient.
        inferred: Whether the constructor is given numbers of the tensor's kind.
    """
    default = (torch.float32, torch.int64, torch.bool) if inferred else (torch.float32,)
    parts = [] if tensor.dtype in default else [f"dtype={tensor.dtype}"]
    if tensor.device.type != "cpu":
        parts.append(f"device={argument_text(tensor.device)}")
    if grad:
        parts.append("requires_grad=True")
    return "".join(f", {part}" for part in parts)


def argument_text(item: Any) -> str:
    """Return an argument of a call as Python.

    Raises:
        ReproductionError: It is nothing that a script may hold.
    """
    if isinstance(item, Var) or item is None:
        return str(item)
    if isinstance(item, bool | int | float | complex):
        return number_text(item)
    if isinstance(item, list | tuple):
        return f"[{', '.join(argument_text(part) for part in item)}]"
    if isinstance(item, torch.dtype | torch.layout | torch.memory_format):
        return str(item)
    if isinstance(item, torch.device) and _DEVICE.fullmatch(str(item)):
        return f'"{item}"'
    if isinstance(item, str) and _WORD.fullmatch(item):
        return f'"{item}"'
    got = f"got an argument of type {type(item).__name__}"
    raise ReproductionError(got, "tensors, numbers, types, devices and words", _INSTEAD)


def _nested(items: Any, dtype: torch.dtype) -> str:
    if isinstance(items, list):
        return f"[{', '.join(_nested(item, dtype) for item in items)}]"
    return number_text(items, dtype)
