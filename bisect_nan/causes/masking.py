"""Masks that leave nothing, and masks that hide a bad value from the loss but not from the gradient."""

from __future__ import annotations

from dataclasses import replace

import torch

from bisect_nan import finite
from bisect_nan.causes import division, domain, exponentials, inverse, reductions, special
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import enough, first_index, numbers, result, show, where, written_by

_SOFTMAXES = frozenset({"_softmax", "_log_softmax", "softmax", "log_softmax", "_safe_softmax", "special_softmax"})
_FORWARD_FAULTS = (
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
    exponentials.EXP_OVERFLOW,
)
_BIASES = ("attn_mask", "attn_bias", "bias")


def _row_is_masked(evidence: Evidence) -> torch.Tensor | None:
    """At each blamed element, whether the row of scores that it comes from holds only -inf; None without such a row."""
    arguments = evidence.call.arguments
    if evidence.op in _SOFTMAXES:
        scores, dim = arguments.get("self"), arguments.get("dim", -1)
        if not isinstance(scores, torch.Tensor) or scores.shape != evidence.mask.shape or not scores.numel():
            return None
        masked = (
            finite.mask(scores, finite.NonFinite.NEG_INF).all(dim, keepdim=True) if scores.ndim else scores.isneginf()
        )
        return masked.expand(scores.shape)[evidence.mask].cpu()
    if evidence.op.startswith("_scaled_dot_product") and evidence.output == 0:
        bias = next((arguments[name] for name in _BIASES if isinstance(arguments.get(name), torch.Tensor)), None)
        if bias is None or not bias.ndim:
            return None
        hidden = ~bias if bias.dtype is torch.bool else finite.mask(bias, finite.NonFinite.NEG_INF)
        rows = hidden.all(-1, keepdim=True)
        return rows.expand(evidence.mask.shape)[evidence.mask].cpu()
    return None


def _softmax_all_masked(evidence: Evidence) -> Match | None:
    masked = _row_is_masked(evidence)
    if masked is None or not enough(masked & result(evidence).isnan()):
        return None
    return Match(0.98, (_name_rows(evidence, masked), *written_by(evidence)))


