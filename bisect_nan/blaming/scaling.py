"""The factor that a step multiplies its loss with at the end, as it is done for half precision."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from bisect_nan.recording.program import Program


def loss_scale(program: Program, given: Mapping[int, torch.Tensor]) -> float:
    """Return the power of two that the last call of the forward pass multiplies the loss with; 1 when it does nothing like that.

    Args:
        program: The step.
        given: Its placeholders by value number: the scale may be a tensor from outside.
    """
    loss = program.targets.loss
    maker = next((node for node in program.nodes if loss is not None and loss in node.outputs), None)
    if maker is None or str(maker.target) != "aten.mul.Tensor":
        return 1.0
    numbers = [given[n] for n in maker.inputs() if n in given]
    factors = [
        *maker.literals,
        *(float(number) for number in numbers if number.numel() == 1 and not number.is_complex()),
    ]
    return next((factor for factor in factors if factor > 1 and math.frexp(factor)[0] == 0.5), 1.0)  # noqa: PLR2004  (one bit)
