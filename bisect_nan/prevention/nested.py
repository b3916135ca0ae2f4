"""The tensors in anything nested, with their paths: batches, outputs of modules, checkpoints.

torch's pytrees know dictionaries, lists, tuples and what libraries register. Here mappings of any class and dataclasses are entered as
well, for batches and outputs are made of those.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def tensors(tree: Any, path: str = "", *, numbers: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a tree with their paths: `batch['labels'][0].depth`.

    Args:
        tree: Mappings, lists, tuples, sets and dataclasses, nested. Anything else holds no tensors.
        path: What the tree itself is called.
        numbers: Whether floats, complex numbers and NumPy arrays count as tensors.
    """
    yield from _tensors(tree, path, as_tensor if numbers else _if_tensor, ())


def _tensors(
    tree: Any, path: str, take: Callable[[Any], torch.Tensor | None], inside: tuple[int, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    tensor = take(tree)
    if tensor is not None:
        yield path, tensor
    elif id(tree) not in inside:  # what contains itself is entered once
        for step, item in _items(tree):
            yield from _tensors(item, path + step, take, (*inside, id(tree)))


def _if_tensor(leaf: Any) -> torch.Tensor | None:
    return leaf if isinstance(leaf, torch.Tensor) else None


def replaced(tree: Any, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """Return a tree with some tensors replaced; what holds none of those is the same object, and `tree` is left as it is.

    Args:
        tree: As in `tensors`; numbers count.
        change: Returns the new tensor, or None to keep the old one.
    """
    tensor = as_tensor(tree)
    if tensor is not None:
        new = change(tensor)
        return tree if new is None else _like(tree, new)
    if isinstance(tree, set | frozenset):
        return type(tree)([replaced(item, change) for item in tree])
    items = [(step, key, item, replaced(item, change)) for step, key, item in _keyed(tree)]
    if all(old is new for _, _, old, new in items):
        return tree
    if isinstance(tree, tuple):
        parts = [new for *_, new in items]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    made = dict(tree) if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping) else copy.copy(tree)
    for step, key, old, new in items:
        if old is new:
            continue
        if step.startswith("."):
            object.__setattr__(made, key, new)  # a frozen dataclass is copied, not changed
        else:
            made[key] = new
    return made


def as_tensor(leaf: Any) -> torch.Tensor | None:
    """Return a leaf as a tensor; None for what holds no numbers that could be non-finite."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, float | complex):
        return torch.tensor(leaf, dtype=torch.complex128 if isinstance(leaf, complex) else torch.float64)
    if type(leaf).__module__ == "numpy" and getattr(getattr(leaf, "dtype", None), "kind", "") in ("f", "c"):
        return torch.tensor(leaf)  # a copy: torch warns of arrays that it may not write to
    return None


def _like(leaf: Any, new: torch.Tensor) -> Any:
    """Return a tensor as the kind of leaf that it replaces."""
    if isinstance(leaf, torch.Tensor):
        return new
    if isinstance(leaf, float | complex):
        return new.item()
    return new.numpy() if hasattr(leaf, "shape") and leaf.shape else leaf.dtype.type(new.item())


def _items(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, set | frozenset):
        yield from (("{}", item) for item in tree)
    else:
        yield from ((step, item) for step, _, item in _keyed(tree))


def _keyed(tree: Any) -> list[tuple[str, Any, Any]]:
    """Return how each item of a container is written behind it, its key, and the item."""
    found: list[tuple[str, Any, Any]] = []
    if isinstance(tree, Mapping):
        found = [(f"[{key!r}]", key, item) for key, item in tree.items()]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        found = [(f".{name}", name, item) for name, item in zip(tree._fields, tree, strict=True)]
    elif isinstance(tree, list | tuple):
        found = [(f"[{place}]", place, item) for place, item in enumerate(tree)]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree)]
        found = [(f".{name}", name, getattr(tree, name)) for name in names if hasattr(tree, name)]
    return found
