"""Captures a step from a file of tensors, a model, its weights and a loss.

Many training scripts save `{"step": ..., "input": ..., "output": ..., "target": ...}` when their loss goes bad. Such a file
says what went in but not what was computed, so the user names the rest. Tensors are read with `weights_only=True`: nothing
in the file runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from bisect_nan.command.child import Request
from bisect_nan.command.user_code import named, user_code
from bisect_nan.errors import TargetError
from bisect_nan.snapshots.snapshot import Snapshot

INPUT_KEYS = ("input", "inputs", "x", "batch", "data", "images", "features")
TARGET_KEYS = ("target", "targets", "y", "label", "labels")
STATE_KEYS = ("model_state_dict", "state_dict", "model_state", "model", "weights")
"""Under which keys people save these things; the first that is there is used."""


def capture_tensors(request: Request) -> tuple[Snapshot, tuple[str, ...]]:
    """Capture the step that a dictionary of tensors, a model and a loss make together.

    Args:
        request: `target` is the `torch.save` dictionary: an input, a target where a loss is named, and perhaps a state dict.
            `model` returns the model; without `weights` a state dict is looked for in the dictionary; without `loss` the
            model has to return the loss; without `device` all of it runs on the CPU.

    Returns:
        The snapshot, and notes on which keys and weights were used.

    Raises:
        TargetError: Something is missing or does not fit; the message says what to add.
    """
    path, model, weights, loss = Path(request.target), request.model, request.weights, request.loss
    device = request.device or "cpu"
    saved = _load(path, device)
    if not isinstance(saved, Mapping):
        expected = 'a dictionary such as {"input": ..., "target": ...}'
        raise TargetError(f"got {type(saved).__name__} in {path}", expected, "save the batch of the failing step so")
    held = ", ".join(map(str, saved)) or "none"
    if not model:
        raise TargetError(
            f"got {path} without a model (its keys: {held})",
            "the model that was trained, for this file carries tensors only",
            f"bisect-nan run {path} --model module:callable --weights FILE --loss module:callable",
        )
    source = _first_key(saved, INPUT_KEYS, path, "the input of the model")
    target = _first_key(saved, TARGET_KEYS, path, "the target of the loss") if loss else None
    network, criterion = _build(model), named(loss, "--loss") if loss else None
    state_key = None if weights else next((key for key in STATE_KEYS if isinstance(saved.get(key), Mapping)), None)
    if weights:
        _load_weights(network, _load(Path(weights), device), weights)
    elif state_key:
        _load_weights(network, saved[state_key], f"the key {state_key} of {path}")
    used = [key for key in (source, target, state_key) if key]
    batch = {key: saved[key] for key in (source, target) if key}
    step = _step(source, target, criterion, loss)
    with user_code(f"{model} on the input of {path}"):
        snapshot = Snapshot.capture(network.to(device), batch, step, step_number=_step_number(saved))
    return snapshot, tuple(_notes(path, saved, used, weights or state_key or ""))


def _notes(path: Path, saved: Mapping[str, Any], used: Sequence[str], weights: str) -> list[str]:
    """Say which keys were used and where the weights came from."""
    ignored = ", ".join(str(key) for key in saved if key not in used)
    keys = f"Used {', '.join(used)} of {path}" + (f"; ignored {ignored}." if ignored else ".")
    return [
        keys,
        f"Weights from {weights}." if weights else "No --weights: the model ran with those it was built with.",
    ]


def _step_number(saved: Mapping[str, Any]) -> int | None:
    """Return the number of the training step, where the dictionary has it."""
    number = saved.get("step")
    if isinstance(number, torch.Tensor) and number.numel() == 1 and not number.is_floating_point():
        number = number.item()
    return number if isinstance(number, int) and number >= 0 else None


def _first_key(saved: Mapping[str, Any], keys: Sequence[str], path: Path, what: str) -> str:
    """Return the first of some keys that a dictionary has."""
    found = next((key for key in keys if key in saved), None)
    if found is None:
        held = ", ".join(map(str, saved)) or "no keys"
        raise TargetError(
            f"got {held} in {path}", f"{what}, under one of {', '.join(keys)}", "save it under such a name"
        )
    return found


def _step(
    source: str, target: str | None, criterion: Callable[..., Any] | None, name: str
) -> Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor]:
    """Return the step: the model on the saved input, then the loss where one is named."""

    def step(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        output = _call(model, batch[source])
        if criterion is not None and target is not None:
            loss = criterion(output, batch[target])
        else:
            loss = (
                output["loss"] if isinstance(output, Mapping) and "loss" in output else getattr(output, "loss", output)
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            do = (
                f"let {name} return one number"
                if name
                else "add --loss module:callable, called as loss(output, target)"
            )
            raise TargetError(f"got {got} from {name or 'the model'}", "the loss, one number", do)
        return loss

    return step


def _call(model: torch.nn.Module, values: Any) -> Any:
    """Call a model with a saved input: a mapping gives keyword arguments, a list or tuple positional ones."""
    if isinstance(values, Mapping):
        return model(**values)
    return model(*values) if isinstance(values, list | tuple) else model(values)


def _build(name: str) -> torch.nn.Module:
    """Return the model that `module:callable` names: a module, or what calling it without arguments gives."""
    found = named(name, "--model")
    if isinstance(found, torch.nn.Module):
        return found
    with user_code(f"{name}()"):
        built = found()
    if not isinstance(built, torch.nn.Module):
        do = "name a function without arguments that returns the model"
        raise TargetError(f"got {type(built).__name__} from {name}()", "a torch.nn.Module", do)
    return built


def _load_weights(model: torch.nn.Module, state: Any, origin: str) -> None:
    """Load a state dict, or a checkpoint that holds one, into a model."""
    inner = next(
        (key for key in STATE_KEYS if isinstance(state, Mapping) and isinstance(state.get(key), Mapping)), None
    )
    weights = state[inner] if inner else state
    if not isinstance(weights, Mapping):
        raise TargetError(f"got {type(weights).__name__} in {origin}", "a state dict", "save model.state_dict()")
    plain = dict(weights)
    for prefix in ("module.", "_orig_mod."):  # What DistributedDataParallel and torch.compile put before every name.
        consume_prefix_in_state_dict_if_present(plain, prefix)
    try:
        model.load_state_dict(plain)
    except (RuntimeError, TypeError) as error:
        problem = " ".join(line.strip() for line in str(error).splitlines()[1:4]) or str(error)
        do = "name the weights of this model, or the model that these weights belong to"
        raise TargetError(
            f"got weights in {origin} that do not fit the model: {problem}", "its own names", do
        ) from error


def _load(path: Path, device: str) -> Any:
    """Read a file of tensors; nothing in it is executed."""
    if not path.is_file():
        raise TargetError(f"got {path}, which is no file", "a file of tensors", "check the path")
    try:
        if path.suffix == ".safetensors":
            return load_file(path, device=device)
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # Each reader has errors of its own, and they all mean this.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        expected = "tensors, numbers, strings, lists and dictionaries, which torch.load reads with weights_only=True"
        do = "save only such values; for anything else write a case file with build()"
        raise TargetError(f"got {path}, which cannot be read: {lines[0]}", expected, do) from error
