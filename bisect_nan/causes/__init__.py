"""The catalog of causes: why an operation made a non-finite value, told by the values that went in."""

from __future__ import annotations

import difflib
from dataclasses import replace

import torch

from bisect_nan.causes import (
    applied,
    degenerate,
    derivatives,
    division,
    domain,
    exponentials,
    infinities,
    inverse,
    masking,
    optimizer,
    quotients,
    ranges,
    reductions,
    special,
    state,
    unclassified,
)
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Call, Evidence
from bisect_nan.causes.extent import extent, isolated
from bisect_nan.causes.fused import inner_step
from bisect_nan.errors import BisectNanError
from bisect_nan.finding import Phase, Symptom

__all__ = ["CAUSES", "Call", "Cause", "Evidence", "Match", "UnknownCause", "diagnose", "explain", "find", "of_state"]

CAUSES: tuple[Cause, ...] = (
    state.INPUT_NONFINITE,
    state.PARAMETER_NONFINITE,
    state.BUFFER_NONFINITE,
    state.UNINITIALIZED_MEMORY,
    optimizer.LEARNING_RATE_NONFINITE,
    applied.GRADIENT_NONFINITE_APPLIED,
    optimizer.OPTIMIZER_EPS_UNDERFLOW,
    masking.SOFTMAX_ALL_MASKED,
    # Overflows of all kinds are only where it shows when the weights have grown without limit.
    optimizer.LEARNING_RATE_EXPLOSION,
    # Half precision before all that looks at operands only: the remedy (another type) is the same whatever the op.
    ranges.FP16_OVERFLOW,
    ranges.GRAD_OVERFLOW_FP16,
    # Derivatives that fail where the function is fine; then those of values that the loss did not see.
    derivatives.SQRT_GRAD_AT_ZERO,
    derivatives.LOG_GRAD_AT_ZERO,
    derivatives.POW_GRAD_AT_ZERO,
    derivatives.TRIG_GRAD_AT_BOUNDARY,
    degenerate.NORM_GRAD_AT_ZERO,
    degenerate.STD_GRAD_AT_ZERO,
    degenerate.DEGENERATE_SPECTRUM_GRAD,
    degenerate.LOGSUMEXP_GRAD_ALL_NEGINF,
    masking.WHERE_MASKED_GRADIENT,
    quotients.DIVISION_GRAD,
    # What the operands say, the special before the general.
    reductions.LOSS_TARGET_INVALID,
    reductions.EMPTY_REDUCTION,
    reductions.DEGENERATE_DOF,
    domain.LOG_OF_ZERO,
    domain.LOG_OF_NEGATIVE,
    domain.SQRT_OF_NEGATIVE,
    domain.POW_DOMAIN,
    inverse.TRIG_DOMAIN,
    special.FUNCTION_POLE,
    special.SINGULAR_MATRIX,
    division.ZERO_VARIANCE,
    division.ZERO_OVER_ZERO,
    division.DIVISION_BY_ZERO,
    infinities.ZERO_TIMES_INF,
    infinities.INF_MINUS_INF,
    state.NONFINITE_CONSTANT,
    exponentials.EXP_OVERFLOW,
    ranges.GRAD_OVERFLOW,
    ranges.OVERFLOW,
    unclassified.UNCLASSIFIED,
)
"""Every entry, in the order in which they are asked."""

_REPLACE = "; single bad values may be replaced in the loader (`torch.nan_to_num`) where a neutral number exists"

_OUTSIDE = (
    "look at the code outside of torch (NumPy, lists, Python numbers) that computes this tensor: a division by zero there, or a "
    "missing value"
)

_BY_NAME = {cause.name: cause for cause in CAUSES}


class UnknownCause(BisectNanError, KeyError):  # noqa: N818  (reads as what happened)
    """No entry of the catalog has this name."""

    __str__ = Exception.__str__


def find(name: str) -> Cause:
    """Return the entry of that name.

    Raises:
        UnknownCause: There is none; the message lists the nearest names.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        word = name.lower()
        near = [known for known in _BY_NAME if word in known] or difflib.get_close_matches(word, _BY_NAME, cutoff=0.4)
        advice = f"did you mean {' or '.join(near[:5])}?" if near else "list all names with `bisect-nan causes`"
        raise UnknownCause(f"got the cause {name!r}", "the name of a catalog entry", advice) from None


def diagnose(evidence: Evidence) -> tuple[Cause, Match]:
    """Return the first entry whose matcher fits, with what it says; `unclassified` when none does.

    A kernel or storage that a matcher cannot read (a sparse layout, a type without comparison) costs that entry, not the answer.
    """
    for cause in CAUSES:
        try:
            match = cause.matches(evidence)
        except (RuntimeError, TypeError, ValueError, IndexError):
            continue
        if match is not None:
            # What has grown over many steps overflows first wherever it happens to be largest: the place says nothing.
            place = () if cause is optimizer.LEARNING_RATE_EXPLOSION else extent(evidence.mask)
            return cause, replace(match, notes=(*match.notes, *inner_step(evidence), *place))
    return unclassified.UNCLASSIFIED, Match(0.1)


def of_state(phase: Phase, name: str, symptom: Symptom, mask: torch.Tensor) -> tuple[Cause, Match]:
    """Return the entry for a parameter, a buffer, a gradient or a part of the batch that is bad before anything runs.

    Args:
        phase: What it is.
        name: What it is called; the gradients that an update starts with are `gradient of layers.0.weight`, tensors that code
            outside of torch made during the step `constant at file:line`.
        symptom: Where the failure shows.
        mask: bool: its bad elements.
    """
    kinds = {Phase.PARAMETER: state.PARAMETER_NONFINITE, Phase.BUFFER: state.BUFFER_NONFINITE}
    cause = kinds.get(phase, state.INPUT_NONFINITE)
    if cause is state.INPUT_NONFINITE and symptom.kind != "loss" and name.startswith("gradient of "):
        return applied.GRADIENT_NONFINITE_APPLIED, Match(1.0, extent(mask))
    if name.startswith("constant"):
        return cause, Match(1.0, extent(mask), _OUTSIDE)
    replaceable = cause is state.INPUT_NONFINITE and isolated(mask)
    return cause, Match(1.0, extent(mask), cause.help + _REPLACE if replaceable else "")


def explain(name: str) -> str:
    """Return an entry as Markdown: what happens, where, an example, what to change, the same look without the fault, references.

    Raises:
        UnknownCause: There is no such entry.
    """
    cause = find(name)
    summary = cause.summary.replace("`{op}`", "the operation")
    parts = [
        f"# {cause.name}",
        f"{summary[0].upper()}{summary[1:]}.",
        cause.explanation,
        f"Where it is met: {cause.practice}",
        f"Example:\n\n```python\n{cause.example.strip()}\n```",
        f"What to change: {cause.help}.",
        f"The example after the change:\n\n```python\n{cause.repaired.strip()}\n```",
        f"The same look without the fault:\n\n```python\n{cause.near_miss.strip()}\n```",
    ]
    if cause.references:
        parts.append("Reported in: " + ", ".join(cause.references) + ".")
    return "\n\n".join(parts) + "\n"
