"""How many values of one tensor are NaN or infinite, said where the program stands."""

from __future__ import annotations

import logging
from typing import Any

from bisect_nan.errors import BisectNanError
from bisect_nan.prevention import nested
from bisect_nan.prevention.check import Check, examine

_LOG = logging.getLogger(__name__)


def check_tensor(tensor: Any, name: str = "tensor", step: int | None = None, *, raise_on_bad: bool = False) -> Check:
    """Count the NaN and Inf of a tensor; log a warning, or raise, if there are any.

    Any infinity is bad here: whoever checks one tensor knows what it should hold.

    Args:
        tensor: Any shape, dtype, layout and device; a NumPy array, or a single number, likewise.
        name: What it is called in the message.
        step: Number of the training step, for the message.
        raise_on_bad: Whether to raise instead of logging.

    Returns:
        The counts: `check.bad[0].values.nan`, `.pos_inf`, `.neg_inf`, and `check.bad[0].share`; nothing in `bad` when all is finite.

    Raises:
        BisectNanError: It is something else.
        NonFiniteValues: Something is bad, and `raise_on_bad` is set.
    """
    values = nested.as_tensor(tensor)
    if values is None:
        do = "give a tensor, or use check_batch for what holds several"
        raise BisectNanError(f"got {type(tensor).__name__} as {name}", "a tensor of numbers that can be non-finite", do)
    check = examine("check" if step is None else f"check in step {step}", [("tensor", name, values)])
    if raise_on_bad:
        check.require("look at what made it: capture the step with bisect_nan.Snapshot.capture and locate the result")
    for spoiled in check.bad:
        place = "" if step is None else f" in step {step}"
        _LOG.warning("%s%s: %s (%.3g%%)", name, place, spoiled.values.describe(), 100 * spoiled.share)
    return check
