"""The JSON form of a program: compact records, with everything that repeats in tables.

The object has these keys (an *index* points into a table; trailing defaults of a record are left out):

===========  ===============================================================================================================
key          content
===========  ===============================================================================================================
`ops`        operators: `aten.mm.default`
`dtypes`     element types: `float32`
`devices`    devices: `cpu`, `cuda:0`
`modules`    module paths; the first is the empty one
`autograd`   names of autograd nodes: `SqrtBackward0`
`lines`      source lines: `[file, line number, function, text]`
`values`     one record a value, by number: `[storage, dtype index, device index, shape, stride, offset, flags]`. Storage -1 is no
             memory of its own. Stride null (the default) is the row-major one, or the empty one for storage -1. Offset 0 and
             flags 0 are the defaults; flags add 1 for a lazily conjugated and 2 for a lazily negated view
`nodes`      one record a call, in order: `[op index, arguments, outputs, cost, line index, flags, module index, forward,
             autograd index, keyword arguments, written, generator, memory]`. Outputs and written are lists of value numbers, with
             null for an undefined tensor; cost is in seconds; forward is a node's number. Flags add 0, 1 or 2 for forward,
             backward or optimizer, 4 if gradients were enabled, 8 if the call draws random numbers. Generator is the number of a
             tensor of the manifest's `generators`, memory a tensor. Defaults: null, and 0, 0, null, null, {}, [], null, null from
             flags on
===========  ===============================================================================================================

How arguments are written says `bisect_nan.arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from bisect_nan.arguments import constant, device, read_argument, write_argument
from bisect_nan.finding import Phase, SourceLine
from bisect_nan.operators import resolve
from bisect_nan.program import NO_STORAGE, Node, Value
from bisect_nan.strict_json import checked_text, clean, count, fields, items, number, wrong

Encode = Callable[[torch.Tensor], Any]
"""Puts a tensor into the file and returns how the manifest refers to it."""
Decode = Callable[[Any, str], torch.Tensor]
"""Returns the tensor behind such a reference; the text is the place, for messages."""

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_GRAD, _RANDOM = 4, 8
_CONJ, _NEG = 1, 2

_KEYS = ("ops", "dtypes", "devices", "modules", "autograd", "lines", "values", "nodes")
_VALUE: tuple[Any, ...] = (None, None, None, None, None, 0, 0)
_NODE: tuple[Any, ...] = (None, None, None, None, None, 0, 0, None, None, {}, [], None, None)
"""Records with the defaults of their trailing fields; the first four always stand."""
_ALWAYS = 4


class _Table:
    """Distinct items, numbered in the order of their first use."""

    def __init__(self, first: Iterable[Any] = ()) -> None:
        self._numbers: dict[Any, int] = {item: place for place, item in enumerate(first)}

    def __getitem__(self, item: Any) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._numbers)


# --- writing ----------------------------------------------------------------------------------------------------------------


def encode(values: Sequence[Value], nodes: Sequence[Node], generator: Encode, memory: Encode) -> dict[str, Any]:
    """Return the JSON form of a program's values and nodes.

    Args:
        values: The values.
        nodes: The calls.
        generator: Takes a generator's state.
        memory: Takes what uninitialised memory held.

    Raises:
        SnapshotError: A call has an operator or an argument that cannot be written.
    """
    ops, dtypes, devices, autograd, lines = _Table(), _Table(), _Table(), _Table(), _Table()
    modules = _Table([""])
    value_records = []
    for value in values:
        flags = value.conj * _CONJ + value.neg * _NEG
        kind = [value.storage, dtypes[value.dtype], devices[value.device]]
        value_records.append(_trimmed([*kind, list(value.shape), _stride(value), value.offset, flags], _VALUE))
    records = []
    for node in nodes:
        place = f"node {node.index} ({node.target})"
        record = [
            ops[str(node.target)],
            [write_argument(item, place) for item in node.args],
            list(node.outputs),
            node.cost,
            None if node.source is None else lines[node.source],
            _PHASES.index(node.phase) + node.grad * _GRAD + node.random * _RANDOM,
            modules[node.module],
            node.forward,
            None if node.autograd is None else autograd[node.autograd],
            {key: write_argument(item, place) for key, item in node.kwargs.items()},
            list(node.written),
            None if node.generator is None else generator(node.generator),
            None if node.memory is None else memory(node.memory),
        ]
        records.append(_trimmed(record, _NODE))
    for name in ops:
        resolve(name)
    return {
        "ops": list(ops),
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes],
        "devices": [str(device) for device in devices],
        "modules": [clean(module) for module in modules],
        "autograd": [clean(name) for name in autograd],
        "lines": [[clean(line.file), line.line, clean(line.function), clean(line.text)] for line in lines],
        "values": value_records,
        "nodes": records,
    }


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, as torch counts them."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _stride(value: Value) -> list[int] | None:
    usual = () if value.storage == NO_STORAGE else row_major(value.shape)
    return None if value.stride == usual else list(value.stride)


def _trimmed(record: list[Any], defaults: tuple[Any, ...]) -> list[Any]:
    while len(record) > _ALWAYS and record[-1] == defaults[len(record) - 1]:
        record.pop()
    return record


# --- reading ----------------------------------------------------------------------------------------------------------------


def decode(data: Any, generator: Decode, memory: Decode) -> tuple[tuple[Value, ...], tuple[Node, ...]]:
    """Read the values and nodes of a program back. Types are checked here, what they mean in `bisect_nan.checks`.

    Raises:
        SnapshotError: Something has the wrong type, points outside of its table, or names what does not exist.
    """
    data = fields(data, "program", _KEYS)
    tables = {key: items(data[key], f"program, {key}") for key in _KEYS}
    dtypes = [constant("dtype", name, "program, dtypes") for name in tables["dtypes"]]
    devices = [device(name, "program, devices") for name in tables["devices"]]
    texts = {
        key: [checked_text(item, f"program, {key}") for item in tables[key]] for key in ("ops", "modules", "autograd")
    }
    ops = [resolve(name) for name in texts["ops"]]
    lines = [_line(item, f"line {place}") for place, item in enumerate(tables["lines"])]
    values = tuple([_value(item, f"value {place}", dtypes, devices) for place, item in enumerate(tables["values"])])
    storages = [value.storage for value in values]

    def at(table: Sequence[Any], index: Any, place: str) -> Any:
        return table[count(index, place, len(table))]

    def maybe(table: Sequence[Any], index: Any, place: str) -> Any:
        return None if index is None else table[count(index, place, len(table))]

    nodes = []
    for index, item in enumerate(tables["nodes"]):
        place = f"node {index}"
        op, args, outputs, cost, line, flags, module, forward, autograd, kwargs, written, state, held = _record(
            item, _NODE, place
        )
        bits = count(flags, f"{place}, flags", 2 * _RANDOM)
        shown = tuple([count(value, f"{place}, written", len(values)) for value in items(written, f"{place}, written")])
        nodes.append(
            Node(
                index=index,
                target=at(ops, op, f"{place}, op"),
                args=tuple(
                    [read_argument(part, f"{place}, argument {i}") for i, part in enumerate(items(args, place))]
                ),
                kwargs={key: read_argument(part, f"{place}, a keyword") for key, part in fields(kwargs, place).items()},
                outputs=tuple(
                    [
                        None if v is None else count(v, f"{place}, outputs", len(values))
                        for v in items(outputs, f"{place}, outputs")
                    ]
                ),
                writes=tuple(dict.fromkeys(storages[value] for value in shown)),
                written=shown,
                phase=at(_PHASES, bits & 3, f"{place}, phase"),
                autograd=maybe(texts["autograd"], autograd, f"{place}, autograd"),
                forward=None if forward is None else count(forward, f"{place}, forward", index),
                module=at(texts["modules"], module, f"{place}, module"),
                source=maybe(lines, line, f"{place}, line"),
                cost=number(cost, f"{place}, cost"),
                grad=bool(bits & _GRAD),
                random=bool(bits & _RANDOM),
                generator=None if state is None else generator(state, f"{place}, generator"),
                memory=None if held is None else memory(held, f"{place}, memory"),
            )
        )
    return values, tuple(nodes)


def _line(item: object, place: str) -> SourceLine:
    parts = items(item, place)
    if len(parts) != 4:  # noqa: PLR2004
        raise wrong(place, parts, "file, line number, function and text")
    file, line, function, text = parts
    return SourceLine(
        checked_text(file, f"{place}, file"),
        count(line, f"{place}, number"),
        checked_text(function, f"{place}, function"),
        checked_text(text, f"{place}, text"),
    )


def _record(item: object, defaults: tuple[Any, ...], place: str) -> list[Any]:
    record = items(item, place)
    if not _ALWAYS <= len(record) <= len(defaults):
        raise wrong(place, record, f"a list of {_ALWAYS} to {len(defaults)} items")
    return [*record, *defaults[len(record) :]]


def _value(item: object, place: str, dtypes: Sequence[torch.dtype], devices: Sequence[torch.device]) -> Value:
    storage, dtype, home, shape, stride, offset, flags = _record(item, _VALUE, place)
    sizes = tuple([count(size, f"{place}, shape") for size in items(shape, f"{place}, shape")])
    storage = NO_STORAGE if storage == NO_STORAGE else count(storage, f"{place}, storage")
    if stride is None:
        steps = () if storage == NO_STORAGE else row_major(sizes)
    else:
        steps = tuple([count(step, f"{place}, stride") for step in items(stride, f"{place}, stride")])
    bits = count(flags, f"{place}, flags", 4)
    return Value(
        storage=storage,
        dtype=dtypes[count(dtype, f"{place}, dtype", len(dtypes))],
        shape=sizes,
        stride=steps,
        offset=count(offset, f"{place}, offset"),
        device=devices[count(home, f"{place}, device", len(devices))],
        conj=bool(bits & _CONJ),
        neg=bool(bits & _NEG),
    )
