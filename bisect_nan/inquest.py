"""From a symptom to the births that make it: collects suspects and lets interventions decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from bisect_nan import finite
from bisect_nan.confirm import Interventions
from bisect_nan.dependence import Dependence
from bisect_nan.errors import ReplayError
from bisect_nan.hidden import Census
from bisect_nan.intent import Intent
from bisect_nan.replay import Edit
from bisect_nan.reproduce import Pass, walk
from bisect_nan.stretch import Stretch
from bisect_nan.trace import Birth, Origin, Trail, of, site

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
        self._echoing: set[int] = set()
        self._late: set[tuple[int, int]] = set()

    def judge(self, *groups: Sequence[Birth]) -> list[Birth] | None:
        """Let interventions decide which births make the symptom, bringing in one group after the other; None when none does."""
        suspects: list[Birth] = []
        for group in groups:
            suspects = [*suspects, *group]
            if group and self.court.heals(suspects):
                self.court.reduce(self.court.own)
                return self.court.own
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
            self._late |= {(birth.node, birth.value) for birth in fresh if known}
            known += [*fresh, *self._echoes(fresh, known)]
            places = _joined(known)
            groups = [of(places, origin) for origin in (Origin.MADE, Origin.TURNED, Origin.ADMITTED)]
            guilty = self.judge(*groups, *([] if fresh else [of(places, Origin.WRITTEN)]))
            if guilty is not None:
                return self._seen(guilty) or guilty[:1], self._seen(without(places, guilty))
            if not fresh:
                break
        return [], self._seen(known)

    def narrowed(self, births: list[Birth]) -> list[Birth]:
        """Leave only those elements that are on the way back from the symptom: one call can make harmless ones too."""
        stretch, done = self._stretch, self._done
        first = min(stretch.cut_after(birth.node) - 1 if birth.node >= 0 else 0 for birth in births)
        if all(int(birth.mask.sum()) == 1 for birth in births) or not stretch.is_small(first, len(stretch)):
            return births
        done.run.advance(len(stretch))
        found = self._follow(done, since=first).births
        if without(births, found):  # it reaches the symptom through finite values
            census = Census(stretch, done.checkpoints, self._intent, self._dependence)
            found = _joined([*found, *(behind for birth in found for behind in census.behind(birth))])
        kept = [_within(birth, found) for birth in births]
        return kept if self.court.still_heals(kept) else births

    def _seen(self, births: Sequence[Birth]) -> list[Birth]:
        return [birth for birth in births if birth.node not in self._echoing]

    def _echoes(self, fresh: Sequence[Birth], known: Sequence[Birth]) -> list[Birth]:
        """Return births at all later turns of a loop, when only further turns of known ones have shown in a round.

        They serve to heal; no run has seen what they are in the step as it was.
        """
        program = self._stretch.program
        before = {site(program, birth) for birth in known}
        if not fresh or any(birth.node < 0 or site(program, birth) not in before for birth in fresh):
            return []
        found = []
        for birth in fresh:
            outputs = program.nodes[birth.node].outputs
            if birth.value not in outputs:
                continue
            place = outputs.index(birth.value)
            for node in self._stretch.nodes:
                value = node.outputs[place] if place < len(node.outputs) else None
                if node.index > birth.node and value is not None:
                    whole = torch.ones(program.values[value].shape, dtype=torch.bool)
                    echo = Birth(node.index, value, whole, birth.origin)
                    if site(program, echo) == site(program, birth):
                        found.append(echo)
        self._echoing |= {birth.node for birth in found}
        return found

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
        plain, settled = Census(self._stretch, self._done.checkpoints, self._intent, self._dependence), False
        while not settled:
            settled = True
            for birth in self._first_of_each_site(births):
                others = without(births, [birth])
                census = self._census(others) or plain if (birth.node, birth.value) in self._late else plain
                behind = [other for other in census.behind(birth) if not is_known(other, births)]
                if behind and self.court.heals([*others, *behind]):
                    births, settled = _joined(self.court.reduce([*others, *behind])), False
                    break
        return births

    def _census(self, neutralised: Sequence[Birth]) -> Census | None:
        """Return the census of a run in which births are neutralised, for one that shows only there."""
        edits, state = self.court.edits(neutralised), self.court.state(neutralised)
        self.runs += 1
        try:
            passed = walk(self._stretch, self._done.checkpoints[0], len(self._stretch), edits=edits, state=state)
        except ReplayError:
            return None
        return Census(self._stretch, passed.checkpoints, self._intent, self._dependence, edits)

    def _first_of_each_site(self, births: Sequence[Birth]) -> list[Birth]:
        firsts: dict[object, Birth] = {}
        for birth in sorted(births, key=lambda birth: birth.node):
            firsts.setdefault(site(self._stretch.program, birth), birth)
        return list(firsts.values())

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


def _joined(births: Sequence[Birth]) -> list[Birth]:
    """Return one birth for all that lie at the same place, with the elements of all."""
    found: dict[object, Birth] = {}
    for birth in births:
        place = (birth.node, birth.value, birth.origin)
        known = found.get(place)
        found[place] = birth if known is None else replace(birth, mask=birth.mask | known.mask)
    return list(found.values())


def without(births: Sequence[Birth], others: Sequence[Birth]) -> list[Birth]:
    """Return the births that lie at other places than all of the others."""
    taken = {(other.node, other.value, other.origin) for other in others}
    return [birth for birth in births if (birth.node, birth.value, birth.origin) not in taken]
