"""Counts what a report draws: one more run of the step, with one look at what each call made."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch

from bisect_nan import finite
from bisect_nan.answer.explain import OVERFLOWS
from bisect_nan.causes.optimizer import LEARNING_RATE_EXPLOSION
from bisect_nan.finding import Culprit, Finding, Phase, Verdict
from bisect_nan.finite import NonFinite
from bisect_nan.pictures import BadElements, Magnitude, Picture
from bisect_nan.recording.program import Node, Program
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Executed, Run, own_generator
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.snapshots.snapshot import Snapshot

_CELLS = 96
"""Rows and columns of a grid, at most: more would be smaller than what an eye tells apart."""

_DIPS = 10.0
"""Within a growth values may fall by this factor, as behind a relu."""

_GROWS = 10.0
"""Values that grew by less are not called growth."""

_GROWING = {*OVERFLOWS, LEARNING_RATE_EXPLOSION.name}
"""Causes in which growth is what happened."""


def picture(snapshot: Snapshot, finding: Finding) -> Picture:
    """Count what an HTML report draws beside a finding: `finding.to_html(picture(snapshot, finding))`.

    The step runs once more, up to its symptom. Nothing is run where nothing was found.

    Args:
        snapshot: The step.
        finding: What `locate(snapshot)` returned.

    Raises:
        ReplayError: A call of the program cannot be executed here.
        SnapshotError: The captured tensors have been written to since.
    """
    history = tuple(dict(numbers) for numbers in snapshot.history)
    if snapshot.observed is None or finding.verdict not in (Verdict.LOCATED, Verdict.INCONCLUSIVE):
        return Picture(history=history)
    program = snapshot.program
    numbers = program.targets.of(snapshot.observed.symptom.kind)
    targets = [numbers[name] for name in snapshot.observed.names if name in numbers]
    with own_generator(), snapshot.environment.applied():
        dependence = Dependence(program)
        look = _Look(program, finding)
        look.state(snapshot)
        stretch = Stretch(program, dependence.slice(targets), targets)
        Run(stretch, stretch.start(snapshot.tensors())).advance(len(stretch), look.call)
    first, growth = finding.culprit, tuple[int, ...]()
    if first is not None and first.node >= 0 and first.cause in _GROWING:
        growth = look.growth(dependence, program.nodes[first.node])
    return Picture(tuple(look.magnitudes), growth, tuple(look.bad), history)


class _Look:
    """Looks at every call of a run and keeps numbers."""

    def __init__(self, program: Program, finding: Finding) -> None:
        self._program = program
        self._culprits: dict[int, list[tuple[int, Culprit]]] = {}
        for place, culprit in enumerate(finding.culprits):
            self._culprits.setdefault(culprit.node, []).append((place, culprit))
        self._largest: dict[tuple[int, int], float] = {}  # by call and value
        inputs = (holder.value for holder in program.placeholders if holder.phase is Phase.INPUT)
        self._fed = set(inputs)  # values that are computed from the batch
        self.magnitudes: list[Magnitude] = []
        self.bad: list[BadElements] = []

    def state(self, snapshot: Snapshot) -> None:
        """Keep the bad elements of what was bad before the step."""
        tensors = snapshot.tensors()
        named = {holder.name: tensors[holder.value] for holder in self._program.placeholders if holder.value in tensors}
        for place, culprit in self._culprits.get(-1, []):
            if culprit.name in named:
                self._keep(place, culprit, [named[culprit.name]])

    def call(self, executed: Executed) -> None:
        """Keep the numbers of one call."""
        node = executed.node
        if not self._fed.isdisjoint(executed.inputs):
            self._fed.update(executed.content)
        made = {n: t for n, t in executed.content.items() if t.is_floating_point() or t.is_complex()}
        seen = []
        for number, tensor in made.items():
            largest, nonfinite = _measured(tensor)
            self._largest[node.index, number] = largest
            limit = torch.finfo(tensor.dtype).max
            known = str(node.target), node.phase, self._program.source(node)
            seen.append(Magnitude(node.index, *known, _short(tensor.dtype), largest, limit, nonfinite))
        if seen:
            self.magnitudes.append(max(seen, key=lambda one: (one.nonfinite > 0, one.largest / one.limit)))
        for place, culprit in self._culprits.get(node.index, []):
            self._keep(place, culprit, list(executed.content.values()))

    def _keep(self, place: int, culprit: Culprit, outputs: list[torch.Tensor]) -> None:
        """Keep which elements are bad, unless they are others than those of the finding.

        A culprit behind another one is explained with the values that it has without that one, and this run has both.
        """
        for summary, tensor in zip(culprit.outputs, outputs, strict=False):
            if summary.nonfinite:
                if finite.summarise(tensor, summary.name) == summary:
                    self.bad.append(_grid(place, tensor))
                return

    def growth(self, dependence: Dependence, culprit: Node) -> tuple[int, ...]:
        """Return the calls over which the values grew up to a culprit: back along the largest operands while these shrink."""
        path, sizes = [culprit.index], [math.inf]
        for index, size in self._back(dependence, culprit):
            if size > sizes[-1] * _DIPS or size == 0:
                break
            path.append(index)
            sizes.append(size)
        if len(sizes) < 2 or not sizes[1] >= _GROWS * min(sizes):  # noqa: PLR2004  (the culprit and one before)
            return ()
        begin = sizes.index(min(sizes))
        return tuple(reversed(path[: begin + 1]))

    def _back(self, dependence: Dependence, node: Node) -> Iterator[tuple[int, float]]:
        """Yield the calls behind a call, the nearest first, with the magnitude of what they made.

        The way leads along what is computed from the batch, rather than to a weight that happens to be larger.
        """
        while True:
            operands = [number for number in node.inputs() if number in self._fed] or node.inputs()
            makers = {
                (index, number): self._largest[index, number]
                for number in operands
                for index in dependence.needed(number, node.index)
                if index < node.index and (index, number) in self._largest
            }
            if not makers:
                return
            index, number = max(makers, key=makers.__getitem__)
            yield index, makers[index, number]
            node = self._program.nodes[index]


def _measured(tensor: torch.Tensor) -> tuple[float, int]:
    """Return the largest finite magnitude, 0 where there is none, and how many values are not finite; one look where all are."""
    largest = finite.largest(tensor)
    if math.isfinite(largest):
        return largest, 0
    summary = finite.summarise(tensor)
    low, high = summary.low, summary.high
    return (0.0 if low is None or high is None else max(-low, high)), summary.nonfinite


@functools.cache
def _short(dtype: torch.dtype) -> str:
    return finite.summarise(torch.empty(0, dtype=dtype)).dtype


def _grid(place: int, tensor: torch.Tensor) -> BadElements:
    """Count the bad elements of a tensor in blocks."""
    nan, inf = finite.mask(tensor, NonFinite.NAN), finite.mask(tensor, NonFinite.INF)
    shape = tuple(nan.shape)
    split = _split(shape)
    count, width = math.prod(shape[:split]), math.prod(shape[split:])
    apart = shape[0] if split and shape[0] <= _CELLS else 1  # groups of rows that share no cell
    height = math.ceil(count // apart / (_CELLS // apart))
    rows = [
        (first + low, first + high)
        for first in range(0, count, count // apart)
        for low, high in _blocks(count // apart, height)
    ]
    columns = _blocks(width, math.ceil(width / _CELLS))
    nan, inf = (_counted(mask.reshape(count, width), rows, columns) for mask in (nan, inf))
    return BadElements(place, shape, split, tuple(rows), tuple(columns), _tuples(nan), _tuples(inf))


def _split(shape: tuple[int, ...]) -> int:
    """Return how many leading dimensions are rows, so that the grid comes out as square as it can."""
    if len(shape) <= 1:
        return len(shape) if math.prod(shape) <= _CELLS else 0
    return min(range(1, len(shape)), key=lambda k: abs(math.log(math.prod(shape[:k]) / math.prod(shape[k:]))))


def _blocks(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def _counted(mask: torch.Tensor, rows: list[tuple[int, int]], columns: list[tuple[int, int]]) -> torch.Tensor:
    """Return how many elements of a matrix are marked in each block."""
    bands = torch.stack([mask[low:high].sum(0) for low, high in rows])
    return torch.stack([bands[:, low:high].sum(1) for low, high in columns], 1)


def _tuples(counts: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in counts.tolist())
