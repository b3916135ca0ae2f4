"""JSON from a stranger: parsed strictly, and every part checked when it is taken out.

Strict means: no duplicate keys, no `NaN` or `Infinity`, no nesting that exhausts the stack. Whatever is not as it should be
ends in one `SnapshotError` that names the place.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Never

from bisect_nan.errors import SnapshotError

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DO = "use a file as `Snapshot.save` wrote it; this one is damaged, or was not written by bisect_nan"


def parse(text: str, place: str) -> Any:
    """Parse a JSON text.

    Raises:
        SnapshotError: It is no strict JSON, or nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as problem:
        reason = "it is nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        raise SnapshotError(f"{place} cannot be read: {clean(reason)[:200]}", "JSON", _DO) from problem


def _refuse_constant(name: str) -> Never:
    message = f"{name} is no JSON"
    raise ValueError(message)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        message = "a key occurs twice in an object"
        raise ValueError(message)
    return found


def wrong(place: str, got: object, expected: str) -> SnapshotError:
    """Return the error for a part of a file that is not as it should be."""
    return SnapshotError(f"{place}: got {shown(got)}", expected, _DO)


def within(place: str, problem: SnapshotError) -> SnapshotError:
    """Return an error with the place of the part in front that its own place is a part of: `node 3, argument 1: ...`.

    Building the names of all places beforehand would take longer than reading the file.
    """
    return SnapshotError(f"{place}, {problem.got}", problem.expected, problem.do)


def shown(value: object) -> str:
    """Return a short printable form of anything that was found in a file."""
    if isinstance(value, int) and not -(2**64) < value < 2**64:
        return "an integer beyond 64 bits"
    if isinstance(value, dict | list) and len(value) > 8:  # noqa: PLR2004
        return f"a {'list' if isinstance(value, list) else 'dictionary'} of {len(value)} items"
    try:
        text = ascii(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."  # noqa: PLR2004


def is_int(value: object) -> bool:
    """Whether a JSON value is an integer (in Python, booleans are integers, too)."""
    return type(value) is int


def count(value: object, place: str, limit: int = 2**63) -> int:
    """Return an integer from 0 to below `limit`.

    Raises:
        SnapshotError: It is none.
    """
    if type(value) is int and 0 <= value < limit:
        return value
    raise wrong(place, value, f"an integer from 0 to {limit - 1}")


def number(value: object, place: str) -> float:
    """Return a number, which can be non-finite.

    Raises:
        SnapshotError: It is none.
    """
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and abs(value) < 2**64:
        return value
    if isinstance(value, str) and value in _NONFINITE:
        return _NONFINITE[value]
    raise wrong(place, value, 'a number, "nan", "inf" or "-inf"')


def plain_number(value: float) -> float | int | str:
    """Return the JSON form of a number."""
    return value if math.isfinite(value) else str(float(value))


def plain(value: Any) -> Any:
    """Return the JSON form of nested values: tuples as lists, enums as their values, non-finite numbers as texts."""
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def items(value: object, place: str) -> list[Any]:
    """Return a list.

    Raises:
        SnapshotError: It is none.
    """
    if isinstance(value, list):
        return value
    raise wrong(place, value, "a list")


def fields(value: object, place: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return an object; with `names`, one that has exactly these keys.

    Raises:
        SnapshotError: It is none.
    """
    if not isinstance(value, dict):
        raise wrong(place, value, "an object")
    if names and value.keys() != set(names):
        raise wrong(place, list(value), f"an object with the keys {', '.join(names)}")
    return value


def checked_text(value: object, place: str) -> str:
    """Return a text of printable characters, so that nothing shown on a terminal can steer it.

    Raises:
        SnapshotError: It is none.
    """
    if isinstance(value, str) and (value.isprintable() or value.replace("\t", " ").isprintable()):
        return value
    raise wrong(place, value, "a text of printable characters")


def clean(text: str) -> str:
    """Return a text with every character replaced that `checked_text` would refuse."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
