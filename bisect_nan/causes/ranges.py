"""Results beyond the range of their type: half precision, and everything else but exponentials."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.healing import CASTS, heal, largest, overflowed
from bisect_nan.causes.operands import (
    HALVES,
    aligned,
    base_op,
    enough,
    finite_inputs,
    ops,
    result,
    show,
    where,
)

_ARITHMETIC = ops(
    "add sub rsub mul div addcmul addcdiv pow square sum mean prod cumsum cumprod mm bmm addmm baddbmm mv addmv dot linear "
    "convolution lerp linalg_vector_norm var std exp exp2 expm1 sinh cosh reciprocal ldexp float_power elu i0 special_i1 special_erfcx "
    "special_modified_bessel_i0 special_modified_bessel_i1"
)
"""What can leave the range of float64, where no wider type tells: from finite numbers they make an infinity in no other way,
once divisions by zero and poles are ruled out."""


def is_gradient(evidence: Evidence) -> bool:
    """Whether the call computes a gradient: a derivative, a sum of gradients, or a gradient that changes its type."""
    passed_on = evidence.call.autograd is not None and (
        "AccumulateGrad" in evidence.call.autograd or evidence.op in CASTS
    )
    return evidence.forward is not None or passed_on


def _half_overflow(evidence: Evidence) -> Match | None:
    if is_gradient(evidence) or evidence.result.dtype not in HALVES:
        return None
    found = overflowed(evidence, torch.float32)
    return Match(found[0], (found[1],), _help_for_masks(evidence)) if found else None


def _help_for_masks(evidence: Evidence) -> str:
    """Speak of the mask where a score was added to the lowest number of the type."""
    lowest = torch.finfo(evidence.result.dtype).min
    terms = (aligned(evidence, name) for name in ("self", "other")) if base_op(evidence.call) == "add" else ()
    if not any(enough(term == lowest) for term in terms if term is not None):
        return ""
    return "the lowest float16 plus a negative score is -inf: mask with `masked_fill` after the addition, or in float32"


def _half_gradient(evidence: Evidence) -> Match | None:
    if not is_gradient(evidence) or evidence.result.dtype not in HALVES:
        return None
    found = overflowed(evidence, torch.float32)
    return _with_scale(evidence, Match(found[0], (found[1],)), torch.float32) if found else None


def _with_scale(evidence: Evidence, match: Match, wider: torch.dtype) -> Match:
    """Say so when the loss is scaled, and the gradient would fit without that: it is proportional to the scale."""
    healed = heal(evidence, wider) if evidence.loss_scale > 1 else None
    if healed is None or not enough(healed.values.abs() / evidence.loss_scale < largest(evidence.result.dtype)):
        return match
    without = healed.values[healed.beyond | healed.inside] / evidence.loss_scale
    safe = 2.0 ** math.floor(math.log2(largest(evidence.result.dtype) / max(float(without.abs().max()), 1.0)))
    note = (
        f"the loss is multiplied by {evidence.loss_scale:g} at the end; without that the element is {show(without[0])},"
    )
    note += f" which fits, as it does with a scale of up to {safe:g}"
    return replace(
        match, notes=(*match.notes, note), help="lower the loss scale, or let `torch.amp.GradScaler` find one"
    )


def _plain_overflow(evidence: Evidence) -> Match | None:
    found = overflowed(evidence, torch.float64)
    if found:
        return Match(found[0], (found[1],))
    values = result(evidence)
    if not (evidence.result.is_floating_point() or evidence.result.is_complex()):
        return None
    infinite = values.isinf()
    if base_op(evidence.call) not in _ARITHMETIC or not enough(infinite) or not finite_inputs(evidence):
        return None
    limit = f"{torch.finfo(evidence.result.dtype).max:.3g}"
    return Match(0.75, (f"finite inputs give a result beyond {limit}{where(evidence, infinite)}",))


def _gradient_overflow(evidence: Evidence) -> Match | None:
    match = _plain_overflow(evidence) if is_gradient(evidence) else None
    return None if match is None else _with_scale(evidence, match, torch.float64)


_HALF_EXAMPLE = """\
import torch

def fails():
    query = torch.full((1, 64), 40.0, dtype=torch.float16, requires_grad=True)
    key = torch.full((64, 1), 40.0, dtype=torch.float16)
    return (query @ key / 8).sum()  # 64 * 40 * 40 = 102400
"""

_HALF_REPAIRED = """\
import torch

def repaired():
    query = torch.full((1, 64), 40.0, dtype=torch.float16, requires_grad=True)
    key = torch.full((64, 1), 40.0, dtype=torch.float16)
    return ((query / 8) @ key).sum()
"""

_HALF_NEAR_MISS = """\
import torch

def near_miss():
    query = torch.full((1, 64), 40.0, dtype=torch.bfloat16, requires_grad=True)
    key = torch.full((64, 1), 40.0, dtype=torch.bfloat16)
    return (query @ key / 8).sum()
"""

FP16_OVERFLOW = Cause(
    name="fp16_overflow",
    summary="`{op}` makes a value beyond 65504 in float16; it is finite in float32",
    matches=_half_overflow,
    explanation="""\
