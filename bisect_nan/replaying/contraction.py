"""Which input elements matrix products and calls along rows compute their result from, told by their shapes.

The derivative would tell the same; for the large calls of attention that takes many times as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bisect_nan.recording.program import Ref
from bisect_nan.replaying.replay import Executed
from bisect_nan.replaying.stretch import Env


def some(mask: torch.Tensor) -> bool:
    """Whether any element of a bool tensor is set: `any()` of CPU tensors reads one byte at a time (torch 2.13)."""
    return mask.numel() > 0 and bool(mask.view(torch.uint8).max())


def contracted(executed: Executed, number: int, mask: torch.Tensor) -> Env | None:
    """Return the floating input elements that the elements `mask` of a result are computed from; None for any other call."""
    node = executed.node
    rule = _RULES.get(str(node.target))
    if rule is None or node.outputs[:1] != (number,) or node.kwargs:
        return None
    found: Env = {}
    for argument, needed in zip(node.args, rule(node.args, mask), strict=False):
        if not isinstance(argument, Ref) or needed is None:
            continue
        tensor = executed.inputs[argument.value]
        if not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return None
        own, before = _shaped(needed, tensor.shape), found.get(argument.value)
        found[argument.value] = own if before is None else before | own
    return found


def _product(_: tuple[Any, ...], mask: torch.Tensor) -> list[torch.Tensor | None]:
    """A row of the first matrix and a column of the second one make an element."""
    return [_any(mask, -1), _any(mask, -2)]


def _sum_and_product(arguments: tuple[Any, ...], mask: torch.Tensor) -> list[torch.Tensor | None]:
    return [mask, *_product(arguments, mask)]


def _along_dimension(arguments: tuple[Any, ...], mask: torch.Tensor) -> list[torch.Tensor | None]:
    return [_any(mask, arguments[1])]


def _layer_norm(arguments: tuple[Any, ...], mask: torch.Tensor) -> list[torch.Tensor | None]:
    row = mask
    for dim in range(-len(arguments[1]), 0):
        row = _any(row, dim)
    return [row, None, mask, mask]


_RULES: dict[str, Callable[[tuple[Any, ...], torch.Tensor], list[torch.Tensor | None]]] = {
    "aten.mm.default": _product,
    "aten.bmm.default": _product,
    "aten.addmm.default": _sum_and_product,
    "aten._softmax.default": _along_dimension,
    "aten._log_softmax.default": _along_dimension,
    "aten.native_layer_norm.default": _layer_norm,
}
"""By call: the elements of its arguments, in order, that are needed; a dimension of size 1 stands for all of its elements."""


def _any(mask: torch.Tensor, dim: int) -> torch.Tensor:
    return mask.view(torch.uint8).amax(dim, keepdim=True).view(torch.bool) if mask.dim() else mask


def _shaped(needed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Bring a mask to the shape of an argument, which is larger where it is added up, and smaller where it is broadcast."""
    if needed.dim() > len(shape) or needed.numel() > shape.numel():
        return needed.to(torch.float32).sum_to_size(shape) > 0
    return needed.expand(shape)
