"""Tries a change on the culprit's call alone, before a whole step is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_map

from bisect_nan import finite
from bisect_nan.causes.evidence import Call
from bisect_nan.recording.program import Tracking, tensors
from bisect_nan.remedies.proposal import Proposal, Site
from bisect_nan.replaying.differentiable import Change, stays


def helps(site: Site, proposal: Proposal) -> bool:
    """Run the changed call alone: its results and derivatives have to be finite, its healthy results as they were."""
    assert site.call is not None
    assert site.node is not None
    change = proposal.check or proposal.changes.get(site.node.index)
    if change is None:
        return True
    own = site.evidence is not None and site.call is site.evidence.call
    place = site.evidence.output if own and site.evidence is not None else 0
    before = site.call.outputs[place]
    try:
        after, gradients = _alone(site.call, change, place, site.node.tracked)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    if before is None or after.shape != before.shape or any(finite.probe([gradient]) for gradient in gradients):
        return False
    if own and site.evidence is not None and finite.probe([after[site.evidence.mask]]):
        return False
    return proposal.moves or stays(after, before)


def _alone(
    call: Call, change: Change, place: int, tracked: Sequence[Tracking]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one result of a changed call, and its derivatives by what autograd tracked, for an upstream gradient of 1."""
    leaves: list[torch.Tensor] = []
    known = iter(tracked)

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            item = item.detach().clone()
            if next(known, Tracking.NO) and _is_number(item):
                leaves.append(item.requires_grad_())
                return item.clone()
        return item

    with torch.set_grad_enabled(bool(tracked)):
        made = tensors(change(call.target, pytree.tree_map(leaf, dict(call.arguments))))
        result = made[min(place, len(made) - 1)]
        if result is None or not _is_number(result):
            raise ValueError(call.target)
        if not result.requires_grad:
            return result, []
        found: tuple[torch.Tensor | None, ...] = torch.autograd.grad(
            result, leaves, torch.ones_like(result), allow_unused=True
        )
    return result.detach(), [gradient for gradient in found if gradient is not None]


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
