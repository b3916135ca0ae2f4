"""Which input elements the elements of one call's result are computed from.

Elementwise calls are answered by position, matrix products by their shapes. Of any other call the derivative on healthy values
tells; those are in the order of the actual values, so that a selection selects the same elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from bisect_nan import finite
from bisect_nan.finite import NonFinite
from bisect_nan.recording.program import Node, Ref
from bisect_nan.replaying.contraction import contracted
from bisect_nan.replaying.neutral import distinct, ordered
from bisect_nan.replaying.replay import Executed
from bisect_nan.replaying.stretch import Env

_ELEMENTWISE = {"clone", "_to_copy", "copy", "alias", "contiguous", "lift_fresh", "masked_fill", "where", "fill"} | {
    "_standard_gamma",
    "_standard_gamma_grad",
}
"""Elementwise calls that torch does not tag as pointwise (or not in every release)."""


def depended_on(executed: Executed, number: int, mask: torch.Tensor) -> Env:
    """Return all input elements, healthy or not, that the elements `mask` of a result are computed from, by value number.

    Inputs whose influence cannot be followed (a call without derivative, the indices of most calls) are left out.
    """
    dense = {n: t for n, t in executed.inputs.items() if t.layout is torch.strided}
    seen = aligned(executed, number, {n: torch.ones_like(t, dtype=torch.bool) for n, t in dense.items()})
    if seen is not None:
        return {n: gathered(mask & m, executed.inputs[n].shape) for n, m in seen.items()}
    found = influence(executed, number, mask) or _counted(executed, number, mask)
    if name(executed.node) == "embedding":
        indices = executed.node.args[1].value
        found[indices] = mask.any(-1)
    return found


def aligned(executed: Executed, number: int, masks: Env) -> Env | None:
    """Return, for an elementwise call, the marked elements of each input as the output reads them; None for any other call.

    Args:
        executed: The call.
        number: Which of its values.
        masks: Bool tensors in the shapes of inputs, by value number.
    """
    node, shape = executed.node, executed.content[number].shape
    if torch.Tag.pointwise not in node.target.tags and name(node) not in _ELEMENTWISE:
        return None
    if len(executed.content) > 1:
        return None  # a call over lists
    try:
        seen = {n: m.expand(shape) for n, m in masks.items()}
    except RuntimeError:
        return None
    unread = _unread(executed, shape)
    return {n: m & ~unread[n] if n in unread else m for n, m in seen.items()}


def _unread(executed: Executed, shape: torch.Size) -> Env:
    """Return, for calls that select, the elements of each input that are not looked at."""
    node, inputs = executed.node, executed.inputs
    operands = [item.value if isinstance(item, Ref) else None for item in node.args]
    everything = torch.ones((), dtype=torch.bool).expand(shape)
    match name(node), operands:
        case "where", [int(condition), first, second, *_]:
            chosen = inputs[condition].expand(shape).bool()
            skipped = {first: ~chosen, second: chosen}
            if first == second:
                return {}
            return {n: m for n, m in skipped.items() if n is not None}
        case "masked_fill", [int(target), int(chosen), *_]:
            return {target: inputs[chosen].expand(shape).bool()}
        case "copy", [int(target), int(source), *_] if target != source:
            return {target: everything}
        case "fill", [int(target), *_]:
            return {target: everything}
    return {}


def influence(executed: Executed, number: int, mask: torch.Tensor) -> Env:
    """Return the floating input elements with a nonzero derivative, on healthy values, of the elements `mask`.

    A selection takes NaN for the highest value or for the lowest, so both are tried where there is any.
    """
    found: Env = {}
    for one in influences(executed, number, mask):
        for n, m in one.items():
            found[n] = found[n] | m if n in found else m
    return found


def influences(executed: Executed, number: int, mask: torch.Tensor) -> Iterator[Env]:
    """Yield the influence with NaN as the highest value, and then, where there is any, with NaN as the lowest."""
    told = contracted(executed, number, mask)
    if told is not None:
        yield told
        return
    yield _derivative(executed, number, mask)
    if finite.has(executed.inputs.values(), NonFinite.NAN):
        yield _derivative(executed, number, mask, nan_highest=False)


def _counted(executed: Executed, number: int, mask: torch.Tensor) -> Env:
    """Return the influence of integers and bools, taken for numbers; those that a call takes for indices cannot be."""
    direct = [item.value for item in executed.node.args if isinstance(item, Ref)]
    for counts in ([*executed.inputs], direct, direct[:1]):
        found = _derivative(executed, number, mask, counts=counts)
        if found:
            return found
    return {}


def _derivative(
    executed: Executed, number: int, mask: torch.Tensor, *, nan_highest: bool = True, counts: Sequence[int] = ()
) -> Env:
    """Return the input elements with a nonzero derivative; the inputs `counts` are taken for numbers whatever their type."""
    inputs = {n: t for n, t in executed.inputs.items() if (n in counts or is_number(t)) and t.layout is torch.strided}
    values = {n: ordered(t, nan_highest=nan_highest) for n, t in inputs.items()}
    found = _nonzero(executed, number, mask, values, [*values])
    if found is None:  # some calls have no derivative by one of their operands, such as the weights of a loss
        each = [_nonzero(executed, number, mask, values, [n]) for n in values] if len(values) > 1 else []
        return {n: m for part in each if part is not None for n, m in part.items()}
    return found


def _nonzero(executed: Executed, number: int, mask: torch.Tensor, values: Env, operands: Sequence[int]) -> Env | None:
    """Return where the derivative by some operands is not zero, all operands having given values; None without a derivative."""
    leaves = {n: t.requires_grad_() if n in operands else t for n, t in ((n, t.clone()) for n, t in values.items())}
    try:
        with torch.enable_grad():
            made = executed.differentiably(
                {n: leaves[n] * 1 if n in leaves else t for n, t in executed.inputs.items()}
            )[number]
            if not made.requires_grad:
                return {}
            # With equal weights a row of a softmax, whose sum is constant, would depend on nothing. The sum is a scalar because
            # seeds of another shape would make torch import all of sympy.
            folded = (made * (mask * distinct(made))).sum()
            folded = folded.real + folded.imag if folded.is_complex() else folded
            gradients: Sequence[torch.Tensor | None] = torch.autograd.grad(
                folded, [leaves[n] for n in operands], allow_unused=True
            )
    except (RuntimeError, NotImplementedError, IndexError, TypeError):
        return None  # no derivative, or an index that is no integer any more
    dense = [g if g is None or g.layout is torch.strided else g.to_dense() for g in gradients]
    return {n: g != 0 for n, g in zip(operands, dense, strict=True) if g is not None}


def name(node: Node) -> str:
    """Return the name of a call without namespace, overload and the underscore of in-place calls."""
    called: str = node.target._schema.name.split("::")[1]
    return called.removesuffix("_")


def is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype can hold non-finite values."""
    return tensor.is_floating_point() or tensor.is_complex()


def union(masks: Iterable[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return where any of the masks is set, in the shape of `like`."""
    found = torch.zeros_like(like)
    for mask in masks:
        found |= mask
    return found


def gathered(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Reduce a mask of the output's shape to the shape of an input that was broadcast to it."""
    return mask if mask.shape == shape else mask.to(torch.float32).sum_to_size(shape) > 0
