"""What has to hold of a program before any of it is executed; asked of every file that is opened, and before one is written.

Shapes and strides are facts for the analysis and allocate nothing; still no call may claim more memory than the machine has, and
what a placeholder shows has to lie in its memory. A file can claim a small result for a call that makes a large one; for calls
that make tensors out of nothing, the sizes among their arguments are compared with the claim.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.recording.memory import extent
from bisect_nan.recording.program import NO_STORAGE, Node, Placeholder, Program, Ref, Value
from bisect_nan.recording.targets import KINDS, Targets
from bisect_nan.recording.traits import Traits
from bisect_nan.snapshots.operators import signature
from bisect_nan.strict_json import shown, within, wrong

_SIZED = frozenset(
    {"empty", "empty_strided", "empty_permuted", "zeros", "ones", "full", "rand", "randn", "randint", "normal"}
    | {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "_efficientzerotensor"}
)
"""Operators whose argument `size` is the shape of their result."""

_ACCELERATOR_ROOM = 2**40
"""Bytes that no accelerator of today offers."""

_MORE = "open it on a machine with more memory"


def check(program: Program, sizes: Mapping[int, int]) -> None:
    """Check a program.

    Args:
        program: Its values, calls and names; types have been checked.
        sizes: Bytes of every storage that a placeholder shows.

    Raises:
        SnapshotError: It is not what a recording can be. Nothing has been executed.
    """
    for number, value in enumerate(program.values):
        try:
            _check_value(value)
        except SnapshotError as problem:
            raise within(f"value {number}", problem) from None
    known = _check_placeholders(program.placeholders, program.values, sizes)
    for node in program.nodes:
        _check_arguments(node, known)
        _check_results(node, program.values)
        known.update(number for number in node.outputs if number is not None)
    _check_targets(program.targets, program.values, known)
    for place, use in enumerate(program.applications):
        named = [number for numbers in (use.inputs, use.outputs, use.given, use.returned) for number in numbers]
        if not use.first <= use.last <= len(program.nodes) or not known.issuperset(n for n in named if n is not None):
            raise wrong(f"function {place}", [use.first, use.last], "calls and values of the program")


@cache
def room(device: torch.device) -> int:
    """Return how many bytes a device can hold at most."""
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _ACCELERATOR_ROOM if device.type != "meta" else 2**62


def _check_value(value: Value) -> None:
    dimensions = 0 if value.storage == NO_STORAGE else len(value.shape)
    if len(value.stride) != dimensions or (value.storage == NO_STORAGE and value.offset):
        raise wrong("stride", list(value.stride), f"{dimensions} strides")
    if value.conj and not value.dtype.is_complex:
        raise wrong("flags", "a conjugated view", f"no such view of {value.dtype}")
    limit = room(value.device)
    if extent(value) > limit or math.prod(value.shape) > limit:
        raise SnapshotError(
            f"shape: got {shown(list(value.shape))}", f"at most {limit} bytes, as this machine has", _MORE
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


def _check_arguments(node: Node, known: set[int]) -> None:
    """Check what a call is given, by the values that exist before it and by its operator."""
    problem = signature(node.target).misfit(node.args, node.kwargs)
    if problem is not None:
        where, got, expected = problem
        raise wrong(f"node {node.index}, {where}", got, expected)
    given = list(node.inputs())
    if node.tracked and len(node.tracked) != len(given):
        raise wrong(f"node {node.index}, tracked", len(node.tracked), f"one for each of {len(given)} tensor arguments")
    used = set(given)
    if not used <= known:
        got = f"value {min(used - known)} as an argument"
        raise wrong(f"node {node.index}", got, "values that exist before the call")
    mutated = _mutated(node)
    if (mutated or node.written) and not mutated <= set(node.written) <= used:
        expected = f"the arguments that {node.target} writes to, {sorted(mutated)}"
        raise wrong(f"node {node.index}, written", list(node.written), expected)


def _check_results(node: Node, values: Sequence[Value]) -> None:
    """Check what a call is said to make, by its operator and by what the machine can hold."""
    place = f"node {node.index}"
    expected = signature(node.target).results
    if expected is not None and len(node.outputs) != expected:
        raise wrong(f"{place}, outputs", len(node.outputs), f"{expected} results of {node.target}")
    if not (math.isfinite(node.cost) and node.cost >= 0):
        raise wrong(f"{place}, cost", node.cost, "seconds")
    made = [values[number] for number in node.outputs if number is not None]
    claimed = _claimed(node, values)
    if claimed is not None and (not made or claimed != math.prod(made[0].shape)):
        shapes = [list(value.shape) for value in made]
        raise wrong(f"{place}, outputs", shapes, f"{claimed} elements, as the arguments say")
    if len(made) > 1:  # one alone is within bounds already
        total = sum({value.storage: extent(value) for value in sorted(made, key=extent)}.values())
        limit = max(room(value.device) for value in made)
        if total > limit:
            raise SnapshotError(
                f"{place}: got {total} bytes of results", f"at most {limit}, as this machine has", _MORE
            )
    memory = node.memory
    if memory is not None and (len(made) != 1 or (memory.shape, memory.dtype) != (made[0].shape, made[0].dtype)):
        got = f"{memory.dtype} of shape {list(memory.shape)}"
        raise wrong(f"{place}, memory", got, "what the result of the call is")


_traits = cache(Traits.of)


def _mutated(node: Node) -> set[int]:
    """Return the values that a call writes to according to its operator."""
    traits = _traits(node.target)
    if not traits.written or (traits.flag is not None and node.args[traits.flag : traits.flag + 1] != (True,)):
        return set()
    found: set[int] = set()
    for which in traits.written:
        item = (
            node.kwargs.get(which) if isinstance(which, str) else node.args[which] if which < len(node.args) else None
        )
        parts = item if isinstance(item, list | tuple) else [item]
        found |= {part.value for part in parts if isinstance(part, Ref)}
    return found


@cache
def _sized(target: torch._ops.OpOverload) -> tuple[str, int] | None:
    """Return name and position of the argument that says how many elements a call makes; None for most operators."""
    name = str(target).split(".")[1]
    wanted = "size" if name in _SIZED else {"repeat": "repeats", "eye": "n", "randperm": "n"}.get(name)
    names = signature(target).names
    return (name, names.index(wanted)) if wanted in names else None


def _claimed(node: Node, values: Sequence[Value]) -> int | None:
    """Return how many elements a call that makes a tensor out of nothing says to make; None for any other call."""
    sized = _sized(node.target)
    if sized is None or len(node.args) <= sized[1]:
        return None
    name, position = sized
    match name, node.args:
        case "repeat", [Ref(source), [*repeats]]:
            return math.prod([*values[source].shape, *repeats])
        case "eye", [int(rows), int(columns), *_]:
            return rows * columns
        case "eye", [int(rows), *_]:
            return rows * rows
    size = node.args[position]
    return int(size) if isinstance(size, int) else math.prod(size)


def _check_targets(targets: Targets, values: Sequence[Value], known: set[int]) -> None:
    for kind in KINDS:
        for name, number in targets.of(kind).items():
            if number not in known:
                raise wrong(f"targets, {kind} {shown(name)}", number, "a value that the program makes")
    if targets.loss is not None:
        loss = values[targets.loss]
        if math.prod(loss.shape) != 1 or not (loss.dtype.is_floating_point or loss.dtype.is_complex):
            raise wrong("targets, loss", f"{loss.dtype} of shape {list(loss.shape)}", "one floating-point number")
