"""Divisions by zero: what the divisor is tells a deviation from a plain number that became 0."""

from __future__ import annotations

import torch

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.normalisation import squared_divisor
from bisect_nan.causes.operands import Quotient, base_op, enough, first, ops, quotient, where

SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})
LENGTHS = ops(
    "linalg_vector_norm norm frobenius_norm linalg_matrix_norm cdist _cdist_forward _euclidean_dist dist hypot"
)
DIFFERENCES = frozenset({"sub", "rsub"})
_SUMS = frozenset({"sum", "mean"})


def measure(ancestors: tuple[str, ...]) -> str:
    """Name what a divisor measures: `deviation`, `norm`, or "" for any other number.

    Both may be written by hand: a root is met before the sum or mean on the way back, and behind that the difference to a
    mean where it is a deviation. A difference that nothing was summed up of is neither, whatever its terms are.
    """
    for position, op in enumerate(ancestors):
        if op in DIFFERENCES:
            return ""
        if op in SPREADS:
            return "deviation"
        if op in LENGTHS:
            return "norm"
        if op in _SUMS:
            if "sqrt" not in ancestors[:position]:
                return ""
            behind = ancestors[position + 1 :]
            centred = any(op in DIFFERENCES and "mean" in behind[place:] for place, op in enumerate(behind))
            return "deviation" if centred else "norm"
    return ""


def zero_divided(evidence: Evidence) -> tuple[Quotient, torch.Tensor, torch.Tensor] | None:
    """Return the quotient and where it is 0/0 and x/0, when the call divides by zero often enough to be the cause."""
    parts = quotient(evidence)
    if parts is None:
        return None
    nothing = parts.denominator == 0
    if not enough(nothing):
        return None
    return parts, nothing & (parts.numerator == 0), nothing & (parts.numerator != 0) & ~parts.numerator.isnan()


def _measured(evidence: Evidence, parts: Quotient) -> str:
    root = ("sqrt",) if base_op(evidence.call) == "rsqrt" else ()
    return measure(root + evidence.ancestors(parts.divisor))


def _origin(evidence: Evidence, parts: Quotient) -> str:
    kind = _measured(evidence, parts)
    return f" (it is a {kind})" if kind else ""


def _no_spread(evidence: Evidence) -> Match | None:
    squared = squared_divisor(evidence)
    if squared is not None and enough(squared == 0):
        note = f"the values that are normalised do not differ, and variance plus eps is exactly 0{where(evidence, squared == 0)}"
        return Match(0.9, (note,))
    found = zero_divided(evidence)
    if found is None:
        return None
    parts, both, rest = found
    kind = _measured(evidence, parts)
    # A vector of zeros over its own norm is 0/0 in the first place; a deviation of 0 says that all values are the same.
    if kind == "deviation":
        return Match(
            0.95, (f"the divisor is a deviation that is exactly 0{where(evidence, both | rest, parts.divisor)}",)
        )
    if kind == "norm" and enough(rest):
        return Match(0.9, (f"the divisor is a norm that is exactly 0{where(evidence, rest, parts.divisor)}",))
    return None


def _nothing_over_nothing(evidence: Evidence) -> Match | None:
    found = zero_divided(evidence)
    if found is None or not enough(found[1]):
        return None
    parts, both, _ = found
    note = f"numerator and divisor{_origin(evidence, parts)} are both exactly 0{where(evidence, both)}"
    narrow = evidence.result.dtype is torch.float16 and evidence.forward is None
    return Match(0.95, (note,), "put a floor under the divisor that float16 can hold: 1e-4, not 1e-8" if narrow else "")


def _something_over_nothing(evidence: Evidence) -> Match | None:
    found = zero_divided(evidence)
    if found is None or not enough(found[2]):
        return None
    parts, _, rest = found
    note = f"the divisor{_origin(evidence, parts)} is exactly 0{where(evidence, rest, parts.divisor)}"
    return Match(0.95, (f"{note}; the numerator there is {first(parts.numerator, rest)}",))


_VARIANCE_EXAMPLE = """\
import torch

def fails():
    channel = torch.full((8,), 3.0, requires_grad=True)
    return (1.0 / channel.std()) * channel.sum()
"""

_VARIANCE_REPAIRED = """\
import torch

def repaired():
    channel = torch.full((8,), 3.0, requires_grad=True)
    return (1.0 / (channel.std() + 1e-5)) * channel.sum()
"""

_VARIANCE_NEAR_MISS = """\
import torch

def near_miss():
    channel = torch.linspace(3.0, 3.1, 8, requires_grad=True)
    return (1.0 / channel.std()) * channel.sum()
"""

