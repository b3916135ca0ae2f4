"""The bytes of a snapshot: memories written once each into a safetensors file, and read back where they lie.

The file is written here and not by safetensors' writer, for three reasons: that one needs NumPy, it takes all memories of an
accelerator to the host at once, and it does not align them. Here all memories whose size is a multiple of 64 bytes start at one,
as torch's own do; the results of some kernels depend on that in the last bit. Reading is safetensors' own, which maps the file
into memory: nothing is read before it is used, and what is written to such memory never reaches the file.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bisect_nan.errors import SnapshotError
from bisect_nan.recording.memory import extent, view
from bisect_nan.recording.program import Value
from bisect_nan.snapshots.arguments import constant
from bisect_nan.snapshots.manifest import HEADER_LIMIT, KEY
from bisect_nan.strict_json import checked_text, count, fields, items, wrong
from bisect_nan.whole_file import whole_file

_ALIGNMENT = 64
_STRIDED = ("entry", "dtype", "shape", "stride")
_SPARSE = ("layout", "shape", "parts", "coalesced")


def cut(storage: torch.UntypedStorage, start: int, end: int) -> torch.UntypedStorage:
    """Return a copy of the bytes of a storage from `start` to `end`."""
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (end - start,), (1,))
    return whole.clone().untyped_storage()


# --- writing ----------------------------------------------------------------------------------------------------------------


def write(path: Path, manifest: str, entries: Mapping[str, torch.UntypedStorage]) -> None:
    """Write a file as a whole or not at all: under another name first, which replaces `path` once everything is on the disk.

    Args:
        path: The file; folders on the way are made.
        manifest: Text for the metadata.
        entries: Memories by name.

    Raises:
        SnapshotError: It cannot be written; what was at `path` is still there.
    """
    ordered = sorted(entries.items(), key=lambda entry: entry[1].nbytes() % _ALIGNMENT != 0)
    header: dict[str, Any] = {"__metadata__": {KEY: manifest}}
    end = 0
    for name, storage in ordered:
        start, end = end, end + storage.nbytes()
        header[name] = {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > HEADER_LIMIT:
        got = f"got a program whose description takes {len(text)} bytes"
        raise SnapshotError(got, f"at most {HEADER_LIMIT}, which safetensors allows", "capture a shorter step")
    try:
        with whole_file(path) as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for _, storage in ordered:
                _write_storage(file, storage)
    except OSError as problem:
        do = "make room, or choose another folder"
        raise SnapshotError(f"got {path}, which cannot be written: {problem.strerror}", "a file", do) from problem


def _write_storage(file: Any, storage: torch.UntypedStorage) -> None:
    held: torch.UntypedStorage = storage.cpu()  # type: ignore[no-untyped-call]
    if held.nbytes():
        file.write(memoryview((ctypes.c_ubyte * held.nbytes()).from_address(held.data_ptr())))


def write_tensor(tensor: torch.Tensor, name: str, entries: dict[str, torch.UntypedStorage]) -> dict[str, Any]:
    """Put a tensor that is no placeholder among the entries and return its record for the manifest.

    Args:
        tensor: Any layout.
        name: Name of its entry, or the start of it.
        entries: Where its memory is added.
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        parts = [write_tensor(part, f"{name}.{i}", entries) for i, part in enumerate(_parts(tensor))]
        layout = str(tensor.layout).removeprefix("torch.")
        coalesced = tensor.layout is torch.sparse_coo and tensor.is_coalesced()
        return {"layout": layout, "shape": list(tensor.shape), "parts": parts, "coalesced": coalesced}
    tensor = tensor.resolve_conj().resolve_neg()
    reached = extent(Value(0, tensor.dtype, tuple(tensor.shape), tensor.stride(), 0, tensor.device))
    if tensor.storage_offset() or tensor.untyped_storage().nbytes() != reached:
        tensor = torch.empty_like(tensor).copy_(tensor)
    entries[name] = tensor.untyped_storage()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"entry": name, "dtype": dtype, "shape": list(tensor.shape), "stride": list(tensor.stride())}


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # the public ones refuse uncoalesced tensors
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


