"""A healthy state of a training, kept in host memory, to go back to."""

from __future__ import annotations

import copy
import random
import sys
from pathlib import Path
from typing import Any

import torch

from bisect_nan.loop.training import Training
from bisect_nan.recording.state import Surroundings, remembered
from bisect_nan.whole_file import whole_file


class HealthyState:
    """Parameters, buffers, optimizer, scaler, scheduler and generators, as they were when this object was made.

    Attributes:
        training: Whose they are.
    """

    def __init__(self, training: Training, scaler: Any, scheduler: Any) -> None:
        """Copy everything.

        Args:
            training: The model and its optimizer.
            scaler: A `GradScaler`, or None.
            scheduler: Anything with `state_dict` and `load_state_dict`, or None.
        """
        self.training = training
        tensors = [*training.parameters(), *remembered(training.model), *training.state()]
        self._before = Surroundings(training.model, training.optimizer)
        self._before.keep((tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors)
        self._others = [(part, copy.deepcopy(part.state_dict())) for part in (scaler, scheduler) if part is not None]

    def restore(self) -> None:
        """Put everything back, any number of times."""
        self._before.restore()
        for part, state in self._others:
            part.load_state_dict(copy.deepcopy(state))


def write_healthy(path: Path, training: Training, scaler: Any, scheduler: Any, step: int) -> None:
    """Write the present state as `torch.save` does, as a whole or not at all; `torch.load(path, weights_only=True)` opens it.

    The file holds `step`, `model`, `optimizer`, `scaler`, `scheduler` (state dicts, or None) and `generators` (`torch`, `python`).

    Raises:
        OSError: It cannot be written; what was at `path` is still there.
    """
    state = {
        "step": step,
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "generators": _generators(),
    }
    with whole_file(path) as file:
        torch.save(state, file)


def _generators() -> dict[str, Any]:
    numpy = sys.modules.get("numpy")
    legacy = () if numpy is None else numpy.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
        "python": random.getstate(),
        "numpy": tuple(part.tolist() if hasattr(part, "tolist") else part for part in legacy),
    }
