"""The checkpoints of a folder, and which came first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")

_NO_WEIGHTS = ("training_args", "rng_state", "random_states", "scheduler", "scaler")
"""Starts of the names of files that stand beside weights and hold none."""

_NUMBER = r"[\W_]*(\d+)(?![\d.]*\d)"
_UNITS = {
    "step": re.compile(rf"(?:steps?|iter|iteration|(?<![a-z])it|checkpoint|ckpt|update|batch){_NUMBER}", re.IGNORECASE),
    "epoch": re.compile(rf"(?:epoch|(?<![a-z])ep?){_NUMBER}", re.IGNORECASE),
}
"""What the number in a name counts, the surer first; a decimal (`loss=0.31`) is none."""

_TIME = "time of writing"

_SHARD = re.compile(r"(.+?)-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class Ordered:
    """The checkpoints of a folder in their order.

    Attributes:
        paths: Files, and folders that are one checkpoint each.
        order: What the order is by, for people: `step number`, `epoch number`, `number`, `time of writing`.
        left_out: Names without such a number, where most have one: `best.pt`, `last.ckpt`.
    """

    paths: tuple[Path, ...]
    order: str
    left_out: tuple[str, ...] = ()


def ordered(folder: Path) -> Ordered:
    """Return the checkpoints in a folder, the earliest first.

    By the number in their names: after a word for steps, else after a word for epochs, else whatever number is there, equal ones by
    name. Where fewer than two have a number, or all have the same, by the time of writing. A single folder whose own files have such
    numbers is entered: `version_0/checkpoints/`.

    Args:
        folder: Holds `torch.save` and safetensors files, or folders with such files.

    Raises:
        OSError: The folder cannot be read.
    """
    found = _checkpoints(folder)
    if len(found) == 1 and found[0].is_dir():
        inner = ordered(found[0])
        if len(inner.paths) > 1 and inner.order.startswith(tuple(_UNITS)):
            return inner
    for unit, pattern in _UNITS.items():
        numbers = {path: int(matches[-1]) for path in found if (matches := pattern.findall(_stem(path)))}
        if len(numbers) > 1 and (len(set(numbers.values())) > 1 or len(numbers) < len(found)):
            return _by(f"{unit} number", found, numbers)
    numbers_of = {path: key for path in found if (key := _numbers(path))}
    if len(set(numbers_of.values())) > 1:
        return _by("number", found, numbers_of)
    return Ordered(tuple(sorted(found, key=lambda path: (_written(path), path.name))), _TIME)


def files_of(checkpoint: Path) -> list[Path]:
    """Return the files of tensors of one checkpoint: the file itself, or all that its folder holds at any depth."""
    if checkpoint.is_file():
        return _shards(checkpoint) or [checkpoint]
    return sorted(path for path in checkpoint.rglob("*") if path.is_file() and _holds_weights(path))


def _holds_weights(file: Path) -> bool:
    return file.suffix in SUFFIXES and not file.name.startswith((".", *_NO_WEIGHTS))


def is_shard(file: Path) -> bool:
    """Whether a file is one of several that make a checkpoint: `model-00001-of-00004.safetensors`."""
    return _SHARD.match(file.stem) is not None


def _by(order: str, found: Sequence[Path], numbers: dict[Path, int] | dict[Path, tuple[int, ...]]) -> Ordered:
    paths = sorted(numbers, key=lambda path: (numbers[path], _natural(path)))
    return Ordered(tuple(paths), order, tuple(path.name for path in found if path not in numbers))


def _checkpoints(folder: Path) -> list[Path]:
    """Return the files and folders that are one checkpoint each; of a sharded file the first shard stands for all."""
    found: list[Path] = []
    known: set[str] = set()
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            found += [path] if files_of(path) else []
        elif path.is_file() and _holds_weights(path):
            whole = f"{match[1]}{path.suffix}" if (match := _SHARD.match(path.stem)) else path.name
            if whole not in known:
                known.add(whole)
                found.append(path)
    return found


def _shards(path: Path) -> list[Path]:
    """Return all shards of the file that one shard belongs to; none when it is no shard."""
    match = _SHARD.match(path.stem)
    return sorted(path.parent.glob(f"{_escaped(match[1])}-*-of-*{path.suffix}")) if match else []


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


def _stem(path: Path) -> str:
    match = _SHARD.match(path.stem)
    return match[1] if match else path.name.removesuffix(path.suffix if path.suffix in SUFFIXES else "")


def _numbers(path: Path) -> tuple[int, ...]:
    """Return the whole numbers in a name; those of a decimal are none."""
    return tuple(int(number) for number in re.findall(r"(?<![\d.])(\d+)(?![\d.]*\d)", _stem(path)))


def _natural(path: Path) -> list[tuple[int, str]]:
    """Return a key by which `v2` comes before `v10`."""
    parts = re.split(r"(\d+)", _stem(path))
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]


def _written(path: Path) -> int:
    return max(file.stat().st_mtime_ns for file in files_of(path))
