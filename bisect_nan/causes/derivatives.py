"""Functions whose value is finite and whose derivative is not: roots, logarithms, powers and inverse functions at an edge."""

from __future__ import annotations

import torch

from bisect_nan.causes.division import DIFFERENCES, measure, zero_divided
from bisect_nan.causes.domain import power
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.masking import forward_is_finite
from bisect_nan.causes.operands import aligned, base_op, enough, under_log, under_root, where

_BOUNDED = frozenset({"acos", "asin", "atanh", "acosh", "erfinv", "special_erfinv"})


def _counts(evidence: Evidence) -> bool:
    """Whether this is a derivative that fails where the function itself was fine (or whose value was seen by the loss)."""
    return (
        evidence.forward is not None
        and bool(evidence.kinds())
        and (evidence.symptom.kind != "gradient" or forward_is_finite(evidence))
    )


def _at_zero(evidence: Evidence, argument: torch.Tensor | None, what: str) -> Match | None:
    if argument is None or not enough(argument == 0):
        return None
    return Match(0.96, (f"{what} is exactly 0{where(evidence, argument == 0)}, where the derivative is infinite",))


def _sqrt_at_zero(evidence: Evidence) -> Match | None:
    if not _counts(evidence) or evidence.forward is None or base_op(evidence.forward) != "sqrt":
        return None
    argument = under_root(evidence, evidence.forward)
    if argument is None:  # a complex root, whose derivative at 0 is NaN instead of inf
        argument = aligned(evidence, "self", evidence.forward)
    return _at_zero(evidence, argument, "the number under the root")


def _log_at_zero(evidence: Evidence) -> Match | None:
    if not _counts(evidence) or evidence.forward is None:
        return None
    argument = under_log(evidence, evidence.forward)
    return _at_zero(evidence, argument, "the argument of the logarithm")


def _pow_at_zero(evidence: Evidence) -> Match | None:
    if not _counts(evidence) or evidence.forward is None:
        return None
    found = power(evidence, evidence.forward)
    if found is None:
        return None
    base, exponent = found
    return _at_zero(evidence, torch.where(exponent < 1, base, torch.ones_like(base)), "the base of the power")


def _inverse_root(evidence: Evidence) -> bool:
    """Whether hand-written backward code divides by the root of a difference, as the derivatives of acos and acosh do."""
    found = zero_divided(evidence)
    if found is None or evidence.forward is not None or evidence.call.autograd is None:
        return False
    ancestors = evidence.ancestors(found[0].divisor)
    difference = next((i for i, op in enumerate(ancestors) if op in DIFFERENCES), 0)
    return "sqrt" in ancestors[:difference] and not measure(ancestors)


def _trig_at_boundary(evidence: Evidence) -> Match | None:
    if _inverse_root(evidence):
        note = (
            "the backward code divides by the root of a difference that is exactly 0, as at the edge of acos or acosh"
        )
        return Match(0.75, (note,))
    if not _counts(evidence) or evidence.forward is None or base_op(evidence.forward) not in _BOUNDED:
        return None
    argument = aligned(evidence, "self", evidence.forward)
    if argument is None or argument.is_complex():
        return None
    edge = (argument.abs() - 1).abs() < 2 * torch.finfo(evidence.result.dtype).eps
    if not enough(edge):
        return None
    return Match(0.96, (f"the argument is 1 or -1{where(evidence, edge)}, where the derivative is infinite",))


_SQRT_EXAMPLE = """\
import torch

def fails():
    a = torch.ones(2, 3, requires_grad=True)
    return torch.sqrt(((a - a.detach()) ** 2).sum(-1)).sum()  # a distance of 0
"""

_SQRT_REPAIRED = """\
import torch

def repaired():
    a = torch.ones(2, 3, requires_grad=True)
    return torch.sqrt(((a - a.detach()) ** 2).sum(-1) + 1e-12).sum()
"""

_SQRT_NEAR_MISS = """\
import torch

def near_miss():
    a = torch.ones(2, 3, requires_grad=True)
    return torch.linalg.vector_norm(a - a.detach(), dim=-1).sum()
"""

SQRT_GRAD_AT_ZERO = Cause(
    name="sqrt_grad_at_zero",
    summary="the derivative of `{op}` at 0 is infinite",
    matches=_sqrt_at_zero,
    explanation="""\
sqrt(0) = 0 is fine, its derivative 1 / (2 sqrt(0)) = inf. One multiplication later, by the 0 of the squared difference
under the root or of a mask, it is nan. Distances of identical points, magnitudes of silent frames and sines at an angle
of 0 sit exactly there. `torch.linalg.vector_norm` has the gradient 0 at 0; a root written by hand has not.""",
    example=_SQRT_EXAMPLE,
    repaired=_SQRT_REPAIRED,
    near_miss=_SQRT_NEAR_MISS,
    practice="""\
Pairwise distances with the diagonal of zeros, contrastive losses on duplicates, spectral magnitudes of silence, and
quaternions of the identity.""",
    help=(
        "add a small constant under the root (`sqrt(x + eps)`, `x.clamp_min(eps).sqrt()`), or use "
        "`torch.linalg.vector_norm`"
    ),
    references=(
        "huggingface/sentence-transformers#4033",
        "pytorch/pytorch#2534",
        "KinWaiCheuk/nnAudio#138",
        "pytorch/pytorch#78903",
    ),
)

