"""From a symptom to the births that make it: collects suspects and lets interventions decide."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bisect_nan import finite
from bisect_nan.confirm import Interventions
from bisect_nan.dependence import Dependence
from bisect_nan.errors import ReplayError
from bisect_nan.hidden import Census
from bisect_nan.intent import Intent
from bisect_nan.replay import Edit
from bisect_nan.reproduce import Pass, walk
from bisect_nan.stretch import Stretch
from bisect_nan.trace import Birth, Origin, Trail, of

_ROUNDS = 8
"""Times that births which showed only after others were neutralised are collected."""


class Inquest:
    """Decides who makes one symptom.

    Attributes:
        court: The interventions.
        runs: Runs made so far, the interventions left out.
    """

    def __init__(
        self, stretch: Stretch, done: Pass, targets: Sequence[int], intent: Intent, dependence: Dependence
    ) -> None:
        """Prepare.

        Args:
            stretch: The calls that the symptom needs.
            done: The pass that showed the symptom.
            targets: Value numbers of the symptom.
            intent: Tells the infinities that were written on purpose.
            dependence: Of the whole program.
        """
        self._stretch, self._done, self._targets, self._intent, self._dependence = (
            stretch,
            done,
            targets,
            intent,
            dependence,
        )
        self.court = Interventions(stretch, done.checkpoints, targets)
        self.runs = 0

    def judge(self, *groups: Sequence[Birth]) -> list[Birth] | None:
        """Let interventions decide which births make the symptom, bringing in one group after the other; None when none does."""
        suspects: list[Birth] = []
        for group in groups:
            suspects = [*suspects, *group]
            if group and self.court.heals(suspects):
                return self.court.reduce(suspects)
        return None

    def collect(self) -> tuple[list[Birth], list[Birth]]:
        """Follow the whole symptom back and return who makes it and who was acquitted.

        Where births show only after others were neutralised, go round again. Infinities that the program wrote are left as they
        are until nothing else is to be found: that one of them reaches the symptom is then the fault itself.
        """
        known: list[Birth] = []
        for _ in range(_ROUNDS):
            try:
                trail = self._without([birth for birth in known if birth.origin is not Origin.WRITTEN])
            except ReplayError:
                break
            fresh = [birth for birth in [*trail.births, *trail.admissions()] if not is_known(birth, known)]
            known += fresh
            groups = [of(known, Origin.MADE), of(known, Origin.TURNED), of(known, Origin.ADMITTED)]
            guilty = self.judge(*groups, *([] if fresh else [of(known, Origin.WRITTEN)]))
            if guilty is not None:
                return self._own(guilty), without(known, guilty)
            if not fresh:
                break
        return [], known

    def narrowed(self, births: list[Birth]) -> list[Birth]:
        """Leave only those elements that are on the way back from the symptom: one call can make harmless ones too."""
        stretch, done = self._stretch, self._done
        first = min(stretch.cut_after(birth.node) - 1 if birth.node >= 0 else 0 for birth in births)
        if all(int(birth.mask.sum()) == 1 for birth in births) or not stretch.is_small(first, len(stretch)):
            return births
        done.run.advance(len(stretch))
        trail = self._follow(done, since=first)
        kept = [_within(birth, trail.births) for birth in births]
        return kept if self.court.still_heals(kept) else births

    def _own(self, guilty: list[Birth]) -> list[Birth]:
        """Take off elements that became NaN of an infinity which another guilty birth made: they are its, not the call's own."""
        kept = list(guilty)
        for place, birth in enumerate(guilty):
            if birth.origin is Origin.TURNED and len(guilty) > 1 and self._stretch.is_small(0, len(self._stretch)):
                with contextlib.suppress(ReplayError):
                    kept[place] = _within(birth, self._without(without(guilty, [birth])).births)
        return kept

    def _without(self, births: Sequence[Birth]) -> Trail:
        """Follow the symptom back in a run in which births are neutralised.

        Raises:
            ReplayError: The recorded calls cannot follow the changed values.
        """
        edits, state = self.court.edits(births), self.court.state(births)
        start, end = self._done.checkpoints[0], len(self._stretch)
        self.runs += 1
        return self._follow(walk(self._stretch, start, end, edits=edits, state=state), edits)

    def _follow(self, passed: Pass, edits: Mapping[int, Edit] | None = None, since: int = 0) -> Trail:
        trail = Trail(self._stretch, passed.checkpoints, self._intent, edits)
        for target in self._targets:
            trail.marks.add(target, finite.mask(passed.run.env[target]))
        trail.follow(len(self._stretch), since)
        return trail

    def roots(self, births: list[Birth]) -> list[Birth]:
        """Put in the place of a birth whose healthy operands are what an infinity left behind the birth of that infinity."""
        census, settled = Census(self._stretch, self._done.checkpoints, self._intent, self._dependence), False
        while not settled:
            settled = True
            for birth in births:
                behind = [other for other in census.behind(birth) if not is_known(other, births)]
                others = without(births, [birth])
                if behind and self.court.heals([*others, *behind]):
                    births, settled = self.court.reduce([*others, *behind]), False
                    break
        return births

    def one_each(self, births: Sequence[Birth]) -> list[Birth]:
        """Leave one birth of each fault: a quotient by zero has a derivative by zero, and that derivative has several parts."""
        nodes, blamed = self._stretch.program.nodes, {birth.node for birth in births}
        kept: list[Birth] = []
        standing: dict[object, int] = {}  # a fault -> the call that stands for it
        for birth in sorted(births, key=lambda birth: birth.node):
            forward = nodes[birth.node].forward if birth.node >= 0 else None
            fault = birth.node if forward is None else (forward, nodes[birth.node].autograd)
            while forward is not None and forward not in blamed:
                forward = nodes[forward].forward
            if forward is None and standing.setdefault(fault, birth.node) == birth.node:
                kept.append(birth)
        return kept


def _within(birth: Birth, found: Sequence[Birth]) -> Birth:
    """Return a birth with only those elements that the same birth has among those found; as it is when it is not among them."""
    same = [b.mask for b in found if (b.node, b.value, b.origin) == (birth.node, birth.value, birth.origin)]
    return replace(birth, mask=birth.mask & same[0]) if same and bool((birth.mask & same[0]).any()) else birth


def is_known(birth: Birth, known: Sequence[Birth]) -> bool:
    """Whether one of the births covers this one."""
    there = [o for o in known if (o.node, o.value, o.origin) == (birth.node, birth.value, birth.origin)]
    return any(bool((other.mask >= birth.mask).all()) for other in there)


def without(births: Sequence[Birth], others: Sequence[Birth]) -> list[Birth]:
    """Return the births that are not among the others."""
    return [birth for birth in births if all(birth is not other for other in others)]
