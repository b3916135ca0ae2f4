"""Whose data: the rows of the batch that blamed elements are computed from.

Blamed elements are followed back to rows of the batch, element by element; where that leads nowhere, rows are guessed by shape, or
taken from the bad elements on the way to the symptom. Then the step is run with a healthy row in the place of the suspected ones:
rows that heal it are confirmed, a guess that does not heal it is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bisect_nan import finite
from bisect_nan.blaming.trace import Marks, execute
from bisect_nan.errors import ReplayError
from bisect_nan.finding import Phase
from bisect_nan.recording.program import Program
from bisect_nan.replaying.blame import responsible, split
from bisect_nan.replaying.influence import depended_on
from bisect_nan.replaying.replay import Edit, Executed, Run
from bisect_nan.replaying.stretch import Checkpoint, Env, Stretch


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of the batch that carry a fault.

    Attributes:
        rows: Their numbers, ascending; none where they cannot be told.
        confirmed: Whether the fault went when a healthy row stood in their place; else they are derived from what was computed
            of what.
    """

    rows: tuple[int, ...] = ()
    confirmed: bool = False


class Batch:
    """The tensors of the batch that have one row for each sample.

    Attributes:
        size: How many samples there are: the most common first dimension.
        values: The value numbers of the tensors with as many rows.
    """

    def __init__(self, program: Program) -> None:
        """Find them. The gradients that an update starts from are inputs of its program, too, and have no samples."""
        inputs = [
            p.value
            for p in program.placeholders
            if p.phase is Phase.INPUT
            and p.name.startswith("batch")
            and not p.constant
            and program.values[p.value].shape
        ]
        sizes = Counter(program.values[value].shape[0] for value in inputs)
        self.size = sizes.most_common(1)[0][0] if sizes else 0
        self.values = [value for value in inputs if program.values[value].shape[0] == self.size]

    def without(self, rows: Sequence[int], tensors: Mapping[int, torch.Tensor]) -> Env:
        """Return the batch's tensors with the first other row in the place of some; nothing when there is no other."""
        healthy = next((row for row in range(self.size) if row not in rows), None)
        if healthy is None:
            return {}
        order = torch.tensor([healthy if row in rows else row for row in range(self.size)])
        there = [value for value in self.values if value in tensors]
        return {value: tensors[value].index_select(0, order.to(tensors[value].device)) for value in there}


