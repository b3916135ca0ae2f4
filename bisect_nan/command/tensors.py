"""Captures a step from saved tensors, a model, its weights and a loss.

Many training scripts save `{"step": ..., "input": ..., "output": ..., "target": ...}` when their loss goes bad, others a
checkpoint and the batch. Such files say what went in but not what was computed, so the user names the rest. Nothing in the files
runs (see `bisect_nan.command.reading`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bisect_nan import finite
from bisect_nan.command.checkpoint import Checkpoint, architecture, left_out, of_content, open_checkpoint
from bisect_nan.command.child import Request
from bisect_nan.command.reading import read, step_number
from bisect_nan.command.roles import INPUT_KEYS, OUTPUT_KEYS, TARGET_KEYS, Roles, flat, key_of, roles
from bisect_nan.command.stored import bad_already
from bisect_nan.command.user_code import named, user_code
from bisect_nan.command.weights import load_weights
from bisect_nan.errors import TargetError
from bisect_nan.finding import Finding, Phase
from bisect_nan.snapshots.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Captured:
    """What came of saved tensors: a snapshot, or a finding where nothing had to be run; and what was used, in sentences."""

    snapshot: Snapshot | None
    finding: Finding | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Saved:
    """A file with a batch, opened.

    Attributes:
        path: The file; the checkpoint's where no batch was saved.
        content: What it holds; None for no batch.
        checkpoint: The training that it is from.
    """

    path: Path
    content: Any
    checkpoint: Checkpoint


def capture_tensors(request: Request) -> Captured:
    """Capture the step that saved tensors, a model and a loss make together.

    Args:
        request: `target` is a file with a batch, or a checkpoint (a file or a folder) with the batch in `batch`. `model` builds
            the model; without `weights` they are looked for in the target; without `loss` the model has to return the loss;
            without `model` the loss alone is run, on a saved output; without `device` all of it runs on the CPU.

    Raises:
        TargetError: Something is missing or does not fit; the message says what to add.
    """
    saved = _open(request)
    if saved.content is None:
        weights = {
            key: value for key, value in (saved.checkpoint.state or {}).items() if isinstance(value, torch.Tensor)
        }
        finding = bad_already(weights, Phase.PARAMETER)
        if finding is not None:
            return Captured(None, finding, (f"Looked only for NaN in the weights of {saved.checkpoint.origin}.",))
        do = f'torch.save({{"input": ..., "target": ...}}, "batch.pt") of the failing step, then {_command(request, batch="batch.pt")}'
        raise TargetError(
            f"got {request.target}, which holds weights and no batch", "the batch of the failing step, too", do
        )
    if not request.model:
        return _without_model(request, saved)
    model = _build(request.model, Path(request.target))
    loss = _loss(request) if request.loss else None
    found = roles(saved.content, model, saved.path, scored=loss is not None)
    checkpoint = (
        open_checkpoint(Path(request.weights), request.device or "cpu") if request.weights else saved.checkpoint
    )
    if request.weights and checkpoint.state is None:
        raise TargetError(f"got no weights in {request.weights}", "a state dict", "save model.state_dict()")
    notes = [_used(saved, found, with_state=not request.weights), *checkpoint.notes]
    if checkpoint.state is None:
        notes.append("No --weights: the model ran with those it was built with.")
    else:
        notes.append(load_weights(model, checkpoint.state, checkpoint.origin))
    notes += filter(None, [checkpoint.seed()])
    saved = replace(saved, checkpoint=checkpoint)
    snapshot = _capture(request, saved, model.to(request.device or "cpu"), found, loss)
    return Captured(snapshot, None, tuple(notes))


def _open(request: Request) -> _Saved:
    """Open the target, and the batch where it lies apart."""
    target, device = Path(request.target), request.device or "cpu"
    if target.is_dir():
        checkpoint, content = open_checkpoint(target, device), None
    else:
        content, unknown = read(target, device)
        checkpoint = of_content(content, str(target), left_out(target, unknown))
        if isinstance(content, Mapping) and checkpoint.state is not None:
            if checkpoint.state is not content:
                key = next(str(key) for key, value in content.items() if value is checkpoint.state)
                checkpoint = replace(checkpoint, origin=f"the key {key} of {target}")
            if checkpoint.state is content or not key_of(content, (*INPUT_KEYS, *OUTPUT_KEYS)):
                content = None
    if not request.batch:
        return _Saved(target, content, checkpoint)
    path = Path(request.batch)
    content, unknown = read(path, device)
    checkpoint = replace(checkpoint, notes=(*checkpoint.notes, *left_out(path, unknown)))
    return _Saved(path, content, checkpoint)


def _without_model(request: Request, saved: _Saved) -> Captured:
    """Say what can be said of saved tensors alone: that the input is bad, or what the loss makes of the output."""
    values = flat(saved.content, scored=True)
    output, target = key_of(values, OUTPUT_KEYS), key_of(values, TARGET_KEYS)
    given = {key: value for key, value in values.items() if key_of({key: 0}, (*INPUT_KEYS, *TARGET_KEYS))}
    finding = bad_already(
        {f"batch['{key}']": tensor for key, value in given.items() for tensor in _tensors(value)}, Phase.INPUT
    )
    if finding is not None:
        return Captured(None, finding, (f"Looked only for NaN in {', '.join(given)} of {saved.path}.",))
    command = _command(
        request, model="module:callable", weights="" if saved.checkpoint.state else "FILE", loss="module:callable"
    )
    held = ", ".join(values)
    if output and finite.probe(_tensors(values[output])):
        summary = finite.summarise(next(t for t in _tensors(values[output]) if finite.probe([t])))
        got = f"got {saved.path}, in which {output} is bad ({summary.describe()}), and the input is not"
        raise TargetError(got, "the model that was trained, for the fault lies in it", command)
    if not (output and target and request.loss):
        named_in_config = architecture(Path(request.target))
        if named_in_config:
            command = _command(request, model=f"transformers:{named_in_config}")
        alone = ", or the loss alone (--loss), run on the saved output" if output and target else ""
        got = f"got {saved.path} without a model (its keys: {held})"
        raise TargetError(got, f"the model that was trained, for this file carries tensors only{alone}", command)
    loss = _loss(request)
    output_and_target = {key: values[key] for key in (output, target)}
    output_and_target[output] = tree_map_only(torch.Tensor, _leaf, output_and_target[output])
    found = Roles(output_and_target, output, (), target)
    note = f"Ran the loss alone, on {output} and {target} of {saved.path}, for there is no --model."
    return Captured(_capture(request, saved, nn.Identity(), found, loss), None, (note,))


def _loss(request: Request) -> Callable[..., Any]:
    """Return the loss that a request names; a class of modules (`torch.nn:CrossEntropyLoss`) with its own defaults."""
    loss: Any = named(request.loss, "--loss")
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        with user_code(f"making {request.loss}"):
            loss = loss()
    return loss.to(request.device or "cpu") if isinstance(loss, nn.Module) else loss


def _capture(
    request: Request, saved: _Saved, model: nn.Module, found: Roles, loss: Callable[..., Any] | None
) -> Snapshot:
    """Record the model on the saved input, then the loss where one is named."""
    name = request.loss

    def step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        output = batch[found.positional] if isinstance(model, nn.Identity) else found.call(model, batch)
        result = _loss_in(output) if loss is None else loss(_prediction(output), batch[found.target])
        if not isinstance(result, torch.Tensor) or result.numel() != 1:
            got = f"shape {list(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
            command = _command(request, loss="module:callable")
            do = f"let {name} return one number" if name else f"add --loss, called as loss(output, target): {command}"
            raise TargetError(f"got {got} from {name or 'the model'}", "the loss, one number", do)
        return result

    number = step_number(saved.content)
    with user_code(f"{request.model or request.loss} on the {'input' if request.model else 'output'} of {saved.path}"):
        return Snapshot.capture(
            model,
            dict(found.values),
            step,
            history=saved.checkpoint.history,
            step_number=saved.checkpoint.step if number is None else number,
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a saved output as it is in training: something that has a gradient."""
    return tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex())


