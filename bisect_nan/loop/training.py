"""What there is to look at in a training: gradients, parameters, optimizer state and buffers, by kind and name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from bisect_nan import finite
from bisect_nan.recording.state import named_parameters, optimizer_tensors

Key = tuple[str, str]
"""Kind of a tensor (`parameter`, `optimizer`, `buffer`) and its name."""


@dataclass(frozen=True, slots=True)
class Training:
    """A model and an optimizer of its parameters; of the parameters only those count that the optimizer changes."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients that are there."""
        return [parameter.grad for parameter in self.parameters() if parameter.grad is not None]

    def state(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer keeps."""
        return [tensor for _, tensor in optimizer_tensors(self.optimizer)]

    def bad_gradients(self) -> dict[str, torch.Tensor]:
        """Return the non-finite gradients by the names of their parameters."""
        gradients = {name: p.grad for name, p in self._named_parameters().items() if p.grad is not None}
        return {name: gradient for name, gradient in gradients.items() if finite.probe([gradient])}

    def named(self) -> Iterator[tuple[Key, torch.Tensor]]:
        """Yield parameters, optimizer state and buffers."""
        yield from ((("parameter", name), parameter.detach()) for name, parameter in self._named_parameters().items())
        yield from ((("optimizer", name), tensor) for name, tensor in optimizer_tensors(self.optimizer))
        yield from ((("buffer", name), buffer) for name, buffer in self.model.named_buffers())

    def bad(self) -> dict[Key, torch.Tensor]:
        """Return those that are non-finite now."""
        named = dict(self.named())
        if not finite.probe(named.values()):
            return {}
        return {key: tensor for key, tensor in named.items() if finite.probe([tensor])}

    def _named_parameters(self) -> dict[str, torch.Tensor]:
        trained = {id(parameter) for parameter in self.parameters()}
        return {name: p for name, p in named_parameters(self.model, self.optimizer).items() if id(p) in trained}
