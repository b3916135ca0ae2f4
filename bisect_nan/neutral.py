"""Healthy values to put in the place of bad ones.

No single value serves everywhere: a constant has no variance, no inverse and no order, 0 cannot be divided by, and the healthy
neighbours of an overflow are close to the end of the range themselves.
"""

from __future__ import annotations

import math

import torch

from bisect_nan import finite

SMALL = 1 << 16
"""Elements of a tensor up to which it is worth to sort it, or to try many variants of it."""

_SEED = 0


def typical(tensor: torch.Tensor) -> float:
    """Return the median of the finite elements (of the real part, for complex ones), or 1 when there is none."""
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    real = tensor.real if tensor.is_complex() else tensor
    healthy = real[~finite.mask(tensor)].float()
    median = float(healthy.median()) if healthy.numel() else 1.0
    return median if math.isfinite(median) else 1.0


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return values between 1/2 and 3/2 in the shape and dtype of a tensor, without order or pattern; always the same ones."""
    generator = torch.Generator().manual_seed(_SEED)
    return (torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5).to(tensor.device, tensor.dtype)


def ordered(tensor: torch.Tensor, *, nan_highest: bool = True) -> torch.Tensor:
    """Return distinct healthy values between 1/2 and 3/2, in double precision, in the same order as those of a tensor.

    Selections (max, sort, median) pick among them what they picked before (those over large tensors do not). NaN counts as the
    highest value, or as the lowest.
    """
    if tensor.is_complex() or tensor.numel() > SMALL:
        return distinct(tensor).to(torch.complex128 if tensor.is_complex() else torch.float64)
    flat = tensor.detach().double().flatten()
    if not nan_highest:
        flat = flat.masked_fill(flat.isnan(), -math.inf)
    values = distinct(flat).sort().values  # no even steps: a matrix of those is singular
    return torch.empty_like(flat).scatter_(0, flat.argsort(stable=True), values).reshape(tensor.shape)


def tamed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real dense tensor clipped to the fourth root of its range: neither squares nor sums of it overflow."""
    if tensor.is_complex() or tensor.layout is not torch.strided:
        return tensor
    limit = torch.finfo(tensor.dtype).max ** 0.25
    return tensor.clamp(-limit, limit)


def neutralised(tensor: torch.Tensor, mask: torch.Tensor, value: float | torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy with the elements `mask` replaced by `value`, or by the median of the finite elements."""
    if tensor.layout is not torch.strided:
        return neutralised(tensor.to_dense(), mask, value).to_sparse(layout=tensor.layout)
    if value is None:
        value = typical(tensor)
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
    return torch.where(mask, value, tensor)
