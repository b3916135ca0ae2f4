"""Derivatives of quotients, which divide once more by what the quotient was divided by."""

from __future__ import annotations

import torch

from bisect_nan.causes.division import measure, zero_divided
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import base_op, enough, quotient, where

_DIVISIONS = frozenset({"div", "true_divide", "reciprocal", "rsqrt", "addcdiv", "remainder", "fmod"})


def _custom_backward(evidence: Evidence) -> bool:
    """Whether the code of a custom autograd Function made it: torch's own nodes end with a number."""
    name = evidence.call.autograd or ""
    return evidence.forward is None and name.endswith("Backward")


def _division(evidence: Evidence) -> Match | None:
    found = zero_divided(evidence)
    if found is not None and (evidence.forward is not None or _custom_backward(evidence)):
        parts, both, rest = found
        if evidence.forward is None and measure(evidence.ancestors(parts.divisor)):
            return None
        note = f"the derivative divides by a number that is exactly 0{where(evidence, both | rest)}"
        return Match(0.8, (note,))
    if evidence.forward is None or base_op(evidence.forward) not in _DIVISIONS or not evidence.kinds():
        return None
    parts_forward = quotient(evidence, evidence.forward)
    if parts_forward is None:
        return None
    tiny = parts_forward.denominator.abs().square() < torch.finfo(evidence.result.dtype).smallest_normal
    if not enough(tiny):
        return None
    note = f"the divisor is so small that its square underflows{where(evidence, tiny)}: the derivative divides by that square"
    return Match(0.85, (note,))


_DIVISION_EXAMPLE = """\
import torch

def fails():
    depth = torch.tensor([1e-30, 1.0], requires_grad=True)
    return (torch.tensor(1e-15) / depth).sum()  # the value is 1e15, the derivative -1e45
"""

_DIVISION_REPAIRED = """\
import torch

def repaired():
    depth = torch.tensor([1e-30, 1.0], requires_grad=True)
    return (torch.tensor(1e-15) / depth.clamp(min=1e-6)).sum()
"""

_DIVISION_NEAR_MISS = """\
import torch

def near_miss():
    depth = torch.tensor([1e-5, 1.0], requires_grad=True)
    return (torch.tensor(1e-15) / depth).sum()
"""

DIVISION_GRAD = Cause(
    name="division_grad",
    summary="the derivative of `{op}` divides by zero or by a number whose square underflows",
    matches=_division,
    explanation="""\
x / y has the derivative -x / y**2 with respect to y. It leaves the range long before x / y does: for y = 1e-30 the
square is 1e-60. Backward code written by hand divides by whatever it saved, and that may be exactly 0 where the forward
value is fine.""",
    example=_DIVISION_EXAMPLE,
    repaired=_DIVISION_REPAIRED,
    near_miss=_DIVISION_NEAR_MISS,
    practice="""\
Depths and distances that shrink to 0 (perspective division, inverse square laws), hyperbolic geometry, and custom
backward code that divides by what it saved.""",
    help=(
        "put a floor under the divisor in the forward pass (`clamp_min(eps)`), and under every divisor of "
        "hand-written backward code"
    ),
    references=("facebookresearch/fairchem#1574", "geoopt/geoopt#121"),
)
