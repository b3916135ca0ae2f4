"""Healthy values to put in the place of bad ones.

No single value serves everywhere: a constant has no variance, no inverse and no order, 0 cannot be divided by, and the healthy
neighbours of an overflow are close to the end of the range themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bisect_nan import finite
from bisect_nan.replaying.replay import Executed

SMALL = 1 << 16
"""Elements of a tensor up to which it is worth to sort it, or to try many variants of it."""

_SEED = 0

_PERIOD = 65521
"""Distinct values before they repeat: a prime, so that no two rows of a tensor are alike."""

_SAMPLE = 4096
"""Elements of a large tensor whose median is taken."""


def typical(tensor: torch.Tensor) -> float:
    """Return the median of the finite elements (of the real part, for complex ones), or 1 when there is none.

    Of a large tensor that of a sample, always the same one, where it holds finite elements.
    """
    flat = (tensor if tensor.layout is torch.strided else tensor.to_dense()).reshape(-1)
    step = flat.numel() // _SAMPLE | 1  # odd, so as not to stay in one column
    healthy = _healthy(flat[::step]) if flat.numel() > SMALL else flat[:0]
    healthy = healthy if healthy.numel() else _healthy(flat)
    median = float(healthy.median()) if healthy.numel() else 1.0
    return median if math.isfinite(median) else 1.0


def _healthy(tensor: torch.Tensor) -> torch.Tensor:
    real = tensor.real if tensor.is_complex() else tensor
    return real[~finite.mask(tensor)].float()


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return values between 1/2 and 3/2 in the shape and dtype of a tensor, without order or pattern; always the same ones."""
    generator, count = torch.Generator().manual_seed(_SEED), tensor.numel()
    values = torch.rand(min(count, _PERIOD), generator=generator, dtype=torch.float64) + 0.5
    values = values.to(tensor.device, tensor.dtype)
    return values.repeat(-(-count // _PERIOD))[:count].reshape(tensor.shape) if count else values.reshape(tensor.shape)


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
    return finite.with_kernels(tensor).clamp(-limit, limit).to(tensor.dtype)


def neutralised(tensor: torch.Tensor, mask: torch.Tensor, value: float | torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy with the elements `mask` replaced by `value`, or by the median of the finite elements."""
    if tensor.layout is not torch.strided:
        return neutralised(tensor.to_dense(), mask, value).to_sparse(layout=tensor.layout)
    if value is None:
        value = typical(tensor)
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
    return torch.where(mask, value, tensor)


Neutral = Callable[[torch.Tensor, Executed | None, int], torch.Tensor | float]
"""What to put in the place of bad elements: from the tensor, the call that made it (None for a placeholder) and its number."""


def median(tensor: torch.Tensor, _: Executed | None, __: int) -> float:
    """The median of the finite elements."""
    return typical(tensor)


def _precise(tensor: torch.Tensor, executed: Executed | None, number: int) -> torch.Tensor | float:
    """What the call gives in double precision, clipped to the tensor's own range."""
    if executed is None or tensor.is_complex():
        return typical(tensor)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in executed.inputs.items()}
    try:
        result = executed.again(wide)[number]
    except RuntimeError:  # no such kernel in double precision
        return typical(tensor)
    limit = torch.finfo(tensor.dtype).max
    return torch.where(finite.mask(result), typical(tensor), result).clamp(-limit, limit).to(tensor.dtype)


def _extreme(tensor: torch.Tensor, _: Executed | None, __: int) -> torch.Tensor | float:
    """The largest or the smallest finite element in the place of an infinity: every comparison and selection stays as it was."""
    values = finite.with_kernels(tensor)
    healthy = values[~finite.mask(tensor)]
    if tensor.is_complex() or not healthy.numel():
        return typical(tensor)
    lowest, highest = healthy.aminmax()
    return torch.nan_to_num(values, typical(tensor), float(highest), float(lowest)).to(tensor.dtype)


def tame(tensor: torch.Tensor, _: Executed | None, __: int) -> torch.Tensor:
    """The median, and all healthy elements brought far from the end of the range, where the neighbours of an overflow are."""
    return tamed(neutralised(tensor, finite.mask(tensor)))


def _distinct(tensor: torch.Tensor, _: Executed | None, __: int) -> torch.Tensor:
    """Values without pattern: a constant has no variance and no inverse."""
    return distinct(tensor)


NEUTRALS: tuple[Neutral, ...] = (median, _precise, _distinct, _extreme, lambda *_: 1.0, lambda *_: 0.0, tame)
"""Tried in turn: a neutral value may make a fault of its own (0 under a logarithm), and then it is no evidence."""
