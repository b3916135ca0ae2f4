"""Interventions: neutralise births, run on, and see whether the symptom goes.

Only births are neutralised, never links: replacing a link would heal its birth's fault as well and acquit the birth.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

import torch

from bisect_nan import finite
from bisect_nan.blaming.trace import Birth, Origin, site
from bisect_nan.errors import ReplayError
from bisect_nan.finite import NonFinite
from bisect_nan.replaying.blame import split
from bisect_nan.replaying.bounds import Bounds
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


class Interventions:
    """Runs a stretch with births neutralised.

    Attributes:
        runs: Runs made so far.
        neutral: The neutral value that healed last.
        own: What was neutralised in the run that healed last: each birth with those elements that were bad there, and its own.
    """

    def __init__(self, stretch: Stretch, checkpoints: Sequence[Checkpoint], targets: Iterable[int]) -> None:
        """Prepare.

        Args:
            stretch: The calls.
            checkpoints: Where runs can start, ascending, the first at cut 0.
            targets: The values that must come out finite.
        """
        self._stretch, self._checkpoints, self._targets = stretch, checkpoints, tuple(targets)
        self.neutral = NEUTRALS[0]
        self.runs = 0
        self.own: list[Birth] = []

    def heals(self, births: Sequence[Birth]) -> bool:
        """Whether the symptom goes when all of `births`, and nothing else, are neutralised.

        Remembers which neutral value did it; `still_heals` uses that one.
        """
        answers: dict[Neutral, Answer] = {}
        for neutral in NEUTRALS:
            answers[neutral] = self._answer(births, neutral)
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
        """Release groups of births, the latest first, as long as what is left heals."""
        kept = list(groups)

        def release(candidates: list[list[Birth]]) -> None:
            rest = [group for group in kept if all(group is not candidate for candidate in candidates)]
            if rest and self.still_heals([birth for group in rest for birth in group]):
                kept[:] = rest
            elif len(candidates) > 1:
                middle = len(candidates) // 2
                release(candidates[middle:])
                release(candidates[:middle])

        if len(kept) > 1:
            release(sorted(groups, key=lambda group: min(birth.node for birth in group)))
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
        """Run with births neutralised, from the latest checkpoint before the first of them, and look at the symptom."""
        places = [0 if b.placeholder is not None else self._stretch.cut_after(b.node) - 1 for b in births]
        checkpoint = [c for c in self._checkpoints if c.cut <= min(places)][-1]
        self.runs += 1
        seen = [birth for birth in births if birth.placeholder is not None]
        edits = self.edits(births, neutral, seen)
        bounds = Bounds(self._stretch, edits)
        run = Run(self._stretch, checkpoint, edits, self.state(births, neutral), bounds)
        try:
            run.advance(len(self._stretch))
        except ReplayError:
            answer = self._where_it_left(checkpoint, run)
            if answer is Answer.LEFT_CLEAN:
                self.own = list(births)  # those behind the place where it stopped have not been seen
            return answer
        if finite.probe(run.env[target] for target in self._targets if target not in bounds.left_out):
            return Answer.STAYS
        self.own = seen or list(births)
        return Answer.GONE

    def _where_it_left(self, checkpoint: Checkpoint, run: Run) -> Answer:
        """Compare the frontier at which a run left the recorded path with the same one without interventions."""
        plain = Run(self._stretch, checkpoint)
        plain.advance(run.cut)
        for kinds in (NonFinite.NAN, NonFinite.ANY):
            if finite.has(plain.env.values(), kinds):
                return Answer.LEFT if finite.has(run.env.values(), kinds) else Answer.LEFT_CLEAN
        return Answer.LEFT


def _edit(births: Sequence[Birth], neutral: Neutral, seen: list[Birth] | None) -> Edit:
    def neutralise(executed: Executed) -> None:
        for birth in births:
            made = executed.content[birth.value]
            bad = birth.mask.to(made.device)
            if birth.origin is not Origin.UNWRITTEN:
                bad = bad & finite.mask(made)
            own = _own(executed, birth, bad) if bad.any() else bad
            if own.any():
                _replace(made, own, neutral, executed, birth.value)
                if seen is not None:
                    seen.append(dataclasses.replace(birth, mask=own))

    return neutralise


def _own(executed: Executed, birth: Birth, bad: torch.Tensor) -> torch.Tensor:
    """The bad elements that are the birth's own in this run: what other births hand on stays as it is."""
    if birth.origin in (Origin.ADMITTED, Origin.UNWRITTEN):
        return bad
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
    if isinstance(value, torch.Tensor):
        tensor.copy_(torch.where(mask, value, tensor))
    else:
        tensor.masked_fill_(mask, value)
