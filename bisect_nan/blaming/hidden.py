"""Faults behind a fault: badness that passes through finite values before it shows again.

`x / inf` and `exp(-inf)` are 0, and 0 / 0 further down has only healthy inputs. So the zeros that a birth was made of (and values
at the very end of the range, which `nan_to_num` makes) are followed back through healthy values to infinities, and from there on
to where these were born. Interventions then decide whether they are the root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bisect_nan import finite
from bisect_nan.blaming.trace import Birth, Marks, Origin, Trail
from bisect_nan.replaying.blame import split
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.influence import depended_on, is_number
from bisect_nan.replaying.intent import Intent
from bisect_nan.replaying.replay import Edit, Executed, Run
from bisect_nan.replaying.stretch import Checkpoint, Stretch


class Census:
    """Knows where a run makes bad values at all: without any there is nothing to follow, which is the usual case."""

    def __init__(
        self,
        stretch: Stretch,
        checkpoints: Sequence[Checkpoint],
        intent: Intent,
        dependence: Dependence,
        edits: Mapping[int, Edit] | None = None,
    ) -> None:
        """Prepare; nothing is run before the first question.

        Args:
            stretch: The calls.
            checkpoints: Where segments can be run from again, ascending, the first at cut 0.
            intent: Tells the infinities that were written on purpose.
            dependence: Of the whole program.
            edits: Interventions that are in force, in the checkpoints as well.
        """
        self._stretch, self._checkpoints, self._intent, self._dependence = stretch, checkpoints, intent, dependence
        self._edits = edits
        self._made: list[int] = []
        self._counted = 0

    def behind(self, birth: Birth) -> list[Birth]:
        """Return the births whose infinities, turned into finite values, a birth was made of."""
        if birth.node < 0 or birth.origin is not Origin.MADE:
            return []
        cut = self._stretch.cut_after(birth.node)
        if not self._stretch.is_small(0, cut):
            return self._roots(birth, zeros_only=True)
        self._count(cut - 1)
        before = self._dependence.ancestors(birth.node)
        unwritten = any(self._stretch.program.nodes[call].memory is not None for call in before)
        if before.isdisjoint(self._made) and not unwritten and not self._outside():
            return []
        return self._roots(birth, everything=unwritten)

    def _roots(self, birth: Birth, *, everything: bool = False, zeros_only: bool = False) -> list[Birth]:
        follow = _Follow(birth, everything, zeros_only)
        walk = _Walk(self._stretch, self._checkpoints, self._intent, follow, self._edits)
        walk.follow(self._stretch.cut_after(birth.node))
        return [birth for birth in walk.births if birth.origin is not Origin.WRITTEN]

    def _outside(self) -> bool:
        """Whether a tensor came in with bad values that are not meant."""
        start, known = self._checkpoints[0].env, self._stretch.program.placeholders
        held = [(placeholder, start[placeholder.value]) for placeholder in known if placeholder.value in start]
        return any(finite.probe([tensor]) and not self._intent.means(p, tensor) for p, tensor in held)

    def _count(self, cut: int) -> None:
        """Note the calls before a cut that make bad values which are not meant."""
        if cut <= self._counted:
            return
        since, self._counted = self._counted, cut
        checkpoint = [c for c in self._checkpoints if c.cut <= since][-1]

        def look(executed: Executed) -> None:
            if finite.probe(executed.content.values()) and self._makes(executed):
                self._made.append(executed.node.index)

        Run(self._stretch, checkpoint, self._edits).advance(cut, look)

    def _makes(self, executed: Executed) -> bool:
        masks = {n: finite.mask(made) for n, made in executed.content.items() if self._stretch.fills(executed.node, n)}
        parts = [split(executed, n, mask) for n, mask in masks.items() if bool(mask.any())]
        born = any(bool(part.born.any()) for part in parts) and not self._intent.wrote(executed)
        return born or any(bool(part.converted.any()) for part in parts)


@dataclass(frozen=True, slots=True)
class _Follow:
    """What a walk follows.

    Attributes:
        birth: Where it starts.
        everything: Whether healthy operands of any value are followed, not only those that an infinity leaves behind.
        zeros_only: Whether to give up where such a value was made of others, which keeps the walk short.
    """

    birth: Birth
    everything: bool
    zeros_only: bool


class _Walk(Trail):
    """A walk back that follows healthy elements as well, from the operands of one birth on."""

    def __init__(
        self,
        stretch: Stretch,
        checkpoints: Sequence[Checkpoint],
        intent: Intent,
        follow: _Follow,
        edits: Mapping[int, Edit] | None,
    ) -> None:
        """Prepare a walk; arguments as for any trail."""
        super().__init__(stretch, checkpoints, intent, edits)
        self._birth, self._everything, self._zeros_only = follow.birth, follow.everything, follow.zeros_only
        self._healthy = Marks(stretch.program)
        self._healthy.add(self._birth.value, self._birth.mask)

    def _waiting(self) -> set[int]:
        return self.marks.memories() | self._healthy.memories()

    def _ask(self, executed: Executed) -> None:
        super()._ask(executed)
        if executed.node.index == self._birth.node:
            self._healthy.take(self._birth.value)
            needed = depended_on(executed, self._birth.value, self._birth.mask)
            self._sort(executed, needed if self._everything else _edges(executed, needed))
            return
        for number in executed.content:
            wanted = self._healthy.take(number) if self._stretch.fills(executed.node, number) else None
            if wanted is None:
                continue
            if executed.node.memory is not None:
                self.births.append(Birth(executed.node.index, number, wanted, Origin.UNWRITTEN))
            needed = depended_on(executed, number, wanted.to(executed.content[number].device))
            self._sort(executed, _edges(executed, needed) if self._zeros_only else needed)

    def _sort(self, executed: Executed, needed: Mapping[int, torch.Tensor]) -> None:
        for number, mask in needed.items():
            bad = finite.mask(executed.inputs[number]) & mask
            self.marks.add(number, bad)
            self._healthy.add(number, mask & ~bad)


def _edges(executed: Executed, needed: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the elements that are bad, zero, or at the very end of the range."""
    kept = {}
    for number, mask in needed.items():
        tensor = executed.inputs[number]
        edge = tensor == 0
        if is_number(tensor):
            edge |= ~(tensor.abs() < torch.finfo(tensor.dtype).max)
        kept[number] = mask & edge
    return kept
