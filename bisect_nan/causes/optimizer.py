"""Faults of the update: gradients are finite, and the parameters are not any more, or so large that the next step overflows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import torch

from bisect_nan import finite
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.healing import overflowed
from bisect_nan.causes.operands import HALVES, base_op, enough, finite_inputs, ops, quotient, result, show, where
from bisect_nan.finding import Phase

_ROOT_AND_EPS = ops("add sqrt maximum amax _foreach_add _foreach_sqrt _foreach_maximum")
_GROWING = ops(
    "exp exp2 expm1 sinh cosh add sub rsub mul addcmul square sum mean prod mm bmm addmm baddbmm mv addmv dot linear convolution"
)
"""What makes an infinity of finite numbers only because they are too large."""

_WEIGHTS_GREW, _LOSS_GREW = 5.0, 100.0
"""How many times the median of those before it the last number must be."""


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


def _weights_exploded(evidence: Evidence) -> Match | None:
    if not _overflows(evidence):
        return None
    notes = [_growth(evidence, "parameter_norm", "norm of all parameters", _WEIGHTS_GREW)]
    if notes[0] is None:  # a loss alone may jump with one odd batch
        notes = [
            _growth(evidence, "loss", "loss", _LOSS_GREW),
            _growth(evidence, "gradient_norm", "norm of the gradients", _LOSS_GREW),
        ]
    found = tuple(note for note in notes if note is not None)
    return Match(0.9, found) if len(found) == len(notes) else None


def _overflows(evidence: Evidence) -> bool:
    """Whether the blamed elements are beyond the range of their type, and nothing else is wrong with the operands."""
    wider = torch.float32 if evidence.result.dtype in HALVES else torch.float64
    if overflowed(evidence, wider):
        return True
    return base_op(evidence.call) in _GROWING and enough(result(evidence).isinf()) and finite_inputs(evidence)


def _growth(evidence: Evidence, key: str, name: str, factor: float) -> str | None:
    """Say that a number has grown by a factor since the steps before, and is still growing; None when it has not."""
    numbers = [abs(entry[key]) for entry in evidence.history if key in entry]
    if len(numbers) < 2 or numbers[-1] < numbers[-2]:  # noqa: PLR2004  (one number is no trend)
        return None
    usual = statistics.median(numbers[:-1])
    if numbers[-1] < factor * max(usual, 1.0):  # what starts at 0 has to grow
        return None
    times = f", {numbers[-1] / usual:.3g} times the median of the steps before" if usual > 0 else ""
    return f"the {name} grew to {show(numbers[-1])}{times}; step by step {_series(numbers[-4:])}"


def _series(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3g}" for number in numbers)


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

_RATE_REPAIRED = """\
import torch

def repaired():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    step, warmup_steps = 0, 0
    optimizer.param_groups[0]["lr"] = 1.0 * min(1.0, (step + 1) / max(1, warmup_steps))
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
    repaired=_RATE_REPAIRED,
    near_miss=_RATE_NEAR_MISS,
    practice="""\
Schedules written by hand: a warm-up or decay length that was computed from the number of batches and came out 0 for a
small data set, and layer-wise rates that divide by a norm.""",
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

_EPSILON_REPAIRED = """\
import torch

def repaired():
    master = torch.ones(3, requires_grad=True)  # the optimizer keeps float32, the computation runs in float16
    optimizer = torch.optim.Adam([master], lr=1e-3)
    (master.half() * 1e-6).sum().backward()
    optimizer.step()
    return master.sum()
"""

_EPSILON_NEAR_MISS = """\
import torch

def near_miss():
    weight = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)  # has the exponent range of float32
    optimizer = torch.optim.Adam([weight], lr=1e-3)
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
    repaired=_EPSILON_REPAIRED,
    near_miss=_EPSILON_NEAR_MISS,
    practice="""\
`model.half()` followed by Adam with its defaults, which people try before they meet mixed precision.""",
    help="use an eps that the parameter's type can hold (1e-4 in float16), or keep float32 master weights",
    references=("pytorch/pytorch#8860", "afiaka87/glide-finetune#5"),
)

_EXPLOSION_EXAMPLE = """\
import torch

def fails():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=10.0)
    for _ in range(20):
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()  # the gradient is 2 w, so w becomes w - 20 w = -19 w
        optimizer.step()
    return loss.detach()
"""

_EXPLOSION_REPAIRED = """\
import torch

def repaired():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
        optimizer.step()
    return loss.detach()
"""

_EXPLOSION_NEAR_MISS = """\
import torch

def near_miss():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()  # w becomes w - 1.8 w: it changes its sign at every step, and shrinks
        optimizer.step()
    return loss.detach()
"""

LEARNING_RATE_EXPLOSION = Cause(
    name="learning_rate_explosion",
    summary="the weights had grown from step to step until `{op}` overflowed",
    matches=_weights_exploded,
    explanation="""\
Every update overshoots: the step is longer than the valley is wide, so the next gradient is larger, and so is the next
step. Weights and loss grow by a factor per update, until some operation that has nothing wrong with it leaves the
range of its type: an exponential, a square, or the update itself. Where it does so says little; the trend of the steps
before says it all. A learning rate that is too high does this, a warm-up that never ends, weight decay times learning
rate beyond 2, gradients of a sum over time steps where a mean was meant, a second-order method without line search.""",
    example=_EXPLOSION_EXAMPLE,
    repaired=_EXPLOSION_REPAIRED,
    near_miss=_EXPLOSION_NEAR_MISS,
    practice="""\
The first hundred steps of a run with a rate copied from another model, from a larger batch, or from Adam to plain
gradient descent; reinforcement learning with rewards that were not scaled; neural differential equations.""",
    help="lower the learning rate or warm it up, and clip the norm of the gradients before the update",
    references=("pytorch/pytorch#5953", "YunYang1994/TensorFlow2.0-Examples#8", "rtqichen/torchdiffeq#58"),
)
