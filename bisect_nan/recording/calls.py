"""A call as it is written down while the step runs: what can only be known then, in as little time as possible.

A `Node` is made of it once the step is over, when making it takes no time from the step and its caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bisect_nan.finding import Phase, SourceLine
from bisect_nan.recording.program import Node, Tracking, tensors


class Effects(NamedTuple):
    """What a call did besides returning values.

    Attributes:
        written: Value numbers of the arguments that it wrote to.
        autograd: Name of the autograd node that ran it.
        derived: Index of the call whose derivative it computes, or that the Python code around it belongs to; else -1.
        cost: Seconds.
        tracked: How autograd knew its tensor arguments.
        random: Whether it draws random numbers.
        generator: State of the generator before it, where that was not left so by the previous draw.
    """

    written: tuple[int, ...] = ()
    autograd: str | None = None
    derived: int = -1
    cost: float = 0.0
    tracked: tuple[Tracking, ...] = ()
    random: bool = False
    generator: torch.Tensor | None = None


class Call(NamedTuple):
    """A call; for the meaning of its fields see `Node` and `Effects`."""

    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int | None, ...]
    effects: Effects
    phase: Phase
    module: str
    source: SourceLine | None
    grad: bool

    def in_phase(self, phase: Phase) -> Call:
        """Return the call as one of another phase."""
        return self._replace(phase=phase)

    def has_derivative(self, name: str) -> bool:
        """Whether an autograd node of this name (`SoftmaxBackward0`) can be the call's derivative."""
        operator = self.target._schema.name.partition("::")[2]
        return operator.replace("_", "").lower() == name.rstrip("0123456789").removesuffix("Backward").lower()

    def node(self, index: int, storages: Sequence[int], memory: torch.Tensor | None) -> Node:
        """Return the node of the program.

        Args:
            index: Its position.
            storages: Storage of every value.
            memory: What the uninitialised memory that it returned held; None when nobody read it.
        """
        effects = self.effects
        return Node(
            index=index,
            target=self.target,
            args=self.args,
            kwargs=self.kwargs,
            outputs=self.outputs,
            writes=tuple({storages[number]: None for number in effects.written}),
            written=effects.written,
            phase=self.phase,
            autograd=effects.autograd,
            forward=effects.derived if effects.derived >= 0 and self.source is None else None,
            module=self.module,
            source=self.source,
            cost=effects.cost,
            grad=self.grad,
            tracked=effects.tracked,
            random=effects.random,
            generator=effects.generator,
            memory=memory,
        )


def tracking(items: list[Any]) -> tuple[Tracking, ...]:
    """Return how autograd knows the tensors among a call's arguments; nothing when it knows none of them."""
    known = []
    for item in items:
        if isinstance(item, torch.Tensor):
            known.append((Tracking.LEAF if item.is_leaf else Tracking.GRAPH) if item.requires_grad else Tracking.NO)
        elif isinstance(item, list | tuple):
            inner = [part for part in tensors(item) if part is not None]
            known += tracking(inner) or [Tracking.NO] * len(inner)
    return tuple(known) if any(known) else ()
