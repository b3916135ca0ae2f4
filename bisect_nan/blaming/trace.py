"""Follows bad elements back from where they show to where they were born, element by element.

Marks live in memory, not on tensors: a view or an in-place call then needs no rule of its own. Walking back, the call that last
wrote a marked element is asked which of its input elements made it bad; those are marked in its stead. Elements that no bad input
explains are births.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bisect_nan import finite
from bisect_nan.finite import NonFinite
from bisect_nan.recording.program import NO_STORAGE, Placeholder, Program
from bisect_nan.replaying.blame import responsible, split
from bisect_nan.replaying.contraction import some
from bisect_nan.replaying.influence import influence
from bisect_nan.replaying.intent import Intent
from bisect_nan.replaying.replay import Edit, Executed, Run
from bisect_nan.replaying.stretch import Checkpoint, Stretch


class Origin(enum.Enum):
    """How elements became bad; the value is the sentence."""

    MADE = "made from healthy values"
    TURNED = "NaN made of infinities"
    WRITTEN = "an infinity that the program wrote on purpose"
    ADMITTED = "a sum or mean that took in an infinity written on purpose"
    UNWRITTEN = "memory that was read before it was written"


@dataclass(frozen=True, slots=True)
class Birth:
    """Elements that became bad at one place.

    Attributes:
        node: Index of the call; -1 for a placeholder.
        value: The value that holds them.
        mask: bool, shape of the value.
        origin: How they became bad.
        placeholder: The state or input that held them before the step.
    """

    node: int
    value: int
    mask: torch.Tensor
    origin: Origin
    placeholder: Placeholder | None = None


def of(births: Iterable[Birth], origin: Origin) -> list[Birth]:
    """Return the births of one origin."""
    return [birth for birth in births if birth.origin is origin]


def site(program: Program, birth: Birth) -> tuple[object, ...]:
    """Return where a birth lies in the code: the same for every turn of a loop, another one for every module."""
    if birth.node < 0:
        return (birth.value,)
    node = program.nodes[birth.node]
    return node.target, program.source(node), node.module, node.autograd


class Marks:
    """Which elements of which memory are to be explained."""

    def __init__(self, program: Program) -> None:
        """Measure each memory in units of its smallest element, so that complex and real views agree."""
        self._program = program
        self._unit: dict[int, int] = {}
        for number, value in enumerate(program.values):
            memory, size = program.memory(number), value.dtype.itemsize
            self._unit[memory] = min(size, self._unit.get(memory, size))
        self._bits: dict[int, torch.Tensor] = {}

    def memories(self) -> set[int]:
        """Return the memories that hold something to be explained."""
        return set(self._bits)

    def add(self, number: int, mask: torch.Tensor) -> None:
        """Mark elements of a value."""
        if not some(mask):
            return
        memory, units = self._program.memory(number), self._units(number, mask.cpu())
        bits = self._bits.get(memory)
        extent = int(units.max()) + 1
        if bits is None or bits.numel() < extent:
            bits = self._bits[memory] = _grown(bits, extent)
        bits[units] = True

    def take(self, number: int) -> torch.Tensor | None:
        """Return the marked elements of a value and unmark them; None when there are none."""
        memory, value = self._program.memory(number), self._program.values[number]
        bits = self._bits.get(memory)
        if bits is None:
            return None
        factor, stride = self._geometry(number)
        last = value.offset + sum(step * (size - 1) for step, size in zip(stride, value.shape, strict=True))
        if 0 not in value.shape and bits.numel() < (last + 1) * factor:
            bits = self._bits[memory] = _grown(bits, (last + 1) * factor)
        steps = [*(step * factor for step in stride), 1]
        shown = bits.as_strided([*value.shape, factor], steps, value.offset * factor)
        found = shown.any(-1)
        for dim, step in enumerate(steps):  # an expanded dimension repeats itself, and cannot be written to
            shown = shown.narrow(dim, 0, 1) if step == 0 and shown.shape[dim] else shown
        shown.zero_()
        if not some(bits):
            del self._bits[memory]
        return found if some(found) else None

    def _units(self, number: int, mask: torch.Tensor) -> torch.Tensor:
        """The places in memory of the elements `mask`: one row per element, one column per unit; views may overlap themselves."""
        factor, stride = self._geometry(number)
        steps = torch.tensor(stride, dtype=torch.int64)
        elements = (mask.nonzero() * steps).sum(-1) + self._program.values[number].offset
        return elements[:, None] * factor + torch.arange(factor)

    def _geometry(self, number: int) -> tuple[int, tuple[int, ...]]:
        """How many units an element of a value has, and its strides in elements."""
        value = self._program.values[number]
        factor = value.dtype.itemsize // self._unit[self._program.memory(number)]
        return factor, value.stride if value.storage != NO_STORAGE else torch.empty(value.shape, device="meta").stride()


def _grown(bits: torch.Tensor | None, extent: int) -> torch.Tensor:
    grown = torch.zeros(extent, dtype=torch.bool)
    if bits is not None:
        grown[: bits.numel()] = bits
    return grown


class Trail:
    """A walk back through a stretch, segment by segment between checkpoints.

    Attributes:
        births: What was found, the latest first.
    """

    def __init__(
        self,
        stretch: Stretch,
        checkpoints: Sequence[Checkpoint],
        intent: Intent,
        edits: Mapping[int, Edit] | None = None,
    ) -> None:
        """Prepare a walk.

        Args:
            stretch: The calls.
            checkpoints: Where segments can be run from again, ascending, the first at cut 0.
            intent: Tells the infinities that were written on purpose.
            edits: Interventions that are in force, in the checkpoints as well.
        """
        self._stretch, self._checkpoints, self._intent, self._edits = stretch, checkpoints, intent, edits
        self.marks = Marks(stretch.program)
        self.births: list[Birth] = []
        self._reductions: list[Birth] = []

    def follow(self, cut: int, since: int = 0) -> None:
        """Walk back from `cut` to the start, or until every mark is explained, or all calls behind the cut `since` were asked.

        Only segments in which a marked memory was written are run again.
        """
        for checkpoint in reversed([c for c in self._checkpoints if c.cut < cut]):
            latest = max((self._stretch.last_change(storage, cut) for storage in self._waiting()), default=-1)
            if latest < since:
                break
            if latest >= checkpoint.cut:
                for executed in reversed(execute(self._stretch, checkpoint, latest + 1, self._edits)):
                    self._ask(executed)
            cut = checkpoint.cut
        if since > 0:
            return
        start = self._checkpoints[0].env
        for placeholder in self._stretch.program.placeholders:
            value = placeholder.value
            mask = self.marks.take(value) if value in start else None
            if mask is not None:
                origin = Origin.WRITTEN if self._intent.means(placeholder, start[value]) else Origin.MADE
                self.births.append(Birth(-1, value, mask, origin, placeholder))

    def explain(self, executed: Executed, number: int, mask: torch.Tensor) -> None:
        """Sort the bad elements `mask` of a value that the call made: births are noted, the inputs of links marked."""
        parts, node = split(executed, number, mask), executed.node
        written = torch.zeros_like(mask)
        if some(parts.born) and self._intent.wrote(executed):
            written = parts.born & finite.mask(executed.content[number], NonFinite.INF)
        found = {Origin.WRITTEN: written, Origin.MADE: parts.born & ~written, Origin.TURNED: parts.converted}
        self.births += [Birth(node.index, number, marked, origin) for origin, marked in found.items() if some(marked)]
        if some(parts.inherited):
            if self._only_written() and _folds(executed, number, parts.inherited):
                self._reductions.append(Birth(node.index, number, parts.inherited, Origin.ADMITTED))
            for argument, marked in responsible(executed, number, parts.inherited).items():
                self.marks.add(argument, marked)

    def admissions(self) -> list[Birth]:
        """Return the first reduction on the way that took in an intended infinity, when nothing but those was found."""
        return self._reductions[-1:] if self._only_written() else []

    def _only_written(self) -> bool:
        return all(birth.origin is Origin.WRITTEN for birth in self.births)

    def _waiting(self) -> set[int]:
        """The memories that hold something to be explained."""
        return self.marks.memories()

    def _ask(self, executed: Executed) -> None:
        for number, made in executed.content.items():
            if not self._stretch.fills(executed.node, number):
                continue  # a view: whoever wrote the memory is asked
            mask = self.marks.take(number)
            mask = None if mask is None else mask.to(made.device) & finite.mask(made)
            if mask is not None and some(mask):
                self.explain(executed, number, mask)


def _folds(executed: Executed, number: int, mask: torch.Tensor) -> bool:
    """Whether the elements `mask` of a result are each computed from many elements, rather than picked among them."""
    sizes = [tensor.numel() for tensor in executed.inputs.values() if tensor.is_floating_point()]
    if executed.content[number].numel() >= max(sizes, default=0):
        return False
    needed = influence(executed, number, mask)
    return sum(int(part.sum()) for part in needed.values()) > int(mask.sum())


def execute(
    stretch: Stretch, checkpoint: Checkpoint, cut: int, edits: Mapping[int, Edit] | None = None
) -> list[Executed]:
    """Run from a checkpoint to a cut and keep every call with its live values."""
    calls: list[Executed] = []
    Run(stretch, checkpoint, edits).advance(cut, calls.append)
    return calls
