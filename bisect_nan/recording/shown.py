"""What tensors show besides their elements: their memory, gradient, hooks, and whether they require a gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # torch 2.6 to 2.13

_facts_of = attrgetter("data", "is_leaf", "requires_grad", *_HOOKS)
_hooks_in = itemgetter(3, 4)


class Shown:
    """What some tensors show, as it was when this object was made; `restore` puts it back, any number of times."""

    __slots__ = "_facts", "_gradients", "_tensors"

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember it.

        Args:
            tensors: Any tensors.
        """
        self._tensors = tensors
        self._facts = list(map(_facts_of, tensors))
        # Reading the gradient of a tensor that is no leaf warns.
        self._gradients = [
            tensor.grad if facts[1] else None for tensor, facts in zip(tensors, self._facts, strict=True)
        ]

    def hooks(self) -> list[Any]:
        """Return the dictionaries of hooks."""
        kept = itertools.chain.from_iterable(map(_hooks_in, self._facts))
        return [hooks for hooks in kept if hooks is not None]

    def restore(self) -> None:
        """Let the tensors show it again; the items in the dictionaries of hooks are somebody else's."""
        for tensor, facts, gradient in zip(self._tensors, self._facts, self._gradients, strict=True):
            _show(tensor, *facts, gradient=gradient)


def _show(
    tensor: torch.Tensor,
    data: torch.Tensor,
    leaf: bool,
    needs_gradient: bool,
    *hooks: Any,
    gradient: torch.Tensor | None,
) -> None:
    if leaf and not tensor.is_leaf:
        tensor.detach_()  # the step wrote something into it that needs a gradient
    if not _same_view(tensor, data):
        tensor.data = data
    for name, before in zip(_HOOKS, hooks, strict=True):
        registered = getattr(tensor, name)
        if registered is not before:
            registered.clear()  # autograd goes on calling the old ones, whatever the attribute is set to
            setattr(tensor, name, before)
    if leaf:
        if tensor.requires_grad is not needs_gradient:
            tensor.requires_grad_(needs_gradient)
        if tensor.grad is not gradient:
            tensor.grad = gradient


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_lazy(one) or one.layout is not torch.strided or one.is_nested or other.layout is not torch.strided:
        return True  # nothing to compare; such tensors cannot be recorded anyway
    geometry = one.shape, one.stride(), one.storage_offset(), one.dtype
    return one.is_set_to(other) and geometry == (other.shape, other.stride(), other.storage_offset(), other.dtype)
