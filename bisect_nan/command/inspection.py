"""What a snapshot holds, for people: its manifest as a table. Nothing of the file is executed, and torch is not needed."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from bisect_nan.errors import SnapshotError
from bisect_nan.snapshots.manifest import Manifest
from bisect_nan.strict_json import clean

SHOWN = 12
"""So many tensors of a kind, and steps of the history, are listed unless all are asked for."""

_PHASES = {"input": "inputs", "parameter": "parameters", "buffer": "buffers", "optimizer": "optimizer state"}


def read_snapshot(path: Path) -> Manifest:
    """Read the manifest of the file that a user named.

    Raises:
        SnapshotError: It cannot be read, or is no snapshot; the message says what takes other files.
    """
    if path.is_file() and path.suffix != ".safetensors":
        got, expected = f"got {path}, which is no snapshot", "a file that Guard, watch or Snapshot.save wrote"
        do = f"bisect-nan run {shlex.quote(str(path))}, which takes saved tensors, checkpoints and case files"
        raise SnapshotError(got, expected, do)
    return Manifest.read(path)


def to_renderable(path: Path, manifest: Manifest, *, everything: bool = False) -> RenderableType:
    """Return what a snapshot holds.

    Args:
        path: The file, for its name and size.
        manifest: Its manifest.
        everything: Whether to list all tensors and steps instead of the first (the last) few.
    """
    parts: list[RenderableType] = [_summary(path, manifest)]
    if manifest.history:
        parts += [Text("\nhistory", style="bold"), _history(manifest, everything=everything)]
    for phase, title in _PHASES.items():
        held = [item for item in manifest.placeholders if item["phase"] == phase]
        if held:
            total = decimal(sum(_bytes(item) for item in held))
            heading = f"\n{len(held)} {title if len(held) > 1 else title.removesuffix('s')}, {total}"
            parts += [Text(heading, style="bold"), _tensors(held, everything=everything)]
    return Group(*parts)


def _summary(path: Path, manifest: Manifest) -> Table:
    """Return the facts that are one line each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _facts(path, manifest):
        table.add_row(Text(key), Text(clean(value)))
    return table


def _facts(path: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    yield "file", f"{path}, {decimal(path.stat().st_size)}, written by {manifest.writer}"
    symptom = manifest.symptom
    if symptom is None:
        yield "symptom", "none: the step was clean"
    else:
        name = "" if symptom["kind"] == "loss" else f" {symptom['name']}"
        more = f" (and {symptom['others']} more)" if symptom["others"] else ""
        yield "symptom", f"{symptom['kind']}{name} is {' and '.join(symptom['nonfinite'])}{more}"
    if symptom is None or symptom["kind"] != "value":  # a step that raised came to none
        yield "loss", f"{manifest.loss:.5g}"
    if manifest.step_number is not None:
        yield "step", f"{manifest.step_number}"
    yield "program", f"{manifest.nodes} nodes"
    if manifest.entry:
        yield "entry", manifest.entry
    for place, (key, value) in enumerate(manifest.environment.items()):
        words = ", ".join(map(str, value)) or "cpu" if isinstance(value, list) else str(value)
        words = {"True": "on", "False": "off"}.get(words, words)
        yield "environment" if place == 0 else "", f"{key.replace('_', ' ')} {words}"


def _history(manifest: Manifest, *, everything: bool) -> Table:
    """Return the numbers of the latest steps, one row a step."""
    rows = manifest.history if everything else manifest.history[-SHOWN:]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        table.add_column(Text(key), justify="right")
    for row in rows:
        table.add_row(*(f"{row[key]:.5g}" if key in row else "" for key in keys))
    return table


def _tensors(held: list[Mapping[str, Any]], *, everything: bool) -> Table:
    """Return the tensors of one kind, one row each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(overflow="fold")
    for column in range(3):
        table.add_column(no_wrap=True, justify="right" if column == 2 else "left")  # noqa: PLR2004  (the size)
    for item in held if everything else held[:SHOWN]:
        device = "" if item["device"] == "cpu" else f" on {item['device']}"
        kind = f"{item['dtype']}{item['shape']}{device}"
        table.add_row(
            Text(f"  {item['name']}"), Text(kind), Text("constant" if item["constant"] else ""), decimal(_bytes(item))
        )
    if not everything and len(held) > SHOWN:
        table.add_row(Text(f"  and {len(held) - SHOWN} more (-v lists all)", style="dim"))
    return table


def _bytes(placeholder: Mapping[str, Any]) -> int:
    """Return the size of a tensor by the bits in the name of its dtype; names without any (`bool`) are bytes."""
    bits = re.search(r"\d+", placeholder["dtype"])
    elements: int = math.prod(placeholder["shape"])
    return elements * (int(bits.group()) if bits else 8) // 8
