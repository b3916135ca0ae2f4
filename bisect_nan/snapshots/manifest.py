"""The manifest of a snapshot file: a JSON object that says everything except the bytes of tensors. Read here without torch.

A snapshot is one valid safetensors file. Its entries are raw bytes (dtype U8, one dimension, little-endian elements), and its
header metadata holds the manifest, a JSON text, under the key `bisect_nan`. JSON here has no duplicate keys and no `NaN` or
`Infinity`; a *number* may be one of the strings `"nan"`, `"inf"` and `"-inf"` instead. Text holds printable characters, spaces
and tabs only.

=================  =========================================================================================================
top-level key      content
=================  =========================================================================================================
`format`           1; grows when a key changes its meaning
`writer`           the package and release that wrote the file: `"bisect_nan 0.1.0"`
`symptom`          null for a clean step, else an object: `kind` (`loss`, `gradient`, `buffer`, `parameter`, `optimizer`,
                   and `value`: what a step that raised had looked at), `name`,
                   `nonfinite` (list of `nan`, `+inf`, `-inf`) and `others` (how many further tensors of this kind are non-finite)
`loss`             number: the loss as recorded
`step_number`      integer or null
`history`          list of objects of numbers, the latest step last: `step`, `loss`, `gradient_norm` ...
`environment`      object: the fields of `bisect_nan.snapshots.environment.Environment`
`nodes`            integer: how many calls the program has
`placeholders`     list of objects, one for each tensor that the step did not make itself: `value` (its number), `name`
                   (`layers.0.weight`, `batch['depth']`), `phase` (`input`, `parameter`, `buffer`, `optimizer`), `constant`
                   (boolean), `dtype` (`float32`), `shape` (list) and `device` (`cpu`, `cuda:0`)
`targets`          object: `loss` (a value number; null for an optimizer's step, and where a step raised), `gradients`,
                   `buffers`, `parameters` and
                   `optimizer` (objects: name to value number), and `hooked` (boolean: gradients pass through hooks);
                   where a step raised also `values`
`observed`         null for a clean step, else an object: `names` (the non-finite targets, the earliest first) and `tensor`
                   (what the first one held)
`storages`         list of `[storage number, device, bytes]`, one for each memory that a placeholder shows. The bytes are the
                   entry `storage.<number>`; those on the device `meta` have none
`sparse`           list of `[value number, tensor]`: placeholders without memory of their own
`generators`       list of tensors: states of random generators
`program`          object: the calls, see `bisect_nan.snapshots.encoding`
`entry`            optional: the code that the step came from, `module:function` or `path/to/file.py:function`. It is a name for
                   the reader, and nothing imports it unless the user has named its folder
=================  =========================================================================================================

A *tensor* here is an object. Strided ones have `entry` (the entry with its memory), `dtype`, `shape` and `stride`; sparse ones
`layout` (`sparse_coo`, `sparse_csr` ...), `shape`, `parts` (strided ones: indices and values, or compressed, plain indices and
values) and `coalesced`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bisect_nan.errors import SnapshotError
from bisect_nan.recording.targets import KINDS
from bisect_nan.strict_json import checked_text, count, fields, is_int, items, number, shown, wrong
from bisect_nan.strict_json import parse as parse_json

FORMAT = 1
"""The format that this release writes, and the only one that it reads."""

KEY = "bisect_nan"
"""Key of the manifest in the metadata of the file."""

HEADER_LIMIT = 100_000_000
"""Largest header in bytes that safetensors accepts (safetensors/src/tensor.rs, MAX_HEADER_SIZE)."""

_KEYS = frozenset(
    {"format", "writer", "symptom", "loss", "step_number", "history", "environment", "nodes", "placeholders", "targets"}
    | {"observed", "storages", "sparse", "generators", "program"}
)
_OPTIONAL = frozenset({"entry"})


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a snapshot says about itself. The human-readable part is checked; the program is not, see `bisect_nan.snapshots.checks`.

    Attributes:
        writer: The package and release that wrote the file.
        symptom: `kind`, `name`, `nonfinite` and `others`; None for a clean step.
        loss: The loss as recorded.
        step_number: Number of the training step, where it is known.
        history: Numbers of the steps before, the latest last.
        environment: What the recording ran on.
        nodes: How many calls the program has.
        entry: The code that the step came from; empty where it is not known.
        placeholders: For each tensor from outside: `value`, `name`, `phase`, `constant`, `dtype`, `shape` and `device`.
        entries: Sizes in bytes of the file's entries.
        data: The whole JSON object.
    """

    writer: str
    symptom: Mapping[str, Any] | None
    loss: float
    step_number: int | None
    history: Sequence[Mapping[str, float]]
    environment: Mapping[str, Any]
    nodes: int
    entry: str
    placeholders: Sequence[Mapping[str, Any]]
    entries: Mapping[str, int] = field(repr=False)
    data: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Manifest:
        """Read the manifest of a file.

        Raises:
            SnapshotError: The file cannot be read, is no snapshot, or has another format.
        """
        text, entries = _read_header(Path(path))
        return cls.parse(text, entries)

    @classmethod
    def parse(cls, text: str, entries: Mapping[str, int]) -> Manifest:
        """Read a manifest from its JSON text.

        Raises:
            SnapshotError: It is no manifest, or has another format.
        """
        data = parse_json(text, "the manifest")
        if not isinstance(data, dict) or not is_int(data.get("format")):
            raise wrong("manifest", data, "an object with an integer under `format`")
        if data["format"] != FORMAT:
            got = f"got a snapshot of format {data['format']}, written by {shown(data.get('writer'))}"
            do = "open it with the release that wrote it" if data["format"] < FORMAT else "upgrade bisect_nan"
            raise SnapshotError(got, f"format {FORMAT}", do)
        if data.keys() - _OPTIONAL != _KEYS:
            raise wrong(
                "manifest",
                sorted((data.keys() - _OPTIONAL) ^ _KEYS),
                "exactly the keys of the format, but these are extra or missing",
            )
        return cls(
            writer=checked_text(data["writer"], "writer"),
            symptom=_symptom(data["symptom"]),
            loss=number(data["loss"], "loss"),
            step_number=None if data["step_number"] is None else count(data["step_number"], "step_number"),
            history=tuple(
                _numbers(item, f"history, item {i}") for i, item in enumerate(items(data["history"], "history"))
            ),
            environment=fields(data["environment"], "environment"),
            nodes=count(data["nodes"], "nodes"),
            entry=checked_text(data.get("entry", ""), "entry"),
            placeholders=tuple(
                _placeholder(item, i) for i, item in enumerate(items(data["placeholders"], "placeholders"))
            ),
            entries=entries,
            data=data,
        )

    def describe_node(self, index: int) -> str:
        """Return `node 12 (aten.mm.default at model.py:19)`, with as much in the brackets as can be found."""
        details = []
        try:
            program = self.data["program"]
            node = program["nodes"][index]
            details.append(checked_text(program["ops"][node[0]], "op"))
            line = _line_of(program, node)
            if line is not None:
                details.append(f"{checked_text(line[0], 'file')}:{count(line[1], 'line')}")
        except (LookupError, TypeError, SnapshotError):
            pass  # a damaged program; the number alone has to do
        return f"node {index} ({' at '.join(details)})" if details else f"node {index}"


