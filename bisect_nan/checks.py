"""What has to hold of a program before any of it is executed; asked of every file that is opened, and before one is written.

Shapes and strides are facts for the analysis and allocate nothing; still no call may claim more memory than the machine has, and
what a placeholder shows has to lie in its memory. A file can claim a small result for a call that makes a large one; for calls
that make tensors out of nothing, the sizes among their arguments are compared with the claim.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.operators import misfit, results
from bisect_nan.program import NO_STORAGE, Node, Placeholder, Program, Ref, Targets, Value
from bisect_nan.strict_json import shown, wrong
from bisect_nan.traits import Traits

_SIZED = frozenset(
    {"empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "rand", "randn", "randint", "normal"}
    | {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "_efficientzerotensor"}
)
"""Operators whose argument `size` is the shape of their result."""

_traits = cache(Traits.of)

_ACCELERATOR_ROOM = 2**40
"""Bytes that no accelerator of today offers."""


def check(program: Program, sizes: Mapping[int, int]) -> None:
    """Check a program.

    Args:
        program: Its values, calls and names; types have been checked.
        sizes: Bytes of every storage that a placeholder shows.

    Raises:
        SnapshotError: It is not what a recording can be. Nothing has been executed.
    """
    for number, value in enumerate(program.values):
        _check_value(value, f"value {number}", len(program.values))
    known = _check_placeholders(program.placeholders, program.values, sizes)
    for node in program.nodes:
        _check_node(node, program.values, known)
    _check_targets(program.targets, program.values, known)


def extent(value: Value) -> int:
    """Return how many bytes of its storage a value reaches over, counted from the start of the storage."""
    if 0 in value.shape or value.storage == NO_STORAGE:
        return 0
    last = sum(step * (size - 1) for step, size in zip(value.stride, value.shape, strict=True))
    return (value.offset + last + 1) * value.dtype.itemsize


def room(device: torch.device) -> int:
    """Return how many bytes a device can hold at most."""
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _ACCELERATOR_ROOM if device.type != "meta" else 2**62


def _check_value(value: Value, place: str, number_of_values: int) -> None:
    if not NO_STORAGE <= value.storage < number_of_values:
        raise wrong(f"{place}, storage", value.storage, "a storage of the program")
    dimensions = 0 if value.storage == NO_STORAGE else len(value.shape)
    if len(value.stride) != dimensions or (value.storage == NO_STORAGE and value.offset):
        raise wrong(f"{place}, stride", value.stride, f"{dimensions} strides")
    if value.conj and not value.dtype.is_complex:
        raise wrong(f"{place}, flags", "a conjugated view", f"no such view of {value.dtype}")
    limit = room(value.device)
    if extent(value) > limit or math.prod(value.shape) > limit:
        do = "open it on a machine with more memory"
        raise SnapshotError(
            f"{place}: got shape {shown(list(value.shape))}", f"at most {limit} bytes, as this machine has", do
        )


def _check_placeholders(
    placeholders: Sequence[Placeholder], values: Sequence[Value], sizes: Mapping[int, int]
) -> set[int]:
    known: set[int] = set()
    for position, placeholder in enumerate(placeholders):
        place, number = f"placeholder {position}", placeholder.value
        if not 0 <= number < len(values) or number in known:
            raise wrong(f"{place}, value", number, "a value of the program, once")
        value = values[number]
        if value.storage != NO_STORAGE and (value.storage not in sizes or extent(value) > sizes[value.storage]):
            got = f"{extent(value)} bytes of storage {value.storage}"
            raise wrong(place, got, f"at most the {sizes.get(value.storage, 0)} bytes that the file has of it")
        known.add(number)
    return known


def _check_node(node: Node, values: Sequence[Value], known: set[int]) -> None:
    """Check a call, given the values that exist before it; add those that it makes."""
    place = f"node {node.index}"
    problem = misfit(node.target, node.args, node.kwargs)
    if problem is not None:
        where, got, expected = problem
        raise wrong(f"{place}, {where}", got, expected)
    used = set(node.inputs())
    if not used <= known:
        raise wrong(place, f"value {min(used - known)} as an argument", "values that exist before the call")
    if not _mutated(node) <= set(node.written) or not set(node.written) <= used:
        raise wrong(f"{place}, written", list(node.written), f"the arguments that {node.target} writes to")
    made = [values[number] for number in node.outputs if number is not None]
    expected_results = results(node.target)
    if expected_results is not None and len(node.outputs) != expected_results:
        raise wrong(f"{place}, outputs", len(node.outputs), f"{expected_results} results of {node.target}")
    if not (math.isfinite(node.cost) and node.cost >= 0):
        raise wrong(f"{place}, cost", node.cost, "seconds")
    claimed = _claimed(node, values)
    if claimed is not None and (not made or claimed != math.prod(made[0].shape)):
        raise wrong(
            f"{place}, outputs", [list(value.shape) for value in made], f"{claimed} elements, as the arguments say"
        )
    total = sum(extent(value) for value in set(made))
    limit = max((room(value.device) for value in made), default=0)
    if total > limit:
        do = "open it on a machine with more memory"
        raise SnapshotError(f"{place}: got {total} bytes of results", f"at most {limit}, as this machine has", do)
    if node.memory is not None:
        _check_memory(node.memory, made, place)
    known.update(number for number in node.outputs if number is not None)


def _check_memory(memory: torch.Tensor, made: Sequence[Value], place: str) -> None:
    if len(made) != 1 or (memory.shape, memory.dtype) != (made[0].shape, made[0].dtype):
        raise wrong(
            f"{place}, memory", f"{memory.dtype} of shape {list(memory.shape)}", "what the result of the call is"
        )


def _mutated(node: Node) -> set[int]:
    """Return the values that a call writes to according to its operator."""
    traits, found = _traits(node.target), set()
    if traits.flag is not None and len(node.args) > traits.flag and not node.args[traits.flag]:
        return set()
    for which in traits.written:
        item = (
            node.kwargs.get(which) if isinstance(which, str) else node.args[which] if which < len(node.args) else None
        )
        found |= {part.value for part in (item if isinstance(item, list | tuple) else [item]) if isinstance(part, Ref)}
    return found


def _claimed(node: Node, values: Sequence[Value]) -> int | None:
    """Return how many elements a call that makes a tensor out of nothing says to make; None for any other call."""
    name = str(node.target).split(".")[1]
    whole = [item for item in node.args if type(item) is int]
    if name in _SIZED:
        sizes = [item for item in _sizes(node) if isinstance(item, list | tuple)]
        return math.prod(sizes[0]) if sizes else None
    if name == "eye" and whole:
        return whole[0] * whole[-1]
    match node.args:
        case [int(size), *_] if name == "randperm":
            return size
        case [Ref(source), [*repeats]] if name == "repeat":
            return math.prod(values[source].shape) * math.prod(repeats)
    return None


def _sizes(node: Node) -> Iterator[Any]:
    """Yield the argument `size` of a call, if it has one."""
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.name == "size":
            yield node.args[position] if position < len(node.args) else node.kwargs.get("size")


def _check_targets(targets: Targets, values: Sequence[Value], known: set[int]) -> None:
    for kind in ("loss", "gradient", "buffer", "parameter", "optimizer"):
        for name, number in targets.of(kind).items():
            if number not in known:
                raise wrong(f"targets, {kind} {shown(name)}", number, "a value that the program makes")
    if targets.loss is not None:
        loss = values[targets.loss]
        if math.prod(loss.shape) != 1 or not (loss.dtype.is_floating_point or loss.dtype.is_complex):
            raise wrong("targets, loss", f"{loss.dtype} of shape {list(loss.shape)}", "one floating-point number")
