"""Exponentials beyond the range of their type, by name or inside of a fused function."""

from __future__ import annotations

import math

import torch

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import aligned, base_op, enough, first, numbers, result, show, where

_EXPONENTIALS = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})


def _exponential(evidence: Evidence) -> Match | None:
    dtype = evidence.result.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    if base_op(evidence.call) == "soft_margin_loss":
        return _inside_of_loss(evidence)
    if base_op(evidence.call) not in _EXPONENTIALS:
        return None
    argument = aligned(evidence, "self")
    if argument is None:
        return None
    exponent = argument.real if argument.is_complex() else argument
    over = argument.isfinite() & ~result(evidence).isfinite()
    if not enough(over):
        return None
    return Match(0.97, (f"the exponent is {first(exponent, over)}{where(evidence, over)}; {_bound(evidence)}",))


def _inside_of_loss(evidence: Evidence) -> Match | None:
    """The soft margin loss is log(1 + exp(-target * score)), as written."""
    score, target = evidence.call.arguments.get("self"), evidence.call.arguments.get("target")
    if not isinstance(score, torch.Tensor) or not isinstance(target, torch.Tensor) or not evidence.kinds():
        return None
    exponent = -numbers(score) * numbers(target)
    over = exponent.isfinite() & (exponent > _limit(evidence))
    if not over.any():
        return None
    note = f"the exponent -target * score is {first(exponent, over)} at {int(over.sum())} of {over.numel()} scores"
    return Match(
        0.95, (f"{note}; {_bound(evidence)}",), "use `binary_cross_entropy_with_logits`, which cannot overflow"
    )


def _limit(evidence: Evidence) -> float:
    limit = math.log(torch.finfo(evidence.result.dtype).max)
    return limit / math.log(2.0) if base_op(evidence.call) == "exp2" else limit


def _bound(evidence: Evidence) -> str:
    narrow = str(evidence.result.dtype).removeprefix("torch.")
    return f"in {narrow} it must stay below {show(_limit(evidence))}"


_EXPONENT_EXAMPLE = """\
import torch

def fails():
    logvar = torch.tensor([0.1, 180.0], requires_grad=True)
    return torch.exp(0.5 * logvar).sum()  # exp(90) = 1.2e39
"""

_EXPONENT_REPAIRED = """\
import torch

def repaired():
    logvar = torch.tensor([0.1, 180.0], requires_grad=True)
    return torch.exp(0.5 * logvar.clamp(-30, 20)).sum()
"""

_EXPONENT_NEAR_MISS = """\
import torch

def near_miss():
    logvar = torch.tensor([0.1, 170.0], requires_grad=True)
    return torch.exp(0.5 * logvar).sum()  # exp(85) = 8.2e36
"""

EXP_OVERFLOW = Cause(
    name="exp_overflow",
    summary="`{op}` overflows: its exponent is too large for the type",
    matches=_exponential,
    explanation="""\
exp(x) is infinite in float32 from x = 88.73 on, in float16 from 11.09 on. Heads that predict a log-variance or a
log-scale are unbounded, a softmax written by hand lacks the subtraction of the maximum, log(1 + exp(x)) is softplus
written by hand, and a ratio of probabilities is the exponential of an unbounded difference.""",
    example=_EXPONENT_EXAMPLE,
    repaired=_EXPONENT_REPAIRED,
    near_miss=_EXPONENT_NEAR_MISS,
    practice="""\
Log-variances of variational autoencoders and of Gaussian policies, softmax and softplus written by hand, importance
ratios exp(new - old) in policy gradients, and energies of normalising flows.""",
    help=(
        "clamp the exponent, subtract the maximum first, or use the fused function (`softmax`, `logsumexp`, `softplus`)"
    ),
    references=("vanderschaarlab/synthcity#331", "fla-org/flash-linear-attention#649", "Jacob-yen/GRIST ID_17"),
)
