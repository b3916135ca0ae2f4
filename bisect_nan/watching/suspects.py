"""A backward pass of a watched script that came out bad, before it is known whether anything will use it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase
from bisect_nan.norms import norms
from bisect_nan.recording.memory import view
from bisect_nan.recording.outcome import Recording
from bisect_nan.recording.program import NO_STORAGE, Placeholder
from bisect_nan.recording.recorder import Recorder
from bisect_nan.snapshots.snapshot import Snapshot


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """A step that may turn out to be a fault.

    Attributes:
        snapshot: The program up to the end of the backward pass, with its own copies of all that may be written to meanwhile.
        leaves: Parameters whose gradients it spoiled; of a bad loss all that it gave gradients to.
        buffers: Buffers that it spoiled.
        needs_bad: Whether it is no fault as long as the gradients are finite.
    """

    snapshot: Snapshot
    leaves: Sequence[torch.Tensor]
    buffers: Sequence[torch.Tensor]
    needs_bad: bool

    @classmethod
    def of(
        cls, snapshot: Snapshot, leaves: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor], *, half: bool
    ) -> Self:
        """Return the suspect of a snapshot that shows a symptom.

        Args:
            snapshot: The snapshot.
            leaves: All leaves by name.
            buffers: All buffers by name.
            half: Whether the loss is a float16: then a scaler may have made it overflow, which harms no gradient.
        """
        assert snapshot.observed is not None
        kind, names = snapshot.observed.symptom.kind, snapshot.observed.names
        if kind == "buffer":
            return cls(snapshot, (), [buffers[name] for name in names], needs_bad=True)
        spoiled = [leaf for name, leaf in leaves.items() if kind == "loss" or name in names]
        return cls(snapshot, spoiled, (), needs_bad=kind == "gradient" or half)

    def stands(self, among: Sequence[torch.Tensor] | None = None) -> bool:
        """Whether what it made is still there.

        Args:
            among: The parameters to look at; None for all.
        """
        if finite.probe(self.buffers):
            return True
        wanted = None if among is None else {id(parameter) for parameter in among}
        leaves = [leaf for leaf in self.leaves if wanted is None or id(leaf) in wanted]
        (norm,) = norms(leaf.grad for leaf in leaves if leaf.grad is not None)
        return not math.isfinite(norm) or (norm > 0 and not self.needs_bad)


def kept(recorder: Recorder, recording: Recording) -> Recording:
    """Return a recording of a script that goes on: with what its placeholders held before it.

    Parameters, buffers, optimizer state and gradients are copied. A NaN in data without a name is taken for a bad input: only
    single numbers are likely to be meant.
    """
    values, program = recorder.values, recording.program
    copies: dict[int, torch.UntypedStorage] = {}
    tensors: dict[int, torch.Tensor] = {}
    placeholders = []
    for placeholder in program.placeholders:
        placeholders.append(placeholder)
        number = placeholder.value
        tensor, value = values.before(values.tensors[number]), program.values[number]
        if _is_state(placeholder) and value.storage != NO_STORAGE:
            if value.storage not in copies:
                copies[value.storage] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            tensor = view(copies[value.storage], value)
        if placeholder.constant and tensor.dim() and finite.has([tensor], finite.NonFinite.NAN):
            name = placeholder.name.replace("constant at", "the tensor that came first at")
            placeholders[-1] = replace(placeholder, name=name, constant=False)
        tensors[number] = tensor
    return replace(recording, program=replace(program, placeholders=tuple(placeholders)), tensors=tensors)


def _is_state(placeholder: Placeholder) -> bool:
    return placeholder.phase is not Phase.INPUT or placeholder.name.startswith("gradient of ")