class Samples:
    """Tells which rows of the batch carry a fault."""

    def __init__(
        self,
        program: Program,
        stretch: Stretch,
        checkpoints: Sequence[Checkpoint],
        targets: Sequence[int],
        edits: Mapping[int, Edit] | None = None,
        *,
        confirm: bool = True,
    ) -> None:
        """Prepare.

        Args:
            program: The step.
            stretch: The calls that the symptom needs.
            checkpoints: Where runs can start, ascending, the first at cut 0.
            targets: The symptom's values.
            edits: What neutralises the culprits: each is looked at without the others.
            confirm: Whether to run the step without the rows; else they are derived, and guesses are not made.
        """
        self._edits, self._confirm = edits or {}, confirm
        self._stretch, self._checkpoints, self._program, self._targets = stretch, checkpoints, program, targets
        self._batch = Batch(program)

    def of_input(self, mask: torch.Tensor) -> Rows:
        """Return the rows of a batch tensor that hold the elements `mask`."""
        return Rows(_rows(mask), confirmed=True) if mask.dim() and mask.shape[0] == self._batch.size else Rows()

    def of_result(self, node: int, value: int, mask: torch.Tensor) -> Rows:
        """Return the rows of the batch that the bad elements `mask` of a call's result come from."""
        size = self._batch.size
        if size < 2:  # noqa: PLR2004  (one row: nothing to tell apart)
            return Rows()
        cut = self._stretch.cut_after(node)
        followed = self._followed(cut, value, mask) if self._stretch.is_small(0, cut) else tuple(range(size))
        if 0 < len(followed) < size:
            return Rows(followed, confirmed=self._confirm and self._heals(followed, cut, value, mask))
        if not self._confirm:
            return Rows()
        if not followed:  # a table, say, that rows look things up in, or a mask that code wrote for some rows
            return self._of_readers(cut)
        guess = _rows(mask) if mask.dim() and mask.shape[0] == size else ()
        if 0 < len(guess) < size and self._heals(guess, cut, value, mask):
            return Rows(guess, confirmed=True)
        return Rows()

    def _heals(self, rows: Sequence[int], cut: int, value: int, mask: torch.Tensor) -> bool:
        """Whether some elements of a call's result are finite when other rows stand in the place of these."""
        try:
            _, made = self._with_others(rows, cut, value)
        except ReplayError:
            return False
        return made is not None and not finite.probe([made[mask]])

    def _with_others(self, rows: Sequence[int], cut: int, value: int) -> tuple[Run, torch.Tensor | None]:
        """Run up to a cut with a healthy row in the place of some, and return what its call then makes.

        Raises:
            ReplayError: There is no other row, or the recorded calls cannot follow the changed ones.
        """
        start = self._checkpoints[0]
        changed = self._batch.without(rows, start.env)
        if not changed:
            raise ReplayError("all rows carry the fault", "a healthy one", "look at what all of them share")
        run = Run(self._stretch, start, self._without_others(cut), changed)
        seen: list[Executed] = []
        run.advance(cut - 1)
        run.advance(cut, seen.append)
        return run, seen[0].content.get(value)

    def _without_others(self, cut: int) -> dict[int, Edit]:
        return {node: edit for node, edit in self._edits.items() if self._stretch.cut_after(node) != cut}

    def _of_readers(self, cut: int) -> Rows:
        """Return the rows that show bad elements first behind a cut, in a result with one row for each sample."""
        size = self._batch.size
        found: list[tuple[Executed, int]] = []

        def look(executed: Executed) -> None:
            for number, tensor in executed.content.items():
                if not found and list(tensor.shape[:1]) == [size] and 0 < len(_rows(finite.mask(tensor))) < size:
                    found.append((executed, number))

        edits = self._without_others(cut)
        first = min([cut - 1, *(self._stretch.cut_after(node) - 1 for node in edits)])
        run = Run(self._stretch, [c for c in self._checkpoints if c.cut <= first][-1], edits)
        run.advance(cut - 1)
        run.advance(len(self._stretch), look)
        for executed, number in found:
            before, place = executed.content[number], self._stretch.cut_after(executed.node.index)
            rows = _rows(finite.mask(before))
            try:
                other, after = self._with_others(rows, place, number)
                moved = () if after is None else _rows(_differ(before, after))
                if not moved or not {*moved} <= {*rows}:
                    return Rows()  # its first dimension is not that of the batch
                other.advance(len(self._stretch))
            except ReplayError:
                return Rows()
            return Rows(rows, confirmed=not finite.probe([other.env[target] for target in self._targets]))
        return Rows()

    def _followed(self, cut: int, value: int, mask: torch.Tensor) -> tuple[int, ...]:
        """Return the rows that hold elements from which the elements `mask` are computed."""
        marks = Marks(self._program)
        marks.add(value, mask)
        for checkpoint in reversed([c for c in self._checkpoints if c.cut < cut]):
            for executed in reversed(execute(self._stretch, checkpoint, cut)):
                for number in executed.content:
                    if not self._stretch.fills(executed.node, number):
                        continue
                    wanted = marks.take(number)
                    if wanted is not None:
                        for argument, needed in _sources(executed, number, wanted.to(mask.device)).items():
                            marks.add(argument, needed)
            cut = checkpoint.cut
        found = [marks.take(value) for value in self._batch.values]
        return tuple(sorted({row for rows in found if rows is not None for row in _rows(rows)}))


def _sources(executed: Executed, number: int, mask: torch.Tensor) -> Env:
    """Return the input elements that made the elements `mask` what they are: the bad ones where those are to blame, else all."""
    bad = mask & finite.mask(executed.content[number])
    inherited = split(executed, number, bad).inherited if bad.any() else bad
    found = responsible(executed, number, inherited) if inherited.any() else {}
    rest = mask & ~inherited
    for argument, needed in (depended_on(executed, number, rest) if rest.any() else {}).items():
        found[argument] = found[argument] | needed if argument in found else needed
    return found


def _rows(mask: torch.Tensor) -> tuple[int, ...]:
    return tuple(mask.reshape(mask.shape[0], -1).any(1).nonzero().flatten().tolist())


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one != other) & ~(one.isnan() & other.isnan())
