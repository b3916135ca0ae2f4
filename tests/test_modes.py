"""The modes that were on at one time can be turned on at another."""

from __future__ import annotations

import torch

from bisect_nan.loop.modes import Modes


def present() -> tuple[bool, bool, torch.dtype]:
    """Return what a step would run under now."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def test_modes_are_turned_on_again_and_off_after() -> None:
    """Autocast, its type and gradients are those of the moment when they were noted, wherever that is undone."""
    outside, plain = present(), Modes()
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        inside, modes = present(), Modes()
        with plain.again():
            assert present()[:2] == outside[:2]
        assert present() == inside
    with modes.again():
        assert present() == inside
    assert present() == outside