def _loss_in(output: Any) -> Any:
    """Return the loss in what a model returns."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def _prediction(output: Any) -> Any:
    """Return what a loss takes of a model's output: of one of transformers' the logits, else all of it."""
    is_output = any(base.__name__ == "ModelOutput" for base in type(output).__mro__)
    return output.logits if is_output and "logits" in output else output


def _used(saved: _Saved, found: Roles, *, with_state: bool) -> str:
    """Say which keys were used."""
    values = flat(saved.content, scored=bool(found.target))
    used = [key for key in values if key in found.values]
    state = saved.checkpoint.state if with_state else None
    states = [str(key) for key, value in values.items() if state is not None and value is state]
    ignored = [key for key in values if key not in (*used, *states)]
    return f"Used {', '.join([*used, *states])} of {saved.path}" + (
        f"; ignored {', '.join(ignored)}." if ignored else "."
    )


def _command(request: Request, **more: str) -> str:
    """Return the command line to type next: what was typed, and what is missing; a script is reduced from a snapshot."""
    words = ["bisect-nan", "run", request.target]
    for option in ("batch", "model", "weights", "loss", "device"):
        value = getattr(request, option) or more.get(option, "")
        words += [f"--{option}", value] if value else []
    kept = "crash.safetensors"
    return (
        f"{shlex.join([*words, '--save', kept])}, then bisect-nan repro {kept}" if request.repro else shlex.join(words)
    )


def _build(name: str, target: Path) -> nn.Module:
    """Return the model that `module:callable` names: a module, or what calling it gives.

    It is called without arguments; a class of transformers beside a checkpoint folder with the configuration in there.
    """
    found = named(name, "--model")
    if isinstance(found, nn.Module):
        return found
    configured = target.is_dir() and hasattr(found, "config_class") and (target / "config.json").is_file()
    with user_code(f"{name}()"):
        built = found(found.config_class.from_pretrained(str(target))) if configured else found()
    if not isinstance(built, nn.Module):
        do = "name a function without arguments that returns the model"
        raise TargetError(f"got {type(built).__name__} from {name}()", "a torch.nn.Module", do)
    return built
