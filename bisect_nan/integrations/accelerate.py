"""Guards for training loops that `accelerate.Accelerator` has prepared."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from bisect_nan.integrations import distributed
from bisect_nan.loop.guard import Guard


def guard_for(
    accelerator: accelerate.Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> Guard:
    """Return a guard of a model and an optimizer; it is used like any `Guard`.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        guard = guard_for(accelerator, model, optimizer)
        step = guard.watch(step)

    `accelerator.backward`, `accumulate`, `clip_grad_norm_` and mixed precision need nothing special. With several processes it is a
    `RankGuard`.

    Args:
        accelerator: What has prepared them.
        model: The prepared model, as the step gets it.
        optimizer: Its prepared optimizer.
        options: Further arguments of `Guard`.
    """
    options = {"scaler": accelerator.scaler, **options}
    return distributed.guard_for(accelerator.unwrap_model(model), optimizer_in(optimizer), **options)


def optimizer_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return torch's optimizer in a prepared one, which knows no hooks."""
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