def _line_of(program: Any, node: Any) -> Any:
    """Return the source line record of a node, or of the node whose derivative it computes; None without one."""
    line_field, forward_field = 4, 7  # their places in a node record, see bisect_nan.snapshots.encoding
    for _ in program["nodes"]:
        if len(node) > line_field and node[line_field] is not None:
            return program["lines"][node[line_field]]
        if len(node) <= forward_field or node[forward_field] is None:
            return None
        node = program["nodes"][node[forward_field]]
    return None


def _symptom(value: object) -> Mapping[str, Any] | None:
    if value is None:
        return None
    symptom = fields(value, "symptom", ("kind", "name", "nonfinite", "others"))
    if symptom["kind"] not in KINDS:
        raise wrong("symptom, kind", symptom["kind"], f"one of {', '.join(KINDS)}")
    checked_text(symptom["name"], "symptom, name")
    kinds = items(symptom["nonfinite"], "symptom, nonfinite")
    if not kinds or any(kind not in ("nan", "+inf", "-inf") for kind in kinds):
        raise wrong("symptom, nonfinite", kinds, "a list of nan, +inf and -inf")
    count(symptom["others"], "symptom, others")
    return symptom


def _numbers(value: object, place: str) -> Mapping[str, float]:
    return {
        checked_text(key, place): number(item, f"{place}, {shown(key)}") for key, item in fields(value, place).items()
    }