ZERO_VARIANCE = Cause(
    name="zero_variance",
    summary="`{op}` divides by a deviation or norm that is 0",
    matches=_no_spread,
    explanation="""\
Normalising divides by a standard deviation, a norm or a length. It is 0 when all values are the same: a constant
channel, a silent frame, a dead feature, a weight row of zeros. Then (x - mean) / std = 0 / 0 = nan, and 1 / std = inf.
An eps that is too small for the type (1e-8 in float16) is 0 as well.""",
    example=_VARIANCE_EXAMPLE,
    repaired=_VARIANCE_REPAIRED,
    near_miss=_VARIANCE_NEAR_MISS,
    practice="""\
Silent frames in speech features, constant channels and black crops, advantages that are all the same, data-dependent
initialisation of normalising flows, and rows of zeros under weight normalisation.""",
    help="add an eps to the divisor or put a floor under it (`clamp_min`), with a value that the type can hold",
    references=("vislearn/FrEIA#121", "huggingface/peft#2049", "philipperemy/deep-speaker#5"),
)

_BOTH_EXAMPLE = """\
import torch

def fails():
    loss = torch.tensor([0.7, 0.2], requires_grad=True)
    mask = torch.tensor([0.0, 0.0])
    return (loss * mask).sum() / mask.sum()
"""

_BOTH_REPAIRED = """\
import torch

def repaired():
    loss = torch.tensor([0.7, 0.2], requires_grad=True)
    mask = torch.tensor([0.0, 0.0])
    return (loss * mask).sum() / mask.sum().clamp(min=1.0)
"""

_BOTH_NEAR_MISS = """\
import torch

def near_miss():
    loss = torch.tensor([0.7, 0.2], requires_grad=True)
    mask = torch.tensor([0.0, 1.0])
    return (loss * mask).sum() / mask.sum()
"""

ZERO_OVER_ZERO = Cause(
    name="zero_over_zero",
    summary="`{op}` divides 0 by 0",
    matches=_nothing_over_nothing,
    explanation="""\
0 / 0 has no value, so IEEE arithmetic gives nan. It is the mean over an empty selection (a sum of nothing over a count
of 0), a vector of zeros over its own norm, an overlap of two empty masks, or an eps that rounds to 0 in half precision.
Replacing the NaN afterwards repairs the value and not the gradient: guard the divisor.""",
    example=_BOTH_EXAMPLE,
    repaired=_BOTH_REPAIRED,
    near_miss=_BOTH_NEAR_MISS,
    practice="""\
Masked means over a batch without any valid element, Dice and intersection over union where neither prediction nor
label holds the class, boxes without any area, and contrastive losses for samples without a positive.""",
    help=(
        "guard the divisor before dividing: `count.clamp(min=1)`, `norm.clamp_min(eps)`, or skip the term when there "
        "is nothing to average"
    ),
    references=(
        "HobbitLong/SupContrast#141",
        "TiankaiHang/Min-SNR-Diffusion-Training#2",
        "pytorch/pytorch#32137",
        "Project-MONAI/MONAI#120",
        "open-mmlab/mmdetection#3394",
    ),
)

_ZERO_EXAMPLE = """\
import torch

def fails():
    error = torch.tensor([1.0, 2.0])
    spread = torch.nn.functional.softplus(torch.tensor([-200.0, 1.0], requires_grad=True))  # exactly 0, and 1.31
    return (error / spread).mean()
"""

_ZERO_REPAIRED = """\
import torch

def repaired():
    error = torch.tensor([1.0, 2.0])
    spread = torch.nn.functional.softplus(torch.tensor([-200.0, 1.0], requires_grad=True))
    return (error / (spread + 1e-6)).mean()
"""

_ZERO_NEAR_MISS = """\
import torch

def near_miss():
    error = torch.tensor([1.0, 2.0])
    spread = torch.nn.functional.softplus(torch.tensor([-20.0, 1.0], requires_grad=True))  # 2e-9
    return (error / spread).mean()
"""

DIVISION_BY_ZERO = Cause(
    name="division_by_zero",
    summary="`{op}` divides a number by 0",
    matches=_something_over_nothing,
    explanation="""\
A finite number over 0 is inf; the NaN comes one operation later (inf - inf, 0 * inf). The divisor was learned,
predicted or measured and became exactly 0: softplus and exp underflow for very negative arguments, a clamp at 0 lets 0
through, a Python number below the smallest float32 is 0.""",
    example=_ZERO_EXAMPLE,
    repaired=_ZERO_REPAIRED,
    near_miss=_ZERO_NEAR_MISS,
    practice="""\
Predicted scales and temperatures that underflow, aspect ratios of boxes with zero height, disparity to depth, and
inverse degrees of isolated nodes.""",
    help=(
        "put a floor under the divisor (`clamp_min(eps)`, or add eps), or divide only where it is not 0 with a safe "
        "divisor elsewhere"
    ),
    references=("mllam/neural-lam#537", "adamsolomou/SC-DNN#1", "ultralytics/yolov5#8539"),
)
