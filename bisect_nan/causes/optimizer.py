"""Faults of the update: gradients are finite, and the parameters are not any more."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from bisect_nan import finite
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import HALVES, enough, ops, quotient, where
from bisect_nan.finding import Phase

_ROOT_AND_EPS = ops("add sqrt _foreach_add _foreach_sqrt")


def _bad_hyperparameters(evidence: Evidence) -> Iterator[str]:
    """Non-finite single numbers among the arguments: Python numbers, lists of them, and tensors without dimensions."""
    for name, value in evidence.call.arguments.items():
        members = value if isinstance(value, list | tuple) else [value]
        for member in members:
            if isinstance(member, float) and not math.isfinite(member):
                yield f"the argument `{name}` is {member}"
            elif isinstance(member, torch.Tensor) and member.ndim == 0 and finite.has([member], finite.NonFinite.ANY):
                yield f"the single number that goes in as `{name}` is {member.item()}"


def _rate_is_bad(evidence: Evidence) -> Match | None:
    if evidence.call.phase is not Phase.OPTIMIZER:
        return None
    found = tuple(dict.fromkeys(_bad_hyperparameters(evidence)))
    return Match(0.9, found) if found else None


def _epsilon_is_lost(evidence: Evidence) -> Match | None:
    if evidence.call.phase is not Phase.OPTIMIZER or evidence.result.dtype not in HALVES:
        return None
    parts = quotient(evidence)
    if parts is None:
        return None
    zero = parts.denominator == 0
    ancestors = evidence.ancestors(parts.divisor)
    if not enough(zero) or (ancestors and not _ROOT_AND_EPS & set(ancestors)):
        return None
    smallest = torch.finfo(evidence.result.dtype).smallest_normal * torch.finfo(evidence.result.dtype).eps
    notes = (
        f"the divisor, root of the second moment plus eps, is exactly 0{where(evidence, zero)}",
        f"in {str(evidence.result.dtype).removeprefix('torch.')} anything below {smallest / 2:.1e} rounds to 0",
    )
    return Match(
        0.95, notes, "give the optimizer an eps that the type can hold, such as 1e-4, or keep float32 master weights"
    )


_RATE_EXAMPLE = """\
import torch

def fails():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.param_groups[0]["lr"] = float("nan")  # the schedule's progress: step 0 of 0 warm-up steps
    weight.sum().backward()
    optimizer.step()
    return weight.sum()
"""

_RATE_NEAR_MISS = """\
import torch

def near_miss():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    weight.sum().backward()
    optimizer.step()
    return weight.sum()
"""

LEARNING_RATE_NONFINITE = Cause(
    name="learning_rate_nonfinite",
    summary="the optimizer multiplies a finite gradient by a hyper-parameter that is not finite",
    matches=_rate_is_bad,
    explanation="""\
The learning rate (or a step size, decay or momentum made from it) is NaN or infinite. Schedules make it: the progress
within a warm-up of 0 steps is 0 / 0, a decay over 0 steps divides by 0. One such update writes NaN into every
parameter, because w - nan * g = nan even where g is 0.""",
    example=_RATE_EXAMPLE,
    near_miss=_RATE_NEAR_MISS,
    help=(
        "look at the schedule: guard its divisions (zero warm-up steps, zero total steps) and assert that the rate is"
        " finite"
    ),
    references=("mlcommons/hpc#27",),
)

_EPSILON_EXAMPLE = """\
import torch

def fails():
    weight = torch.ones(3, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3)  # eps is 1e-8
    (weight * 1e-6).sum().backward()
    optimizer.step()
    return weight.sum()
"""

_EPSILON_NEAR_MISS = """\
import torch

def near_miss():
    weight = torch.ones(3, dtype=torch.float16, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=1e-3, eps=1e-4)
    (weight * 1e-6).sum().backward()
    optimizer.step()
    return weight.sum()
"""

OPTIMIZER_EPS_UNDERFLOW = Cause(
    name="optimizer_eps_underflow",
    summary="the optimizer's eps rounds to 0 in the type of the parameter, and the update divides by 0",
    matches=_epsilon_is_lost,
    explanation="""\
Adam and its kin divide by sqrt(v) + eps. The smallest positive float16 is 6.0e-08, so an eps of 1e-8 is 0 there, and
the square of a gradient below 2.4e-4 underflows as well: sqrt(0) + 0 = 0. A gradient that is small gives x / 0 = inf,
one that is 0 gives 0 / 0 = nan. Loss and gradients look normal; the parameters are gone after the first step.""",
    example=_EPSILON_EXAMPLE,
    near_miss=_EPSILON_NEAR_MISS,
    help="use an eps that the parameter's type can hold (1e-4 in float16), or keep float32 master weights",
    references=("pytorch/pytorch#8860", "afiaka87/glide-finetune#5"),
)
