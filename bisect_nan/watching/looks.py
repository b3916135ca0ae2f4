"""What a script looked at and saw to be bad, before any update could use it: then it stops by itself.

Such a script reads a number (`loss.item()`, `if torch.isnan(loss)`), or hands a tensor to a function that refuses it (`eigh`). What
was read is followed back through comparisons to the numbers that were compared; the earliest of those that are not finite is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase, Symptom
from bisect_nan.finite import NonFinite
from bisect_nan.recording.outcome import Observed, Recording
from bisect_nan.recording.program import Node, Program, Ref, Targets, Value
from bisect_nan.recording.recorder import READS, Recorder
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Run, own_generator
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.watching.suspects import kept

_SECONDS = 3.0
"""How long the calls may have taken that are run again to look once more: a script that has come to its end is to end."""

_LOOKS = 100
"""The latest looks that are looked into; most scripts read a few numbers between two updates."""


@dataclass(frozen=True, slots=True)
class Look:
    """Values that a script looked at.

    Attributes:
        call: How many calls of the program had run.
        values: Their numbers.
    """

    call: int
    values: tuple[int, ...]


def bad_look(recorder: Recorder, rejected: Look | None, *, failed: bool) -> Recording | None:
    """Return what was recorded up to the latest look at something bad, judged by what was seen; None where all was finite.

    What was seen, or its sum where it is more than one number, takes the place of the loss.

    Args:
        recorder: What has recorded the calls since the latest backward pass or update.
        rejected: What was handed to the latest call that raised an exception.
        failed: Whether the script has failed, so that what was handed over counts as a look, too.
    """
    recording = kept(recorder, Recording(recorder.finish(Targets()), dict(recorder.values.tensors), None, math.nan))
    program = recording.program
    looks = [Look(node.index, tuple(node.inputs())) for node in program.nodes if node.target in READS]
    looks += [] if rejected is None or not failed else [rejected]
    if not looks:
        return None
    dependence, seconds = Dependence(program), 0.0
    with own_generator():
        for look in sorted(looks, key=lambda look: -look.call)[:_LOOKS]:
            for number, call in sorted(_compared(program, dependence, look)):
                seen = _Seen(replace(recording, program=_up_to(program, call)), number)
                seconds += seen.seconds
                if seconds > max(_SECONDS, seen.seconds):  # (the latest is looked into, whatever it takes)
                    return None
                if (found := seen.judged()) is not None:
                    return found
    return None


def _compared(program: Program, dependence: Dependence, look: Look) -> Iterator[tuple[int, int]]:
    """Yield the values of floating point that decided what was seen, itself or what was compared, each with the call that read it."""
    waiting, met = [(number, look.call) for number in look.values], set(look.values)
    while waiting:
        number, before = waiting.pop()
        dtype = program.values[number].dtype
        if dtype.is_floating_point or dtype.is_complex:
            yield number, before
            continue
        for call in dependence.needed(number, before):
            for source in program.nodes[call].inputs():
                if source not in met:
                    met.add(source)
                    waiting.append((source, call))


def _up_to(program: Program, call: int) -> Program:
    """Return the beginning of a program, without targets."""
    applications = [application for application in program.applications if application.last <= call]
    return replace(program, nodes=program.nodes[:call], targets=Targets(), applications=applications)


class _Seen:
    """A value that a script looked at when all of a program had run."""

    def __init__(self, recording: Recording, number: int) -> None:
        """Find out what has to be run again to see it."""
        self._recording, self._number = recording, number
        self._stretch = Stretch(recording.program, Dependence(recording.program).slice([number]), [number])

    @property
    def seconds(self) -> float:
        """How long that took while it was recorded."""
        return sum(self._stretch.costs)

    def judged(self) -> Recording | None:
        """Return the recording with it in the place of the loss, if it is bad and not meant to be."""
        program, number = self._recording.program, self._number
        value = self._run(self._stretch)
        kinds = self._unmeant() if value.layout is torch.strided else NonFinite(0)
        if not finite.has([value], kinds if value.numel() == 1 else kinds & ~NonFinite.NEG_INF):
            return None
        if value.numel() != 1:
            program, number = _with_sum(program, number)
            value = self._run(Stretch(program, Dependence(program).slice([number]), [number]))
        labels = tuple(finite.labels(finite.kinds(value)))
        return replace(
            self._recording,
            program=replace(program, targets=Targets(number)),
            observed=Observed(Symptom("loss", "loss", labels), ("loss",), value.clone()),
            loss=math.nan if value.is_complex() else float(value),
        )

    def _run(self, stretch: Stretch) -> torch.Tensor:
        """Return the one target of a stretch."""
        run = Run(stretch, stretch.start(self._recording.tensors))
        run.advance(len(stretch))
        (number,) = stretch.targets
        return run.env[number].detach()

    def _unmeant(self) -> NonFinite:
        """Return what is bad there: not an infinity that was written as such, or that came from outside."""
        program, number = self._recording.program, self._number
        placeholder = next((p for p in program.placeholders if p.value == number), None)
        if placeholder is not None and placeholder.constant:
            return NonFinite(0)
        makers = [program.nodes[call] for call in Dependence(program).needed(number)]
        meant = placeholder is not None or any(math.isinf(literal) for node in makers for literal in node.literals)
        return NonFinite.NAN if meant else NonFinite.ANY


def _with_sum(program: Program, number: int) -> tuple[Program, int]:
    """Return a program with one more call, the sum of a value, and the number of that."""
    value, last = program.values[number], len(program.values)
    storage = 1 + max(value.storage for value in program.values)
    total = Value(storage, value.dtype, (), (), 0, value.device)
    source = next((node.source for node in reversed(program.nodes) if node.source is not None), None)
    node = Node(
        index=len(program.nodes),
        target=torch.ops.aten.sum.default,
        args=(Ref(number),),
        kwargs={},
        outputs=(last,),
        writes=(),
        written=(),
        phase=Phase.FORWARD,
        autograd=None,
        forward=None,
        module="",
        source=source,
        cost=0.0,
    )
    return replace(program, values=[*program.values, total], nodes=[*program.nodes, node]), last
