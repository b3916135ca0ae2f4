"""Euclidean norms of whole models, which tell as a by-product whether every element is finite."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator

import torch

from bisect_nan import finite

_FULL = (torch.float32, torch.float64)
_PLAIN = (*_FULL, torch.bfloat16, torch.float16)


@torch.no_grad()
def norms(*groups: Iterable[torch.Tensor]) -> list[float]:
    """Return the 2-norm over all elements of each group of tensors, with one pass over memory and one synchronisation.

    It is NaN or infinite exactly when an element is: where only the sum of squares overflowed, the norm is taken again in double
    precision, and bounded by the largest float64.

    Args:
        groups: Tensors of any shape, dtype, layout and device; integers count as nothing.
    """
    kept = [list(group) for group in groups]
    values = [list(_values(group)) for group in kept]
    parts = iter(_each([value for group in values for value in group]).tolist())
    found = [math.hypot(*itertools.islice(parts, len(group))) for group in values]
    return [value if math.isfinite(value) else _carefully(group) for value, group in zip(found, kept, strict=True)]


@torch.no_grad()
def total_norm(group: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm over all elements of some tensors, as a scalar where they lie, without waiting for it."""
    total: torch.Tensor = torch.linalg.vector_norm(_each(list(_values(group))), dtype=torch.float64)
    return total


def _each(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each of some strided tensors of real numbers, in one tensor where they lie."""
    if len({(value.dtype, value.device) for value in values}) > 1:
        parts = [_each([value]).to(torch.float64) for value in values]
        home = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
        return torch.cat([part.to(home) for part in parts])
    if not values:
        return torch.zeros(0)
    # Halves are summed in float32, where they cannot overflow so soon. torch 2.9 to 2.13: `_foreach_norm`.
    dtype = None if values[0].dtype in _FULL else torch.float32
    return torch.stack(torch._foreach_norm(values, 2, dtype))  # noqa: SLF001


def _carefully(group: list[torch.Tensor]) -> float:
    """Return NaN or infinity when an element is, else the norm in double precision."""
    found = finite.probe(group)
    if found:
        return math.nan if finite.NonFinite.NAN in found else math.inf
    parts = [float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in _values(group)]
    return min(math.hypot(*parts), sys.float_info.max)


def _values(group: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the elements of each tensor as a strided tensor of real numbers."""
    for tensor in group:
        if tensor.dtype in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta:
            yield tensor
        elif not tensor.is_meta and (tensor.is_floating_point() or tensor.is_complex()):
            yield _plain(tensor.detach())


def _plain(values: torch.Tensor) -> torch.Tensor:
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.is_nested:
        values = values.values()
    elif values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.float() if values.itemsize == 1 else values
