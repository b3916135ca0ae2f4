"""The JSON form of a recorded call's arguments.

Null, booleans, integers, finite floats (a float always has a point or an exponent) and lists of arguments are written as they
are; a string is `%` and a value number. Anything else is an object with one key that says what it is: `float` (`"nan"`, `"inf"`,
`"-inf"`), `complex` (two numbers), `str`, `tuple` (a list), `generator` (an integer), `dtype`, `device`, `layout`,
`memory_format`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

import torch

from bisect_nan.errors import SnapshotError
from bisect_nan.recording.program import GeneratorRef, Ref
from bisect_nan.strict_json import checked_text, clean, count, items, number, plain_number, wrong

_REFERENCE = re.compile("%([0-9]{1,18})")
_DEPTH = 4
"""How deeply lists of arguments nest at most; no schema asks for more than two."""


def _names(kind: type) -> dict[str, Any]:
    """Return torch's constants of a type by name, without the quantized dtypes, whose tensors are more than their memory."""
    found = {str(item).removeprefix("torch."): item for item in vars(torch).values() if isinstance(item, kind)}
    return {name: item for name, item in found.items() if not name.startswith(("qint", "quint"))}


_CONSTANTS = {
    "dtype": _names(torch.dtype),
    "layout": _names(torch.layout),
    "memory_format": _names(torch.memory_format),
}


def write_argument(item: Any, place: str) -> Any:
    """Return the JSON form of an argument.

    Raises:
        SnapshotError: It has none.
    """
    for kind in type(item).__mro__:
        if kind in _WRITERS:
            return _WRITERS[kind](item, place)
    do = "call locate(snapshot) in the process that recorded the step; a file cannot carry this call"
    raise SnapshotError(f"{place}: got an argument of type {type(item).__name__}", "tensors, numbers and texts", do)


def read_argument(item: Any, place: str, depth: int = 0) -> Any:
    """Return an argument from its JSON form.

    Raises:
        SnapshotError: It is none.
    """
    kind = type(item)
    if kind is str and (match := _REFERENCE.fullmatch(item)):
        return Ref(int(match[1]))
    if item is None or kind in (bool, int) or (kind is float and math.isfinite(item)):
        return item
    if depth == _DEPTH:
        raise wrong(place, item, f"lists within lists at most {_DEPTH} deep")
    if kind is list:
        return [read_argument(part, place, depth + 1) for part in item]
    if kind is dict and len(item) == 1:
        ((name, content),) = item.items()
        if name in _CONSTANTS:
            return constant(name, content, place)
        if name in _READERS:
            return _READERS[name](content, place, depth)
    raise wrong(place, item, "an argument")


def constant(kind: str, name: object, place: str) -> Any:
    """Return torch's constant of a kind (`dtype`, `layout`, `memory_format`) and name.

    Raises:
        SnapshotError: There is none.
    """
    found = _CONSTANTS[kind].get(name) if isinstance(name, str) else None
    if found is None:
        raise wrong(place, name, f"a {kind.replace('_', ' ')} of this release of torch")
    return found


def device(name: object, place: str) -> torch.device:
    """Return the device of a name; whether this machine has it is not looked at.

    Raises:
        SnapshotError: It is none.
    """
    text = checked_text(name, place)
    try:
        found = torch.device(text)
    except (RuntimeError, ValueError) as problem:
        raise wrong(place, name, "a device, such as cpu or cuda:0") from problem
    if str(found) != text:
        raise wrong(place, name, f"the device written as {found}")
    return found


def _write_constant(item: Any, place: str) -> dict[str, str]:
    kind, name = type(item).__name__, str(item).removeprefix("torch.")
    constant(kind, name, place)
    return {kind: name}


def _read_complex(content: Any, place: str, _: int) -> complex:
    parts = items(content, place)
    if len(parts) != 2:  # noqa: PLR2004
        raise wrong(place, parts, "a real and an imaginary part")
    return complex(number(parts[0], place), number(parts[1], place))


_WRITERS: Mapping[type, Callable[[Any, str], Any]] = {
    Ref: lambda item, _: f"%{item.value}",
    NoneType: lambda item, _: item,
    bool: lambda item, _: item,
    int: lambda item, _: int(item),
    float: lambda item, _: float(item) if math.isfinite(item) else {"float": plain_number(item)},
    list: lambda item, place: [write_argument(part, place) for part in item],
    tuple: lambda item, place: {"tuple": [write_argument(part, place) for part in item]},
    complex: lambda item, _: {"complex": [plain_number(item.real), plain_number(item.imag)]},
    str: lambda item, _: {"str": clean(item)},
    GeneratorRef: lambda item, _: {"generator": item.index},
    torch.device: lambda item, _: {"device": str(item)},
    torch.dtype: _write_constant,
    torch.layout: _write_constant,
    torch.memory_format: _write_constant,
}

_READERS: Mapping[str, Callable[[Any, str, int], Any]] = {
    "float": lambda content, place, _: number(content, place),
    "complex": _read_complex,
    "str": lambda content, place, _: checked_text(content, place),
    "tuple": lambda content, place, depth: tuple(
        [read_argument(part, place, depth + 1) for part in items(content, place)]
    ),
    "generator": lambda content, place, _: GeneratorRef(count(content, place, 2**16)),
    "device": lambda content, place, _: device(content, place),
}