def _placeholder(value: object, position: int) -> Mapping[str, Any]:
    place = f"placeholder {position}"
    data = fields(value, place, ("value", "name", "phase", "constant", "dtype", "shape", "device"))
    count(data["value"], f"{place}, value")
    for key in ("name", "dtype", "device"):
        checked_text(data[key], f"{place}, {key}")
    if data["phase"] not in ("input", "parameter", "buffer", "optimizer"):
        raise wrong(f"{place}, phase", data["phase"], "input, parameter, buffer or optimizer")
    if not isinstance(data["constant"], bool):
        raise wrong(f"{place}, constant", data["constant"], "true or false")
    for size in items(data["shape"], f"{place}, shape"):
        count(size, f"{place}, shape")
    return data


def _read_header(path: Path) -> tuple[str, Mapping[str, int]]:
    """Return the manifest's text and the entries' sizes of a safetensors file.

    The layout is 8 bytes with the length of the header, the header (a JSON object, padded with spaces), the entries without gaps:
    https://github.com/huggingface/safetensors#format.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(HEADER_LIMIT, size - 8):  # noqa: PLR2004
                do = "copy it again if it was cut off; snapshots are what Snapshot.save and Guard write"
                raise SnapshotError(
                    f"got {path}, a file of {size} bytes without a whole header", "a safetensors file", do
                )
            header = file.read(length)
    except OSError as problem:
        raise SnapshotError(
            f"got {path}, which cannot be read: {problem.strerror}", "a snapshot file", "check the path"
        ) from problem
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise wrong(f"the header of {path}", header[:20], "JSON in UTF-8") from problem
    entries = parse_json(text, f"the header of {path}")
    metadata = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
    manifest = metadata.get(KEY) if isinstance(metadata, dict) else None
    if not isinstance(manifest, str):
        do = "name a file that Snapshot.save or Guard wrote; weights are passed with --weights"
        raise SnapshotError(f"got {path}, a safetensors file without a recorded step", f"metadata under {KEY!r}", do)
    return manifest, _sizes(entries, size - 8 - length)


def _sizes(entries: Mapping[str, Any], total: int) -> Mapping[str, int]:
    """Return the entries' sizes, once they are known to fill the `total` bytes behind the header without gaps."""
    spans: dict[str, tuple[int, int]] = {}
    for name, entry in entries.items():
        place = f"entry {shown(name)}"
        offsets = items(fields(entry, place, ("dtype", "shape", "data_offsets"))["data_offsets"], place)
        start, end = (count(offset, place) for offset in offsets) if len(offsets) == 2 else (1, 0)  # noqa: PLR2004
        if entry["dtype"] != "U8" or entry["shape"] != [end - start]:
            raise wrong(place, entry, "raw bytes: dtype U8, one dimension, a start and an end")
        spans[name] = (start, end)
    ordered = [(0, 0), *sorted(spans.values()), (total, total)]
    for (_, before), (start, _) in pairwise(ordered):
        if before != start:
            do = "copy it again; this file was cut off or damaged"
            raise SnapshotError(
                f"got {total} bytes of tensors, but {start} bytes from {before}", "entries without gaps", do
            )
    return {name: end - start for name, (start, end) in spans.items()}
