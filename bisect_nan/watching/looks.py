"""What a script looked at and saw to be bad, before any update could use it: then it stops by itself.

Such a script reads a number (`loss.item()`, `if torch.isnan(loss)`), or hands a tensor to a function that refuses it (`eigh`). What
was read is followed back through comparisons to the numbers that were compared; the earliest of those that are not finite is judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase, Symptom
from bisect_nan.finite import NonFinite
from bisect_nan.recording.outcome import Observed, Recording
from bisect_nan.recording.program import NO_STORAGE, Node, Program, Ref, Targets, Value
from bisect_nan.recording.recorder import READS, Recorder
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Executed, Run, own_generator
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.watching.suspects import kept

_SECONDS = 10.0
"""How long the calls may have taken that are run again at the end of a script that did not fail."""


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
        failed: Whether the script has failed; else a program that took long is not run again.
    """
    recording = kept(recorder, Recording(recorder.finish(Targets()), dict(recorder.values.tensors), None, math.nan))
    program, tensors = recording.program, recording.tensors
    if not failed and sum(node.cost for node in program.nodes) > _SECONDS:
        return None
    looks = [Look(node.index, tuple(node.inputs())) for node in program.nodes if node.target in READS]
    looks += [] if rejected is None or not failed else [rejected]
    if not looks:
        return None
    dependence = Dependence(program)
    with own_generator():
        bad = _bad(program, tensors)
        for look in sorted(looks, key=lambda look: -look.call):
            for number, call in sorted(_compared(program, dependence, look)):
                found = _judged(_up_to(program, call), tensors, number) if number in bad else None
                if found is not None:
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


def _bad(program: Program, tensors: Mapping[int, torch.Tensor]) -> set[int]:
    """Return the values that were bad at some time. Infinities that were written as such, and those of masks, are not."""
    found = {p.value for p in program.placeholders if not p.constant and _is_bad(tensors[p.value], NonFinite.NAN)}

    def visit(executed: Executed) -> None:
        if not any(math.isinf(literal) for literal in executed.node.literals):
            found.update(number for number, tensor in executed.content.items() if _is_bad(tensor, _kinds(tensor)))

    stretch = Stretch(program, range(len(program.nodes)), ())
    Run(stretch, stretch.start(tensors)).advance(len(stretch), visit)
    return found


def _kinds(tensor: torch.Tensor) -> NonFinite:
    return NonFinite.ANY if tensor.numel() == 1 else NonFinite.NAN | NonFinite.POS_INF


def _is_bad(tensor: torch.Tensor, which: NonFinite) -> bool:
    return tensor.layout is torch.strided and finite.has([tensor], which)


def _up_to(program: Program, call: int) -> Program:
    """Return the beginning of a program, without targets."""
    applications = [application for application in program.applications if application.last <= call]
    return replace(program, nodes=program.nodes[:call], targets=Targets(), applications=applications)


def _judged(program: Program, tensors: Mapping[int, torch.Tensor], number: int) -> Recording | None:
    """Return the recording of a program that ends with a value, if it is bad then."""
    value = program.values[number]
    if value.storage == NO_STORAGE:
        return None
    if math.prod(value.shape) != 1:
        program, number = _with_sum(program, number)
    program = replace(program, targets=Targets(number))
    stretch = Stretch(program, Dependence(program).slice([number]), [number])
    run = Run(stretch, stretch.start(tensors))
    run.advance(len(stretch))
    loss = run.env[number].detach().clone()
    kinds = finite.kinds(loss)
    if not kinds:
        return None
    observed = Observed(Symptom("loss", "loss", tuple(finite.labels(kinds))), ("loss",), loss)
    return Recording(program, tensors, observed, math.nan if loss.is_complex() else float(loss))


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
