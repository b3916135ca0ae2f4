"""A stretch of a program: the calls that some target values need, and what is alive between them.

Cuts count its calls. A checkpoint is the frontier at a cut: references, and copies only of memory that a later call writes to, so
that no run spoils what another one starts from.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bisect_nan.recording.binding import Binding
from bisect_nan.recording.frontiers import Frontier
from bisect_nan.recording.generators import Source, source_of
from bisect_nan.recording.memory import view as shown
from bisect_nan.recording.program import NO_STORAGE, Node, Program

Env = dict[int, torch.Tensor]
"""Tensors by value number."""

_SMALL = 4_000_000
"""Elements that a stretch may make to be looked at element by element, at up to a microsecond each."""


@dataclass(slots=True)
class Checkpoint:
    """Everything that a run needs to go on from a cut.

    Attributes:
        cut: How many calls of the stretch have run.
        env: The values alive there; their memory is never written to by a run.
        generators: State of the random generators, by what draws from them.
    """

    cut: int
    env: Env
    generators: Mapping[Source, torch.Tensor] = field(default_factory=dict)


class Stretch:
    """The calls of a program that some targets need, ready to run.

    Attributes:
        program: The whole program.
        nodes: The calls, in order; cut k lies behind the first k of them.
        targets: Value numbers that are kept alive to the end.
        bindings: How each call gets its arguments.
        free: By cut: the values that no call behind the next one needs.
        executed: Calls executed so far, by all runs.
        announce: Told the program index before every call, where a call may end the process.
    """

    def __init__(
        self,
        program: Program,
        order: Sequence[int],
        targets: Iterable[int],
        announce: Callable[[int], None] | None = None,
    ) -> None:
        """Work out once when each value is born and used last, and when each memory is written."""
        self.program = program
        self.nodes = [program.nodes[index] for index in order]
        self.targets = frozenset(targets)
        self.bindings = [Binding(node) for node in self.nodes]
        self.executed = 0
        self.announce = announce
        self._place = {node.index: place for place, node in enumerate(self.nodes)}
        last_use: dict[int, int] = {}
        changes: dict[int, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for value in [*node.inputs(), *(output for output in node.outputs if output is not None)]:
                last_use[value] = place
            for output in node.outputs:
                if output is not None:
                    changes.setdefault(program.memory(output), [place])
            for storage in node.writes:
                changes.setdefault(storage, []).append(place)
        for placeholder in program.placeholders:
            storage = program.values[placeholder.value].storage
            if storage in changes:
                changes[storage] = [place for place in changes[storage] if storage in self.nodes[place].writes]
        self._last_use = last_use
        self._changes = {storage: sorted(set(places)) for storage, places in changes.items() if places}
        self.free: list[list[int]] = [[] for _ in self.nodes]
        for value, place in last_use.items():
            if value not in self.targets:
                self.free[place].append(value)

    def __len__(self) -> int:
        """Return the number of calls; the last cut."""
        return len(self.nodes)

    @property
    def costs(self) -> list[float]:
        """Seconds that each call took while recording."""
        return [node.cost for node in self.nodes]

    def is_small(self, start: int, stop: int) -> bool:
        """Whether the calls between two cuts make few enough elements to be looked at one by one."""
        values = self.program.values
        made = [values[n].shape for node in self.nodes[start:stop] for n in node.outputs if n is not None]
        return sum(math.prod(shape) for shape in made) <= _SMALL

    def cut_after(self, index: int) -> int:
        """Return the cut just behind the program's node `index`."""
        return self._place[index] + 1

    def has(self, index: int) -> bool:
        """Whether the program's node `index` belongs to the stretch."""
        return index in self._place

    def start(self, tensors: Mapping[int, torch.Tensor]) -> Checkpoint:
        """Return the checkpoint at cut 0.

        Args:
            tensors: The placeholders' tensors by value number; they are never written to.
        """
        wanted = {value for node in self.nodes for value in node.inputs()} | self.targets
        return Checkpoint(0, {value: tensor for value, tensor in tensors.items() if value in wanted})

    def resume(self, frontiers: Iterable[Frontier], start: Checkpoint) -> list[Checkpoint]:
        """Return the checkpoints at frontiers that were kept while recording, without those that lack something.

        Args:
            frontiers: What was alive there.
            start: The checkpoint at cut 0.
        """
        indices = [node.index for node in self.nodes]
        born = {
            placeholder.value: -1 for placeholder in self.program.placeholders
        }  # some calls return what they write to
        for place, node in enumerate(self.nodes):
            for number in node.outputs:
                if number is not None:
                    born.setdefault(number, place)
        lives = [
            (number, born[number], len(self) if number in self.targets else last)
            for number, last in self._last_use.items()
        ]
        outside = {
            self.program.memory(n): t.untyped_storage() for n, t in start.env.items() if t.layout is torch.strided
        }
        tensors: dict[tuple[int, int], torch.Tensor] = {}  # one for a value in the same memory, at any frontier
        found = []
        for frontier in frontiers:
            cut, env = bisect_left(indices, frontier.calls), Env()
            for number, first, last in lives:
                if not first < cut <= last:
                    continue
                value = self.program.values[number]
                storage = frontier.storages.get(value.storage, outside.get(value.storage))
                if storage is not None:
                    key = number, id(storage)
                    env[number] = tensors[key] if key in tensors else tensors.setdefault(key, shown(storage, value))
                elif number in start.env:
                    env[number] = start.env[number]
                else:
                    break
            else:
                found.append(Checkpoint(cut, env, frontier.generators))
        return found

    def changed(self, storage: int, since: int, cut: int) -> bool:
        """Whether a memory was made or written by the calls between two cuts."""
        places = self._changes.get(storage)
        return places is not None and bisect_right(places, cut - 1) > bisect_right(places, since - 1)

    def last_change(self, storage: int, cut: int) -> int:
        """Return the place of the last call before a cut that made or wrote a memory; -1 when there is none."""
        places = self._changes.get(storage, [])
        before = bisect_left(places, cut)
        return places[before - 1] if before else -1

    def fills(self, node: Node, number: int) -> bool:
        """Whether a call made or wrote the memory of a value of its own, rather than return a view of what others wrote."""
        place = self._place[node.index]
        return self.changed(self.program.memory(number), place, place + 1)

    def written_later(self, storage: int, cut: int) -> bool:
        """Whether a call behind the cut writes to a memory."""
        places = self._changes.get(storage)
        return places is not None and places[-1] >= cut

    def source(self, node: Node) -> Source:
        """Return the random generator that a call draws from."""
        devices = [
            self.program.values[number].device for number in [*node.outputs, *node.written] if number is not None
        ]
        return source_of([*node.args, *node.kwargs.values()], devices)

    def own(self, env: Env, cut: int) -> Env:
        """Return `env` with fresh copies of every memory that a call behind the cut writes to."""
        values, owned = self.program.values, dict(env)
        copies: dict[int, torch.UntypedStorage] = {}
        for number, tensor in env.items():
            value = values[number]
            if value.storage == NO_STORAGE or not self.written_later(value.storage, cut):
                continue
            copy = copies.get(value.storage)
            if copy is None:
                copy = copies[value.storage] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            owned[number] = view(copy, tensor)
        return owned


def view(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shows `storage` as `like` shows its own."""
    shown = torch.empty(0, dtype=like.dtype, device=storage.device)
    shown.set_(storage, like.storage_offset(), like.shape, like.stride())
    shown = torch._conj(shown) if like.is_conj() else shown
    return torch._neg_view(shown) if like.is_neg() else shown
