"""Infinities that the program means (a mask of -inf, a limit) and that meet an operation which cannot take them."""

from __future__ import annotations

import math

import torch

from bisect_nan import finite
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import aligned, base_op, enough, first_index, numbers, ops, result, where, written_by

CONTRACTIONS = ops(
    "mm bmm addmm baddbmm addbmm mv addmv dot vdot addr linear matmul einsum convolution _convolution mkldnn_convolution "
    "mkldnn_linear _addmm_activation _grouped_mm _trilinear "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"
)
"""Ops whose results are sums of products."""

SUMS = ops(
    "sum mean nansum cumsum logcumsumexp trace std var std_mean var_mean native_layer_norm native_group_norm native_batch_norm "
    "_native_batch_norm_legit _fused_rms_norm _softmax _log_softmax logsumexp linalg_vector_norm norm avg_pool1d avg_pool2d "
    "adaptive_avg_pool2d _adaptive_avg_pool2d scatter_add index_add scatter_reduce segment_reduce mse_loss l1_loss "
    "smooth_l1_loss huber_loss nll_loss_forward binary_cross_entropy binary_cross_entropy_with_logits cdist _cdist_forward lerp"
)
"""Ops that add up many elements, or subtract a mean or maximum of them."""

_GATED = ops("silu gelu mish hardswish")
"""Activations that multiply their argument by a gate that is 0 at -inf."""

_MATRICES = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
_PAIRS = {"mul": ("self", "other"), "addcmul": ("tensor1", "tensor2")}
_QUOTIENTS = {"div": ("self", "other"), "true_divide": ("self", "other"), "addcdiv": ("tensor1", "tensor2")}
_TERMS = {"add": ("self", "other"), "sub": ("self", "other"), "rsub": ("self", "other")}


def _factors(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The two factors at the blamed elements, when the call multiplies (or divides) element by element."""
    op = base_op(evidence.call)
    left, right = _PAIRS.get(op, ("", ""))
    for name in (right, "scalar", "scalars") if left else ():
        one, two = aligned(evidence, left), aligned(evidence, name)
        if one is not None and two is not None:
            return one, two
    left, right = _QUOTIENTS.get(op, ("", ""))
    if left:
        above, below = aligned(evidence, left), aligned(evidence, right)
        if above is not None and below is not None:
            return above, 1 / below
    return None


def _row_and_column(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The row and the column whose product is the first blamed element, when the call is a product of matrices."""
    left, right = (evidence.call.arguments.get(name) for name in _MATRICES.get(evidence.op, ("", "")))
    place = first_index(evidence)
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor) or not place:
        return None
    *batch, row, column = place
    for index in batch:
        left, right = left[index], right[index]
    return numbers(left[row]), numbers(right[:, column])


def _product_has_zero_times_inf(evidence: Evidence) -> Match | None:
    """Judge a sum of products by the terms of its first blamed element, or by its operands where those are not known."""
    terms = _row_and_column(evidence)
    if terms is not None:
        row, column = terms
        met = ((row == 0) & column.isinf()) | (row.isinf() & (column == 0))
        if not met.any() or (row.isnan() | column.isnan()).any():
            return None
        note = f"{int(met.sum())} of {met.numel()} terms of the element {first_index(evidence)} are 0 * inf"
        return Match(0.9, (note, *written_by(evidence)))
    inputs = list(evidence.call.tensors().items())
    infinite = [name for name, value in inputs if finite.has([value], finite.NonFinite.INF)]
    zeros = [name for name, value in inputs if name not in infinite and bool((value == 0).any())]
    if not infinite or not zeros:
        return None
    note = f"`{infinite[0]}` holds infinities and `{zeros[0]}` zeros: the sum of products has a term 0 * inf"
    return Match(0.7, (note, *written_by(evidence)))


def _inside(evidence: Evidence) -> Match | None:
    """The product inside of a fused function: a gated activation at -inf, or the term (1 - target) * logit of a cross entropy."""
    undefined = result(evidence).isnan()
    if evidence.op in _GATED:
        argument = aligned(evidence, "self")
        met = None if argument is None else (argument == -math.inf) & undefined
        if met is None or not enough(met):
            return None
        note = (
            f"`{evidence.op}` multiplies its argument by a gate, at -inf that is -inf * 0 = nan{where(evidence, met)}"
        )
        return Match(0.95, (note, *written_by(evidence)))
    logits, target = evidence.call.arguments.get("self"), evidence.call.arguments.get("target")
    if evidence.op != "binary_cross_entropy_with_logits" or not isinstance(logits, torch.Tensor):
        return None
    if not isinstance(target, torch.Tensor) or not enough(undefined) or logits.isnan().any():
        return None
    met = logits.isinf() & (target == 1)
    if not met.any():
        return None
    note = f"{int(met.sum())} of {met.numel()} logits are infinite where the target is 1: the term (1 - target) * logit is 0 * inf"
    return Match(0.95, (note, *written_by(evidence)))


def _zero_times_inf(evidence: Evidence) -> Match | None:
    factors = _factors(evidence)
    if factors is not None:
        one, two = factors
        met = ((one == 0) & two.isinf()) | (one.isinf() & (two == 0))
        if not enough(met):
            return None
        words = "inf / inf" if "div" in evidence.op else "0 * inf"
        return Match(0.95, (f"the result is {words} = nan{where(evidence, met)}", *written_by(evidence)))
    if evidence.op not in CONTRACTIONS or not enough(result(evidence).isnan()):
        return _inside(evidence)
    return _product_has_zero_times_inf(evidence)


