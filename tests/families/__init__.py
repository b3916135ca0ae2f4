"""Families of operations, each with the ways in which it fails, forward and in its derivative alone, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Case:
    """A function of leaves; the causes of its culprits in their order, none where nothing is wrong."""

    name: str
    causes: tuple[str, ...]
    function: Callable[..., torch.Tensor]
    leaves: tuple[torch.Tensor, ...]


CASES: list[Case] = []


def case(name: str, causes: str, function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> None:
    """Add a case; several causes are separated by commas, and `clean` stands for none."""
    CASES.append(Case(name, () if causes == "clean" else tuple(causes.split(", ")), function, leaves))


def t(*values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor of the given numbers."""
    return torch.tensor(values, dtype=dtype)


def half(*values: Any) -> torch.Tensor:
    """Make a float16 tensor of the given numbers."""
    return t(*values, dtype=torch.float16)


def complexes(*values: complex) -> torch.Tensor:
    """Make a complex tensor of the given numbers."""
    return t(*values, dtype=torch.complex64)


def masked(scores: torch.Tensor, kept: Any) -> torch.Tensor:
    """Put -inf where `kept` is false, as attention masks do."""
    return scores.masked_fill(~torch.tensor(kept), -INF)
