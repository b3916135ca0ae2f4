"""How a recorded call gets its live arguments, worked out once: what stays the same, and where values and generators go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bisect_nan.recording.program import GeneratorRef, Node, Ref, substitute


class Binding:
    """The arguments of one call, to be filled in as often as the call is run."""

    __slots__ = ("_fixed", "_keywords", "_mixed", "_refs")

    def __init__(self, node: Node) -> None:
        """Sort the arguments of a call."""
        self._fixed: list[Any] = list(node.args)
        self._refs = [(place, item.value) for place, item in enumerate(node.args) if isinstance(item, Ref)]
        self._mixed = [
            (place, item) for place, item in enumerate(node.args) if _varies(item) and not isinstance(item, Ref)
        ]
        self._keywords = {name: item for name, item in node.kwargs.items() if _varies(item)}

    def fill(
        self, node: Node, env: Mapping[int, torch.Tensor], generator: Callable[[int], torch.Generator]
    ) -> tuple[list[Any], Mapping[str, Any]]:
        """Return the positional and the keyword arguments.

        Args:
            node: The call.
            env: Tensors by value number.
            generator: Returns the generator that an index stands for.
        """
        arguments = self._fixed.copy()
        for place, number in self._refs:
            arguments[place] = env[number]
        for place, item in self._mixed:
            arguments[place] = substitute(item, env.__getitem__, generator)
        if not self._keywords:
            return arguments, node.kwargs
        return arguments, {**node.kwargs, **substitute(self._keywords, env.__getitem__, generator)}


def _varies(item: Any) -> bool:
    """Whether an argument holds a value or a generator."""
    if isinstance(item, list | tuple):
        return any(map(_varies, item))
    return isinstance(item, Ref | GeneratorRef)
