"""Whose data: the rows of the batch that blamed elements belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from bisect_nan import finite
from bisect_nan.errors import ReplayError
from bisect_nan.finding import Phase
from bisect_nan.program import Program
from bisect_nan.replay import Checkpoint, Env, Run, Stretch
from bisect_nan.trace import Birth

_BUDGET = 0.25
"""Seconds of recorded cost that may be spent on finding rows by trying them one by one."""


class Samples:
    """Follows the batch dimension; where it cannot be followed, replaces rows and looks which elements heal."""

    def __init__(self, program: Program, stretch: Stretch, checkpoints: Sequence[Checkpoint]) -> None:
        """Find the size of the batch: the most common first dimension of its tensors."""
        self._stretch, self._checkpoints = stretch, checkpoints
        inputs = [p.value for p in program.placeholders if p.phase is Phase.INPUT and not p.constant and program.values[p.value].shape]
        sizes = Counter(program.values[value].shape[0] for value in inputs)
        self._size = sizes.most_common(1)[0][0] if sizes else 0
        start = checkpoints[0].env
        self._inputs = [value for value in inputs if program.values[value].shape[0] == self._size and value in start]

    def rows_of_input(self, birth: Birth) -> tuple[int, ...]:
        """Return the rows in which an input tensor is bad."""
        if birth.mask.dim() == 0 or birth.mask.shape[0] != self._size:
            return ()
        return tuple(birth.mask.flatten(1).any(1).nonzero().flatten().tolist() if birth.mask.dim() > 1 else birth.mask.nonzero().flatten().tolist())

    def rows(self, birth: Birth, value: int, mask: torch.Tensor) -> tuple[int, ...]:
        """Return the rows of the batch that the elements `mask` of a call's result belong to; () where that cannot be told."""
        if self._size < 2:  # noqa: PLR2004  (one row: nothing to tell apart)
            return ()
        guesses = self._guesses(mask)
        if len(guesses) == 1 and mask.shape[0] == self._size:
            return guesses[0]
        for rows in guesses:
            if len(rows) < self._size and self._carry(rows, birth, value, mask):
                return rows
        cost = sum(self._stretch.costs[: self._stretch.cut_after(birth.node)])
        if cost * self._size > _BUDGET:
            return guesses[0] if guesses else ()
        return tuple(row for row in range(self._size) if self._carry((row,), birth, value, mask, entirely=False))

    def _guesses(self, mask: torch.Tensor) -> list[tuple[int, ...]]:
        """The rows by each dimension that has the size of the batch, or a multiple of it in front (flattened tokens)."""
        where = mask.nonzero()
        found = [tuple(sorted(set(where[:, d].tolist()))) for d, size in enumerate(mask.shape) if size == self._size]
        if not found and mask.dim() and mask.shape[0] % self._size == 0 and mask.shape[0]:
            group = mask.shape[0] // self._size
            found = [tuple(sorted(set((where[:, 0] // group).tolist()))), tuple(sorted(set((where[:, 0] % self._size).tolist())))]
        return found

    def _carry(self, rows: Sequence[int], birth: Birth, value: int, mask: torch.Tensor, *, entirely: bool = True) -> bool:
        """Whether the blamed elements heal (all of them, or any) when rows of the batch are replaced by a healthy one."""
        healthy = next(row for row in range(self._size) if row not in rows)
        state: Env = {}
        for number in self._inputs:
            tensor = self._checkpoints[0].env[number].clone()
            for row in rows:
                tensor[row] = tensor[healthy]
            state[number] = tensor
        run, found = Run(self._stretch, self._checkpoints[0], state=state), []
        cut = self._stretch.cut_after(birth.node)
        try:
            run.advance(cut - 1)
            run.advance(cut, lambda executed: found.append(executed.content[value]))
        except ReplayError:
            return False
        if found[0].shape != mask.shape:
            return False
        left = finite.mask(found[0]) & mask
        return not bool(left.any()) if entirely else bool((left != mask).any())
