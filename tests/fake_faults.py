"""Plants a fault behind any node of a recorded step: an extra call that adds 0 / 0 to one element of what the node made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase
from bisect_nan.recording.outcome import _observed
from bisect_nan.recording.program import Node, Placeholder, Program, Ref, Value
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Run
from bisect_nan.replaying.stretch import Stretch
from bisect_nan.snapshots.snapshot import Snapshot

KERNEL = torch.ops.aten.addcdiv_.default


def places(snapshot: Snapshot) -> list[tuple[int, int]]:
    """Return the nodes that something can be planted behind, each with its floating output, in order."""
    values, found = snapshot.program.values, []
    for node in snapshot.program.nodes:
        for number in node.outputs:
            if number is not None and values[number].dtype.is_floating_point and _writable(values[number]):
                found.append((node.index, number))
                break
    return found


def planted(snapshot: Snapshot, place: int, number: int) -> Snapshot:
    """Return the step with a fault behind the node `place`, in the first element of the value `number`; `observed` as it comes out."""
    program, value = snapshot.program, snapshot.program.values[number]
    zeros, ones = torch.zeros(value.shape, dtype=value.dtype), torch.ones(value.shape, dtype=value.dtype)
    ones.flatten()[place % ones.numel()] = 0
    known, storages = len(program.values), 1 + max(v.storage for v in program.values)
    added = [_value(tensor, storages + offset) for offset, tensor in enumerate((zeros, ones))]
    fault = Node(
        index=place + 1,
        target=KERNEL,
        args=(Ref(number), Ref(known), Ref(known + 1)),
        kwargs={},
        outputs=(number,),
        writes=(value.storage,),
        written=(number,),
        phase=program.nodes[place].phase,
        autograd=None,
        forward=None,
        module="",
        source=None,
        cost=1e-6,
    )
    behind = [
        dataclasses.replace(
            node, index=node.index + 1, forward=None if node.forward is None else node.forward + (node.forward > place)
        )
        for node in program.nodes[place + 1 :]
    ]
    changed = Program(
        values=(*program.values, *added),
        placeholders=(*program.placeholders, *(Placeholder(known + i, Phase.BUFFER, f"planted_{i}") for i in range(2))),
        nodes=(*program.nodes[: place + 1], fault, *behind),
        targets=program.targets,
    )
    tensors = {**snapshot.tensors(), known: zeros, known + 1: ones}
    return dataclasses.replace(
        snapshot, program=changed, _tensors=tensors, _live=(), observed=_symptom(changed, tensors)
    )


def _writable(value: Value) -> bool:
    """Whether a value has elements, and a place in memory for each."""
    return all(size > 0 and (stride > 0 or size == 1) for size, stride in zip(value.shape, value.stride, strict=True))


def _value(tensor: torch.Tensor, storage: int) -> Value:
    return Value(storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0, tensor.device)


def _symptom(program: Program, tensors: Mapping[int, torch.Tensor]) -> object:
    """Execute the changed program and return what a recording of it would have seen."""
    for kind in ("loss", "gradient"):
        numbers = program.targets.of(kind)
        stretch = Stretch(program, Dependence(program).slice(numbers.values()), numbers.values())
        run = Run(stretch, stretch.start(tensors))
        run.advance(len(stretch))
        found = {name: run.env[number].clone() for name, number in numbers.items() if finite.probe([run.env[number]])}
        if found:
            return _observed(program, kind, found)
    return None
