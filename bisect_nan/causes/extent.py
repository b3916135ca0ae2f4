"""How far a fault reaches, and what that points at: single values, one sample or channel, or everything."""

from __future__ import annotations

import torch

_SMALL = 8
"""Elements below which a share says nothing."""

_FEW = 0.05
"""Share of bad elements up to which they are isolated."""

_OUTLIERS = ", which points at outliers in the data or in one channel, not at the layer as a whole"


def isolated(mask: torch.Tensor) -> bool:
    """Whether only single elements are bad."""
    return mask.numel() >= _SMALL and 0 < int(mask.sum()) <= _FEW * mask.numel()


def extent(mask: torch.Tensor) -> tuple[str, ...]:
    """Return a note on where the bad elements lie, if that points at something.

    Args:
        mask: bool: the bad elements of a tensor.
    """
    bad, total = int(mask.sum()), mask.numel()
    if total < _SMALL or not bad:
        return ()
    if bad == total:
        return ("every element is bad: look at what all of them are computed from, not at one sample",)
    if bad == 1:
        return (f"one element alone is bad{_OUTLIERS}",)
    places = mask.nonzero()
    shared = [str(int(place[0])) if len(set(place.tolist())) == 1 else ":" for place in places.T]
    if any(place != ":" and size > 1 for place, size in zip(shared, mask.shape, strict=True)):
        return (f"the bad elements all lie in [{', '.join(shared)}], which points at one sample, channel or position",)
    if isolated(mask):
        return (f"the bad elements are few and far between{_OUTLIERS}",)
    return ()
