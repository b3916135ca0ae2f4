"""Inverse and periodic functions outside of their domain."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import aligned, base_op, enough, ops, where

_DOMAINS: tuple[tuple[frozenset[str], str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (ops("acos asin"), "[-1, 1]", lambda x: x.abs() > 1),
    (ops("atanh erfinv special_erfinv"), "(-1, 1)", lambda x: x.abs() >= 1),
    (ops("acosh"), "[1, inf)", lambda x: x < 1),
    (ops("special_ndtri"), "(0, 1)", lambda x: (x <= 0) | (x >= 1)),
    (ops("sin cos tan sinc"), "(-inf, inf)", torch.isinf),
)


def _outside(evidence: Evidence) -> tuple[torch.Tensor, torch.Tensor, str] | None:
    """Return argument, where it is outside, and the domain in words, for an inverse or periodic function."""
    op, argument = base_op(evidence.call), aligned(evidence, "self")
    if argument is None or argument.is_complex():
        return None
    for names, domain, is_outside in _DOMAINS:
        if op in names:
            return argument, is_outside(argument), domain
    return None


def _trig_domain(evidence: Evidence) -> Match | None:
    found = _outside(evidence)
    if found is None or not enough(found[1]):
        return None
    argument, condition, domain = found
    value = f"{argument[condition][0].item():.9g}"
    return Match(0.97, (f"the argument is outside of {domain}{where(evidence, condition)}, where it is {value}",))


_TRIG_EXAMPLE = """\
import torch

def fails():
    a = torch.tensor([1.0, 1.0, 1.0001], requires_grad=True)
    cosine = (a @ a) / 3.0
    return torch.acos(cosine)
"""

_TRIG_REPAIRED = """\
import torch

def repaired():
    a = torch.tensor([1.0, 1.0, 1.0001], requires_grad=True)
    cosine = (a @ a) / 3.0
    return torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6))
"""

_TRIG_NEAR_MISS = """\
import torch

def near_miss():
    a = torch.tensor([1.0, 1.0, 1.0001], requires_grad=True)
    cosine = (a @ a) / 3.001
    return torch.acos(cosine)
"""

TRIG_DOMAIN = Cause(
    name="trig_domain",
    summary="the argument of `{op}` is outside of its domain",
    matches=_trig_domain,
    explanation="""\
acos and asin take [-1, 1], atanh and erfinv the open interval, acosh everything from 1 on; outside they give nan (at
the edge of an open interval inf). A cosine of two unit vectors is 1.0000001 after rounding as easily as 0.9999999. sin,
cos and tan of an infinity are nan, too.""",
    example=_TRIG_EXAMPLE,
    repaired=_TRIG_REPAIRED,
    near_miss=_TRIG_NEAR_MISS,
    practice="""\
Angles between unit vectors, geodesic losses on rotations (the trace gives a cosine), angular-margin losses, and
Fisher's transform of a correlation of 1.""",
    help=(
        "clamp the argument a little inside of the domain (`clamp(-1 + eps, 1 - eps)`), or use atan2 of sine and cosine"
    ),
    references=("papagina/RotationContinuity#1", "PointCloudLibrary/pcl#1033"),
)
