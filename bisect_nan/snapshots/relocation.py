"""The same program over other memory: with unused parts of large memories left out, or on another device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bisect_nan.recording.memory import extent, view
from bisect_nan.recording.program import NO_STORAGE, Node, Program, Ref, Value

_ALIGNMENT = 64
"""Parts start at a multiple of this many bytes, which is one of every element size, too."""

_WORTHWHILE = 2**16
"""Smaller memories are kept whole."""

_OFFSET = 3
"""Position of `as_strided`'s argument `storage_offset`."""


def used_parts(program: Program, sizes: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return the parts of memories that are worth cutting out: large ones of which the step sees less than half.

    A batch is often a slice of the whole data set.

    Args:
        program: The program.
        sizes: Bytes of the memories from outside, by storage number.

    Returns:
        First byte and end of the used part, by storage number.
    """
    large = {storage for storage, size in sizes.items() if size >= _WORTHWHILE}
    large -= {
        program.values[value].storage for node in program.nodes for value in node.inputs() if _looks_elsewhere(node)
    }
    parts: dict[int, tuple[int, int]] = {}
    for value in program.values:
        if value.storage in large and (end := extent(value)):
            start = value.offset * value.dtype.itemsize
            known = parts.get(value.storage, (start, end))
            parts[value.storage] = min(start, known[0]), max(end, known[1])
    aligned = {storage: (start - start % _ALIGNMENT, end) for storage, (start, end) in parts.items()}
    return {storage: (start, end) for storage, (start, end) in aligned.items() if 2 * (end - start) < sizes[storage]}


def rebased(program: Program, parts: Mapping[int, tuple[int, int]]) -> Program:
    """Return the program over memories of which only a part is left."""
    if not parts:
        return program

    def moved(value: Value) -> Value:
        start = parts[value.storage][0] // value.dtype.itemsize if value.storage in parts else 0
        return replace(value, offset=max(value.offset - start, 0)) if start else value

    def shown(node: Node) -> Node:
        if _absolute(node) and program.values[node.args[0].value].storage in parts:
            source = program.values[node.args[0].value]
            start = parts[source.storage][0] // source.dtype.itemsize
            return replace(node, args=(*node.args[:_OFFSET], max(node.args[_OFFSET] - start, 0)))
        return node

    return replace(program, values=tuple(map(moved, program.values)), nodes=tuple(map(shown, program.nodes)))


def _absolute(node: Node) -> bool:
    """Whether a call names an offset into the memory of its first argument, in a place where it can be changed."""
    if str(node.target) != "aten.as_strided.default" or node.kwargs or len(node.args) <= _OFFSET:
        return False
    return type(node.args[_OFFSET]) is int and isinstance(node.args[0], Ref)


def _looks_elsewhere(node: Node) -> bool:
    """Whether a call may look at its argument's memory beyond what the argument shows, in a way that is not understood here."""
    return ".as_strided" in str(node.target) and not _absolute(node)


def devices(program: Program) -> set[torch.device]:
    """Return the devices that the program's values live on."""
    return {value.device for value in program.values}


def destinations(program: Program, device: torch.device) -> dict[torch.device, torch.device]:
    """Return where each device's values go when the program moves to `device`.

    What lived on an accelerator moves; what lived on the CPU beside one stays there. Meta tensors have no memory to move.
    """
    found = {home for home in devices(program) if home.type != "meta"}
    accelerators = {home for home in found if home.type != "cpu"}
    return dict.fromkeys(accelerators or found, device)


def moved(program: Program, to: Mapping[torch.device, torch.device]) -> Program:
    """Return the program on other devices.

    States of an accelerator's random generator become states of the CPU's where the program moves there: equal ones equal ones,
    so that a checkpointed block draws the same numbers twice, but not the numbers that were recorded.

    Args:
        program: The program; what uninitialised memory held may still be on the CPU.
        to: Where the values of each device go; those of other devices stay.
    """
    if not to and not any(home.type not in ("cpu", "meta") for home in devices(program)):
        return program

    def home(value: Value) -> Value:
        return replace(value, device=to[value.device]) if value.device in to else value

    def call(node: Node) -> Node:
        args = tuple([_moved_argument(item, to) for item in node.args])
        kwargs = {key: _moved_argument(item, to) for key, item in node.kwargs.items()}
        if kwargs.get("pin_memory") and all(device.type == "cpu" for device in to.values()):
            kwargs["pin_memory"] = False  # needs an accelerator
        memory, state = node.memory, node.generator
        if memory is not None:
            target = program.values[node.outputs[0] or 0].device
            memory = memory.to(to.get(target, target))
        if state is not None and any(device.type == "cpu" for device in to.values()):
            state = _portable(state)
        return replace(node, args=args, kwargs=kwargs, memory=memory, generator=state)

    return replace(program, values=tuple(map(home, program.values)), nodes=tuple(map(call, program.nodes)))


def moved_tensors(tensors: Mapping[int, torch.Tensor], program: Program) -> dict[int, torch.Tensor]:
    """Return placeholders' tensors, by value number, where the program has them; those that share memory still do."""
    memories: dict[int, torch.UntypedStorage] = {}
    found = {}
    for number, tensor in tensors.items():
        value = program.values[number]
        if tensor.device == value.device or value.storage == NO_STORAGE:
            found[number] = tensor.to(value.device)
            continue
        if value.storage not in memories:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            memories[value.storage] = whole.to(value.device).untyped_storage()
        found[number] = view(memories[value.storage], value)
    return found


def _moved_argument(item: Any, to: Mapping[torch.device, torch.device]) -> Any:
    if not isinstance(item, torch.device):
        return item
    if item in to:
        return to[item]
    return next((new for old, new in to.items() if str(item) == old.type), item)


def _portable(state: torch.Tensor) -> torch.Tensor:
    """Return a state of the CPU's generator: the given one, or one that follows from it."""
    if state.numel() == torch.default_generator.get_state().numel():
        return state
    digest = hashlib.sha256(bytes(state.tolist())).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1).get_state()
