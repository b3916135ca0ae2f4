"""Memory that `empty` and its kin returned: what it held is kept when a call reads it before it was overwritten as a whole.

A replay that ran `empty` again would find something else there, and show another fault or none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from bisect_nan.program import Node
from bisect_nan.values import Values


class Uninitialized:
    """The memories that nobody has written to or read yet; false when there are none."""

    def __init__(self, values: Values, nodes: list[Node]) -> None:
        """Watch a program under construction; `Node.memory` is filled in there."""
        self._values, self._nodes = values, nodes
        self._pending: dict[int, int] = {}  # storage -> index of the call that made it

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._pending)

    def made(self, value: int, index: int) -> None:
        """Watch the value that the `empty` call number `index` returned."""
        self._pending[self._values.values[value].storage] = index

    def used(self, arguments: Sequence[tuple[int, torch.Tensor]], overwritten: Sequence[int]) -> None:
        """Settle the fate of what a call uses, just before it runs.

        Args:
            arguments: Value number and tensor of every tensor argument.
            overwritten: The values among them of which the call replaces every element without reading it.
        """
        numbers = [number for number, _ in arguments]
        for number, tensor in arguments:
            index = self._pending.pop(self._values.values[number].storage, None)
            if index is None:
                continue
            whole = self._nodes[index].outputs[0]
            if not (number == whole and number in overwritten and numbers.count(number) == 1):
                self._keep(index, tensor)

    def _keep(self, index: int, tensor: torch.Tensor) -> None:
        """Copy the memory that `tensor` shows, as the call that made it returned it, into the node."""
        node = self._nodes[index]
        value = self._values.values[node.outputs[0] or 0]
        whole = torch.empty(0, dtype=value.dtype, device=value.device)
        whole.set_(tensor.untyped_storage(), value.offset, value.shape, value.stride)
        content = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(whole)
        self._nodes[index] = dataclasses.replace(node, memory=content)
