"""What stands around a culprit: the terms of the loss that it spoils, and the magnitudes that led up to an overflow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from bisect_nan.answer.witness import Witness
from bisect_nan.causes.evidence import base_name
from bisect_nan.finding import Phase
from bisect_nan.recording.program import Node, Program
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Executed

_SUMS = {"add", "sub", "mul", "div", "neg", "sum", "stack", "cat", "view", "reshape", "unsqueeze", "mean"}
"""Calls that put the terms of a loss together."""

_TERMS = 6
"""Terms that are told."""

_STEPS = 5
"""Calls before an overflow whose magnitudes are told."""


class Story:
    """Tells of the calls around culprits."""

    def __init__(self, program: Program, dependence: Dependence, witness: Witness) -> None:
        """Prepare.

        Args:
            program: The step.
            dependence: Of the program.
            witness: Executes calls.
        """
        self._program, self._dependence, self._witness = program, dependence, witness

    def terms(self) -> tuple[str, ...]:
        """Say which term of a non-finite loss is bad and what the others are, where the loss is a sum of several.

        Where births before the terms are neutralised, the numbers would not be those of the step, and nothing is said.
        """
        loss = self._program.targets.loss
        adding = [] if loss is None else list(self._adding(loss))
        if not adding or self._witness.altered(adding[-1]):
            return ()
        seen = {executed.node.index: executed for executed in self._witness.between(adding[-1], adding[0])}
        terms = dict(self._terms(adding, seen))
        bad = [(number, value) for number, value in terms.items() if not torch.isfinite(value)]
        good = [(number, value) for number, value in terms.items() if torch.isfinite(value)]
        if not bad or not good:
            return ()
        many = "one is" if len(bad) == 1 else f"{len(bad)} are"
        rest = "the other is" if len(good) == 1 else "the others are"
        return (f"of the {len(terms)} terms of the loss {many} bad: {self._told(bad)}; {rest} {self._told(good)}",)

    def _told(self, terms: list[tuple[int, torch.Tensor]]) -> str:
        """Return numbers with the lines that they come from; those of one line are put together."""
        lines: dict[str, list[str]] = {}
        for number, value in terms[:_TERMS]:
            lines.setdefault(self._origin(number), []).append(f"{float(value):.4g}")
        return ", ".join(f"{', '.join(values)}{line}" for line, values in lines.items())

    def _adding(self, loss: int) -> Iterator[Node]:
        """Yield the calls that put scalars together to the loss, the last one first."""
        waiting, known = [(loss, len(self._program.nodes))], set[int]()
        while waiting:
            value, before = waiting.pop(0)
            for index in self._dependence.needed(value, before):
                node = self._program.nodes[index]
                parts = [n for n in node.inputs() if self._is_term(n) or self._is_list(n, index)]
                if index in known or base_name(str(node.target)) not in _SUMS or not parts:
                    continue
                known.add(index)
                yield node
                waiting += [(n, index) for n in parts]

    def _is_term(self, number: int) -> bool:
        value = self._program.values[number]
        return value.dtype.is_floating_point and all(size == 1 for size in value.shape)

    def _is_list(self, number: int, before: int) -> bool:
        """Whether a value is a list of scalars as `stack` and `cat` make it."""
        makers = [base_name(str(self._program.nodes[i].target)) for i in self._dependence.needed(number, before)]
        return makers in (["stack"], ["cat"])

    def _terms(self, adding: list[Node], seen: Mapping[int, Executed]) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the scalars that are put together and are not put together themselves."""
        inner = {number for node in adding for number in node.outputs}
        for node in sorted(adding, key=lambda node: node.index):
            executed = seen.get(node.index)
            for number in node.inputs() if executed is not None else ():
                if number not in inner and self._is_term(number) and self._dependence.needed(number, node.index):
                    yield number, executed.inputs[number].detach().reshape(())  # type: ignore[union-attr]

    def _origin(self, number: int) -> str:
        source = next((self._program.source(self._program.nodes[i]) for i in self._dependence.needed(number)), None)
        return "" if source is None else f" ({source})"

    def growth(self, node: Node) -> tuple[str, ...]:
        """Say how large the values were on the way to an overflow, along the first floating operands."""
        path = list(itertools.islice(self._before(node), _STEPS * 2))
        if not path:
            return ()
        largest: dict[int, float] = {}
        for executed in self._witness.between(path[-1], path[0]):
            for number, made in executed.content.items():
                if made.is_floating_point() and made.numel():
                    largest[number] = float(made.detach().abs().nan_to_num(posinf=0).max())
        told: list[tuple[str, float]] = []
        for call in reversed(path):
            sizes = [largest[n] for n in call.outputs if n is not None and n in largest]
            if sizes and (not told or told[-1][1] != sizes[0]):
                told.append((base_name(str(call.target)).lstrip("_"), sizes[0]))
        if len(told) < 2:  # noqa: PLR2004
            return ()
        steps = ", ".join(f"{name} {size:.3g}" for name, size in told[-_STEPS:])
        return (f"largest magnitudes of the calls before it: {steps}",)

    def _before(self, node: Node) -> Iterator[Node]:
        """Yield the calls behind a call along its first floating operand, the nearest first."""
        while True:
            operands = [n for n in node.inputs() if self._program.values[n].dtype.is_floating_point]
            found = [index for n in operands[:1] for index in self._dependence.needed(n, node.index)]
            found = [index for index in found if index < node.index]
            if not found or self._program.nodes[found[0]].phase is not Phase.FORWARD:
                return
            node = self._program.nodes[found[0]]
            yield node
