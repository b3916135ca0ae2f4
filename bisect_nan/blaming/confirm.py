"""Interventions: neutralise births, run on, and see whether the symptom goes.

Only births are neutralised, never links: replacing a link would heal its birth's fault as well and acquit the birth.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from bisect_nan import finite
from bisect_nan.blaming.trace import Birth, Origin, site
from bisect_nan.errors import ReplayError
from bisect_nan.finite import NonFinite
from bisect_nan.replaying.blame import split
from bisect_nan.replaying.bounds import Bounds
from bisect_nan.replaying.contraction import some
from bisect_nan.replaying.neutral import NEUTRALS, Neutral, median, tame, typical
from bisect_nan.replaying.replay import Edit, Executed, Run
from bisect_nan.replaying.stretch import Checkpoint, Env, Stretch

_MANY = 16
"""Births up to which each is released by itself, and above which those of the same line stand or fall together at first."""


class Answer(enum.Enum):
    """What became of the symptom in a run with interventions; the value is the sentence."""

    GONE = "The symptom is gone."
    STAYS = "The symptom is still there."
    LEFT_CLEAN = (
        "The recorded calls cannot follow the changed values, but where they stop nothing is bad that was bad before."
    )
    LEFT = "The recorded calls cannot follow the changed values (another expert is chosen, say), so nothing is known."


@dataclass(frozen=True, slots=True)
class _Way:
    """A run that healed.

    Attributes:
        asked: The births that it was asked to neutralise.
        own: What it did neutralise, as in `Interventions`.
        checkpoints: Where a run with a part of them can start, ascending, each with the values that were left out before.
    """

    asked: list[Birth]
    own: list[Birth]
    checkpoints: list[tuple[Checkpoint, frozenset[int]]]

    def led_by(self, births: Sequence[Birth]) -> bool:
        """Whether births are some of those that it was asked for, or of those that it neutralised; others may have other elements."""
        known = {id(birth) for birth in [*self.asked, *self.own]}
        return all(id(birth) in known for birth in births)


class Interventions:
    """Runs a stretch with births neutralised.

    Attributes:
        runs: Runs made so far.
        neutral: The neutral value that healed last.
        own: What was neutralised in the run that healed last: each birth with those elements that were bad there, and its own.
    """

    def __init__(
        self,
        stretch: Stretch,
        checkpoints: Sequence[Checkpoint],
        targets: Iterable[int],
        told: Callable[[int], None] | None = None,
    ) -> None:
        """Prepare.

        Args:
            stretch: The calls.
            checkpoints: Where runs can start, ascending, the first at cut 0.
            targets: The values that must come out finite.
            told: Told the number of each run before it.
        """
        self._told = told or (lambda _: None)
        self._stretch, self._checkpoints, self._targets = stretch, checkpoints, tuple(targets)
        self.neutral = NEUTRALS[0]
        self.runs = 0
        self.own: list[Birth] = []
        self._way: _Way | None = None

    def heals(self, births: Sequence[Birth], echoes: Callable[[], Sequence[Birth]] = tuple) -> bool:
        """Whether the symptom goes when all of `births`, and nothing else, are neutralised.

        Remembers which neutral value did it; `still_heals` uses that one.

        Args:
            births: What to neutralise.
            echoes: Gives further births, to be neutralised as well where these alone do not heal; they are tried before other
                neutral values are.
        """
        answers: dict[Neutral, Answer] = {}
        for neutral in NEUTRALS:
            answers[neutral] = self._answer(births, neutral)
            if answers[neutral] is Answer.STAYS and neutral is NEUTRALS[0] and (further := echoes()):
                answers[neutral] = self._answer([*births, *further], neutral)
            if answers[neutral] is Answer.GONE:
                self.neutral = neutral
                return True
        if Answer.STAYS in answers.values():
            return False
        left = [neutral for neutral, answer in answers.items() if answer is Answer.LEFT_CLEAN]
        self.neutral = left[0] if left else NEUTRALS[0]
        return bool(left)

    def still_heals(self, births: Sequence[Birth]) -> bool:
        """Whether a part of births that heal together is enough."""
        return self._answer(births, self.neutral) in (Answer.GONE, Answer.LEFT_CLEAN)

    def differ(self, some: Sequence[Birth], others: Sequence[Birth]) -> bool:
        """Whether the first target comes out differently when one or the other births are neutralised; both heal the symptom.

        Where the recorded calls cannot follow the changed values it does.
        """
        results = []
        for births in (some, others):
            run = Run(self._stretch, self._checkpoints[0], self.edits(births), self.state(births))
            self.runs += 1
            try:
                run.advance(len(self._stretch))
            except ReplayError:
                return True
            results.append(run.env[self._targets[0]])
        return not finite.same(*results)

    def reduce(self, births: Sequence[Birth]) -> list[Birth]:
        """Return a smallest part of `births` that heals already, given that all of them together do.

        Releases the latest first: of two births on one path, either of which heals, the earlier one is the root.
        """
        if len(births) <= _MANY:
            return self._released([[birth] for birth in births])
        sites: dict[object, list[Birth]] = {}
        for birth in births:
            sites.setdefault(site(self._stretch.program, birth), []).append(birth)
        kept = self._released(list(sites.values()))
        return self._released([[birth] for birth in kept]) if len(kept) <= _MANY else kept

    def _released(self, groups: list[list[Birth]]) -> list[Birth]:
        """Release groups of births, the latest first, as long as what is left heals; the more at once the better that goes."""
        kept = list(groups)
        waiting, size = sorted(groups, key=lambda group: min(birth.node for birth in group)), 1
        while waiting and len(kept) > 1:
            candidates = waiting[-size:]
            rest = [group for group in kept if all(group is not candidate for candidate in candidates)]
            if rest and self.still_heals([birth for group in rest for birth in group]):
                kept, size = rest, 2 * size
            elif len(candidates) > 1:
                size = max(1, len(candidates) // 2)
                continue
            del waiting[-len(candidates) :]
        return [birth for group in kept for birth in group]

    def edits(
        self, births: Sequence[Birth], neutral: Neutral = median, seen: list[Birth] | None = None
    ) -> dict[int, Edit]:
        """Return the edits that neutralise the births made by calls; they add what they neutralise to `seen`."""
        at: dict[int, list[Birth]] = {}
        for birth in births:
            if birth.placeholder is None:
                at.setdefault(birth.node, []).append(birth)
        return {node: _edit(group, neutral, seen) for node, group in at.items()}

    def state(self, births: Sequence[Birth], neutral: Neutral = median) -> Env:
        """Return the placeholders among the births with their bad elements neutralised."""
        start, changed = self._checkpoints[0].env, {}
        for birth in births:
            if birth.placeholder is not None:
                if birth.value not in changed:
                    changed[birth.value] = start[birth.value].clone()
                _replace(changed[birth.value], birth.mask, neutral, None, birth.value)
        return changed

    def _answer(self, births: Sequence[Birth], neutral: Neutral) -> Answer:
        """Run with births neutralised, and look at the symptom.

        Up to the first of them nothing is new, nor, for a part of those of the run that healed last, up to the first that is left
        out of it.
        """
        way = self._way if self._way is not None and neutral is self.neutral and self._way.led_by(births) else None
        if way is None:
            usable, start = [(c, frozenset[int]()) for c in self._checkpoints], min(map(self._place, births))
        else:
            kept = {_key(birth) for birth in births}
            left = [self._place(birth) for birth in way.own if _key(birth) not in kept]
            usable, start = way.checkpoints, min(left, default=0)
        usable = [(c, left_out) for c, left_out in usable if c.cut <= start]
        checkpoint, left_out = usable[-1]
        self.runs += 1
        self._told(self.runs)
        done = way.own if way is not None else births
        seen = [b for b in done if b.placeholder is not None or self._place(b) < checkpoint.cut]
        edits = self.edits(births, neutral, seen)
        bounds = Bounds(self._stretch, edits)
        bounds.left_out |= left_out
        run = Run(self._stretch, checkpoint, edits, {} if checkpoint.cut else self.state(births, neutral), bounds)
        try:
            for cut in self._stops(births, checkpoint.cut):
                run.advance(cut)
                usable.append((run.checkpoint(), frozenset(bounds.left_out)))
            run.advance(len(self._stretch))
        except ReplayError:
            answer = self._where_it_left(run, start)
            if answer is Answer.LEFT_CLEAN:
                self.own, self._way = list(births), None  # those behind the place where it stopped have not been seen
            return answer
        if finite.probe(run.env[target] for target in self._targets if target not in bounds.left_out):
            return Answer.STAYS
        self.own = seen or list(births)
        self._way = _Way(list(births), self.own, usable)
        return Answer.GONE

    def _stops(self, births: Sequence[Birth], since: int) -> list[int]:
        """Return cuts behind `since`, in front of births, that a run without some of these may start from."""
        cuts = sorted({place for birth in births if (place := self._place(birth)) > since})
        return cuts[:: len(cuts) // _MANY + 1]

    def _place(self, birth: Birth) -> int:
        """Return the cut in front of a birth."""
        return 0 if birth.placeholder is not None else self._stretch.cut_after(birth.node) - 1

    def _where_it_left(self, run: Run, since: int) -> Answer:
        """Compare the frontier at which a run left the recorded path with the same one without interventions."""
        plain = Run(self._stretch, [c for c in self._checkpoints if c.cut <= since][-1])
        plain.advance(run.cut)
        for kinds in (NonFinite.NAN, NonFinite.ANY):
            if finite.has(plain.env.values(), kinds):
                return Answer.LEFT if finite.has(run.env.values(), kinds) else Answer.LEFT_CLEAN
        return Answer.LEFT


def _key(birth: Birth) -> tuple[int, int, Origin]:
    return birth.node, birth.value, birth.origin


def _edit(births: Sequence[Birth], neutral: Neutral, seen: list[Birth] | None) -> Edit:
    def neutralise(executed: Executed) -> None:
        for birth in births:
            made = executed.content[birth.value]
            bad = birth.mask.to(made.device)
            if birth.origin is not Origin.UNWRITTEN:
                bad = bad & finite.mask(made)
            own = _own(executed, birth, bad) if some(bad) else bad
            if some(own):
                _replace(made, own, neutral, executed, birth.value)
                if seen is not None:
                    seen.append(replace(birth, mask=own))

    return neutralise


def _own(executed: Executed, birth: Birth, bad: torch.Tensor) -> torch.Tensor:
    """The bad elements that are the birth's own in this run: what other births hand on stays as it is."""
    if birth.origin in (Origin.ADMITTED, Origin.UNWRITTEN):
        return bad
    if birth.origin is Origin.TURNED and not finite.has(executed.inputs.values(), NonFinite.NAN):
        nan = finite.mask(executed.content[birth.value], NonFinite.NAN)
        if not some(bad & ~nan):
            return bad  # whether born or made of infinities is the same here
    parts = split(executed, birth.value, bad)
    return parts.born | parts.converted if birth.origin is Origin.TURNED else parts.born


def _replace(
    tensor: torch.Tensor, mask: torch.Tensor, neutral: Neutral, executed: Executed | None, number: int
) -> None:
    """Write neutral values into the elements `mask` of a tensor, in place."""
    if tensor.layout is not torch.strided:
        values = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
        values.masked_fill_(finite.mask(values), typical(tensor))
        return
    mask = mask.to(tensor.device)
    value = neutral(tensor, executed, number)
    if neutral is tame:
        mask = mask | ~finite.mask(tensor)
    if not isinstance(value, torch.Tensor):
        value = torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
    tensor.copy_(torch.where(mask, value, tensor))  # float8 has no kernel for masked_fill
