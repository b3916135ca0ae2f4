"""Shows of calls at the end of a step, without running them, that what they make is finite.

Half of a backward pass computes gradients of weights that no other call reads: matrix products and sums. None of their elements,
nor any sum on the way to them, is larger than the number of terms times the largest factors; where that is far below the end of
the range, the result is finite. To look at the operands takes a fraction of the time of the product.

Only such calls are left out whose results nothing reads but views that nothing reads. So whether one of them has to run after all
never depends on what another one would have made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from bisect_nan import finite
from bisect_nan.recording.program import NO_STORAGE, Node
from bisect_nan.replaying.stretch import Env, Stretch

_ATEN = torch.ops.aten
_VIEWS = {
    *(_ATEN.t.default, _ATEN.transpose.int, _ATEN.permute.default, _ATEN.view.default, _ATEN.detach.default),
    *(_ATEN.alias.default, _ATEN.expand.default, _ATEN.unsqueeze.default),
    *(_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims),
}
"""Views that show all elements of what they are a view of."""

_PRODUCTS = {_ATEN.mm.default, _ATEN.bmm.default}
"""Calls that add up products of elements of their two arguments along the last dimension of the first."""

_SUMS = {_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.embedding_dense_backward.default}
"""Calls that add up elements of their first argument; where there is a second one, at most as many as it has indices."""

_REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}

_MARGIN = 4.0
"""For kernels that round operands to a shorter type before they multiply them."""


class _Claim(NamedTuple):
    """A call is finite when the product of the largest elements of its factors is not above a limit."""

    factors: list[int]
    limit: float


class Bounds:
    """What one run may leave out.

    Attributes:
        left_out: The values that were not made; they would have been finite.
    """

    def __init__(self, stretch: Stretch, needed: Collection[int] = ()) -> None:
        """Find the calls whose results nothing reads but views that nothing reads.

        Args:
            stretch: The calls.
            needed: Program indices of calls that have to run all the same.
        """
        self.left_out: set[int] = set()
        self._stretch, self._values = stretch, stretch.program.values
        self._claims: dict[int, _Claim | None] = {}  # by place of such a call; None for a view
        self._shows: dict[int, int] = {}  # a view -> the value whose elements it shows
        self._looks: dict[int, tuple[int, float]] = {}  # a value -> where it was looked at, and its largest element
        read: set[int] = set()
        for place in reversed(range(len(stretch))):
            node = stretch.nodes[place]
            claim, made = self._claim(node), [number for number in node.outputs if number is not None]
            view = node.target in _VIEWS and len(made) == 1
            if view:
                self._shows[made[0]] = node.inputs()[0]
            if (view or claim) and node.index not in needed and read.isdisjoint(made) and self._stays(made, place):
                self._claims[place] = claim
            if not view or place not in self._claims:
                read.update(node.inputs())

    def cover(self, place: int, env: Env) -> bool:
        """Whether a call may be left out, in a run that is in front of it."""
        if place not in self._claims:
            return False
        node, claim = self._stretch.nodes[place], self._claims[place]
        if claim is None:
            covered = node.inputs()[0] in self.left_out
        else:
            covered = math.prod(self._largest(factor, place, env) for factor in claim.factors) <= claim.limit
        if covered:
            self.left_out.update(number for number in node.outputs if number is not None)
        return covered

    def _claim(self, node: Node) -> _Claim | None:
        """Return what makes the result of a product or of a sum finite; None for any other call."""
        if node.target not in _PRODUCTS and node.target not in _SUMS:
            return None
        inputs = node.inputs()
        factors = inputs if node.target in _PRODUCTS else inputs[:1]
        values = [self._values[number] for number in [*factors, *node.outputs] if number is not None]
        if any(value.dtype not in _REAL or value.storage == NO_STORAGE for value in values):
            return None
        if node.target in _PRODUCTS:
            terms = values[0].shape[-1]
        elif len(inputs) == 1:
            terms = math.prod(values[0].shape) // max(math.prod(values[-1].shape), 1)
        else:
            terms = math.prod(self._values[inputs[-1]].shape)
        kind = min((torch.finfo(value.dtype) for value in values), key=lambda kind: kind.max)
        rounded = math.exp(-terms * kind.eps)  # every addition may round up
        return _Claim(factors, kind.max / _MARGIN / max(terms, 1) * rounded)

    def _stays(self, numbers: Iterable[int], place: int) -> bool:
        """Whether what a call made is not written to by a later one."""
        storages = {self._values[number].storage for number in numbers}
        return not any(
            storage != NO_STORAGE and self._stretch.written_later(storage, place + 1) for storage in storages
        )

    def _largest(self, number: int, place: int, env: Env) -> float:
        """Return the largest element of a value; of several views of the same elements only one is looked at."""
        whole = number
        while whole in self._shows:
            whole = self._shows[whole]
        seen, found = self._looks.get(whole, (-1, 0.0))
        if seen < 0 or self._stretch.changed(self._stretch.program.memory(whole), seen, place):
            found = finite.largest(env[number])
            self._looks[whole] = place, found
        return found