def _opposite_terms(evidence: Evidence) -> torch.Tensor | None:
    """Where two infinite terms cancel, when the call adds or subtracts element by element."""
    left, right = _TERMS.get(base_op(evidence.call), ("", ""))
    if not left:
        return None
    for name in (right, "scalar", "scalars"):
        one, two = aligned(evidence, left), aligned(evidence, name)
        if one is not None and two is not None:
            return one.isinf() & two.isinf()
    return None


def _inf_minus_inf(evidence: Evidence) -> Match | None:
    undefined = result(evidence).isnan()
    met = _opposite_terms(evidence)
    if met is not None:
        met = met & undefined
        if not enough(met):
            return None
        return Match(0.95, (f"two infinities cancel, inf - inf = nan{where(evidence, met)}", *written_by(evidence)))
    if evidence.op not in SUMS | CONTRACTIONS:
        return None
    infinite = {
        name: int(numbers(value).isinf().sum())
        for name, value in evidence.call.tensors().items()
        if finite.has([value], finite.NonFinite.INF) and not finite.has([value], finite.NonFinite.NAN)
    }
    if not infinite:
        return None
    held = " and ".join(f"{count} infinities in `{name}`" for name, count in infinite.items())
    if enough(undefined):
        return Match(0.85, (f"there are {held}, and they meet as inf - inf = nan", *written_by(evidence)))
    return Match(0.6, (f"the result runs over {held}, so it is infinite", *written_by(evidence)))


_PRODUCT_EXAMPLE = """\
import torch

def fails():
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    allowed = torch.tensor([True, True, False])
    logp = torch.log_softmax(logits.masked_fill(~allowed, float("-inf")), 0)
    return -(logp.exp() * logp).sum()  # 0 * -inf
"""

_PRODUCT_REPAIRED = """\
import torch

def repaired():
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    allowed = torch.tensor([True, True, False])
    logp = torch.log_softmax(logits.masked_fill(~allowed, float("-inf")), 0)
    return -(logp.exp() * logp.masked_fill(~allowed, 0.0)).sum()
"""

_PRODUCT_NEAR_MISS = """\
import torch

def near_miss():
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    allowed = torch.tensor([True, True, False])
    logp = torch.log_softmax(logits.masked_fill(~allowed, -1e9), 0)  # large, and finite
    return -(logp.exp() * logp).sum()
"""

ZERO_TIMES_INF = Cause(
    name="zero_times_inf",
    summary="`{op}` multiplies an infinity by 0",
    matches=_zero_times_inf,
    explanation="""\
A -inf for a forbidden position is right, and so is its probability 0; their product is not 0 but nan. Entropies written
as exp(logp) * logp do this, and so does every 0/1 mask that is applied by multiplication. inf / inf is the same fault.""",
    example=_PRODUCT_EXAMPLE,
    repaired=_PRODUCT_REPAIRED,
    near_miss=_PRODUCT_NEAR_MISS,
    practice="""\
Entropies of policies with forbidden actions, losses multiplied by a 0/1 mask after -inf was filled in, attention
weights of 0 times values that overflowed, and soft labels over a masked class.""",
    help=(
        "replace the infinity before multiplying (`masked_fill(mask, 0)`, `torch.where`), or use `torch.xlogy`, which"
        " takes 0 * log 0 as 0"
    ),
    references=("huggingface/trl#7221", "pytorch/pytorch#195197"),
)

_DIFFERENCE_EXAMPLE = """\
import torch

def fails():
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    masked = logits.masked_fill(torch.tensor([False, False, True]), float("-inf"))
    new, old = torch.log_softmax(masked, 0), torch.log_softmax(masked.detach(), 0)
    return (new - old).exp().sum()  # -inf - -inf
"""

_DIFFERENCE_REPAIRED = """\
import torch

def repaired():
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    hidden = torch.tensor([False, False, True])
    masked = logits.masked_fill(hidden, float("-inf"))
    new, old = torch.log_softmax(masked, 0), torch.log_softmax(masked.detach(), 0)
    return (new.masked_fill(hidden, 0.0) - old.masked_fill(hidden, 0.0)).exp().sum()
"""

_DIFFERENCE_NEAR_MISS = """\
import torch

def near_miss():
    logits = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    masked = logits.masked_fill(torch.tensor([False, False, True]), -1e9)
    new, old = torch.log_softmax(masked, 0), torch.log_softmax(masked.detach(), 0)
    return (new - old).exp().sum()
"""

INF_MINUS_INF = Cause(
    name="inf_minus_inf",
    summary="`{op}` adds up infinities that the program meant to stay apart",
    matches=_inf_minus_inf,
    explanation="""\
An infinity that is meant (a masked log-probability, a distance that rules a pair out) is harmless until it is summed:
inf - inf is nan, and the mean over a masked value is infinite. A ratio of two policies at a forbidden token is exp(-inf
- -inf). A softmax row with +inf, a variance or a layer norm over an infinity subtract it from itself.""",
    example=_DIFFERENCE_EXAMPLE,
    repaired=_DIFFERENCE_REPAIRED,
    near_miss=_DIFFERENCE_NEAR_MISS,
    practice="""\
Ratios of two policies at forbidden tokens, distillation between models with the same mask, means over masked scores,
and infinities in the cost matrix of a bipartite matcher.""",
    help=(
        "take the masked positions out before adding up (`torch.where` on the operands), or mask with a large finite "
        "number"
    ),
    references=("areal-project/AReaL#1347", "roboflow/rf-detr#431"),
)
