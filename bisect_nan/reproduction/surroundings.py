"""The calls around a culprit, with the values that they had in the step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bisect_nan import finite
from bisect_nan.answer.witness import results
from bisect_nan.causes.evidence import base_name
from bisect_nan.finding import Culprit, Phase
from bisect_nan.recording.program import Node, Program, substitute, tensors
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Executed, Run, own_generator
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.reproduction.draft import Form
from bisect_nan.reproduction.spelling import called, is_list, member, spellings
from bisect_nan.snapshots.snapshot import Snapshot

DEPTH = 6
"""How many calls away from the culprit is still looked."""

_MOST = 64
"""Calls that are looked at, so that their values fit into memory."""

Unit = tuple[int, int]
"""A call, and which member of it when it is one on lists (`_foreach_sqrt`), else 0."""


@dataclass(frozen=True, slots=True)
class Written:
    """A unit as the script writes it.

    Attributes:
        form: How it is called.
        args: Positional arguments, tensors as `Ref`.
        kwargs: Keyword arguments.
        single: Whether one tensor comes out, not a tuple.
    """

    form: Form
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    single: bool


class Surroundings:
    """What a culprit was computed from, and what was made of it.

    Attributes:
        program: The step.
        core: What a script must hold: the culprit's own call, or the forward call whose derivative failed.
        blamed: Position of the blamed tensor among the results of the culprit's call.
        derivative: Whether the core is not the culprit's own call.
        differentiates: Whether the step takes derivatives itself, so that there may be derivatives of these.
        upstream: The gradient that the derivative of the core was given in the step; None where it cannot be told.
    """

    def __init__(self, snapshot: Snapshot, culprit: Culprit) -> None:
        """Run the step once more as far as it is needed, and keep the values of the calls nearby.

        Args:
            snapshot: The step.
            culprit: A call of it.

        Raises:
            ReplayError: A call of the program cannot be executed here.
        """
        self.program: Program = snapshot.program
        self._dependence = Dependence(self.program)
        node = self.program.nodes[culprit.node]
        origin = self.program.origin(node)
        self.derivative = origin.index != node.index
        self.differentiates = any(n.autograd is not None and n.phase is Phase.FORWARD for n in self.program.nodes)
        self._successors: dict[int, list[int]] = {}
        for call, needed in enumerate(self._dependence.before):
            for before in needed:
                self._successors.setdefault(before, []).append(call)
        self._origin = origin
        near = {origin.index, *self._near()}
        given = self._given_gradient() if self.derivative else None
        self.executed = self._run(snapshot, {*near, node.index, *([given[0]] if given else [])})
        self.upstream = self.executed[given[0]].inputs[given[1]] if given else None
        self.blamed = self._blamed(self.executed[node.index])
        self.core: Unit = (origin.index, self.blamed if is_list(origin) and not self.derivative else 0)
        self._written: dict[Unit, Written | None] = {}

    def _near(self) -> list[int]:
        """Return the calls before and behind the core, the nearest first."""
        front, found = [self._origin.index], list[int]()
        for _ in range(DEPTH):
            reached = [
                call for known in front for call in (*self._dependence.before[known], *self._successors.get(known, ()))
            ]
            front = [n for n in dict.fromkeys(reached) if n not in found and self._usable(self.program.nodes[n])]
            found += front
        return found[:_MOST]

    def _usable(self, node: Node) -> bool:
        same = node.phase is self._origin.phase and (node.autograd is None) == (self._origin.autograd is None)
        return same and not node.random and node.memory is None

    def _given_gradient(self) -> tuple[int, int] | None:
        """Return the call that the core's derivative begins with, and which of its arguments is the gradient that it was given."""
        values = self.program.values
        shapes = {values[number].shape for number in self._origin.outputs[:1] if number is not None}
        made = {number for node in self.program.nodes if node.autograd is not None for number in node.outputs}
        for node in self.program.nodes[self._origin.index + 1 :]:
            if node.forward == self._origin.index and node.autograd is not None:
                for number in node.inputs():
                    if values[number].shape in shapes and number in made:
                        return node.index, number
        return None

    def _run(self, snapshot: Snapshot, wanted: set[int]) -> dict[int, Executed]:
        nodes = [self.program.nodes[call] for call in sorted(wanted)]
        numbers = [number for node in nodes for number in (*node.outputs, *node.written) if number is not None]
        order = [call for call in self._dependence.slice(numbers) if call <= nodes[-1].index]
        stretch = Stretch(self.program, order, numbers)
        found: dict[int, Executed] = {}

        def visit(executed: Executed) -> None:
            if executed.node.index in wanted:
                found[executed.node.index] = executed

        with own_generator(), snapshot.environment.applied():
            Run(stretch, stretch.start(snapshot.tensors())).advance(len(stretch), visit)
        return found

    def _blamed(self, executed: Executed) -> int:
        return next(
            (place for place, tensor in enumerate(_made(executed)) if tensor is not None and finite.probe([tensor])), 0
        )

    def name(self, unit: Unit) -> str:
        """Return the name of a unit's operation, without the marks of its variants."""
        return base_name(str(self.program.nodes[unit[0]].target)).removeprefix("_foreach_")

    def bad_elements(self) -> list[tuple[int, ...]]:
        """Return the index of the first element of the blamed tensor that is NaN, and of the first that is infinite."""
        tensor = _made(self.executed[self._origin.index])[self.blamed]
        if tensor is None:
            return []
        masks = [finite.mask(tensor, kind) for kind in (finite.NonFinite.NAN, finite.NonFinite.INF)]
        return [tuple(int(i) for i in mask.nonzero()[0]) for mask in masks if mask.any()]

    def selections(self, *, later: bool) -> Iterator[list[Unit]]:
        """Yield growing sets of units around the core, the core alone first.

        Args:
            later: Whether units behind it belong to them.
        """
        chosen, front = {self.core}, [self.core]
        yield [self.core]
        for _ in range(DEPTH):
            reached = [source for unit in front for source in self._sources(unit)]
            if later:
                reached += [unit for before in front for unit in self._users(before)]
            front = [unit for unit in dict.fromkeys(reached) if unit not in chosen and self.written(unit) is not None]
            if not front:
                return
            chosen.update(front)
            yield sorted(chosen)

    def _sources(self, unit: Unit) -> list[Unit]:
        written = self.written(unit)
        numbers = numbers_in((written.args, written.kwargs)) if written is not None else []
        made = [self.maker(number, unit[0]) for number in numbers]
        return [found[0] for found in made if found is not None and found[0][0] in self.executed]

    def _users(self, before: Unit) -> list[Unit]:
        found: list[Unit] = []
        for call in self._successors.get(before[0], ()):
            node = self.program.nodes[call]
            if call in self.executed and self._usable(node):
                places = range(len(results(self.executed[call]))) if is_list(node) else [0]
                found += [(call, place) for place in places if before in self._sources((call, place))]
        return found

    def maker(self, number: int, before: int) -> tuple[Unit, int] | None:
        """Return the unit that made a value, as a call reads it, and its position among the unit's results.

        Args:
            number: The value.
            before: Index of the call.

        Returns:
            None where the step began with the value, or its memory was written through another view.
        """
        calls = self._dependence.needed(number, before)
        if not calls:
            return None
        node = self.program.nodes[max(calls)]
        held = [*node.outputs, *(n for n in node.written if n not in node.outputs)]
        if number not in held:
            return None
        place = held.index(number)
        return ((node.index, place), 0) if is_list(node) else ((node.index, 0), place)

    def version(self, number: int, before: int) -> tuple[int, int]:
        """Return what tells the contents of a value apart that different calls read."""
        return number, max(self._dependence.needed(number, before), default=-1)

    def written(self, unit: Unit) -> Written | None:
        """Return the most readable way to write a unit that gives what was recorded; None when there is none."""
        if unit not in self._written:
            self._written[unit] = self._choose(unit) if unit[0] in self.executed else None
        return self._written[unit]

    def _choose(self, unit: Unit) -> Written | None:
        executed, place = self.executed[unit[0]], unit[1]
        node = executed.node
        args, kwargs = member(node, node.args, node.kwargs, place)
        expected = _made(executed)
        if is_list(node):
            expected = expected[place : place + 1]
        for form, given, named in spellings(node, args, kwargs):
            with contextlib.suppress(Exception), torch.no_grad():  # operators refuse arguments with errors of any kind
                own_args, own_kwargs = substitute((given, dict(named)), lambda n: executed.inputs[n].clone())
                made = called(form, own_args, own_kwargs)
                single = isinstance(made, torch.Tensor)
                if all(_alike(*pair) for pair in zip(tensors(made if single else list(made)), expected, strict=False)):
                    return Written(form, given, named, single)
        return None


def _made(executed: Executed) -> list[torch.Tensor | None]:
    """Return what a call returned, by position, and behind that what it only wrote to."""
    return [None if number is None else executed.content.get(number) for number in results(executed)]


def numbers_in(item: Any) -> list[int]:
    """Return the numbers of the values among nested arguments."""
    found: list[int] = []
    substitute(item, found.append)
    return found


def _alike(mine: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if mine is None or theirs is None:
        return True
    same = mine.shape == theirs.shape and mine.dtype == theirs.dtype
    return same and torch.allclose(mine, theirs, equal_nan=True)
