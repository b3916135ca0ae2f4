"""Snapshot files with something changed in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Return the header, the manifest and the bytes of the entries of a file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return header, json.loads(header["__metadata__"]["bisect_nan"]), data[8 + length :]


def assemble(header: dict[str, Any], manifest: str, body: bytes) -> bytes:
    """Return a file with another manifest, as text."""
    text = json.dumps({**header, "__metadata__": {"bisect_nan": manifest}}).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + body


def changed(path: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Write a copy of a file after `change` was applied to its manifest (in place, or to what `change` returns)."""
    header, manifest, body = parts(path)
    replaced = change(manifest)
    text = json.dumps(manifest if replaced is None else replaced)
    target.write_bytes(assemble(header, text, body))
    return target


def paths(item: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the keys and positions that lead to every part of a JSON value."""
    inner = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    return [path, *(found for key, part in inner for found in paths(part, (*path, key)))]


def put(item: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a JSON value in which one part is another."""
    if not path:
        return value
    part = item
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return item