The largest float16 is 65504. Products of queries and keys before they are scaled, convolution outputs, squares and sums
reach it easily, and so does the mask value finfo.min plus a negative score: -65504 - 20 rounds to -inf. The next
normalisation or softmax turns the infinity into nan. The same numbers are harmless in float32 and in bfloat16, which
has float32's range.""",
    example=_HALF_EXAMPLE,
    repaired=_HALF_REPAIRED,
    near_miss=_HALF_NEAR_MISS,
    practice="""\
T5 and models pretrained in bfloat16 that are run in float16, LoRA on a base model in float16, scores of attention
before they are scaled, sums over many elements, and masks of `finfo.min` that are added twice.""",
    help="compute this operation in float32 or bfloat16, or scale its inputs down before it",
    references=("huggingface/transformers#24638", "huggingface/transformers#17306", "pytorch/pytorch#88474"),
)

_PLAIN_EXAMPLE = """\
import torch

def fails():
    ratio = torch.tensor([1e25, 1.0], requires_grad=True)
    return ratio.pow(2).sum()  # 1e50
"""

_PLAIN_REPAIRED = """\
import torch

def repaired():
    ratio = torch.tensor([1e25, 1.0], requires_grad=True)
    return ratio.clamp(max=1e15).pow(2).sum()
"""

_PLAIN_NEAR_MISS = """\
import torch

def near_miss():
    ratio = torch.tensor([1e15, 1.0], requires_grad=True)
    return ratio.pow(2).sum()
"""

OVERFLOW = Cause(
    name="overflow",
    summary="`{op}` makes a value beyond the range of its type from finite inputs",
    matches=_plain_overflow,
    explanation="""\
Finite numbers whose result exceeds the largest number of their type, 3.4e38 in float32 and bfloat16. Such numbers are
never sensible activations: weights that were never initialised, a deviation of 1e-30 in a divisor, recurrences that
grow, or training that diverged some steps earlier.""",
    example=_PLAIN_EXAMPLE,
    repaired=_PLAIN_REPAIRED,
    near_miss=_PLAIN_NEAR_MISS,
    practice="""\
Features in raw units (file sizes, timestamps in nanoseconds) that are squared, layers that were never initialised,
recurrences without any damping, and quotients by a deviation of 1e-30.""",
    help="find out why the inputs are so large (uninitialised or diverged weights, a tiny divisor) and bound them",
    references=("sgl-project/sglang#26772", "emited/VariationalRecurrentNeuralNetwork#2"),
)

_GRADIENT_EXAMPLE = """\
import torch

def fails():
    weight = torch.ones(4, dtype=torch.float16, requires_grad=True)
    return (weight.float() * 1e6).sum()  # the gradient 1e6 goes back through the cast to float16
"""

_GRADIENT_REPAIRED = """\
import torch

def repaired():
    weight = torch.ones(4, dtype=torch.float16, requires_grad=True)
    return (weight.float() * 1e6).mean() / 1e3
"""

_GRADIENT_NEAR_MISS = """\
import torch

def near_miss():
    weight = torch.ones(4, dtype=torch.float16, requires_grad=True)
    return (weight.float() * 1e4).sum()  # the same cast, and a gradient of 10000
"""

GRAD_OVERFLOW_FP16 = Cause(
    name="grad_overflow_fp16",
    summary="the gradient of `{op}` is beyond 65504 in float16; it is finite in float32",
    matches=_half_gradient,
    explanation="""\
Loss and activations fit into float16, the gradient does not: a loss that is a sum instead of a mean, a loss scale that
is too high, a normalisation of small features that multiplies the gradient by their inverse size, the cube inside a
hand-written GELU. Under autocast the gradient is cast back to float16 where it re-enters the region and turns into inf
right there.""",
    example=_GRADIENT_EXAMPLE,
    repaired=_GRADIENT_REPAIRED,
    near_miss=_GRADIENT_NEAR_MISS,
    practice="""\
Regression on targets in large units, losses that are summed over time steps or tokens, a static loss scale that is too
high, and the first steps of float16 models whose inputs are small and then normalised.""",
    help="lower the loss scale (or take a mean), or run this operation in float32 or bfloat16",
    references=("pytorch/pytorch#63719", "facebookresearch/fairseq#2235", "unslothai/unsloth-zoo#866"),
)

_STEEP_EXAMPLE = """\
import torch

def fails():
    weight = torch.tensor([1e-35], requires_grad=True)
    return ((weight * 1e30) * 1e30).sum()  # the value is 1e25, the derivative 1e60
"""

_STEEP_REPAIRED = """\
import torch

def repaired():
    weight = torch.tensor([1e-35], requires_grad=True)
    return ((weight * 1e15) * 1e15).sum()
"""

_STEEP_NEAR_MISS = """\
import torch

def near_miss():
    weight = torch.tensor([1e-35], requires_grad=True)
    return ((weight * 1e30) * 1e8).sum()  # the derivative is 1e38
"""

GRAD_OVERFLOW = Cause(
    name="grad_overflow",
    summary="the gradient of `{op}` is beyond the range of its own type",
    matches=_gradient_overflow,
    explanation="""\
Every value of the forward pass is finite, and a product of derivatives on the way back is not: long recurrences
multiply the gradient at every time step, and steep functions in a row multiply their slopes.""",
    example=_STEEP_EXAMPLE,
    repaired=_STEEP_REPAIRED,
    near_miss=_STEEP_NEAR_MISS,
    practice="""\
Recurrent networks over thousands of steps, unrolled solvers and physics simulations, and gradients through many steep
activations.""",
    help=(
        "scale the loss or the steep factor down, shorten the recurrence, or clip the gradient inside of it with a hook"
    ),
    references=("thu-ml/tianshou#19",),
)
