"""Which call needs which: a `networkx.DiGraph` over node indices, through arguments and through written memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property

import networkx as nx

from bisect_nan.recording.program import NO_STORAGE, Program


class Dependence:
    """The dependences of a program.

    A call needs the calls that made its arguments, and the latest call that wrote to their memory; earlier writers follow from
    that one, since whoever writes to memory takes it as an argument.

    Attributes:
        before: By call: the calls that it needs.
    """

    def __init__(self, program: Program) -> None:
        """Build the graph in one pass over the program."""
        self._program = program
        self._maker: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}
        self._random = [node.index for node in program.nodes if node.random]
        self.before: list[dict[int, None]] = []
        for node in program.nodes:
            self.before.append({call: None for value in node.inputs() for call in self.needed(value)})
            for storage in node.writes:
                self._writers.setdefault(storage, []).append(node.index)
            for output in node.outputs:
                if output is not None:
                    self._maker.setdefault(output, node.index)

    @cached_property
    def graph(self) -> nx.DiGraph[int]:
        """Edge i -> j when call j needs call i; made when it is first asked for, which many searches never do."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(len(self.before)))
        graph.add_edges_from((before, call) for call, needed in enumerate(self.before) for before in needed)
        return graph

    def needed(self, value: int, before: int | None = None) -> list[int]:
        """Return the calls that made a value, or wrote to its memory last.

        Args:
            value: Its number.
            before: Index of the call that reads it; the end of the program when not given.
        """
        found = [self._maker[value]] if value in self._maker else []
        storage = self._program.values[value].storage
        writers = self._writers.get(storage, []) if storage != NO_STORAGE else []
        place = len(writers) if before is None else bisect_left(writers, before)
        if place and writers[place - 1] not in found:
            found.append(writers[place - 1])
        return found

    def slice(self, targets: Iterable[int]) -> list[int]:
        """Return the calls that the values `targets`, as they are when the program ends, are computed from, in order.

        Random calls before the last of them belong to it: each draws on from where the one before stopped.
        """
        wanted = self._with_ancestors(call for value in targets for call in self.needed(value))
        last = max((call for call in self._random if call in wanted), default=-1)
        draws = [call for call in self._random if call < last]
        return sorted(wanted if wanted.issuperset(draws) else wanted | self._with_ancestors(draws))

    def _with_ancestors(self, calls: Iterable[int]) -> set[int]:
        """Return calls and everything that they need: one sweep, for a call only needs earlier ones."""
        wanted = set(calls)
        for call in range(max(wanted, default=-1), -1, -1):
            if call in wanted:
                wanted.update(self.before[call])
        return wanted

    def finished(self, targets: Iterable[int]) -> int:
        """Return how many calls of the program have run when all of `targets` have their final content."""
        return 1 + max((call for value in targets for call in self.needed(value)), default=-1)

    def ancestors(self, call: int) -> set[int]:
        """Return everything that a call needs, itself left out."""
        return self._with_ancestors([call]) - {call}

    def descendants(self, calls: Iterable[int]) -> set[int]:
        """Return everything that needs one of some calls."""
        return {later for call in calls for later in nx.descendants(self.graph, call)}

    def chain(self, start: int, targets: Iterable[int], through: Sequence[int] | None = None) -> list[int]:
        """Return the shortest path of calls from `start` to one that finishes a target, both ends included.

        Args:
            start: A call.
            targets: Value numbers.
            through: The calls that the path may use; any call when not given.
        """
        allowed = None if through is None else {*through, start}
        after: dict[int, int] = {}  # a call -> the one behind it on the shortest way to a target; -1 at the end
        ends = [end for value in targets for end in self.needed(value)]
        waiting = deque(end for end in ends if allowed is None or end in allowed)
        after.update(dict.fromkeys(waiting, -1))
        while waiting and start not in after:
            call = waiting.popleft()
            fresh = [
                b for b in self.before[call] if b >= start and b not in after and (allowed is None or b in allowed)
            ]
            after.update(dict.fromkeys(fresh, call))
            waiting.extend(fresh)
        path = [start]
        while after.get(path[-1], -1) >= 0:
            path.append(after[path[-1]])
        return path
