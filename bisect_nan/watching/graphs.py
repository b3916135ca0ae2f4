"""Tells whether autograd still holds a graph that a later backward pass may run through.

Nothing public says so, but whatever is put into the metadata of an autograd node lives exactly as long as the node.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch

_KEY = "bisect_nan"


class _Mark:
    """Lies in the metadata of a node that no backward pass has run yet."""

    __slots__ = ("__weakref__",)


class Graphs:
    """The graphs that were made while gradients were enabled, and not run since."""

    def __init__(self) -> None:
        """Start without any."""
        self._marks: weakref.WeakSet[_Mark] = weakref.WeakSet()

    @property
    def wait(self) -> bool:
        """Whether there is a graph whose backward pass may still come."""
        return len(self._marks) > 0

    def seen(self, items: Iterable[Any]) -> None:
        """Mark the graphs that the tensors among the arguments of a call belong to."""
        for item in items:
            if isinstance(item, torch.Tensor):
                node: Any = item.grad_fn  # torch's stubs take its `metadata` for a method
                kind: Any = type(node)
                if node is not None and _saves(kind) and _KEY not in node.metadata:
                    mark = node.metadata[_KEY] = _Mark()
                    self._marks.add(mark)
            elif isinstance(item, list | tuple):
                self.seen(item)

    def ran(self, roots: Iterable[torch.Tensor]) -> None:
        """Forget the graphs behind some roots: their backward pass has run, and nothing is left to run again."""
        waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
        met = set(waiting)
        while waiting:
            node = waiting.pop()
            mark = node.metadata.pop(_KEY, None)
            if mark is not None:
                self._marks.discard(mark)
            for before, _ in node.next_functions:
                if before is not None and before not in met:
                    met.add(before)
                    waiting.append(before)

    def forget(self) -> None:
        """Wait for none of those that there are."""
        self._marks.clear()


@functools.cache
def _saves(kind: type) -> bool:
    """Whether nodes of a type keep tensors for the backward pass. A sum that a script carries along (`total += loss`) keeps none."""
    python = issubclass(kind, torch.autograd.function.BackwardCFunction)
    return python or any(name.startswith("_raw_saved") for name in dir(kind))
