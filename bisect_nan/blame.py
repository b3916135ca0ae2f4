"""Asks one call: which of your bad output elements are your own, and which input elements made the others bad?

Elementwise calls are answered by position. Any other call is asked by experiment: run it again with its bad inputs neutralised
(what stays bad is its own), and follow its derivative on healthy values from the bad outputs to the inputs that they depend on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bisect_nan import finite
from bisect_nan.finite import NonFinite
from bisect_nan.program import Node, Ref
from bisect_nan.replay import Env, Executed

_ELEMENTWISE = {"clone", "_to_copy", "copy", "alias", "contiguous", "lift_fresh", "masked_fill", "where", "fill"}
"""Elementwise calls that torch does not tag as pointwise (or not in every release)."""



@dataclass(frozen=True, slots=True)
class Split:
    """Bad elements of one value, sorted by where they come from; three bool masks of its shape.

    Attributes:
        born: No bad input explains them.
        inherited: Bad inputs explain them.
        converted: The part of `inherited` that is NaN though the inputs that explain it are infinite, not NaN.
    """

    born: torch.Tensor
    inherited: torch.Tensor
    converted: torch.Tensor


def split(executed: Executed, number: int, mask: torch.Tensor) -> Split:
    """Sort the bad elements `mask` of the value `number` that a call made."""
    made = executed.content[number]
    bad = {n: finite.mask(t) for n, t in executed.inputs.items() if _is_number(t)}
    bad = {n: m for n, m in bad.items() if bool(m.any())}
    none = torch.zeros_like(mask)
    if not bad:
        return Split(mask, none, none)
    aligned = _aligned(executed, number, bad)
    if aligned is not None:
        inherited = mask & _union(aligned.values(), mask)
        nans = {n: finite.mask(executed.inputs[n], NonFinite.NAN) for n in aligned}
        from_nan = _union([_spread(m, nans[n], mask) for n, m in aligned.items()], mask)
        converted = inherited & finite.mask(made, NonFinite.NAN) & ~from_nan
        return Split(mask & ~inherited, inherited, converted)
    born = mask.clone()
    for healthy in _healthy_inputs(executed, bad):
        born &= finite.mask(executed.again(healthy)[number])
        if not bool(born.any()):
            break
    inherited = mask & ~born
    nan_inputs = {n: finite.mask(executed.inputs[n], NonFinite.NAN) for n in bad}
    result = made
    if any(bool(m.any()) for m in nan_inputs.values()):
        healthy = {n: neutralised(t, nan_inputs[n]) if n in bad else t for n, t in executed.inputs.items()}
        result = executed.again(healthy)[number]
    converted = inherited & finite.mask(made, NonFinite.NAN) & finite.mask(result, NonFinite.NAN)
    return Split(born, inherited, converted)


def responsible(executed: Executed, number: int, mask: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the bad input elements that made the elements `mask` of the value `number` bad, by value number."""
    bad = {n: finite.mask(t) for n, t in executed.inputs.items() if _is_number(t)}
    bad = {n: m for n, m in bad.items() if bool(m.any())}
    aligned = _aligned(executed, number, bad)
    if aligned is not None:
        return {n: _gather(mask & m, executed.inputs[n].shape) & bad[n] for n, m in aligned.items()}
    found = {n: m & bad[n] for n, m in _influence(executed, number, mask).items() if n in bad}
    if any(bool(m.any()) for m in found.values()):
        return found
    return bad


def neutralised(tensor: torch.Tensor, mask: torch.Tensor, value: float | None = None) -> torch.Tensor:
    """Return a copy with the elements `mask` replaced by `value`, or by the median of the finite elements (1 without any)."""
    if value is None:
        value = typical(tensor)
    return torch.where(mask, torch.tensor(value, dtype=tensor.dtype, device=tensor.device), tensor)


def typical(tensor: torch.Tensor) -> float:
    """Return the median of the finite elements (of the real part, for complex ones), or 1 when there is none."""
    real = tensor.real if tensor.is_complex() else tensor
    healthy = real[~finite.mask(tensor)]
    return float(healthy.to(torch.float32).median()) if healthy.numel() and math.isfinite(float(healthy.float().median())) else 1.0


