"""The tensors of one checkpoint, one at a time; nothing in its files is executed."""

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

_NO_WEIGHTS = ("training_args", "rng_state", "random_states", "scheduler", "scaler")
"""Starts of the names of files that stand beside weights and hold none, often as pickled objects."""

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
        CheckpointError: A file is damaged, is missing, or holds more than tensors and plain values.
    """
    files = [file for file in files_of(checkpoint) if not file.name.startswith(_NO_WEIGHTS)]
    _require_all(checkpoint, files)
    if not files:
        raise CheckpointError(f"got {checkpoint.name} without a file of weights", "weights", "skip it")
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
    if "nsupported global" in text:  # what torch.load says of a class; its message is about executing it all the same
        return "it holds more than tensors and plain values"
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


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as problem:
        if "mmap" not in str(problem):
            raise
        return torch.load(file, map_location="cpu", weights_only=True)


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
