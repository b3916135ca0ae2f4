"""What was alive in the middle of a recording, held by reference, so that a search in the same process need not start in front.

A frontier is kept where nothing that the step made was found to be non-finite; behind the first find, none is. That is a hint where
to begin and proves nothing: whatever starts at a frontier looks at it again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from bisect_nan import finite
from bisect_nan.recording.generators import Source
from bisect_nan.recording.memory import Memory
from bisect_nan.recording.program import Program
from bisect_nan.recording.values import Values

_UNIT = 2**18
"""Elements that a step makes at least from one frontier to the next; running so few again takes no time."""

_SHARE = 8
"""A frontier is due when this part of all elements so far was made since the one before."""

_MOST = 16
"""Frontiers that are held at most."""

_BUDGET = 2**29
"""Bytes that they may hold during the backward pass. In the forward pass autograd holds the same memory anyway."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """The memory that was alive between two calls.

    Attributes:
        calls: How many calls of the program had run.
        storages: What it held, by storage number; memory from outside only where it had been written to.
        generators: State of the random generators that had been drawn from.
    """

    calls: int
    storages: dict[int, torch.UntypedStorage]
    generators: Mapping[Source, torch.Tensor]


class Frontiers:
    """Keeps frontiers while a step is recorded: the latest ones, the further apart the longer ago."""

    def __init__(self, values: Values, *, active: bool) -> None:
        """Start with none.

        Args:
            values: The values of the recording.
            active: Whether to keep any.
        """
        self._values, self._stopped = values, not active
        self._kept: list[Frontier] = []
        self._holders: Counter[int] = Counter()  # how many frontiers hold a storage, by its identity
        self._bytes, self._budget = 0, math.inf
        self._alive: list[Memory] = []
        self._looked = 0  # memories that were looked at
        self._written: set[int] = set()  # memories that were written to since
        self._raw: set[int] = set()  # memories that hold whatever was there
        self._elements = self._since = 0

    def made(self, first: int) -> bool:
        """Note the values from `first` on, which a call has made, and return whether a frontier is due."""
        if self._stopped:
            return False
        for number in range(first, len(self._values.storages)):
            self._since += self._values.size(number)
        return self._since >= max(_UNIT, self._elements / _SHARE)

    def unwritten(self, first: int) -> None:
        """Note that nothing was written yet to the memory of the values from `first` on."""
        self._raw.update(self._values.storages[first:])

    def keep(self, calls: int, generators: Mapping[Source, torch.Tensor]) -> None:
        """Keep the present frontier, unless something in it is non-finite.

        Args:
            calls: How many calls have run.
            generators: State of the random generators that were drawn from.
        """
        memories = self._values.memories
        fresh = [*memories[self._looked :], *(memories[number] for number in self._written if number < self._looked)]
        self._elements, self._since, self._looked = self._elements + self._since, 0, len(memories)
        self._written.clear()
        own = {memory.number: memory for memory in [*self._alive, *fresh] if memory.base >= 0 and memory.changes}
        held = {number: storage for number, memory in own.items() if (storage := memory.reference()) is not None}
        self._alive = [own[number] for number in held]
        if finite.probe(self._values.whole(m.number) for m in fresh if m.number in held and m.number not in self._raw):
            self._stopped = True
            return
        for memory in self._alive:
            if memory.owner is not None:  # it is put back when the recording ends
                held[memory.number] = held[memory.number].clone()  # type: ignore[no-untyped-call]
        self._hold(Frontier(calls, held, dict(generators)))

    def bound(self) -> None:
        """Keep to the budget from now on, since memory that frontiers hold is no longer held by others anyway."""
        self._budget = _BUDGET
        self._trim()

    def before_write(self, number: int) -> None:
        """Copy memory that frontiers hold before it is written to."""
        self._written.add(number)
        self._raw.discard(number)
        live = self._values.memories[number].reference()
        holding = [frontier for frontier in self._kept if frontier.storages.get(number) is live]
        if live is None or not holding:
            return
        copy: torch.UntypedStorage = live.clone()  # type: ignore[no-untyped-call]
        for frontier in holding:
            frontier.storages[number] = copy
            self._count(live, -1)
            self._count(copy, 1)

    def of(self, program: Program) -> tuple[Frontier, ...]:
        """Return the frontiers of a finished program, each without the memory that no later call reads."""
        read: dict[int, float] = {}  # storage -> the last call that reads it
        for node in program.nodes:
            for number in node.inputs():
                read[program.values[number].storage] = node.index
        for number in program.targets.all():
            read[program.values[number].storage] = math.inf
        return tuple(
            replace(f, storages={n: storage for n, storage in f.storages.items() if read.get(n, -1) >= f.calls})
            for f in self._kept
        )

    def _hold(self, frontier: Frontier) -> None:
        self._kept.append(frontier)
        for storage in frontier.storages.values():
            self._count(storage, 1)
        while len(self._kept) > _MOST:
            gaps = [late.calls - early.calls for early, late in zip(self._kept, self._kept[2:], strict=False)]
            self._drop(1 + gaps.index(min(gaps)))
        self._trim()

    def _trim(self) -> None:
        while self._bytes > self._budget:
            self._drop(0)

    def _drop(self, place: int) -> None:
        for storage in self._kept.pop(place).storages.values():
            self._count(storage, -1)

    def _count(self, storage: torch.UntypedStorage, change: int) -> None:
        before = self._holders[id(storage)]
        self._holders[id(storage)] += change
        if before == 0 or before + change == 0:
            self._bytes += change * storage.nbytes()
        if before + change == 0:
            del self._holders[id(storage)]
