"""Notices when tensors of a running training, which a captured snapshot refers to, are written to."""

from __future__ import annotations

import functools
from collections.abc import Iterable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves  # torch 2.6 to 2.13
from torch.utils.weak import WeakIdKeyDictionary

from bisect_nan.recording.outcome import Recording
from bisect_nan.recording.state import optimizer_tensors

_fused: MutableMapping[torch.Tensor, int] = WeakIdKeyDictionary()
"""How often fused updates have written to a tensor: their kernels do not count it (torch 2.13: `torch._fused_adamw_`)."""


@dataclass(frozen=True, slots=True, eq=False)
class Live:
    """A tensor of the running training.

    Attributes:
        name: What it is called in the program.
        tensor: The tensor.
        counts: How often it had been written to when this object was made.
    """

    name: str
    tensor: torch.Tensor
    counts: tuple[int, int]

    @property
    def changed(self) -> bool:
        """Whether it has been written to since."""
        return _counts(self.tensor) != self.counts


def _counts(tensor: torch.Tensor) -> tuple[int, int]:
    return writes(tensor), _fused.get(tensor, 0)


@functools.cache
def _count_fused_updates() -> None:
    """Look after each update of each optimizer, from the first captured snapshot on."""
    register_optimizer_step_post_hook(_after_update)


def _after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for parameter in (p for group in optimizer.param_groups if group.get("fused") for p in group["params"]):
        for tensor in [parameter, *optimizer.state.get(parameter, {}).values()]:
            if isinstance(tensor, torch.Tensor):
                _fused[tensor] = _fused.get(tensor, 0) + 1


def watch(
    recording: Recording, model: Any, batch: Any = None, optimizer: torch.optim.Optimizer | None = None
) -> tuple[Live, ...]:
    """Return the tensors of model, batch and optimizer whose memory a recording's placeholders show.

    The recording's own tensors would not tell: they were made below autograd, where torch gives views a count of their own.
    """
    _count_fused_updates()
    names: dict[int, str] = {}
    for placeholder in recording.program.placeholders:
        tensor = recording.tensors[placeholder.value]
        if tensor.layout is torch.strided:
            names.setdefault(tensor.untyped_storage().data_ptr(), placeholder.name)
    found = []
    for tensor in _tensors(model, batch, optimizer):
        if tensor.layout is torch.strided and not tensor.is_inference():  # torch does not count those
            name = names.get(tensor.untyped_storage().data_ptr())
            if name is not None:
                found.append(Live(name, tensor, _counts(tensor)))
    return tuple(found)


def _tensors(model: Any, batch: Any, optimizer: torch.optim.Optimizer | None) -> Iterable[torch.Tensor]:
    if isinstance(model, nn.Module):
        yield from model.parameters()
        yield from model.buffers()
    yield from (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    if optimizer is not None:
        yield from (tensor for _, tensor in optimizer_tensors(optimizer))
        yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor has been written to."""
    return tensor._version  # noqa: SLF001  (described in torch's notes on autograd)


def counts(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor has been written to; torch does not count it for those made in inference mode."""
    return [0 if tensor.is_inference() else writes(tensor) for tensor in tensors]


def uncounted(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """Return a context in which writes to some tensors are not counted, since all that is written will be put back.

    A graph that waits for its backward pass refuses it once a tensor that it has saved was written to.
    """
    counted = tuple(tensor for tensor in tensors if not tensor.is_inference())
    context: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter  # noqa: SLF001  (torch 2.9 to 2.13)
    return context(counted)  # type: ignore[no-any-return]
