"""Runs one training step under the recorder and leaves everything as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_flatten_with_path, keystr

from bisect_nan import finite
from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase, Symptom
from bisect_nan.recording.frontiers import Frontier
from bisect_nan.recording.program import Program, Targets
from bisect_nan.recording.recorder import Recorder
from bisect_nan.recording.setting import eager, hooks_noticed, module_paths, old_objects_left_alone
from bisect_nan.recording.state import Surroundings, named_parameters, optimizer_tensors

Step = Callable[[Any, Any], Any]
"""`step(model, batch) -> loss`."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A target that came out non-finite in the recording.

    Attributes:
        symptom: What a user reads.
        names: All non-finite targets of this kind, the one that was finished first in front.
        tensor: The first one's content, bit for bit.
    """

    symptom: Symptom
    names: tuple[str, ...]
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Recording:
    """One recorded step.

    Attributes:
        program: What was executed.
        tensors: The placeholders' tensors by value number, holding what they held before the step.
        observed: What came out non-finite; None for a clean step.
        loss: The loss.
        frontiers: What was alive in the middle of a step that came out non-finite, the latest last.
    """

    program: Program
    tensors: Mapping[int, torch.Tensor]
    observed: Observed | None
    loss: float
    frontiers: tuple[Frontier, ...] = ()


def record(model: Any, batch: Any, step: Step, *, backward: bool = True, frontiers: bool = False) -> Recording:
    """Run `step(model, batch)` once under the recorder, then the backward pass.

    The backward pass is left out when the loss is already non-finite or needs no gradient. Parameters, buffers, gradients,
    attributes, the batch, generators and hooks are afterwards as they were, also when the step raises.

    Args:
        model: The module (or any object that `step` takes).
        batch: Any pytree of tensors and plain values.
        step: Returns the loss: a scalar tensor, or a mapping or sequence of them (a mapping's "loss", else their sum).
        backward: Whether to run the backward pass at all.
        frontiers: Whether to keep what is alive on the way.

    Raises:
        RecordingError: The step returned no scalar loss, or needs tensors without memory of their own.
    """
    recorder, surroundings = Recorder(frontiers=frontiers), Surroundings(model, batch=batch)
    try:
        _name_tensors(recorder, model, batch)
        leaves, held = _gradient_leaves(model, batch), _buffers(model)
        for leaf in leaves.values():
            leaf.grad = None
        with (
            eager(),
            old_objects_left_alone(),
            module_paths(model, recorder.modules),
            hooks_noticed(model, leaves.values()) as hooks,
        ):
            return _run(recorder, model, functools.partial(step, model, batch), leaves, held, hooks, backward=backward)
    finally:
        recorder.restore()
        surroundings.restore()


def record_update(model: Any, optimizer: torch.optim.Optimizer, loss: float, *args: Any, **kwargs: Any) -> Recording:
    """Run `optimizer.step(*args, **kwargs)` once under the recorder, on the gradients that are there.

    Parameters, gradients, buffers, optimizer state and generators are afterwards as they were. The gradients are inputs of the
    program, named `gradient of layers.0.weight`. What was non-finite before is no symptom.

    Args:
        model: The module that is trained.
        optimizer: Its optimizer.
        loss: The loss of the step, for the report.
        args: Arguments of `optimizer.step`: a closure computes loss and gradients again, and becomes part of the program.
        kwargs: Further arguments.
    """
    recorder, surroundings = Recorder(), Surroundings(model, optimizer)
    try:
        parameters, held = named_parameters(model, optimizer), _buffers(model)
        _name_tensors(recorder, model, None)
        for name, parameter in parameters.items():
            recorder.values.name(parameter, Phase.PARAMETER, name)
            if parameter.grad is not None:
                recorder.values.name(parameter.grad, Phase.INPUT, f"gradient of {name}")
        for name, tensor in optimizer_tensors(optimizer):
            recorder.values.name(tensor, Phase.OPTIMIZER, name)
        before = _nonfinite(dict(optimizer_tensors(optimizer)))
        recorder.phase = Phase.OPTIMIZER
        with eager(), old_objects_left_alone(), module_paths(model, recorder.modules), recorder:
            optimizer.step(*args, **kwargs)
        values = recorder.values
        parameters, buffers = _written(recorder, parameters), _written(recorder, _buffers(model), held)
        state = {name: tensor for name, tensor in optimizer_tensors(optimizer) if values.seen(tensor)}
        targets = Targets(
            parameters={name: recorder.number(parameter) for name, parameter in parameters.items()},
            buffers={name: recorder.number(buffer) for name, buffer in buffers.items()},
            optimizer={name: recorder.number(tensor) for name, tensor in state.items()},
        )
        kind, found = "parameter", _spoiled(recorder, parameters)
        if not found:
            kind, found = "optimizer", {name: t for name, t in _nonfinite(state).items() if name not in before}
        if not found:
            kind, found = "buffer", _spoiled(recorder, buffers, held)
        program = recorder.finish(targets)
        return Recording(program, dict(values.tensors), _observed(program, kind, found), loss)
    finally:
        recorder.restore()
        surroundings.restore()


def _run(
    recorder: Recorder,
    model: Any,
    step: Callable[[], Any],
    leaves: Mapping[str, torch.Tensor],
    held: Mapping[str, torch.Tensor],
    hooks: Sequence[object],
    *,
    backward: bool,
) -> Recording:
    values = recorder.values
    with recorder:
        loss = scalar_loss(step())
    number = recorder.number(loss)
    targets, kind = Targets(number), "loss"
    left = [leaf for leaf in leaves.values() if leaf.grad is not None]  # gradients that the step itself made
    found = {"loss": loss.detach()} if finite.kinds(loss.detach()) else {}
    if found and backward and loss.requires_grad and recorder.applications:
        _record_backward_code(recorder, loss)
    elif not found and backward and loss.requires_grad:
        recorder.phase = Phase.BACKWARD
        recorder.frontiers.bound()
        with recorder:
            torch.autograd.backward(loss)
        leaves = {**leaves, **values.leaves}
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        targets = Targets(number, {name: recorder.number(gradient) for name, gradient in gradients.items()})
        kind, found = "gradient", _nonfinite(gradients)
    if not found:
        written = _written(recorder, _buffers(model), held)
        targets = Targets(
            number, targets.gradients, {name: recorder.number(buffer) for name, buffer in written.items()}
        )
        kind, found = "buffer", _spoiled(recorder, written, held)
    program = recorder.finish(replace(targets, hooked=bool(hooks or left or recorder.unfollowed)))
    observed = _observed(program, kind, found)
    frontiers = () if observed is None else recorder.frontiers.of(program)
    return Recording(program, dict(values.tensors), observed, float(loss.detach()), frontiers)


def _record_backward_code(recorder: Recorder, loss: torch.Tensor) -> None:
    """Run the backward pass of a bad loss for the sake of the Python code in it; where that cannot bear NaN, it stays unknown."""
    recorder.phase = Phase.BACKWARD
    with recorder, contextlib.suppress(Exception):
        torch.autograd.backward(loss)


def scalar_loss(result: Any) -> torch.Tensor:
    """Return the loss in what a step returned.

    Raises:
        RecordingError: There is no scalar floating-point tensor to find.
    """
    if isinstance(result, Mapping) and "loss" in result:
        result = result["loss"]
    elif isinstance(result, Mapping | Sequence) and not isinstance(result, str):
        parts = list(result.values()) if isinstance(result, Mapping) else list(result)
        if parts and all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in parts):
            result = sum(part.reshape(()) for part in parts)
    if isinstance(result, torch.Tensor) and result.numel() == 1 and result.is_floating_point():
        return result
    got = type(result).__name__
    if isinstance(result, torch.Tensor):
        got = f"a tensor of shape {tuple(result.shape)} and {result.dtype}"
    raise RecordingError(
        f"step(model, batch) returned {got}",
        "a scalar floating-point loss, a mapping with one under 'loss', or several scalars",
        "return the loss that you call backward() on",
    )


def _nonfinite(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not finite.probe(tensors.values()):
        return {}
    return {name: tensor for name, tensor in tensors.items() if finite.probe([tensor])}


def _written(
    recorder: Recorder, tensors: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return those tensors that the recorded calls wrote to, and those in the place of others, which were `held` before."""
    values, before = recorder.values, tensors if held is None else held

    def changed(name: str, tensor: torch.Tensor) -> bool:
        return values.wrote(tensor) or (tensor is not before.get(name) and values.seen(tensor))

    return {name: tensor.detach() for name, tensor in tensors.items() if changed(name, tensor)}


def _spoiled(
    recorder: Recorder, written: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return the non-finite ones among written tensors that were finite before."""
    before = written if held is None else {**written, **held}
    return {n: t for n, t in _nonfinite(written).items() if not finite.probe([recorder.values.before(before[n])])}


def _observed(program: Program, kind: str, found: Mapping[str, torch.Tensor]) -> Observed | None:
    """Keep the non-finite target that was finished first: nothing between the fault and it had to run on."""
    if not found:
        return None
    made: dict[int, int] = {}
    for node in program.nodes:
        for value in [*node.outputs, *node.written]:
            if value is not None:
                made[value] = node.index
    numbers = program.targets.of(kind)
    names = sorted(found, key=lambda name: made.get(numbers[name], -1))
    first = found[names[0]].detach().clone()
    labels = tuple(finite.labels(finite.kinds(first)))
    return Observed(Symptom(kind, names[0], labels, len(names) - 1), tuple(names), first)


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else {}


def _buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) if isinstance(model, nn.Module) else {}


def _gradient_leaves(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the backward pass leaves gradients in, by name; one under two names once."""
    leaves = _parameters(model)
    known = {id(leaf) for leaf in leaves.values()}
    for name, leaf in _batch_tensors(batch):
        if leaf.requires_grad and leaf.is_leaf and id(leaf) not in known:
            known.add(id(leaf))
            leaves[name] = leaf
    return leaves


def _name_tensors(recorder: Recorder, model: Any, batch: Any) -> None:
    name_it = recorder.values.name
    for name, parameter in _parameters(model).items():
        name_it(parameter, Phase.PARAMETER, name)
    if isinstance(model, nn.Module):
        for name, buffer in model.named_buffers():
            name_it(buffer, Phase.BUFFER, name)
    for name, leaf in _batch_tensors(batch):
        name_it(leaf, Phase.INPUT, name)


def _batch_tensors(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a batch with their path: `batch['labels']['depth']`."""
    paths, _ = pytree.tree_flatten_with_path(batch)
    return ((f"batch{pytree.keystr(path)}", leaf) for path, leaf in paths if isinstance(leaf, torch.Tensor))
