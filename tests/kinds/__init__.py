"""Every kind of fault that people meet, each as a small step whose guilty line is marked; here is what they share."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bisect_nan import Phase

INF = float("inf")
Batch = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A step and what has to be found in it: names that fit the culprit, rows of the batch, phase and module."""

    step: Callable[[Any, Any], torch.Tensor]
    ops: tuple[str, ...]
    rows: tuple[int, ...] | None
    phase: Phase | None
    module: str | None

    def lines(self) -> set[int]:
        """The marked lines."""
        text, first = inspect.getsourcelines(self.step)
        return {first + place for place, line in enumerate(text) if line.rstrip().endswith("# CULPRIT")}


KINDS: list[Kind] = []


def kind(
    *ops: str, rows: tuple[int, ...] | None = None, phase: Phase | None = Phase.FORWARD, module: str | None = None
) -> Callable[[Callable[[Any, Any], torch.Tensor]], Callable[[Any, Any], torch.Tensor]]:
    """Add a step to the kinds."""

    def add(step: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        KINDS.append(Kind(step, ops, rows, phase, module))
        return step

    return add


class Model(nn.Module):
    """A few layers that steps can use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.table = nn.Embedding(9, 6)
        self.zero = nn.Parameter(torch.zeros(6))
        self.register_buffer("steps", torch.zeros(()))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch() -> Batch:
    """Five rows; row 3 of `gap` and of `scale` holds the zero that faults are made of, row 1 of `spare` one that harms nobody."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 6, generator=generator)
    gap, spare = torch.rand(5, 6, generator=generator) + 0.5, torch.rand(5, 6, generator=generator) + 0.5
    gap[3], spare[1] = 0.0, 0.0
    one = torch.rand(5, 6, generator=generator) + 0.5
    one[3, 2] = 0.0
    keep = torch.ones(5, 6, dtype=torch.bool)
    keep[3] = False
    part = torch.rand(5, 6, generator=generator) > 0.4
    part[:, 0] = True
    return {
        "x": x,
        "gap": gap,
        "one": one,
        "spare": spare,
        "keep": keep,
        "part": part,
        "label": torch.tensor([0, 2, 1, 0, 2]),
        "ids": torch.tensor([[0, 1], [2, 3], [4, 5], [8, 6], [7, 1]]),
        "group": torch.tensor([0, 0, 1, 3, 3]),
    }


def decoy(b: Batch) -> torch.Tensor:
    """Innocent faults: selected away, clamped, scrubbed, sent through exp(-inf)."""
    spare = b["spare"]
    away = torch.where(spare > 0, 1 / spare, 0.0).mean()
    scrubbed = torch.nan_to_num(spare / spare).mean() + spare.log().clamp(-3, 3).mean() + spare.log().exp().mean()
    masked = b["x"].detach().masked_fill(~b["part"], -INF).softmax(-1)[:, 0].mean()
    return 0.01 * (away + scrubbed + masked)


class filled:  # noqa: N801  (reads like the context manager that it is)
    """torch fills new memory with NaN inside, as memory that was used before may be."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(mode=False)


def in_module(layer: nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run code of a step as if it stood in a module's forward."""
    plain = layer.forward
    layer.forward = lambda y: run(plain, y)  # type: ignore[method-assign]
    try:
        return layer(x)  # type: ignore[no-any-return]
    finally:
        layer.forward = plain  # type: ignore[method-assign]


def prepared() -> tuple[Model, Batch]:
    """Return a model and a batch for any of the steps."""
    model, data = Model(), batch()
    model.table_with_nan = nn.Embedding(9, 6)
    with torch.no_grad():
        model.table_with_nan.weight[8, 1] = math.nan
    data["broken"] = data["x"].clone()
    data["broken"][3, 4] = math.nan
    data["far"] = torch.rand(5, 6) + 1
    data["far"][3], data["far"][1, 2:4] = INF, INF
    data["energies"] = torch.randn(5, 6)
    data["pad"] = torch.zeros(5, 6, dtype=torch.bool)
    data["pad"][1, 2:] = True
    data["energies"][1, 2:], data["energies"][3, 4] = -INF, -INF
    data["missing"] = data["x"].clone()
    data["missing"][[0, 3], [1, 4]] = math.nan
    data["unmeasured"] = data["missing"].clone()
    data["unmeasured"][:, 2] = math.nan
    data["additive"] = torch.zeros(5, 6).masked_fill(~data["keep"], -INF)
    return model, data
