"""The tensors of one checkpoint, one at a time; nothing in its files is executed.

Many checkpoints hold arguments, configurations or whole models beside their weights, which `torch.load` refuses with
`weights_only=True`. Here every class that it does not know is replaced by an inert one, so that their tensors are found all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bisect_nan import finite
from bisect_nan.checkpoints.order import files_of, is_shard
from bisect_nan.errors import BisectNanError, SnapshotError
from bisect_nan.prevention import nested
from bisect_nan.prevention.check import Check, Spoiled
from bisect_nan.prevention.meant import is_meant, kind_in_file
from bisect_nan.strict_json import parse

_NO_STATE = {"callbacks", "loops", "lr_schedulers", "hyper_parameters", "hparams_name", "datamodule_hyper_parameters"}
"""Keys of Lightning's checkpoints that hold no state of the model or the optimizer: the best score starts as an infinity."""


class CheckpointError(BisectNanError):
    """A checkpoint that cannot be read; the others of the folder can be looked at all the same."""


def read(checkpoint: Path) -> Check:
    """Check the weights and the optimizer state of a checkpoint.

    Files are mapped into memory, and one tensor is looked at after the other. (Files that torch wrote before 1.6 are read as a whole.)

    Args:
        checkpoint: A file, a shard of one, or a folder with the files of one checkpoint, sharded ones with their index.

    Raises:
        CheckpointError: A file is damaged or missing, or there is no tensor.
    """
    files = files_of(checkpoint)
    _require_all(checkpoint, files)
    count = 0
    bad: list[Spoiled] = []
    meant: list[Spoiled] = []
    for file in files:
        start = f"{file.relative_to(checkpoint)}: " if checkpoint.is_dir() and len(files) > 1 else ""
        for kind, name, tensor in _tensors(file):
            count += 1
            if finite.probe([tensor]):
                spoiled = Spoiled(kind, finite.summarise(tensor, f"{start}{name}"))
                (meant if is_meant(tensor, kind, name) else bad).append(spoiled)
    if not count:
        raise CheckpointError(f"got {checkpoint.name} without any tensor", "weights", "skip it")
    return Check(f"checkpoint {checkpoint.name}", count, tuple(bad), tuple(meant))


def _tensors(file: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield kind, path and tensor of a file.

    Raises:
        CheckpointError: It cannot be read.
    """
    try:
        for name, tensor in _safetensors(file) if file.suffix == ".safetensors" else _saved(file):
            yield kind_in_file(f"{file.name} {name}"), name, tensor
    except Exception as problem:  # Each reader has errors of its own, and they all mean this.
        reason = _reason(problem)
        expected = "a whole file that torch.load reads with weights_only=True, or a safetensors file"
        raise CheckpointError(f"got {file.name}, which cannot be read: {reason}", expected, "skip it") from problem


def _reason(problem: Exception) -> str:
    """Return in a few words why a file cannot be read."""
    text = str(problem)
    if "unsupported global" in text.lower() or "unrecognized function" in text:
        return "it asks for functions that torch.load never calls"
    if "eights only load failed" in text or " " not in text.strip():  # some errors are a bare key or byte
        return "it is damaged, or was not written by torch.save"
    return text.strip().splitlines()[0].split(". ")[0]


def _safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (it is no mapping)
            yield name, opened.get_tensor(name)


def _saved(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    loaded = _load(file)
    parts = loaded.items() if isinstance(loaded, dict) else [("", loaded)]
    for key, part in parts:
        if str(key) in _NO_STATE:
            continue
        for path, leaf in nested.tensors(part):
            yield f"{key}{path}", leaf


class _Foreign(dict[Any, Any]):
    """Stands for an object of a class that `torch.load` does not know: it keeps what the file says of it, and runs none of its code."""

    def __init__(self, *args: Any, **_: Any) -> None:
        super().__init__()
        self["arguments"] = args

    def __setstate__(self, state: Any) -> None:
        self["state"] = state


def _load(file: Path) -> Any:
    """Read a file of `torch.save`, its tensors mapped into memory; of other objects in it only what they hold."""
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except ValueError:  # no zip file: from before torch 1.6, or none of torch's at all
        return torch.load(file, map_location="cpu", weights_only=True)
    # torch is told that each of these names means the class above, so that nothing is imported for them.
    with torch.serialization.safe_globals([(_Foreign, name) for name in unknown]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def _require_all(checkpoint: Path, files: Sequence[Path]) -> None:
    """See to it that no shard is missing, neither of those that an index names nor of those that the names count.

    Raises:
        CheckpointError: One is, or the index is damaged.
    """
    there = {file.name for file in files}
    wanted: set[str] = set()
    for file in files:
        start, mark, total = file.stem.rpartition("-of-")
        if mark and is_shard(file):
            wanted |= {f"{start[:-5]}{number:05}-of-{total}{file.suffix}" for number in range(1, int(total) + 1)}
    for index in checkpoint.glob("*.index.json") if checkpoint.is_dir() else ():
        try:
            wanted |= {
                str(name) for name in parse(index.read_text(encoding="utf-8"), index.name)["weight_map"].values()
            }
        except (OSError, ValueError, LookupError, AttributeError, TypeError, SnapshotError) as problem:
            got = f"got {index.name} in {checkpoint.name}, which cannot be read"
            raise CheckpointError(got, "the index of a sharded checkpoint", "skip it") from problem
    missing = sorted(wanted - there)
    if missing:
        got = f"got {checkpoint.name} without {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        raise CheckpointError(got, "all of its shards", "skip it")
