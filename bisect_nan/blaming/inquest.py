"""From a symptom to the births that make it: collects suspects and lets interventions decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from bisect_nan import finite
from bisect_nan.blaming.confirm import Interventions
from bisect_nan.blaming.hidden import Census
from bisect_nan.blaming.trace import Birth, Origin, Trail, site
from bisect_nan.errors import ReplayError
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.intent import Intent
from bisect_nan.replaying.replay import Edit
from bisect_nan.replaying.reproduce import Pass, walk
from bisect_nan.replaying.stretch import Stretch

_ROUNDS = 12
"""Times that births which showed only after others were neutralised are collected."""

_PLACES = 8
"""Places up to which the elements of each are looked at while the others are neutralised."""

_ORDER = (Origin.MADE, Origin.UNWRITTEN, Origin.TURNED, Origin.ADMITTED, Origin.WRITTEN)
"""Who is suspected first."""


class Inquest:
    """Decides who makes one symptom.

    Attributes:
        court: The interventions.
        runs: Runs made so far, the interventions left out.
    """

    def __init__(
        self,
        stretch: Stretch,
        done: Pass,
        targets: Sequence[int],
        intent: Intent,
        dependence: Dependence,
        told: Callable[[int], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            stretch: The calls that the symptom needs.
            done: The pass that showed the symptom.
            targets: Value numbers of the symptom.
            intent: Tells the infinities that were written on purpose.
            dependence: Of the whole program.
            told: Told the number of each intervention before it.
        """
        self._stretch, self._done, self._targets = stretch, done, targets
        self._intent, self._dependence = intent, dependence
        self.court = Interventions(stretch, done.checkpoints, targets, told)
        self.runs = 0
        self._in_vain: list[Sequence[Birth]] = []
        self._echoing: set[int] = set()
        self._late: set[tuple[int, int]] = set()

    def judge(self, suspects: Sequence[Birth], *, elsewhere: bool = False) -> list[Birth] | None:
        """Let interventions decide which of the suspects make the symptom; None when they do not, even all together.

        Args:
            suspects: Births.
            elsewhere: Whether later calls of the same kernels are suspected as well when these are not enough: layer after layer
                makes the same fault.
        """
        if not suspects or any(_alike(suspects, others) for others in self._in_vain):
            return None
        if not self.court.heals(suspects, (lambda: self._later(suspects, elsewhere=True)) if elsewhere else tuple):
            self._in_vain.append(suspects)
            return None
        known = {(birth.node, birth.value) for birth in suspects}
        self._late |= {place for birth in self.court.own if (place := (birth.node, birth.value)) not in known}
        self.court.reduce(self.court.own)
        return self.court.own

    def collect(self) -> tuple[list[Birth], list[Birth]]:
        """Follow the whole symptom back and return who makes it and who was acquitted.

        Where births show only after others were neutralised, go round again. Those of one origin are left as they are until those
        before it are complete: a mean heals the symptom as well as the infinities that it turned into NaN, and would be blamed
        in their stead. That an infinity which the program wrote reaches the symptom is the fault itself only when there is no other.
        """
        known: list[Birth] = []
        rank = 0
        for _ in range(_ROUNDS):
            try:
                trail = self._without([birth for birth in known if _ORDER.index(birth.origin) <= rank])
            except ReplayError:
                break
            fresh = [birth for birth in [*trail.births, *trail.admissions()] if not is_known(birth, known)]
            self._late |= {(birth.node, birth.value) for birth in fresh if known}
            known += [*fresh, *self._echoes(fresh, known)]
            ranks = [_ORDER.index(birth.origin) for birth in known]
            if all(_ORDER.index(birth.origin) > rank for birth in fresh):  # complete
                later = [other for other in ranks if other > rank]
                if not later:
                    break
                rank = min(later)
            places = _joined(known)
            guilty = self.judge([birth for birth in places if _ORDER.index(birth.origin) <= rank])
            if guilty is not None:
                guilty = self._seen(guilty) or guilty[:1]
                several = len(self._faults(guilty)) > 1
                return self.narrowed(guilty) if several else guilty, self._seen(without(places, guilty))
        return [], self._seen(known)

    def narrowed(self, births: list[Birth]) -> list[Birth]:
        """Leave only those elements that make the symptom when the births elsewhere are neutralised.

        One call can make harmless ones, too.
        """
        stretch = self._stretch
        first = min(stretch.cut_after(birth.node) - 1 if birth.node >= 0 else 0 for birth in births)
        faults = self._faults(births)
        if len(faults) > _PLACES or not stretch.is_small(first, len(stretch)):
            return births
        kept: list[Birth] = []
        for group in faults:
            others = without(births, group)
            if all((birth.mask.numel() if others else int(birth.mask.sum())) == 1 for birth in group):
                kept += group
                continue
            found = self._reaching(group, others, first)
            kept += [_as(birth, found) if others else _within(birth, found) for birth in group]
        return kept if not _alike(kept, births) and self.court.still_heals(kept) else births

    def _reaching(self, births: Sequence[Birth], others: Sequence[Birth], since: int) -> list[Birth]:
        """Return what births behind a cut the symptom has in a run in which the others are neutralised."""
        others = [*others, *self._forward(others)]
        done, edits = self._done, self.court.edits(others, self.court.neutral)
        if others:
            self.runs += 1
            state = self.court.state(others, self.court.neutral)
            try:
                done = walk(self._stretch, done.checkpoints[0], len(self._stretch), edits=edits, state=state)
            except ReplayError:
                return []
        else:
            done.run.advance(len(self._stretch))
        found = self._follow(done, edits, since).births
        if without(births, found):  # it reaches the symptom through finite values
            census = Census(self._stretch, done.checkpoints, self._intent, self._dependence, edits)
            found = _joined([*found, *(behind for birth in found for behind in census.behind(birth))])
        return found

    def _faults(self, births: Sequence[Birth]) -> list[list[Birth]]:
        """Put together the births at one place in the code, forward and backward."""
        program = self._stretch.program
        found: dict[object, list[Birth]] = {}
        for birth in births:
            call = birth.node
            while call >= 0 and (forward := program.nodes[call].forward) is not None:
                call = forward
            found.setdefault(site(program, replace(birth, node=call)), []).append(birth)
        return list(found.values())

    def _forward(self, births: Sequence[Birth]) -> list[Birth]:
        """Return the same faults in the forward pass: a call that is mended has another value as well as another derivative."""
        nodes, values = self._stretch.program.nodes, self._stretch.program.values
        calls = {nodes[birth.node].forward for birth in births if birth.node >= 0} - {birth.node for birth in births}
        made = [
            (call, n) for call in calls if call is not None and self._stretch.has(call) for n in nodes[call].outputs
        ]
        return [
            Birth(call, n, torch.ones(values[n].shape, dtype=torch.bool), Origin.MADE)
            for call, n in made
            if n is not None and (values[n].dtype.is_floating_point or values[n].dtype.is_complex)
        ]

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
        found = self._later(fresh)
        self._echoing |= {birth.node for birth in found}
        return found

    def _later(self, births: Sequence[Birth], *, elsewhere: bool = False) -> list[Birth]:
        """Return births of all elements at the later calls of the same code, or at those of the same kernel elsewhere."""
        program, found = self._stretch.program, dict[tuple[int, int], Birth]()
        for birth in births:
            made = program.nodes[birth.node] if birth.node >= 0 else None
            if made is None or birth.value not in made.outputs:
                continue
            place, code = made.outputs.index(birth.value), site(program, birth)
            for node in self._stretch.nodes:
                value = node.outputs[place] if place < len(node.outputs) else None
                if node.index <= birth.node or value is None or node.target is not made.target:
                    continue
                whole = torch.ones(program.values[value].shape, dtype=torch.bool)
                echo = Birth(node.index, value, whole, birth.origin)
                if (site(program, echo) == code) is not elsewhere:
                    found[node.index, value] = echo
        return list(found.values())

    def _without(self, births: Sequence[Birth]) -> Trail:
        """Follow the symptom back in a run in which births are neutralised.

        Raises:
            ReplayError: The recorded calls cannot follow the changed values.
        """
        start, end = self._done.checkpoints[0], len(self._stretch)
        if not births:
            self._done.run.advance(end)
            return self._follow(self._done)
        edits, state = self.court.edits(births), self.court.state(births)
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
            made = [birth for birth in self._first_of_each_site(births) if birth.origin is Origin.MADE]
            late = self._census(births) if any((b.node, b.value) in self._late for b in made) else None
            for birth in made:
                others = without(births, [birth])
                census = late or plain if (birth.node, birth.value) in self._late else plain
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


def _as(birth: Birth, found: Sequence[Birth]) -> Birth:
    """Return a birth with the elements that the same birth has among those found; as it is when it is not among them."""
    same = [b.mask for b in found if (b.node, b.value, b.origin) == (birth.node, birth.value, birth.origin)]
    return replace(birth, mask=same[0]) if same else birth


def _within(birth: Birth, found: Sequence[Birth]) -> Birth:
    """Return a birth with only those elements that the same birth has among those found; as it is when there are none."""
    left = birth.mask & _as(birth, found).mask
    return replace(birth, mask=left) if bool(left.any()) else birth


def is_known(birth: Birth, known: Sequence[Birth]) -> bool:
    """Whether one of the births covers this one."""
    there = [o for o in known if (o.node, o.value, o.origin) == (birth.node, birth.value, birth.origin)]
    return any(bool((other.mask >= birth.mask).all()) for other in there)


def _alike(some: Sequence[Birth], others: Sequence[Birth]) -> bool:
    """Whether births are the same, in whatever order."""
    return all(is_known(birth, others) for birth in some) and all(is_known(other, some) for other in others)


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
