"""Euclidean norms of whole models, which tell as a by-product whether every element is finite."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator

import torch

from bisect_nan import finite

_FULL = (torch.float32, torch.float64)


@torch.no_grad()
def norms(*groups: Iterable[torch.Tensor]) -> list[float]:
    """Return the 2-norm over all elements of each group of tensors, with one pass over memory and one synchronisation.

    It is NaN or infinite exactly when an element is: where only the sum of squares overflowed, the norm is taken again in double
    precision, and bounded by the largest float64.

    Args:
        groups: Tensors of any shape, dtype, layout and device; integers count as nothing.
    """
    kept = [list(group) for group in groups]
    totals = [total_norm(group) for group in kept]
    home = next((total.device for total in totals if total.device.type != "cpu"), torch.device("cpu"))
    found = torch.stack([total.to(home, torch.float64) for total in totals]).tolist()
    return [value if math.isfinite(value) else _carefully(group) for value, group in zip(found, kept, strict=True)]


@torch.no_grad()
def total_norm(group: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm over all elements of some tensors, as a scalar where they lie, without waiting for it.

    Halves are summed in float32, where they cannot overflow so soon.
    """
    values = list(_values(group))
    if not values:
        return torch.zeros(())
    full = [value for value in values if value.dtype in _FULL]
    parts = [torch.linalg.vector_norm(value, dtype=torch.float32) for value in values if value.dtype not in _FULL]
    if full:
        parts.append(torch.nn.utils.get_total_norm(full))
    home = parts[-1].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([part.to(home, torch.float64) for part in parts]))
    return total


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
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        values = tensor.detach()
        if values.layout is torch.sparse_coo:
            values = values.coalesce().values()
        elif values.is_nested:
            values = values.values()
        elif values.layout is not torch.strided:
            values = values.to_dense()
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj())
        yield values.float() if values.itemsize == 1 else values
