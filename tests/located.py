"""Locates the fault of a small function through the public interface, with its leaves as the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bisect_nan import Finding, Snapshot, locate


class Leaves(TorchFunctionMode):
    """Keeps the leaves that code makes, or hands out those that were kept in an earlier run of the same code."""

    def __init__(self, kept: Sequence[torch.Tensor] = ()) -> None:
        """Keep leaves when there are none yet."""
        super().__init__()
        self.made: list[torch.Tensor] = []
        self._kept = list(kept)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the call; a leaf that comes out is kept, or replaced."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or not (result.requires_grad and result.is_leaf):
            return result
        if any(result is leaf for leaf in (*self.made, *self._kept)):
            return result
        self.made.append(result)
        return self._kept[len(self.made) - 1] if self._kept else result


def finding_of_code(function: Callable[[], torch.Tensor]) -> Finding:
    """Locate the fault of a function without arguments: a non-finite result, or a gradient of a leaf that it makes."""
    with Leaves() as first:
        function()
    model = nn.ParameterList([nn.Parameter(leaf.detach().clone()) for leaf in first.made])

    def step(model: nn.ParameterList, _: Any) -> torch.Tensor:
        with Leaves(list(model)):
            return function()

    return locate(Snapshot.capture(model, {}, step))


def finding_of(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Finding:
    """Locate the fault of a function of leaves; a result that is no scalar is summed up."""
    model = nn.ParameterList([nn.Parameter(leaf.clone()) for leaf in leaves])

    def step(model: nn.ParameterList, _: Any) -> torch.Tensor:
        result = function(*model)
        result = result.real if result.is_complex() else result
        return result.float().sum() if result.ndim else result

    return locate(Snapshot.capture(model, {}, step))
