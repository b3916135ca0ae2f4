"""Reductions over nothing, deviations of one value, and losses that cannot score their targets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from bisect_nan.recording.program import Arguments
from bisect_nan.remedies.proposal import Proposal, Site, instead, written

_MEAN, _SUM = 1, 2
"""`Reduction` of ATen (aten/src/ATen/core/Reduction.h)."""


def zero_for_empty(site: Site) -> Iterator[Proposal]:
    """Let a mean over nothing be zero."""
    if site.call is None:
        return
    if site.op == "mean":
        text, change = "divide by a count of at least 1", instead(_mean)
        wrap = "({x}.sum() / max({x}.numel(), 1))" if not site.call.arguments.get("dim") else ""
    elif site.op in {"nll_loss_forward", "nll_loss2d_forward"}:
        text = "let the loss of a batch without any label be 0: sum it, and divide by (target != ignore_index).sum().clamp(min=1)"
        wrap = ""

        def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
            total, weight = target(**{**arguments, "reduction": _SUM})
            return total / weight.clamp(min=1), weight

    elif site.op == "segment_reduce":
        text, wrap, change = "give segments without elements a value: initial=0", "", _from_zero
    elif site.call.arguments.get("reduction") == _MEAN:
        text, wrap = "sum the loss, and divide by a count of at least 1", ""

        def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
            count = next(item.numel() for item in arguments.values() if isinstance(item, torch.Tensor))
            return target(**{**arguments, "reduction": _SUM}) / max(count, 1)

    else:
        return
    yield Proposal("zero_for_empty", text, wrap, whole=True, changes=site.everywhere(change))


def population_variance(site: Site) -> Iterator[Proposal]:
    """Divide by n where there is a single value."""
    call = site.call
    if call is None or not {"correction", "unbiased"} & set(call.arguments):
        return

    def change(target: torch._ops.OpOverload, arguments: Arguments, eps: float = 0.0) -> Any:
        x: torch.Tensor = arguments["self"]
        count = math.prod(x.shape[dim] for dim in arguments.get("dim") or range(x.dim()))
        if count > 1 and eps == 0:  # a deviation that other calls of the line can take
            return target(**arguments)
        kind = {"unbiased": False} if "unbiased" in arguments else {"correction": 0}
        result = target(**{**arguments, **kind})
        return written(target, arguments, result if eps == 0 else (result.square() + eps).sqrt())

    yield Proposal(
        "population_variance",
        "take the deviation of the values at hand where there is one alone: correction=0",
        changes=site.everywhere(change),
    )
    if site.op != "std":
        return
    for eps in (1e-8, 1e-4):
        yield Proposal(
            "population_variance",
            f"take the deviation of the values at hand, with an eps under the root: (x.var(correction=0) + {eps:g}).sqrt()",
            changes=site.everywhere(lambda target, arguments, eps=eps: change(target, arguments, eps)),  # type: ignore[misc]
        )


def zero_infinity(site: Site) -> Iterator[Proposal]:
    """Leave out transcripts that no alignment reaches, as `zero_infinity` does."""
    if site.op != "_ctc_loss":
        return

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        loss, alpha = target(**{**arguments, "zero_infinity": True})
        return torch.where(loss == math.inf, torch.zeros_like(loss), loss), alpha

    yield Proposal(
        "zero_infinity",
        "pass zero_infinity=True, which leaves out transcripts that are longer than their input, and repair the lengths",
        changes=site.everywhere(change),
    )


def leave_out_ruled_out(site: Site) -> Iterator[Proposal]:
    """Leave labels out of a loss whose own class is masked."""
    if site.call is None or site.op not in {"nll_loss_forward", "nll_loss2d_forward"}:
        return

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        scores, labels, ignored = arguments["self"], arguments["target"], arguments["ignore_index"]
        classes = min(1, scores.ndim - 1)
        scored = labels != ignored
        picked = scores.gather(classes, labels.where(scored, 0).unsqueeze(classes)).squeeze(classes)
        lost = scored & (picked == -math.inf)
        return target(**{**arguments, "target": labels.masked_fill(lost, ignored)})

    yield Proposal(
        "leave_out_ruled_out",
        f"repair these labels or the mask; until then label them {site.call.arguments['ignore_index']}, so that the loss ignores them",
        changes=site.everywhere(change),
        local=False,
    )


def _from_zero(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
    return target(**{**arguments, "initial": 0.0})


def _mean(arguments: Arguments) -> torch.Tensor:
    x: torch.Tensor = arguments["self"]
    dims: list[int] = arguments.get("dim") or list(range(x.dim()))
    count = math.prod(x.shape[dim] for dim in dims)
    total: torch.Tensor = x.sum(dims, keepdim=bool(arguments.get("keepdim", False)), dtype=arguments.get("dtype"))
    return total / max(count, 1)
