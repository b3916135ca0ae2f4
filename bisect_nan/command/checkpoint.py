"""What a checkpoint tells: weights, the number of the step, the losses so far, random generators.

A checkpoint is a file, as people save it by hand or as Lightning does, or a folder, as the Trainer of transformers leaves it:
`model.safetensors` in one or several parts, `trainer_state.json`, `rng_state.pth`. What else it holds (the optimizer, hyper-parameters) has
no part in one step forward and backward.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bisect_nan.command.reading import read, step_number
from bisect_nan.command.weights import state_of
from bisect_nan.errors import TargetError

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_PARTS = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_GENERATORS = ("rng_state.pth", "rng_state_0.pth")
_NAMES = {"loss": "loss", "grad_norm": "gradient_norm"}
"""What the Trainer calls numbers of a step, and what a snapshot's history does."""

_CALLED = {"cpu": "torch", "cuda": "CUDA", "python": "Python", "numpy": "NumPy"}
"""Under which names the Trainer keeps the states of random generators, and whose they are."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What is known of a training.

    Attributes:
        state: The state dict; None where there is none.
        origin: Where the weights lie, for messages.
        step: Number of the step, or None.
        history: Numbers of the steps before.
        generators: States of random generators, by the names in `_CALLED`.
        notes: What was left out, each a sentence.
    """

    state: Mapping[str, Any] | None
    origin: str
    step: int | None = None
    history: tuple[Mapping[str, float], ...] = ()
    generators: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def seed(self) -> str:
        """Put random generators back to where the checkpoint has them; return a sentence, or "" when it has none."""
        done = []
        for name, restore in (
            ("cpu", torch.set_rng_state),
            ("cuda", _seed_cuda),
            ("python", random.setstate),
            ("numpy", _seed_numpy),
        ):
            try:
                if name in self.generators:
                    restore(self.generators[name])
                    done.append(_CALLED[name])
            except (TypeError, ValueError, RuntimeError):  # of another release, or of another kind of device
                continue
        return f"Random generators ({', '.join(done)}) as the checkpoint has them." if done else ""


def open_checkpoint(path: Path, device: str) -> Checkpoint:
    """Read a checkpoint: a file, or a folder.

    Raises:
        TargetError: There is none, or none that can be read.
    """
    if path.is_dir():
        return _folder(path, device)
    content, unknown = read(path, device)
    return of_content(content, str(path), left_out(path, unknown))


def of_content(content: Any, origin: str, notes: tuple[str, ...] = ()) -> Checkpoint:
    """Return what a file's content tells of a training."""
    held = content if isinstance(content, Mapping) else {}
    generators = held.get("rng_state", held.get("torch_rng_state"))
    if isinstance(generators, torch.Tensor):
        generators = {"cpu": generators.cpu()}
    known = generators if isinstance(generators, Mapping) else {}
    return Checkpoint(state_of(content), origin, step_number(content), (), known, notes)


def left_out(path: Path, unknown: tuple[str, ...]) -> tuple[str, ...]:
    """Return a sentence on the objects of a file that were not loaded."""
    return (f"Left out of {path}: objects of {', '.join(unknown)}.",) if unknown else ()


def architecture(path: Path) -> str:
    """Return the class that the `config.json` of a checkpoint folder names, such as `BertForMaskedLM`, or ""."""
    named = _json(path / "config.json").get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def _folder(path: Path, device: str) -> Checkpoint:
    files = list(_weights(path))
    if not files:
        others = ", ".join(sorted(file.name for file in path.iterdir())[:8]) or "nothing"
        expected = f"a checkpoint folder, with {' or '.join(_WHOLE)}"
        raise TargetError(
            f"got the folder {path}, which holds {others}",
            expected,
            f"name the file with the weights; of several checkpoints, bisect-nan checkpoints {path} finds the first bad one",
        )
    state: dict[str, Any] = {}
    for file in files:
        state |= state_of(read(file, device)[0]) or {}
    origin = str(files[0]) if len(files) == 1 else f"{len(files)} files of {path}"
    told = _json(path / "trainer_state.json")
    number = told.get("global_step")
    generators: Any = {}
    notes: tuple[str, ...] = ()
    kept = next((path / name for name in _GENERATORS if (path / name).is_file()), None)
    if kept is not None:
        generators, unknown = read(kept, "cpu")
        notes = left_out(kept, unknown)
    return Checkpoint(
        state,
        origin,
        number if isinstance(number, int) else None,
        tuple(_history(told.get("log_history"))),
        generators if isinstance(generators, Mapping) else {},
        notes,
    )


def _weights(path: Path) -> Iterator[Path]:
    """Yield the files with the weights of a folder."""
    for whole, parts in zip(_WHOLE, _PARTS, strict=True):
        if (path / whole).is_file():
            yield path / whole
            return
        names = _json(path / parts).get("weight_map")
        if isinstance(names, Mapping):
            # Only names: an index file is not to point out of its folder.
            yield from (path / name for name in sorted({Path(str(name)).name for name in names.values()}))
            return


def _history(logs: Any) -> Iterator[Mapping[str, float]]:
    """Yield the numbers of steps in a Trainer's log."""
    for entry in logs if isinstance(logs, list) else []:
        if isinstance(entry, Mapping) and isinstance(entry.get("step"), int) and "loss" in entry:
            numbers = {
                ours: entry[theirs] for theirs, ours in _NAMES.items() if isinstance(entry.get(theirs), int | float)
            }
            yield {
                "step": entry["step"],
                **{key: float(value) for key, value in numbers.items() if math.isfinite(value)},
            }


def _json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; an empty one where there is none, for nothing depends on it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _seed_cuda(state: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(list(state) if isinstance(state, list | tuple) else [state])
    else:
        message = f"no CUDA on {sys.platform}"
        raise RuntimeError(message)


def _seed_numpy(state: Any) -> None:
    import numpy as np  # noqa: PLC0415  (without it, there is no such state)

    name, keys, *rest = state
    np.random.set_state((name, keys.numpy(), *rest))  # noqa: NPY002  (the generator that unseeded code draws from)
