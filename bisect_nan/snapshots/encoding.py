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
`values`     one record a value, by number: `[storage, dtype index, device index, shape, stride, offset, flags,
             autograd index]`, the last one for results of Python autograd Functions. Storage -1 is no
             memory of its own. Stride null (the default) is the row-major one, or the empty one for storage -1. Offset 0 and
             flags 0 are the defaults; flags add 1 for a lazily conjugated and 2 for a lazily negated view
`nodes`      one record a call, in order: `[op index, arguments, outputs, cost, line index, flags, module index, forward,
             autograd index, keyword arguments, written, generator, memory, tracked]`. Outputs and written are lists of value numbers, with
             null for an undefined tensor; cost is in seconds; forward is a node's number. Flags add 0, 1 or 2 for forward,
             backward or optimizer, 4 if gradients were enabled, 8 if the call draws random numbers. Generator is the number of a
             tensor of the manifest's `generators`, memory a tensor. Tracked says for each tensor argument whether autograd did
             not track it (0), tracked it (1), or knew it as a leaf (2). Defaults: null, and 0, 0, null, null, {}, [], null,
             null, [] from flags on
`functions`  one record a use of a Python autograd Function: `[autograd index, inputs, outputs, given, returned, first, last]`, the
             fields of `bisect_nan.recording.program.Application`: four lists of value numbers, with null for none, and two node numbers
===========  ===============================================================================================================

How arguments are written says `bisect_nan.snapshots.arguments`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.finding import Phase, SourceLine
from bisect_nan.recording.program import NO_STORAGE, Application, Node, Program, Tracking, Value
from bisect_nan.snapshots.arguments import constant, device, read_argument, write_argument
from bisect_nan.snapshots.operators import resolve
from bisect_nan.strict_json import checked_text, clean, count, fields, items, number, within, wrong

Encode = Callable[[torch.Tensor], Any]
"""Puts a tensor into the file and returns how the manifest refers to it."""
Decode = Callable[[Any, str], torch.Tensor]
"""Returns the tensor behind such a reference; the text is the place, for messages."""

_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
_GRAD, _RANDOM = 4, 8
_CONJ, _NEG = 1, 2

_KEYS = ("ops", "dtypes", "devices", "modules", "autograd", "lines", "values", "nodes", "functions")
_VALUE: tuple[Any, ...] = (None, None, None, None, None, 0, 0, None)
_NODE: tuple[Any, ...] = (None, None, None, None, None, 0, 0, None, None, {}, [], None, None, [])
"""Records with the defaults of their trailing fields; the first four always stand."""
_ALWAYS = 4
_USE = 7


class _Table:
    """Distinct items, numbered in the order of their first use."""

    def __init__(self, first: Iterable[Any] = ()) -> None:
        self._numbers: dict[Any, int] = {item: place for place, item in enumerate(first)}

    def __getitem__(self, item: Any) -> int:
        return self._numbers.setdefault(item, len(self._numbers))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._numbers)


# --- writing ----------------------------------------------------------------------------------------------------------------


def encode(program: Program, generator: Encode, memory: Encode) -> dict[str, Any]:
    """Return the JSON form of a program's values and calls.

    Args:
        program: The program.
        generator: Takes a generator's state.
        memory: Takes what uninitialised memory held.

    Raises:
        SnapshotError: A call has an operator or an argument that cannot be written.
    """
    ops, dtypes, devices, autograd, lines = _Table(), _Table(), _Table(), _Table(), _Table()
    modules = _Table([""])
    value_records = []
    for value in program.values:
        flags = value.conj * _CONJ + value.neg * _NEG
        kind = [value.storage, dtypes[value.dtype], devices[value.device]]
        function = autograd[value.function] if value.function else None
        value_records.append(
            _trimmed([*kind, list(value.shape), _stride(value), value.offset, flags, function], _VALUE)
        )
    records = []
    for node in program.nodes:
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
            list(map(int, node.tracked)),
        ]
        records.append(_trimmed(record, _NODE))
    functions = [
        [autograd[use.name], *map(list, (use.inputs, use.outputs, use.given, use.returned)), use.first, use.last]
        for use in program.applications
    ]
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
        "functions": functions,
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


def decode(
    data: Any, generator: Decode, memory: Decode
) -> tuple[tuple[Value, ...], tuple[Node, ...], tuple[Application, ...]]:
    """Read the values, nodes and uses of Functions of a program back; types are checked here, meanings in `checks.py`.

    Raises:
        SnapshotError: Something has the wrong type, points outside of its table, or names what does not exist.
    """
    reader = _Decoder(fields(data, "program", _KEYS), generator, memory)
    reader.values = _each("value", reader.value, items(data["values"], "program, values"))
    nodes = _each("node", reader.node, items(data["nodes"], "program, nodes"))
    uses = _each("function", reader.application, items(data["functions"], "program, functions"))
    return tuple(reader.values), tuple(nodes), tuple(uses)


def _each(what: str, read: Callable[[int, Any], Any], records: list[Any]) -> list[Any]:
    found = []
    for place, record in enumerate(records):
        try:
            found.append(read(place, record))
        except SnapshotError as problem:
            raise within(f"{what} {place}", problem) from None
    return found


