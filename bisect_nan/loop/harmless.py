"""Calls that are left out: what they return has a backward pass that changes no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_map

from bisect_nan.loop.training import Training


class LeftOut:
    """The calls of a step whose gradients its update does not use.

    Attributes:
        some: Whether there are any in this step.
        thrown: How often the loop has thrown away the gradients of a step that had some.
    """

    def __init__(self, training: Training) -> None:
        """None is left out yet."""
        self._training = training
        self._zeros: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.some, self.thrown = False, 0

    def harmless(self, result: Any) -> Any:
        """Return what a call returned, with every tensor that has a backward pass replaced by one whose backward pass does nothing.

        Args:
            result: A loss, or any pytree with losses.
        """
        self.some = True

        def replaced(leaf: Any) -> Any:
            if not (isinstance(leaf, torch.Tensor) and leaf.requires_grad):
                return leaf
            with torch.enable_grad():
                start = torch.zeros((), device=leaf.device, requires_grad=True)
                return _Harmless.apply(start, leaf.detach(), self)  # type: ignore[no-untyped-call]

        return pytree.tree_map(replaced, result)

    def settle(self) -> None:
        """Take back the gradients of zeros that nothing was added to: to an optimizer none and zero are not the same."""
        for parameter, zeros in self._zeros:
            if parameter.grad is zeros and not zeros.any():
                parameter.grad = None
        self.forget()

    def forget(self) -> None:
        """Begin with the next step."""
        self._zeros, self.some = [], False

    def throw_away(self) -> None:
        """Begin anew: the loop has thrown the gradients away."""
        self.thrown += self.some
        self.forget()

    def backward(self) -> None:
        """Give every parameter a gradient of zeros if none has one: a `GradScaler` refuses to step without any."""
        parameters = self._training.parameters()
        if all(parameter.grad is None for parameter in parameters):
            for parameter in parameters:
                parameter.grad = zeros_for(parameter, self._training.optimizer)
                self._zeros.append((parameter, parameter.grad))


def zeros_for(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return a gradient of zeros of the kind that an optimizer takes: that of the present one, which may be sparse."""
    if parameter.grad is not None:
        return torch.zeros_like(parameter.grad)
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    return torch.zeros_like(parameter, layout=torch.sparse_coo if sparse else parameter.layout)


class _Harmless(torch.autograd.Function):
    """Shows a tensor as it is."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, shown: torch.Tensor, left: LeftOut) -> torch.Tensor:
        ctx.left = left
        return shown.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None, None]:
        ctx.left.backward()
        return None, None, None
