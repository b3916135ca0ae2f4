"""What came out of a recorded step: which of its targets are non-finite, the first one in front."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase, Symptom
from bisect_nan.recording.frontiers import Frontier
from bisect_nan.recording.naming import name_tensors
from bisect_nan.recording.program import Program
from bisect_nan.recording.recorder import Recorder
from bisect_nan.recording.state import optimizer_tensors
from bisect_nan.recording.targets import Targets


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


class Update:
    """An optimizer's step that runs under a recorder, from before it to its outcome."""

    def __init__(
        self,
        recorder: Recorder,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        """Name what there is before the update, and tell the recorder that the update begins.

        Args:
            recorder: What the update runs under.
            optimizer: Whose update it is.
            parameters: Parameters by name.
            buffers: Buffers by name.
        """
        self._recorder, self._optimizer, self._parameters, self._buffers = recorder, optimizer, parameters, buffers
        name_tensors(recorder, parameters, buffers)
        for name, tensor in optimizer_tensors(optimizer):
            recorder.values.name(tensor, Phase.OPTIMIZER, name)
        self._bad_before = _nonfinite(dict(optimizer_tensors(optimizer)))
        recorder.phase = Phase.OPTIMIZER

    def outcome(self, loss: float, buffers: Mapping[str, torch.Tensor]) -> Recording:
        """Return the recording once the update has run; what was non-finite before is no symptom.

        Args:
            loss: The loss of the step, for the report.
            buffers: The buffers that there are now.
        """
        recorder, values = self._recorder, self._recorder.values
        held = self._buffers
        parameters, buffers = _written(recorder, self._parameters), _written(recorder, buffers, held)
        state = {name: tensor for name, tensor in optimizer_tensors(self._optimizer) if values.seen(tensor)}
        targets = Targets(
            parameters={name: recorder.number(parameter) for name, parameter in parameters.items()},
            buffers={name: recorder.number(buffer) for name, buffer in buffers.items()},
            optimizer={name: recorder.number(tensor) for name, tensor in state.items()},
        )
        kind, found = "parameter", _spoiled(recorder, parameters)
        if not found:
            kind = "optimizer"
            found = {name: t for name, t in _nonfinite(state).items() if name not in self._bad_before}
        if not found:
            kind, found = "buffer", _spoiled(recorder, buffers, held)
        program = recorder.finish(targets)
        return Recording(program, dict(values.tensors), _observed(program, kind, found), loss)


def outcome(
    recorder: Recorder,
    loss: torch.Tensor | None,
    gradients: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    *,
    held: Mapping[str, torch.Tensor],
    hooked: bool,
) -> Recording:
    """Judge the forward and backward pass that a recorder has seen: by the loss, then the gradients, then the buffers.

    Args:
        recorder: What the passes ran under.
        loss: The loss, of one element; None where nobody knows it.
        gradients: The gradients that were made, by the names of their parameters.
        buffers: Buffers by name; those count that became non-finite.
        held: The buffers that there were before.
        hooked: Whether gradients pass through hooks.
    """
    targets = Targets(None if loss is None else recorder.number(loss))
    kind, found = "loss", {} if loss is None else _nonfinite({"loss": loss.detach()})
    if not found:
        targets = replace(targets, gradients={name: recorder.number(gradient) for name, gradient in gradients.items()})
        kind, found = "gradient", _nonfinite(gradients)
    if not found:
        written = _written(recorder, buffers, held)
        targets = replace(targets, buffers={name: recorder.number(buffer) for name, buffer in written.items()})
        kind, found = "buffer", _spoiled(recorder, written, held)
    program = recorder.finish(replace(targets, hooked=hooked or recorder.unfollowed))
    value = math.nan if loss is None else float(loss.detach())
    return Recording(program, dict(recorder.values.tensors), _observed(program, kind, found), value)


def outcome_of_value(recorder: Recorder, name: str, tensor: torch.Tensor) -> Recording:
    """Judge a step that came to no loss by a value of it: what it looked at before it raised, say.

    Args:
        recorder: What the step ran under.
        name: What reports call the tensor.
        tensor: A tensor that a recorded call returned, or was given.
    """
    program = recorder.finish(Targets(values={name: recorder.number(tensor)}))
    return Recording(program, dict(recorder.values.tensors), _observed(program, "value", {name: tensor}), math.nan)


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
