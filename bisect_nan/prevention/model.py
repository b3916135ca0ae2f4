"""Are all weights of a model finite?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bisect_nan.errors import BisectNanError
from bisect_nan.prevention.check import Check, examine


def check_model(model: nn.Module) -> Check:
    """Name the parameters and buffers of a model that hold NaN or Inf.

    Infinities that look meant are told apart, in `meant`: those of a buffer, or of a parameter that is not trained, which are a mask
    or a single number. A parameter that is trained, and the running statistics of a normalisation, are bad with any infinity.

        check = check_model(model)
        check.ok, check.names
        print(check)

    Args:
        model: The module.

    Raises:
        BisectNanError: It is something else.
    """
    if not isinstance(model, nn.Module):
        do = "pass the model; for saved weights, check_batch(weights) or `bisect-nan checkpoints FOLDER`"  # type: ignore[unreachable]
        raise BisectNanError(f"got {type(model).__name__} as the model", "a torch.nn.Module", do)
    return examine("model", model_tensors(model))


def model_tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kind, path and tensor of the parameters and buffers of a model; one under two names once."""
    for name, parameter in model.named_parameters():
        yield "parameter" if parameter.requires_grad else "constant", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer
