"""Which infinities a program wrote on purpose: they are no fault in themselves."""

from __future__ import annotations

import math

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase
from bisect_nan.finite import NonFinite
from bisect_nan.recording.program import Placeholder, Program
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Executed

_LOGARITHMS = {"aten::log", "aten::log2", "aten::log10"}


class Intent:
    """Knows the literals of a program."""

    def __init__(self, program: Program, dependence: Dependence) -> None:
        """Remember which values depend on a parameter."""
        self._program, self._dependence = program, dependence
        self._accepted: set[int] = set()
        self._parameters = {p.value for p in program.placeholders if p.phase is Phase.PARAMETER}

    def wrote(self, executed: Executed) -> bool:
        """Whether infinities that a call made are meant: an infinite literal, or the logarithm of a 0/1 mask (not a learned one)."""
        node = executed.node
        if any(math.isinf(literal) for literal in node.literals):
            return True
        if node.target._schema.name not in _LOGARITHMS:
            return False
        (source,) = executed.inputs.values()
        zero, one = source == 0, source == 1
        return bool((zero | one).all()) and bool(one.any()) and not self._learned(node.index)

    def accept(self, value: int) -> None:
        """Take the bad elements of a placeholder for meant from now on: the step bears others of the same tensor."""
        self._accepted.add(value)

    def means(self, placeholder: Placeholder, tensor: torch.Tensor) -> bool:
        """Whether bad elements that came from outside are meant: accepted ones, infinities of a mask, those of a literal."""
        if placeholder.value in self._accepted:
            return True
        return not finite.kinds(tensor) & NonFinite.NAN and (placeholder.constant or is_mask(tensor))

    def _learned(self, index: int) -> bool:
        calls = {index, *self._dependence.ancestors(index)}
        return any(value in self._parameters for call in calls for value in self._program.nodes[call].inputs())


def is_mask(tensor: torch.Tensor) -> bool:
    """Whether a tensor from outside looks like a mask: infinities, no NaN, and at most one other value beside them."""
    others = tensor[~finite.mask(tensor, NonFinite.INF)]
    return not finite.kinds(tensor) & NonFinite.NAN and bool((others == others.flatten()[:1]).all())
