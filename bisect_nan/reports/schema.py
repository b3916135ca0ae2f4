"""The JSON Schema (draft 2020-12) of a finding's JSON form, made from the fields of its parts and what their docstrings say.

`Finding.to_dict` gives the parts as they are, with two exceptions that stand in `_culprit` and `to_schema`.
"""

from __future__ import annotations

import enum
import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bisect_nan.culprit import Culprit, SourceLine
from bisect_nan.finding import VERSION, Finding, Verdict

_NUMBER = {
    "description": "A number; those that JSON cannot write are texts.",
    "anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}],
}
_SIMPLE: Mapping[object, Mapping[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    bool: {"type": "boolean"},
    float: {"$ref": "#/$defs/number"},
}


def to_schema() -> dict[str, Any]:
    """Return the schema of what `Finding.to_dict` gives. Every field is required and described, and there are no others."""
    parts: dict[str, Any] = {"number": _NUMBER}
    finding = _object(Finding, parts)
    properties = finding["properties"]
    verdict = properties.pop("verdict")["description"]
    properties = {
        "version": {"const": VERSION, "description": "Version of this form; grows when a field changes its meaning."},
        "verdict": {"enum": [item.name.lower() for item in Verdict], "description": "The answer as one word."},
        "message": {"enum": [item.value for item in Verdict], "description": verdict},
        "culprit": {
            "anyOf": [{"$ref": "#/$defs/Culprit"}, {"type": "null"}],
            "description": "The earliest of the culprits.",
        },
        **properties,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:bisect-nan:finding:{VERSION}",
        "title": "bisect-nan finding",
        **finding,
        "properties": properties,
        "required": list(properties),
        "$defs": parts,
    }


def _object(part: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass; those of its fields go into `parts`."""
    hints, described = typing.get_type_hints(part), _described(part)
    properties = {
        item.name: {**_schema(hints[item.name], parts), "description": described[item.name]} for item in fields(part)
    }
    if part is Culprit:
        properties = _culprit(properties, parts)
    return {
        "description": (inspect.getdoc(part) or "").split("\n\n")[0].replace("\n", " "),
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _culprit(properties: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Put the fields of a culprit's line in the place of the line: all of them null where there is none."""
    line, text = _object(SourceLine, parts)["properties"], properties.pop("source")["description"]
    inside = {
        key: {"type": [value["type"], "null"], "description": f"{value['description']} Null without a line."}
        for key, value in line.items()
    }
    inside["line"]["description"] = f"{inside['line']['description']} {text}"
    return {**properties, **inside}


def _schema(hint: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type."""
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return {"anyOf": [{"type": "null"} if part is type(None) else _schema(part, parts) for part in arguments]}
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(arguments[1], parts)}
    if origin is tuple:
        return _array([_schema(part, parts) for part in arguments if part is not ...], repeated=... in arguments)
    if issubclass(hint, enum.Enum):
        return {"enum": [item.value for item in hint]}
    if hint.__name__ not in parts:
        parts[hint.__name__] = _object(hint, parts)
    return {"$ref": f"#/$defs/{hint.__name__}"}


def _array(items: list[dict[str, Any]], *, repeated: bool) -> dict[str, Any]:
    """Return the schema of a list: any number of one kind of item, or exactly these items."""
    if repeated:
        return {"type": "array", "items": items[0]}
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _described(part: type) -> dict[str, str]:
    """Return what the `Attributes:` section of a class says of each field, in the words of JSON."""
    text = (inspect.getdoc(part) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()).replace("None", "null") for name, said in found}
