"""Whose data: the rows of the batch that blamed elements are computed from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from bisect_nan import finite
from bisect_nan.blame import responsible, split
from bisect_nan.finding import Phase
from bisect_nan.influence import depended_on
from bisect_nan.program import Program
from bisect_nan.replay import Executed
from bisect_nan.stretch import Checkpoint, Env, Stretch
from bisect_nan.trace import Marks, execute


class Samples:
    """Follows blamed elements back to rows of the batch: by the shape where that is plain, else element by element."""

    def __init__(self, program: Program, stretch: Stretch, checkpoints: Sequence[Checkpoint]) -> None:
        """Find the size of the batch: the most common first dimension of its tensors."""
        self._stretch, self._checkpoints, self._program = stretch, checkpoints, program
        inputs = [
            p.value
            for p in program.placeholders
            if p.phase is Phase.INPUT
            and p.name.startswith("batch")
            and not p.constant
            and program.values[p.value].shape
        ]  # the gradients that an update starts from are inputs, too, and have no samples
        sizes = Counter(program.values[value].shape[0] for value in inputs)
        self._size = sizes.most_common(1)[0][0] if sizes else 0
        self._inputs = [value for value in inputs if program.values[value].shape[0] == self._size]

    def of_input(self, mask: torch.Tensor) -> tuple[int, ...]:
        """Return the rows of a batch tensor that hold the elements `mask`."""
        return _rows(mask) if mask.dim() and mask.shape[0] == self._size else ()

    def of_result(self, node: int, value: int, mask: torch.Tensor) -> tuple[int, ...]:
        """Return the rows of the batch that the elements `mask` of a call's result come from; () where that cannot be told."""
        if self._size < 2:  # noqa: PLR2004  (one row: nothing to tell apart)
            return ()
        if mask.dim() and mask.shape[0] == self._size and list(mask.shape).count(self._size) == 1:
            return _rows(mask)
        place = self._stretch.cut_after(node)
        if self._stretch.is_small(0, place):
            rows = self._followed(place, value, mask)
            if len(rows) < self._size:
                return rows
        return _rows(mask) if mask.dim() and mask.shape[0] == self._size else ()

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
        found = [marks.take(value) for value in self._inputs]
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