_LOG_EXAMPLE = """\
import torch

def fails():
    logits = torch.tensor([0.0, -200.0], requires_grad=True)
    target = torch.softmax(logits, 0)  # the second underflows to 0
    logp = torch.log_softmax(torch.zeros(2), 0)
    return torch.nn.functional.kl_div(logp, target, reduction="sum")
"""

_LOG_REPAIRED = """\
import torch

def repaired():
    logits = torch.tensor([0.0, -200.0], requires_grad=True)
    target = torch.log_softmax(logits, 0)
    logp = torch.log_softmax(torch.zeros(2), 0)
    return torch.nn.functional.kl_div(logp, target, reduction="sum", log_target=True)
"""

_LOG_NEAR_MISS = """\
import torch

def near_miss():
    prediction = torch.zeros(2, requires_grad=True)
    target = torch.softmax(torch.tensor([0.0, -200.0]), 0)  # takes no gradient
    return torch.nn.functional.kl_div(torch.log_softmax(prediction, 0), target, reduction="sum")
"""

LOG_GRAD_AT_ZERO = Cause(
    name="log_grad_at_zero",
    summary="the derivative of `{op}` at 0 is infinite",
    matches=_log_at_zero,
    explanation="""\
xlogy and kl_div take 0 * log(0) as 0, so the loss is finite. The derivative of t log t is log t + 1, or computed piece
by piece t / t = 0 / 0: at t = 0 it does not exist. A softmax that underflows and is used as a target that takes a
gradient gets there.""",
    example=_LOG_EXAMPLE,
    repaired=_LOG_REPAIRED,
    near_miss=_LOG_NEAR_MISS,
    practice="""\
Mutual learning and label refinement, where the target of a KL divergence takes a gradient, and entropies of attention
weights that underflowed.""",
    help=(
        "compute with log-probabilities (`log_target=True`, `log_softmax`), clamp the probability from below, or "
        "detach the target"
    ),
    references=("pytorch/pytorch#89558", "MakazhanAlpamys/Soup#719"),
)

_POW_EXAMPLE = """\
import torch

def fails():
    mean = torch.zeros(2, requires_grad=True)
    return mean.pow(0.5).sum()
"""

_POW_REPAIRED = """\
import torch

def repaired():
    mean = torch.zeros(2, requires_grad=True)
    return mean.clamp(min=1e-7).pow(0.5).sum()
"""

_POW_NEAR_MISS = """\
import torch

def near_miss():
    mean = torch.zeros(2, requires_grad=True)
    return mean.pow(1.5).sum()
"""

POW_GRAD_AT_ZERO = Cause(
    name="pow_grad_at_zero",
    summary="the derivative of `{op}` at 0 is infinite for an exponent below 1",
    matches=_pow_at_zero,
    explanation="""\
x ** p has the derivative p * x ** (p - 1). For p < 1 and x = 0 that is 0 to a negative power: inf, and nan once it
meets a 0. The gradient with respect to the exponent holds log(0).""",
    example=_POW_EXAMPLE,
    repaired=_POW_REPAIRED,
    near_miss=_POW_NEAR_MISS,
    practice="""\
Generalised mean pooling with a learned exponent, power normalisation, colour and exposure losses of image enhancement
on black pixels.""",
    help="clamp the base to a small positive number, or add it, before the power",
    references=("pyg-team/pytorch_geometric#10366", "Li-Chongyi/Zero-DCE_extension#2"),
)

_TRIG_EXAMPLE = """\
import torch

def fails():
    cosine = torch.tensor([1.0, 0.3], requires_grad=True)
    return torch.acos(cosine.clamp(-1.0, 1.0)).sum()
"""

_TRIG_REPAIRED = """\
import torch

def repaired():
    cosine = torch.tensor([1.0, 0.3], requires_grad=True)
    return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6)).sum()
"""

_TRIG_NEAR_MISS = """\
import torch

def near_miss():
    cosine = torch.tensor([0.999, 0.3], requires_grad=True)
    return torch.acos(cosine.clamp(-1.0, 1.0)).sum()
"""

TRIG_GRAD_AT_BOUNDARY = Cause(
    name="trig_grad_at_boundary",
    summary="the derivative of `{op}` at the edge of its domain is infinite",
    matches=_trig_at_boundary,
    explanation="""\
acos(1) = 0 is fine, its derivative -1 / sqrt(1 - 1) = -inf; asin, acosh at 1 and hand-written versions of them divide
by the same root. A clamp to [-1, 1] lets exactly 1 through, together with its gradient: the identity rotation,
identical directions, two points in one place. In float32 1 - y * y is 0 already for y within 3e-8 of 1.""",
    example=_TRIG_EXAMPLE,
    repaired=_TRIG_REPAIRED,
    near_miss=_TRIG_NEAR_MISS,
    practice="""\
Angles of the identity rotation at the first step, angular losses once a sample is learned perfectly, bond angles of
collinear atoms, and distances in hyperbolic space of a point to itself.""",
    help=(
        "clamp the argument a little inside of the domain (`clamp(-1 + eps, 1 - eps)`), or use atan2 of sine and cosine"
    ),
    references=("kornia/kornia#4228", "facebookresearch/fairchem#1574", "geoopt/geoopt#121"),
)
