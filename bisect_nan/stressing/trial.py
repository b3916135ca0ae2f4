"""One example: fresh leaves, the loss, its gradients, and one look at whether all of them are finite."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis.errors import UnsatisfiedAssumption
from torch import nn
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves, tree_map_only

from bisect_nan import finite
from bisect_nan.recording.capture import scalar_loss
from bisect_nan.recording.raised import suspicion
from bisect_nan.recording.state import Surroundings, remembered
from bisect_nan.snapshots.snapshot import Snapshot

SEED = 0
"""torch's generator at the start of every example, and in the case file."""

_DATA = re.compile(r"^(y|y_true|gt)$|target|label|truth|mask|weight")
"""What losses call those of their arguments that no gradient belongs to."""


class Trial:
    """A loss that is run on many examples, each as if it were the first.

    Attributes:
        count: How many examples have been run.
    """

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Remember the state that every example starts from.

        Args:
            function: The loss, or a step that takes a model.
            arguments: What it is called with, modules among them.
        """
        found = [
            value
            for value in (function, getattr(function, "__self__", None), *arguments)
            if isinstance(value, nn.Module)
        ]
        self.count = 0
        self.modules = list({id(module): module for module in found}.values())
        self.model = self.modules[0] if len(self.modules) == 1 else nn.ModuleList(self.modules)
        self._function = function
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._before = Surroundings(self.model)
        torch.manual_seed(SEED)
        self._start = Surroundings(self.model, contents=remembered(self.model))

    def accepts(self, arguments: Sequence[Any]) -> bool:
        """Tell whether the loss runs on some arguments without an error."""
        try:
            self.fails(arguments)
        except Exception:  # noqa: BLE001  (whatever it is, the loss does not take these arguments)
            return False
        return True

    def fails(self, arguments: Sequence[Any]) -> bool:
        """Run the loss forward and backward, and tell whether it or a gradient is non-finite, or it raises because of a NaN."""
        self.count += 1
        arguments = self.leaves(arguments)
        leaves = [
            leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                if self.count > 1:  # What the first example was warned of need not be said hundreds of times.
                    warnings.simplefilter("ignore")
                loss = scalar_loss(self._function(*arguments))
                gradients = self._gradients(loss, [*leaves, *self._parameters])
        except UnsatisfiedAssumption:
            raise
        except Exception as error:
            self._start.restore()
            with contextlib.suppress(Exception):  # what it raises for another reason, once more
                if suspicion(error) is not None:
                    return self.capture(arguments).observed is not None
            raise
        finally:
            self._start.restore()
        return bool(finite.probe([loss.detach(), *gradients]))

    def capture(self, arguments: Sequence[Any]) -> Snapshot:
        """Record the loss on an example."""
        function, arguments = self._function, self.leaves(arguments)
        own = {index: value for index, value in enumerate(arguments) if not isinstance(value, nn.Module)}
        names = self.names(arguments)

        def step(_: nn.Module, batch: dict[str, Any]) -> Any:
            return function(*(batch[names[index]] if index in own else value for index, value in enumerate(arguments)))

        return Snapshot.capture(self.model, {names[index]: value for index, value in own.items()}, step)

    def end(self) -> None:
        """Put generators and modules back to where they were before the first example."""
        self._before.restore()

    def names(self, arguments: Sequence[Any]) -> list[str]:
        """Return what the loss calls its arguments."""
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):  # A function without a signature, such as some of C.
            parameters = []
        plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return [*plain, *(f"argument {index}" for index in range(len(plain), len(arguments)))][: len(arguments)]

    def leaves(self, arguments: Sequence[Any]) -> list[Any]:
        """Return copies of the arguments whose gradients can be taken: of the tensors that require them, or as `guesses` says."""
        guesses = self.guesses(arguments)

        def leaf(tensor: torch.Tensor, *, guessed: bool) -> torch.Tensor:
            wanted = guessed and (tensor.is_floating_point() or tensor.is_complex())
            return tensor.detach().clone().requires_grad_(wanted or tensor.requires_grad)

        return [
            pytree.tree_map_only(
                torch.Tensor, functools.partial(leaf, guessed=guesses and not _DATA.search(name)), value
            )
            for name, value in zip(self.names(arguments), arguments, strict=True)
        ]

    def guesses(self, arguments: Sequence[Any]) -> bool:
        """Tell whether nothing says of what gradients are taken: neither a tensor that requires one nor a parameter.

        Then it is every floating-point tensor whose name is not that of data: a target has no gradient in training, and
        torch's own losses have infinite ones there.
        """
        given = [leaf for leaf in pytree.tree_leaves(list(arguments)) if isinstance(leaf, torch.Tensor)]
        return not (self._parameters or any(tensor.requires_grad for tensor in given))

    @staticmethod
    def _gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not (leaves and loss.requires_grad):
            return []
        return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
