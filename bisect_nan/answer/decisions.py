"""Whether a step whose numbers are changed goes the same way: Python reads some of them, and may decide on what it reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase
from bisect_nan.recording.program import Node, Program
from bisect_nan.recording.traits import READS
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Run
from bisect_nan.replaying.stretch import Env, Stretch


class Decisions:
    """The numbers that Python reads before the loss is there."""

    def __init__(self, program: Program, dependence: Dependence, tensors: Mapping[int, torch.Tensor]) -> None:
        """Find them.

        Args:
            program: The step.
            dependence: Of the program.
            tensors: Its placeholders by value number.
        """
        self._program, self._dependence, self._tensors = program, dependence, tensors
        loss = program.targets.loss
        end = max(max(dependence.needed(loss), default=-1), 0) if loss is not None else 0
        self._reads = [n for n in program.nodes[:end] if n.target in READS and n.phase is Phase.FORWARD]

    def answers(self, changed: Collection[int]) -> list[int]:
        """Return the values of the answers, true or false, that are read behind changed calls (a validation's, an assertion's)."""
        return [number for node in self._behind(changed) for number in node.inputs() if self._is_answer(number)]

    def stand(self, changed: Collection[int], env: Env) -> bool:
        """Whether nothing is read behind changed calls but answers that are the same after the change.

        Args:
            changed: The calls.
            env: The values after the change, the answers among them.
        """
        numbers = [number for node in self._behind(changed) for number in node.inputs()]
        if not all(self._is_answer(number) and number in env for number in numbers):
            return False
        if not numbers:
            return True
        stretch = Stretch(self._program, self._dependence.slice(numbers), numbers)
        run = Run(stretch, stretch.start(self._tensors))
        run.advance(len(stretch))
        return all(finite.same(run.env[number], env[number]) for number in numbers)

    def _behind(self, changed: Collection[int]) -> list[Node]:
        following = self._dependence.descendants(changed) if self._reads else ()
        return [node for node in self._reads if node.index in following]

    def _is_answer(self, number: int) -> bool:
        return self._program.values[number].dtype is torch.bool