class _Decoder:
    """The tables of a program, and how records that point into them are read."""

    def __init__(self, data: Mapping[str, Any], generator: Decode, memory: Decode) -> None:
        self._generator, self._memory = generator, memory
        tables = {key: items(data[key], f"program, {key}") for key in _KEYS}
        self._dtypes = [constant("dtype", name, "program, dtypes") for name in tables["dtypes"]]
        self._devices = [device(name, "program, devices") for name in tables["devices"]]
        self._ops = [resolve(checked_text(name, "program, ops")) for name in tables["ops"]]
        self._modules = [checked_text(name, "program, modules") for name in tables["modules"]]
        self._autograd = [checked_text(name, "program, autograd") for name in tables["autograd"]]
        self._lines = _each("line", _line, tables["lines"])
        self.values: list[Value] = []

    def value(self, _: int, item: Any) -> Value:
        storage, dtype, home, shape, stride, offset, flags, function = _record(item, _VALUE)
        sizes = _counts(shape, "shape")
        storage = NO_STORAGE if storage == NO_STORAGE else count(storage, "storage")
        usual = () if storage == NO_STORAGE else row_major(sizes)
        bits = count(flags, "flags", 4)
        return Value(
            storage=storage,
            dtype=self._dtypes[count(dtype, "dtype", len(self._dtypes))],
            shape=sizes,
            stride=usual if stride is None else _counts(stride, "stride"),
            offset=count(offset, "offset"),
            device=self._devices[count(home, "device", len(self._devices))],
            conj=bool(bits & _CONJ),
            neg=bool(bits & _NEG),
            function="" if function is None else self._autograd[count(function, "autograd", len(self._autograd))],
        )

    def node(self, index: int, item: Any) -> Node:
        op, args, outputs, cost, line, flags, module, forward, autograd, kwargs, written, state, held, tracked = (
            _record(item, _NODE)
        )
        bits = count(flags, "flags", 2 * _RANDOM)
        values = self.values
        changed = _counts(written, "written", len(values)) if written else ()
        made = [None if v is None else count(v, "outputs", len(values)) for v in items(outputs, "outputs")]
        arguments = items(args, "arguments")
        if len(arguments) > len(_ARGUMENTS):
            raise wrong("arguments", len(arguments), f"at most {len(_ARGUMENTS)}")
        return Node(
            index=index,
            target=self._ops[count(op, "op", len(self._ops))],
            args=tuple([read_argument(part, place) for part, place in zip(arguments, _ARGUMENTS, strict=False)]),
            kwargs={key: read_argument(part, "a keyword argument") for key, part in fields(kwargs, "keywords").items()},
            outputs=tuple(made),
            writes=tuple(dict.fromkeys([values[value].storage for value in changed])),
            written=changed,
            phase=_PHASES[count(bits & 3, "phase", len(_PHASES))],
            autograd=None if autograd is None else self._autograd[count(autograd, "autograd", len(self._autograd))],
            forward=None if forward is None else count(forward, "forward", index),
            module=self._modules[count(module, "module", len(self._modules))],
            source=None if line is None else self._lines[count(line, "line", len(self._lines))],
            cost=number(cost, "cost"),
            grad=bool(bits & _GRAD),
            tracked=tuple([Tracking(known) for known in _counts(tracked, "tracked", len(Tracking))]),
            random=bool(bits & _RANDOM),
            generator=None if state is None else self._generator(state, "generator"),
            memory=None if held is None else self._memory(held, "memory"),
        )

    def application(self, _: int, item: Any) -> Application:
        record = items(item, "record")
        if len(record) != _USE:
            raise wrong("record", record, f"{_USE} items")
        name, inputs, outputs, given, returned, first, last = record
        return Application(
            self._autograd[count(name, "autograd", len(self._autograd))],
            self._optional(inputs, "inputs"),
            self._optional(outputs, "outputs"),
            self._optional(given, "given"),
            self._optional(returned, "returned"),
            count(first, "first"),
            count(last, "last"),
        )

    def _optional(self, numbers: Any, place: str) -> tuple[int | None, ...]:
        return tuple([None if n is None else count(n, place, len(self.values)) for n in items(numbers, place)])


_ARGUMENTS = tuple([f"argument {place}" for place in range(64)])


def _line(_: int, item: object) -> SourceLine:
    parts = items(item, "record")
    if len(parts) != 4:  # noqa: PLR2004
        raise wrong("record", parts, "file, line number, function and text")
    file, line, function, text = parts
    return SourceLine(
        checked_text(file, "file"),
        count(line, "number"),
        checked_text(function, "function"),
        checked_text(text, "text"),
    )


def _record(item: object, defaults: tuple[Any, ...]) -> list[Any]:
    record = items(item, "record")
    if not _ALWAYS <= len(record) <= len(defaults):
        raise wrong("record", record, f"a list of {_ALWAYS} to {len(defaults)} items")
    return [*record, *defaults[len(record) :]]


def _counts(value: object, place: str, limit: int = 2**63) -> tuple[int, ...]:
    return tuple([count(part, place, limit) for part in items(value, place)])
