"""What the fused normalisation kernels divide by: a variance plus eps, or the length of a weight vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import numbers, ops

_BATCH_NORMS = ops(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
    "_batch_norm_with_update _batch_norm_no_update"
)


def squared_divisor(evidence: Evidence) -> torch.Tensor | None:
    """Return variance plus eps (or the squared length) at the blamed elements of a normalisation kernel.

    Returns:
        1-D float64, aligned with the blamed elements of what is normalised, or of the inverse root that is saved for the
        derivative; None when the call is no such kernel.
    """
    arguments = evidence.call.arguments
    if evidence.op in ("native_layer_norm", "_fused_rms_norm"):
        variance = _over_last(evidence.op, arguments)
    elif evidence.op == "native_group_norm":
        variance = _over_groups(arguments)
    elif evidence.op in _BATCH_NORMS:
        variance = _over_batch(evidence.op, arguments)
    elif evidence.op == "_weight_norm_interface":
        variance = _over_weight(arguments)
    else:
        return None
    if evidence.output == 0:
        return variance.expand(evidence.mask.shape)[evidence.mask.cpu()]
    saved = evidence.output == len(evidence.call.outputs) - 1 and variance.numel() == evidence.mask.numel()
    return variance.reshape(evidence.mask.shape)[evidence.mask.cpu()] if saved else None


def _over_last(op: str, arguments: Mapping[str, Any]) -> torch.Tensor:
    values = numbers(arguments["input"])
    dims = tuple(range(-len(arguments["normalized_shape"]), 0))
    given = arguments.get("eps")
    eps = torch.finfo(arguments["input"].dtype).eps if given is None else float(given)
    if op == "_fused_rms_norm":
        return values.square().mean(dims, keepdim=True) + eps
    return values.var(dims, correction=0, keepdim=True) + eps


def _over_groups(arguments: Mapping[str, Any]) -> torch.Tensor:
    values = numbers(arguments["input"])
    grouped = values.reshape(values.shape[0], arguments["group"], -1)
    variance = grouped.var(-1, correction=0, keepdim=True) + float(arguments["eps"])
    return variance.expand(grouped.shape).reshape(values.shape)


def _over_batch(op: str, arguments: Mapping[str, Any]) -> torch.Tensor:
    values = numbers(arguments["input"])
    running = arguments.get("running_var")
    training = arguments.get("training", op == "_batch_norm_with_update")
    if training or running is None:
        variance = values.var([dim for dim in range(values.ndim) if dim != 1], correction=0)
    else:
        variance = numbers(running)
    eps = float(arguments.get("eps", arguments.get("epsilon", 0.0)))
    return (variance + eps).reshape(-1, *[1] * (values.ndim - 2))


def _over_weight(arguments: Mapping[str, Any]) -> torch.Tensor:
    values, kept = numbers(arguments["v"]), arguments.get("dim", 0)
    dims = [dim for dim in range(values.ndim) if dim != kept % max(values.ndim, 1)]
    return values.square().sum(dims, keepdim=True) if dims else values.square()
