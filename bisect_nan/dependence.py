"""Which call needs which: a `networkx.DiGraph` over node indices, through arguments and through written memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import networkx as nx

from bisect_nan.program import NO_STORAGE, Program


class Dependence:
    """The dependences of a program.

    A call needs the calls that made its arguments, and the latest call that wrote to their memory; earlier writers follow from
    that one, since whoever writes to memory takes it as an argument.

    Attributes:
        graph: Edge i -> j when call j needs call i.
    """

    def __init__(self, program: Program) -> None:
        """Build the graph in one pass over the program."""
        self._program = program
        self._maker: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}
        self._random = [node.index for node in program.nodes if node.random]
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.graph.add_nodes_from(range(len(program.nodes)))
        for node in program.nodes:
            for value in node.inputs():
                self.graph.add_edges_from((before, node.index) for before in self.needed(value))
            for storage in node.writes:
                self._writers.setdefault(storage, []).append(node.index)
            for output in node.outputs:
                if output is not None:
                    self._maker.setdefault(output, node.index)

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
                wanted.update(self.graph.predecessors(call))
        return wanted

    def finished(self, targets: Iterable[int]) -> int:
        """Return how many calls of the program have run when all of `targets` have their final content."""
        return 1 + max((call for value in targets for call in self.needed(value)), default=-1)

    def chain(self, start: int, targets: Iterable[int], through: Sequence[int] | None = None) -> list[int]:
        """Return the shortest path of calls from `start` to one that finishes a target, both ends included.

        Args:
            start: A call.
            targets: Value numbers.
            through: The calls that the path may use; any call when not given.
        """
        graph = self.graph if through is None else self.graph.subgraph([*through, start])
        paths = nx.single_source_shortest_path(graph, start)
        found = [paths[end] for value in targets for end in self.needed(value) if end in paths]
        return min(found, key=len, default=[start])
