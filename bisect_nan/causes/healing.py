"""Whether blamed elements would be finite in a wider type, and whether that makes them an overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import aligned, enough, first, numbers, result, where

CASTS = {"_to_copy": "self", "to": "self", "copy": "src", "convert_element_type": "a"}
"""Ops that only change the type, with the argument that they read."""


@dataclass(frozen=True, slots=True)
class Healed:
    """What the blamed elements are in a wider type.

    Attributes:
        values: 1-D float64, aligned with the blamed elements.
        beyond: Where the value is finite there, and larger than the original type can hold.
        inside: Where it is finite and would fit: only something on the way to it overflowed.
    """

    values: torch.Tensor
    beyond: torch.Tensor
    inside: torch.Tensor


def largest(dtype: torch.dtype) -> float:
    """Return the magnitude from which a number rounds to infinity in a floating type."""
    info = torch.finfo(dtype)
    return float(info.max) * (1 + info.eps / 4)


def heal(evidence: Evidence, wider: torch.dtype) -> Healed | None:
    """Look at the blamed elements in a wider type; None when the call cannot run there or they stay non-finite."""
    dtype = evidence.result.dtype
    if not (dtype.is_floating_point or dtype.is_complex) or torch.finfo(dtype).bits >= torch.finfo(wider).bits:
        return None
    if evidence.op in CASTS:
        values = aligned(evidence, CASTS[evidence.op])
    else:
        again = evidence.recomputed(wider)
        values = None if again is None else numbers(again)
    if values is None or values.numel() != result(evidence).numel():
        return None
    whole = values.isfinite() & ~result(evidence).isfinite()
    size = values.real.abs().maximum(values.imag.abs()) if values.is_complex() else values.abs()
    beyond = whole & (size > largest(dtype) * 0.999)
    return Healed(values, beyond, whole & ~beyond) if enough(whole) else None


def overflowed(evidence: Evidence, wider: torch.dtype) -> tuple[float, str] | None:
    """Return confidence and a note when the blamed elements overflowed their type, judged by running in a wider one.

    Healing alone is no proof: a result that fits the narrow type counts only if sums of products of its inputs do not.
    """
    healed = heal(evidence, wider)
    if healed is None:
        return None
    narrow, wide = (str(dtype).removeprefix("torch.") for dtype in (evidence.result.dtype, wider))
    limit = f"{torch.finfo(evidence.result.dtype).max:.5g} is the largest {narrow}"
    if enough(healed.beyond):
        value = first(healed.values, healed.beyond)
        return 0.95, f"{limit}; in {wide} the element is {value}{where(evidence, healed.beyond)}"
    inner = _largest_inside(evidence)
    if enough(healed.inside) and inner > largest(evidence.result.dtype):
        value = first(healed.values, healed.inside)
        note = f"{limit}; in {wide} the element is {value}, but terms on the way to it reach up to {inner:.2g}"
        return 0.7, note + where(evidence, healed.inside)
    return None


def _largest_inside(evidence: Evidence) -> float:
    """A bound on what a sum of products of the inputs can reach."""
    peaks, width = [1.0], 1
    for tensor in evidence.call.tensors().values():
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            values = numbers(tensor).abs()
            peaks.append(float(values[values.isfinite()].max()) if values.isfinite().any() else 1.0)
            width = max(width, *tensor.shape, 1)
    peaks.sort()
    return peaks[-1] * max(peaks[-2], peaks[-1] if len(peaks) == 2 else 1.0) * width  # noqa: PLR2004  (one input: its square)
