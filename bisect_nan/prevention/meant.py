"""Which infinities outside of a step are meant: a mask, or where a running minimum starts.

In a recorded step the program tells what an infinity is for. In a model, a batch or a file only the values and the kind of the
tensor do, so what is taken for meant is told all the same, apart from what is bad.
"""

from __future__ import annotations

import torch

from bisect_nan import finite
from bisect_nan.finite import NonFinite
from bisect_nan.replaying.intent import is_mask

_STATISTICS = ("running_mean", "running_var")
"""Buffers of torch's normalisations, which are measured; an infinity in one was measured, too."""


def is_meant(tensor: torch.Tensor, kind: str, name: str) -> bool:
    """Tell whether the infinities of a non-finite tensor are meant. A NaN never is.

    Args:
        tensor: The tensor.
        kind: What it is. `buffer` and `constant` (a parameter that is not trained): a single number (where a minimum starts), one other
            value beside the infinities, or -Inf alone in two dimensions or more (a mask, added to slopes perhaps). `input`: 0 and -Inf
            in two dimensions or more. `sample` (an input without the dimension of the batch): in one dimension or more. `weight` (a
            tensor of a file, of which nothing more is known): as `input`, or a number without dimensions. Anything else: never.
        name: Its path.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    found = finite.kinds(tensor)
    tensor = finite.with_kernels(tensor)
    if NonFinite.NAN in found or any(word in name for word in _STATISTICS):
        return False
    only_negative = found == NonFinite.NEG_INF
    if kind in ("buffer", "constant"):
        return tensor.numel() == 1 or (only_negative and tensor.dim() > 1) or is_mask(tensor)
    if kind == "weight" and tensor.dim() == 0:
        return True
    dimensions = {"input": 2, "weight": 2, "sample": 1}.get(kind)
    return dimensions is not None and tensor.dim() >= dimensions and only_negative and _is_zero_mask(tensor)


def kind_in_file(path: str) -> str:
    """Return the kind of a tensor of a checkpoint by its path, which tells the optimizer's state from the weights."""
    return "optimizer" if "optim" in path.lower() else "weight"


def _is_zero_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds 0 and -Inf, and some of both."""
    others = tensor[~finite.mask(tensor)]
    return others.numel() > 0 and not bool(others.any())
