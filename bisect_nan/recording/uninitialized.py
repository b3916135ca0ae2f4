"""Memory that `empty` and its kin returned: what it held is kept when a call reads it before it was overwritten as a whole.

A replay that ran `empty` again would find something else there, and show another fault or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bisect_nan.recording.values import Values


class Uninitialized:
    """The memories that nobody has written to or read yet; false when there are none.

    Attributes:
        kept: By index of the call that made it: what a memory held that was read first. See `Node.memory`.
    """

    def __init__(self, values: Values) -> None:
        """Watch the memories of a program under construction."""
        self.kept: dict[int, torch.Tensor] = {}
        self._values = values
        self._pending: dict[int, tuple[int, int]] = {}  # storage -> its first value, and the call that made it

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._pending)

    def made(self, value: int, index: int) -> None:
        """Watch the value that the `empty` call number `index` returned."""
        self._pending[self._values.storages[value]] = value, index

    def used(self, arguments: Sequence[tuple[int, torch.Tensor]], overwritten: Sequence[int]) -> None:
        """Settle the fate of what a call uses, just before it runs.

        Args:
            arguments: Value number and tensor of every tensor argument.
            overwritten: The values among them of which the call replaces every element without reading it.
        """
        numbers = [number for number, _ in arguments]
        for number, tensor in arguments:
            whole, index = self._pending.pop(self._values.storages[number], (-1, -1))
            if index >= 0 and not (number == whole and number in overwritten and numbers.count(number) == 1):
                with torch._C._DisableTorchDispatch():  # noqa: SLF001  (as in `values`)
                    self.kept[index] = self._content(whole, tensor)

    def _content(self, whole: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the memory that `tensor` shows, as the value `whole` shows it."""
        value = self._values.value(whole)
        shown = torch.empty(0, dtype=value.dtype, device=value.device)
        shown.set_(tensor.untyped_storage(), value.offset, value.shape, value.stride)
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(shown)