def _name_rows(evidence: Evidence, masked: torch.Tensor) -> str:
    """Say how many rows hold only -inf and which is the first: `[1, 0, :]`."""
    if not evidence.mask.ndim:
        return "the only score is -inf"
    dim = evidence.call.arguments.get("dim", -1) % evidence.mask.ndim
    rows = -(-int(masked.sum()) // evidence.mask.shape[dim])
    place: list[object] = [*first_index(evidence, masked)]
    place[dim] = ":"
    return f"{rows} row{'s' * (rows > 1)} of scores hold{'s' * (rows == 1)} only -inf, first [{', '.join(map(str, place))}]"


def _forward_value(evidence: Evidence) -> torch.Tensor | None:
    """What the forward op gave at the blamed elements of its derivative, where the shapes agree."""
    forward = evidence.forward
    value = forward.outputs[0] if forward is not None and forward.outputs else None
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return None
    try:
        return numbers(value.expand(evidence.mask.shape)[evidence.mask])
    except RuntimeError:
        return numbers(value.flatten()) if value.numel() else None


def forward_is_finite(evidence: Evidence) -> bool:
    """Whether the forward op was inside of its domain where its derivative is blamed."""
    value = _forward_value(evidence)
    return value is None or not enough(~value.isfinite())


def _where_masked_gradient(evidence: Evidence) -> Match | None:
    if evidence.symptom.kind != "gradient" or not evidence.kinds():
        return None
    value = result(evidence) if evidence.hidden else _forward_value(evidence)
    if value is None or not enough(~value.isfinite()):
        return None
    bad = ~value.isfinite()
    note = (
        f"the forward value is {show(value[bad][0])}{where(evidence, bad)}, and what follows keeps it out of the loss"
    )
    return Match(0.85 if evidence.hidden else 0.9, (note, *_why_bad(evidence)))


def _why_bad(evidence: Evidence) -> tuple[str, ...]:
    """What an entry for forward faults says of the value that the loss did not see."""
    if evidence.forward is not None:
        value = evidence.forward.outputs[0]
        if value is None or value.shape != evidence.mask.shape:
            return ()
        evidence = replace(evidence, call=evidence.forward, forward=None, output=0)
    matches = (cause.matches(evidence) for cause in _FORWARD_FAULTS)
    return next((match.notes for match in matches if match is not None), ())


_ROW_EXAMPLE = """\
import torch

def fails():
    scores = torch.zeros(2, 3, requires_grad=True)
    padding = torch.tensor([[False, False, True], [True, True, True]])  # the second row sees no key
    weights = torch.softmax(scores.masked_fill(padding, float("-inf")), -1)
    return weights.square().sum()
"""

_ROW_REPAIRED = """\
import torch

def repaired():
    scores = torch.zeros(2, 3, requires_grad=True)
    padding = torch.tensor([[False, False, True], [True, True, True]])
    padding = padding & ~padding.all(-1, keepdim=True)  # a row without any key sees them all
    weights = torch.softmax(scores.masked_fill(padding, float("-inf")), -1)
    return weights.square().sum()
"""

_ROW_NEAR_MISS = """\
import torch

def near_miss():
    scores = torch.zeros(2, 3, requires_grad=True)
    padding = torch.tensor([[False, False, True], [True, True, False]])
    weights = torch.softmax(scores.masked_fill(padding, float("-inf")), -1)
    return weights.square().sum()
"""

SOFTMAX_ALL_MASKED = Cause(
    name="softmax_all_masked",
    summary="a row of `{op}` is masked completely: it holds only -inf",
    matches=_softmax_all_masked,
    explanation="""\
Softmax subtracts the largest score of the row first. In a row of only -inf that is -inf - -inf = nan, for every element
of the row. The masks are right one by one and leave nothing together: the pad positions of a left-padded batch under a
causal mask, a query without any key. One layer later 0 * nan carries it into the other rows. Cutting the rows off
afterwards keeps the loss finite and not the gradient.""",
    example=_ROW_EXAMPLE,
    repaired=_ROW_REPAIRED,
    near_miss=_ROW_NEAR_MISS,
    practice="""\
Left-padded prompts under a causal mask, samples that are nothing but padding, cross-attention to an empty memory,
windows that hold no valid token, and action masks of a game state without a legal move.""",
    help=(
        "leave one finite score in every row (let such rows attend to themselves), or zero the weights of fully "
        "masked rows right after the softmax"
    ),
    references=("pytorch/pytorch#41508", "unslothai/unsloth#9848"),
)

_BRANCH_EXAMPLE = """\
import torch

def fails():
    angle = torch.zeros(3, requires_grad=True)
    regular = torch.sin(angle) / angle  # 0 / 0, not selected
    return torch.where(angle == 0, torch.ones(3), regular).sum()
"""

_BRANCH_REPAIRED = """\
import torch

def repaired():
    angle = torch.zeros(3, requires_grad=True)
    safe = torch.where(angle == 0, torch.ones(3), angle)
    return torch.where(angle == 0, torch.ones(3), torch.sin(safe) / safe).sum()
"""

_BRANCH_NEAR_MISS = """\
import torch

def near_miss():
    angle = torch.zeros(3, requires_grad=True)
    regular = torch.sin(angle) / (angle + 1.0)  # not selected either, and finite
    return torch.where(angle == 0, torch.ones(3), regular).sum()
"""

WHERE_MASKED_GRADIENT = Cause(
    name="where_masked_gradient",
    summary="`{op}` is bad where its value is not selected: the loss is finite, and the gradient is 0 times an infinity",
    matches=_where_masked_gradient,
    explanation="""\
`torch.where(ok, f(x), safe)` computes f everywhere and drops the bad values, so the loss is right. The gradient that
goes back into the dropped branch is 0, and autograd multiplies it by the derivative of f: 0 * inf = nan. minimum,
maximum, clamp, masked_fill, indexing and nan_to_num select in the same way. The input of f must be safe, not its
output.""",
    example=_BRANCH_EXAMPLE,
    repaired=_BRANCH_REPAIRED,
    near_miss=_BRANCH_NEAR_MISS,
    practice="""\
sin(x) / x and axis-angle rotations at the identity, contractions of unbounded scenes in radiance fields, Huber-like
losses with a root in the branch not taken, and `nan_to_num` after the fact.""",
    help="make the argument safe before the operation: `x = torch.where(ok, x, 1)`, then compute, then select",
    references=(
        "kornia/kornia#3949",
        "SuLvXiangXin/zipnerf-pytorch#54",
        "ashawkey/torch-ngp#198",
        "gdalsanto/flamo#35",
        "pytorch/pytorch#121416",
    ),
)
