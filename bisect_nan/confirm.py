"""Interventions: neutralise births, run on, and see whether the symptom goes.

Only births are neutralised, never links: replacing a link would heal its birth's fault as well and acquit the birth.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence

import torch

from bisect_nan import finite
from bisect_nan.blame import split
from bisect_nan.errors import ReplayError
from bisect_nan.finite import NonFinite
from bisect_nan.neutral import distinct, neutralised, tamed, typical
from bisect_nan.replay import Edit, Executed, Run
from bisect_nan.stretch import Checkpoint, Env, Stretch
from bisect_nan.trace import Birth, Origin

Neutral = Callable[[torch.Tensor, Executed | None, int], torch.Tensor | float]
"""What to put in the place of bad elements: from the tensor, the call that made it (None for a placeholder) and its number."""


def _typical(tensor: torch.Tensor, _: Executed | None, __: int) -> float:
    """The median of the finite elements."""
    return typical(tensor)


def _precise(tensor: torch.Tensor, executed: Executed | None, number: int) -> torch.Tensor | float:
    """What the call gives in double precision, clipped to the tensor's own range."""
    if executed is None or tensor.is_complex():
        return typical(tensor)
    try:
        result = executed.again({n: t.double() if t.is_floating_point() else t for n, t in executed.inputs.items()})[
            number
        ]
    except RuntimeError:  # no such kernel in double precision
        return typical(tensor)
    limit = torch.finfo(tensor.dtype).max
    return torch.where(finite.mask(result), typical(tensor), result).clamp(-limit, limit).to(tensor.dtype)


def _extreme(tensor: torch.Tensor, executed: Executed | None, number: int) -> torch.Tensor | float:
    """The largest or the smallest finite element in the place of an infinity: every comparison and selection stays as it was."""
    healthy = tensor[~finite.mask(tensor)]
    if tensor.is_complex() or not healthy.numel():
        return _typical(tensor, executed, number)
    lowest, highest = healthy.aminmax()
    return torch.nan_to_num(tensor, typical(tensor), float(highest), float(lowest))


def _tame(tensor: torch.Tensor, _: Executed | None, __: int) -> torch.Tensor:
    """The median, and all healthy elements brought far from the end of the range, where the neighbours of an overflow are."""
    return tamed(neutralised(tensor, finite.mask(tensor)))


def _distinct(tensor: torch.Tensor, _: Executed | None, __: int) -> torch.Tensor:
    """Values without pattern: a constant has no variance and no inverse."""
    return distinct(tensor)


