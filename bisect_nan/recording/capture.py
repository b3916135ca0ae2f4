"""Runs one training step under the recorder and leaves everything as it was."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bisect_nan import finite
from bisect_nan.errors import BisectNanError, RecordingError
from bisect_nan.finding import Phase
from bisect_nan.recording.naming import batch_tensors, name_batch, name_tensors
from bisect_nan.recording.outcome import Recording, Update, outcome, outcome_of_value
from bisect_nan.recording.raised import reason
from bisect_nan.recording.recorder import Recorder
from bisect_nan.recording.setting import eager, hooks_noticed, module_paths, old_objects_left_alone
from bisect_nan.recording.state import Surroundings, named_parameters

Step = Callable[[Any, Any], Any]
"""`step(model, batch) -> loss`."""


def require_step(step: Step) -> None:
    """Refuse a step that cannot be called with a model and a batch.

    Raises:
        BisectNanError: It takes other arguments.
    """
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):  # nobody knows, as for functions in C
        return
    try:
        signature.bind(None, None)
    except TypeError:
        got = f"got a step {getattr(step, '__name__', type(step).__name__)}{signature}"
        do = "put all else into the batch: step(model, (inputs, targets))"
        raise BisectNanError(got, "step(model, batch)", do) from None


def record(model: Any, batch: Any, step: Step, *, backward: bool = True, frontiers: bool = False) -> Recording:
    """Run `step(model, batch)` once under the recorder, then the backward pass.

    The backward pass is left out when the loss is already non-finite or needs no gradient. A step that raises because of what it saw
    of a NaN or an infinity is recorded as far as it came, and judged by that. Parameters, buffers, gradients,
    attributes, the batch, generators and hooks are afterwards as they were, also when the step raises.

    Args:
        model: The module (or any object that `step` takes).
        batch: Any pytree of tensors and plain values.
        step: Returns the loss: a scalar tensor, or a mapping or sequence of them (a mapping's "loss", else their sum).
        backward: Whether to run the backward pass at all.
        frontiers: Whether to keep what is alive on the way.

    Raises:
        BisectNanError: The step takes other arguments.
        RecordingError: The step returned no scalar loss, or needs tensors without memory of their own.
        Exception: Whatever the step raised for another reason.
    """
    require_step(step)
    recorder, surroundings = Recorder(frontiers=frontiers), Surroundings(model, batch=batch)
    try:
        leaves, held = _gradient_leaves(model, batch), _buffers(model)
        for leaf in leaves.values():
            leaf.grad = None
        name_tensors(recorder, _parameters(model), _buffers(model))
        name_batch(recorder, batch)
        with (
            eager(),
            old_objects_left_alone(),
            module_paths(model, recorder.modules),
            hooks_noticed(model, leaves.values()) as hooks,
        ):
            return _run(recorder, model, functools.partial(step, model, batch), leaves, held, hooks, backward=backward)
    except (Exception, SystemExit) as error:
        found = reason(recorder, error)
        if found is None:
            raise
        return outcome_of_value(recorder, *found)
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
        update = Update(recorder, optimizer, named_parameters(model, optimizer), _buffers(model))
        with eager(), old_objects_left_alone(), module_paths(model, recorder.modules), recorder:
            optimizer.step(*args, **kwargs)
        return update.outcome(loss, _buffers(model))
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
    with recorder:
        loss = scalar_loss(step())
    recorder.number(loss)
    left = [leaf for leaf in leaves.values() if leaf.grad is not None]  # gradients that the step itself made
    bad, gradients = bool(finite.kinds(loss.detach())), dict[str, torch.Tensor]()
    if bad and backward and loss.requires_grad and recorder.applications:
        _record_backward_code(recorder, loss)
    elif not bad and backward and loss.requires_grad:
        recorder.phase = Phase.BACKWARD
        recorder.frontiers.bound()
        with recorder, torch.autograd.set_detect_anomaly(mode=False):  # which would end it at the first NaN
            torch.autograd.backward(loss)
        leaves = {**leaves, **recorder.values.leaves}
        gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    found = outcome(recorder, loss, gradients, _buffers(model), held=held, hooked=bool(hooks or left))
    frontiers = () if found.observed is None else recorder.frontiers.of(found.program)
    return replace(found, frontiers=frontiers)


def _record_backward_code(recorder: Recorder, loss: torch.Tensor) -> None:
    """Run the backward pass of a bad loss for the sake of the Python code in it; where that cannot bear NaN, it stays unknown."""
    recorder.phase = Phase.BACKWARD
    with recorder, torch.autograd.set_detect_anomaly(mode=False), contextlib.suppress(Exception):
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


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else {}


def _buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers()) if isinstance(model, nn.Module) else {}


def _gradient_leaves(model: Any, batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that the backward pass leaves gradients in, by name; one under two names once."""
    leaves = _parameters(model)
    known = {id(leaf) for leaf in leaves.values()}
    for name, leaf in batch_tensors(batch):
        if leaf.requires_grad and leaf.is_leaf and id(leaf) not in known:
            known.add(id(leaf))
            leaves[name] = leaf
    return leaves
