"""What torch was switched to while something ran: autocast and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_DEVICES = "cpu", "cuda"


class Modes:
    """The modes that were on when this object was made; `again` turns them on for a while.

    A step may be called within `torch.autocast`, and the update that finds its gradients bad without it.
    """

    def __init__(self) -> None:
        """Remember the present modes."""
        self._gradients = torch.is_grad_enabled()
        self._autocast = {name: _autocast(name) for name in _DEVICES}

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Run under these modes."""
        with contextlib.ExitStack() as stack, torch.set_grad_enabled(self._gradients):
            for name, (enabled, dtype) in self._autocast.items():
                if (enabled, dtype) != _autocast(name):
                    stack.enter_context(torch.autocast(name, dtype, enabled))
            yield


def _autocast(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