def _healthy_inputs(executed: Executed, bad: Env) -> Iterator[Env]:
    """Yield inputs without bad elements: by their median, by 0, and with all other elements far from the range's end too.

    The neighbours of an overflowed element are huge themselves; what fails on them alone is still the same fault.
    """
    for value in (None, 0.0):
        yield {n: neutralised(t, bad[n], value) if n in bad else t for n, t in executed.inputs.items()}
    yield {n: tamed(neutralised(t, bad[n])) if n in bad else t for n, t in executed.inputs.items()}


def tamed(tensor: torch.Tensor) -> torch.Tensor:
    """Clip a tensor to the fourth root of its range, so that neither squares nor sums of it overflow."""
    if tensor.is_complex():
        return tensor
    limit = torch.finfo(tensor.dtype).max ** 0.25
    return tensor.clamp(-limit, limit)


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _name(node: Node) -> str:
    name: str = node.target._schema.name.split("::")[1]
    return name.removesuffix("_")


def _aligned(executed: Executed, number: int, bad: Env) -> dict[int, torch.Tensor] | None:
    """Return, for an elementwise call, each input's bad elements as the output sees them; None for any other call."""
    node, shape = executed.node, executed.content[number].shape
    if torch.Tag.pointwise not in node.target.tags and _name(node) not in _ELEMENTWISE:
        return None
    if len(executed.content) > 1:
        return None  # a call over lists
    try:
        seen = {n: m.expand(shape) for n, m in bad.items()}
    except RuntimeError:
        return None
    unread = _unread(executed, shape)
    return {n: m & ~unread[n] if n in unread else m for n, m in seen.items()}


def _unread(executed: Executed, shape: torch.Size) -> dict[int, torch.Tensor]:
    """Return, for calls that select, the elements of each input that are not looked at."""
    node, inputs = executed.node, executed.inputs
    operands = [item.value if isinstance(item, Ref) else None for item in node.args]
    everything = torch.ones((), dtype=torch.bool).expand(shape)
    match _name(node), operands:
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


def _union(masks: object, like: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(like)
    for mask in masks:  # type: ignore[attr-defined]
        found |= mask
    return found


def _spread(aligned: torch.Tensor, mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return aligned & mask.expand(like.shape)


def _gather(mask: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Reduce a mask of the output's shape to the shape of an input that was broadcast to it."""
    return mask.to(torch.float32).sum_to_size(shape) > 0


def depended_on(executed: Executed, number: int, mask: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return all input elements, healthy or not, that the elements `mask` of a result are computed from, by value number.

    Inputs whose influence cannot be followed (a call without derivative, the indices of most calls) are left out.
    """
    aligned = _aligned(executed, number, {n: torch.ones_like(t, dtype=torch.bool) for n, t in executed.inputs.items()})
    if aligned is not None:
        return {n: _gather(mask & m, executed.inputs[n].shape) for n, m in aligned.items()}
    found = _influence(executed, number, mask)
    if _name(executed.node) == "embedding":
        indices = executed.node.args[1].value
        found[indices] = mask.any(-1)
    return found


def _influence(executed: Executed, number: int, mask: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the floating input elements with a nonzero derivative, on healthy values, of the elements `mask`."""
    leaves = {n: _healthy(t).requires_grad_() for n, t in executed.inputs.items() if _is_number(t)}
    try:
        with torch.enable_grad():
            made = executed.differentiably({n: leaves[n] * 1 if n in leaves else t for n, t in executed.inputs.items()})[number]
            if not made.requires_grad:
                return {}
            gradients = torch.autograd.grad(made, list(leaves.values()), mask.to(made.dtype), allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return {}  # no derivative
    return {n: g != 0 for n, g in zip(leaves, gradients, strict=True) if g is not None}


def _healthy(tensor: torch.Tensor) -> torch.Tensor:
    """Return distinct values between 1/2 and 3/2 in the same shape, in double precision."""
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64, device=tensor.device).reshape(tensor.shape).to(dtype)