NEUTRALS: tuple[Neutral, ...] = (_typical, _precise, _distinct, _extreme, lambda *_: 1.0, lambda *_: 0.0, _tame)
"""Tried in turn: a neutral value may make a fault of its own (0 under a logarithm), and then it is no evidence."""


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
    """

    def __init__(self, stretch: Stretch, checkpoints: Sequence[Checkpoint], targets: Iterable[int]) -> None:
        """Prepare.

        Args:
            stretch: The calls.
            checkpoints: Where runs can start, ascending, the first at cut 0.
            targets: The values that must come out finite.
        """
        self._stretch, self._checkpoints, self._targets = stretch, checkpoints, tuple(targets)
        self._neutral = NEUTRALS[0]
        self.runs = 0

    def heals(self, births: Sequence[Birth]) -> bool:
        """Whether the symptom goes when all of `births`, and nothing else, are neutralised.

        Remembers which neutral value did it; `still_heals` uses that one.
        """
        answers: dict[Neutral, Answer] = {}
        for neutral in NEUTRALS:
            answers[neutral] = self._answer(births, neutral)
            if answers[neutral] is Answer.GONE:
                self._neutral = neutral
                return True
        if Answer.STAYS in answers.values():
            return False
        left = [neutral for neutral, answer in answers.items() if answer is Answer.LEFT_CLEAN]
        self._neutral = left[0] if left else NEUTRALS[0]
        return bool(left)

    def still_heals(self, births: Sequence[Birth]) -> bool:
        """Whether a part of births that heal together is enough."""
        return self._answer(births, self._neutral) in (Answer.GONE, Answer.LEFT_CLEAN)

    def differ(self, some: Sequence[Birth], others: Sequence[Birth]) -> bool:
        """Whether the first target comes out differently when one or the other births are neutralised; both heal the symptom."""
        results = []
        for births in (some, others):
            run = Run(self._stretch, self._checkpoints[0], self.edits(births), self.state(births))
            self.runs += 1
            run.advance(len(self._stretch))
            results.append(run.env[self._targets[0]])
        return not finite.same(*results)

    def reduce(self, births: Sequence[Birth]) -> list[Birth]:
        """Return a smallest part of `births` that heals already, given that all of them together do.

        Releases the latest first: of two births on one path, either of which heals, the earlier one is the root.
        """
        kept = list(births)

        def release(candidates: list[Birth]) -> None:
            rest = [birth for birth in kept if all(birth is not candidate for candidate in candidates)]
            if rest and self.still_heals(rest):
                kept[:] = rest
            elif len(candidates) > 1:
                middle = len(candidates) // 2
                release(candidates[middle:])
                release(candidates[:middle])

        if len(kept) > 1:
            release(sorted(births, key=lambda birth: birth.node))
        return kept

    def edits(self, births: Sequence[Birth], neutral: Neutral = _typical) -> dict[int, Edit]:
        """Return the edits that neutralise the births made by calls."""
        at: dict[int, list[Birth]] = {}
        for birth in births:
            if birth.placeholder is None:
                at.setdefault(birth.node, []).append(birth)
        return {node: _edit(group, neutral) for node, group in at.items()}

    def state(self, births: Sequence[Birth], neutral: Neutral = _typical) -> Env:
        """Return the placeholders among the births with their bad elements neutralised."""
        start, changed = self._checkpoints[0].env, {}
        for birth in births:
            if birth.placeholder is not None:
                changed[birth.value] = start[birth.value].clone()
                _replace(changed[birth.value], birth.mask, neutral, None, birth.value)
        return changed

    def _answer(self, births: Sequence[Birth], neutral: Neutral) -> Answer:
        """Run with births neutralised, from the latest checkpoint before the first of them, and look at the symptom."""
        places = [0 if b.placeholder is not None else self._stretch.cut_after(b.node) - 1 for b in births]
        checkpoint = [c for c in self._checkpoints if c.cut <= min(places)][-1]
        self.runs += 1
        run = Run(self._stretch, checkpoint, self.edits(births, neutral), self.state(births, neutral))
        try:
            run.advance(len(self._stretch))
        except ReplayError:
            return self._where_it_left(checkpoint, run)
        bad = finite.probe(run.env[target] for target in self._targets)
        return Answer.STAYS if bad else Answer.GONE

    def _where_it_left(self, checkpoint: Checkpoint, run: Run) -> Answer:
        """Compare the frontier at which a run left the recorded path with the same one without interventions."""
        plain = Run(self._stretch, checkpoint)
        plain.advance(run.cut)
        for kinds in (NonFinite.NAN, NonFinite.ANY):
            if finite.has(plain.env.values(), kinds):
                return Answer.LEFT if finite.has(run.env.values(), kinds) else Answer.LEFT_CLEAN
        return Answer.LEFT


def _edit(births: Sequence[Birth], neutral: Neutral) -> Edit:
    def neutralise(executed: Executed) -> None:
        for birth in births:
            made = executed.content[birth.value]
            bad = birth.mask.to(made.device)
            if birth.origin is not Origin.UNWRITTEN:
                bad = bad & finite.mask(made)
            if bad.any():
                _replace(made, _own(executed, birth, bad), neutral, executed, birth.value)

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
    if neutral is _tame:
        mask = mask | ~finite.mask(tensor)
    if isinstance(value, torch.Tensor):
        tensor.copy_(torch.where(mask, value, tensor))
    else:
        tensor.masked_fill_(mask, value)
