"""Tells of saved tensors that hold NaN already, for which nothing has to be run."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bisect_nan import causes, finite
from bisect_nan.finding import Culprit, Finding, Phase, Symptom, Verdict
from bisect_nan.finite import NonFinite


def bad_already(tensors: Mapping[str, torch.Tensor], phase: Phase) -> Finding | None:
    """Return the finding that tensors hold NaN, or None. Infinities alone say nothing: a mask is made of them.

    Args:
        tensors: The tensors by name.
        phase: What they are: `INPUT` or `PARAMETER`.
    """
    bad = {name: tensor for name, tensor in tensors.items() if finite.has([tensor], NonFinite.NAN)}
    if not bad:
        return None
    name, tensor = next(iter(bad.items()))
    mask = finite.mask(tensor, NonFinite.NAN)
    symptom = Symptom(phase.value, name, tuple(finite.labels(finite.kinds(tensor))), len(bad) - 1)
    cause, match = causes.of_state(phase, name, symptom, mask)
    summary = finite.summarise(tensor, name)
    rows = mask.flatten(1).any(1).nonzero().flatten().tolist() if phase is Phase.INPUT and mask.dim() > 1 else []
    culprit = Culprit(
        phase=phase,
        cause=cause.name,
        summary=cause.summary,
        confidence=1.0,
        op="",
        kernel="",
        autograd=None,
        node=-1,
        name=name,
        source=None,
        module="",
        inputs=(),
        outputs=(summary,),
        element=summary.first or (),
        samples=tuple(rows),
        notes=match.notes,
        help=match.help or cause.help,
    )
    return Finding(Verdict.LOCATED, symptom, (culprit,))