# --- reading ----------------------------------------------------------------------------------------------------------------


class Reader:
    """The entries of a file, mapped into memory."""

    def __init__(self, path: Path, sizes: Mapping[str, int]) -> None:
        """Open a file.

        Args:
            path: The file.
            sizes: Bytes of its entries, as its header says.

        Raises:
            SnapshotError: It is no valid safetensors file.
        """
        self._path, self._sizes = path, sizes
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as problem:
            do = "copy it again if it was cut off"
            raise SnapshotError(f"got {path}, which cannot be read: {problem}", "a safetensors file", do) from problem

    def storage(self, name: str, size: int, place: str) -> torch.UntypedStorage:
        """Return an entry's memory, aligned as torch's own is; it must not be written to.

        Raises:
            SnapshotError: There is no such entry, or it has another size.
        """
        if self._sizes.get(name) != size:
            raise wrong(place, f"{size} bytes", f"the {self._sizes.get(name, 0)} bytes of the entry {name}")
        try:
            shown: torch.Tensor = self._file.get_tensor(name)  # type: ignore[no-untyped-call]
        except (OSError, SafetensorError) as problem:
            raise SnapshotError(
                f"got {self._path}, which changed meanwhile", f"an entry {name}", "open it again"
            ) from problem
        if shown.dtype != torch.uint8 or shown.numel() != size:
            raise SnapshotError(
                f"got {self._path}, which changed while it was opened", f"{size} bytes of {name}", "open it again"
            )
        storage: torch.UntypedStorage = shown.untyped_storage()
        if shown.storage_offset() or storage.nbytes() != size or storage.data_ptr() % _ALIGNMENT:
            storage = shown.clone().untyped_storage()
        return storage

    def tensor(self, record: Any, place: str) -> torch.Tensor:
        """Return a tensor that is no placeholder from its record in the manifest.

        Raises:
            SnapshotError: The record is not as it should be, or does not fit its entry.
        """
        if isinstance(record, dict) and "layout" in record:
            return self._sparse(record, place)
        record = fields(record, place, _STRIDED)
        name, dtype = checked_text(record["entry"], place), constant("dtype", record["dtype"], place)
        shape, stride = (
            tuple([count(number, f"{place}, {key}") for number in items(record[key], f"{place}, {key}")])
            for key in ("shape", "stride")
        )
        if len(shape) != len(stride):
            raise wrong(f"{place}, stride", list(stride), f"{len(shape)} strides")
        value = Value(0, dtype, shape, stride, 0, torch.device("cpu"))
        storage = self.storage(name, self._sizes.get(name, 0), place)
        if extent(value) > storage.nbytes():
            raise wrong(place, f"{extent(value)} bytes", f"at most the {storage.nbytes()} bytes of the entry {name}")
        return view(storage, value)

    def _sparse(self, record: dict[str, Any], place: str) -> torch.Tensor:
        fields(record, place, _SPARSE)
        layout = constant("layout", record["layout"], place)
        shape = [count(size, f"{place}, shape") for size in items(record["shape"], f"{place}, shape")]
        parts = [
            self.tensor(fields(part, f"{place}, parts", _STRIDED), f"{place}, parts")
            for part in items(record["parts"], f"{place}, parts")
        ]
        coalesced = record["coalesced"] is True
        try:
            if layout is torch.sparse_coo:
                indices, values = parts
                return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=coalesced, check_invariants=True)
            compressed, plain, values = parts
            return torch.sparse_compressed_tensor(
                compressed, plain, values, shape, layout=layout, check_invariants=True
            )
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            raise wrong(place, record["layout"], f"a sparse tensor ({str(problem).splitlines()[0]})") from problem
