"""Arguments outside of a function's domain: logarithms, roots and powers."""

from __future__ import annotations

import torch

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Call, Evidence
from bisect_nan.causes.normalisation import squared_divisor
from bisect_nan.causes.operands import (
    aligned,
    base_op,
    enough,
    first,
    ops,
    refused_determinant,
    under_log,
    under_root,
    where,
)

_IN_LOG_FORM = {
    "_softmax": "take `torch.log_softmax` of the scores instead of the logarithm of their softmax",
    "sigmoid": "take `torch.nn.functional.logsigmoid(x)` instead of log(sigmoid(x)), and logsigmoid(-x) for log(1 - sigmoid(x))",
}
_DIFFERENCES = ops("sub rsub addcmul _foreach_sub _foreach_addcmul")
_NEAR = 3
"""How many ops back a difference is still what stands under the root."""


_OF_A_MATRIX = (
    "find out why the matrix mirrors (two rows exchanged, an odd number of negative factors); where the sign does not matter, use "
    "`torch.linalg.slogdet`, which gives the logarithm of the absolute value beside it"
)


_AWAY = "keep the argument away from 0, where the function has a value and no slope"


def _log_of_zero(evidence: Evidence) -> Match | None:
    argument = under_log(evidence)
    if argument is None or not enough(argument == 0):
        return None
    there = where(evidence, argument == 0)
    if evidence.forward is not None and under_log(evidence, evidence.forward) is None:
        name = evidence.forward.op.strip("_")
        return Match(
            0.8, (f"the derivative of `{name}` takes the logarithm of an argument that is exactly 0{there}",), _AWAY
        )
    note = f"the argument of the logarithm is exactly 0{there}"
    made_by = next((op for op in evidence.ancestors("self") if op in _IN_LOG_FORM), "")
    return Match(0.97, (note,), _IN_LOG_FORM.get(made_by, ""))


def _log_of_negative(evidence: Evidence) -> Match | None:
    argument = under_log(evidence)
    if argument is None or argument.is_complex() or not enough(argument < 0):
        return None
    below = argument < 0
    if refused_determinant(evidence):
        return Match(0.97, (f"the determinant is negative{where(evidence, below)}",), _OF_A_MATRIX)
    note = f"the argument of the logarithm is below 0{where(evidence, below)}, where it is {first(argument, below)}"
    return Match(0.97, (note,))


def _sqrt_of_negative(evidence: Evidence) -> Match | None:
    argument, what = under_root(evidence), "the number under the root"
    if argument is None:
        argument, what = squared_divisor(evidence), "variance plus eps"
    if argument is None or not enough(argument < 0):
        return None
    below = argument < 0
    notes = [f"{what} is below 0{where(evidence, below)}, where it is {first(argument, below)}"]
    if _DIFFERENCES & set(evidence.ancestors("self")[:_NEAR]):
        notes.append("it is a difference: where its two terms agree in nearly all digits, rounding decides its sign")
    return Match(0.97, tuple(notes))


def power(evidence: Evidence, call: Call | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return base and exponent of a power at the blamed elements, or None when the call takes none; the exponent is real."""
    call = call or evidence.call
    if base_op(call) not in ("pow", "float_power"):
        return None
    base, exponent = aligned(evidence, "self", call), aligned(evidence, "exponent", call)
    if base is None or exponent is None or exponent.is_complex():
        return None
    return base, exponent


def _pow_domain(evidence: Evidence) -> Match | None:
    found = power(evidence)
    if found is None:
        return None
    base, exponent = found
    if base.is_complex():  # every power of a complex number but 0 is defined
        return None
    fractional = (base < 0) & base.isfinite() & (exponent != exponent.floor())
    pole = (base == 0) & (exponent < 0)
    if enough(fractional):
        values = f"{first(base, fractional)} ** {first(exponent, fractional)}"
        return Match(0.97, (f"a negative base has a fractional exponent{where(evidence, fractional)}: {values}",))
    if enough(pole):
        values = f"0 ** {first(exponent, pole)}"
        return Match(0.97, (f"the base is 0 and the exponent is negative{where(evidence, pole)}: {values}",))
    return None


_ZERO_EXAMPLE = """\
import torch

def fails():
    logits = torch.tensor([200.0, 0.0], requires_grad=True)
    return -torch.log(torch.softmax(logits, 0))[1]  # the probability underflows to 0
"""

_ZERO_REPAIRED = """\
import torch

def repaired():
    logits = torch.tensor([200.0, 0.0], requires_grad=True)
    return -torch.log_softmax(logits, 0)[1]
"""

_ZERO_NEAR_MISS = """\
import torch

def near_miss():
    logits = torch.tensor([20.0, 0.0], requires_grad=True)
    return -torch.log(torch.softmax(logits, 0))[1]  # the probability is 2e-9
"""

LOG_OF_ZERO = Cause(
    name="log_of_zero",
    summary="`{op}` takes the logarithm of 0",
    matches=_log_of_zero,
    explanation="""\
log(0) = -inf, and the weight 0 that often stands before it makes it nan. The 0 is a probability that underflowed:
softmax is 0 in float32 for scores about 104 below the largest, sigmoid likewise, and 1 - p is 0 once p rounds to 1. A
guard may round away: 1e-10 + 1 - p is 1 - p. `logdet` of a singular matrix is the same fault.""",
    example=_ZERO_EXAMPLE,
    repaired=_ZERO_REPAIRED,
    near_miss=_ZERO_NEAR_MISS,
    practice="""\
log(softmax(x)) and log(sigmoid(x)) written out: saturated sigmoids in word2vec and in adversarial losses, KL
divergences of probabilities, entropies of policies that became certain, and log-likelihoods of counts.""",
    help=(
        "compute the logarithm from the logits (`log_softmax`, `logsigmoid`, a loss with logits), or clamp the "
        "argument from below"
    ),
    references=("deepspeedai/DeepSpeedExamples#423", "open-mmlab/mmdetection#1299", "pytorch/pytorch#22442"),
)

_NEGATIVE_EXAMPLE = """\
import torch

def fails():
    width = torch.tensor([10.0, -2.0], requires_grad=True)  # right edge left of the left edge
    return torch.log(width / 4.0).sum()
"""

_NEGATIVE_REPAIRED = """\
import torch

def repaired():
    width = torch.tensor([10.0, -2.0], requires_grad=True)
    return torch.log(width.clamp(min=1.0) / 4.0).sum()
"""

_NEGATIVE_NEAR_MISS = """\
import torch

def near_miss():
    width = torch.tensor([10.0, 2.0], requires_grad=True)
    return torch.log(width / 4.0).sum()
"""

LOG_OF_NEGATIVE = Cause(
    name="log_of_negative",
    summary="`{op}` takes the logarithm of a negative number",
    matches=_log_of_negative,
    explanation="""\
A negative number has no real logarithm, so the result is nan. The argument should have been positive: a width with
swapped edges, a log-variance where the variance was meant, a determinant that changed its sign, a probability that
rounding pushed below 0.""",
    example=_NEGATIVE_EXAMPLE,
    repaired=_NEGATIVE_REPAIRED,
    near_miss=_NEGATIVE_NEAR_MISS,
    practice="""\
Box encoders fed with boxes whose corners are swapped or that lie outside of the image, variances that a linear layer
predicts, and densities of values outside of the support.""",
    help=(
        "find out why the argument is negative (data, or a wrong formula); clamp it from below only if rounding is "
        "the reason"
    ),
    references=("jwyang/faster-rcnn.pytorch#349", "Jacob-yen/GRIST ID_4"),
)

_ROOT_EXAMPLE = """\
import torch

def fails():
    mean = torch.tensor(100.00001, requires_grad=True)  # of x, rounded up
    mean_of_squares = torch.tensor(10000.0)  # of x * x, rounded down
    return torch.sqrt(mean_of_squares - mean * mean)
"""

_ROOT_REPAIRED = """\
import torch

def repaired():
    mean = torch.tensor(100.00001, requires_grad=True)
    mean_of_squares = torch.tensor(10000.0)
    return torch.sqrt((mean_of_squares - mean * mean).clamp(min=1e-6))
"""

_ROOT_NEAR_MISS = """\
import torch

def near_miss():
    x = torch.linspace(0.0, 1.0, 100, requires_grad=True)
    variance = ((x - x.mean()) ** 2).mean()
    return torch.sqrt(variance)
"""

SQRT_OF_NEGATIVE = Cause(
    name="sqrt_of_negative",
    summary="`{op}` takes the square root of a negative number",
    matches=_sqrt_of_negative,
    explanation="""\
A negative number has no real root, so the result is nan. Most often it is a variance in one pass, E[x*x] - E[x]**2: for
values that hardly differ both terms agree in nearly all digits and rounding leaves a small negative number. It comes
out right in float64, which hides the fault and does not remove it. An eps added after the root does not help.""",
    example=_ROOT_EXAMPLE,
    repaired=_ROOT_REPAIRED,
    near_miss=_ROOT_NEAR_MISS,
    practice="""\
Statistics in one pass (E[x*x] - E[x]**2) in pooling and normalisation layers, squared distances as |a|**2 + |b|**2 -
2ab, and the root of 1 - cos**2.""",
    help="clamp under the root (`clamp_min(eps)`), or compute the variance from the differences to the mean",
    references=("k2-fsa/sherpa-onnx#2844", "apache/mxnet#6235", "lucidrains/vector-quantize-pytorch#106"),
)

_POWER_EXAMPLE = """\
import torch

def fails():
    contrast = torch.tensor([-0.2, 0.9], requires_grad=True)
    return (contrast ** 0.3).sum()
"""

_POWER_REPAIRED = """\
import torch

def repaired():
    contrast = torch.tensor([-0.2, 0.9], requires_grad=True)
    return (contrast.clamp(min=1e-6) ** 0.3).sum()
"""

_POWER_NEAR_MISS = """\
import torch

def near_miss():
    contrast = torch.tensor([-0.2, 0.9], requires_grad=True)
    return (contrast ** 3.0).sum()  # a whole exponent takes any base
"""

POW_DOMAIN = Cause(
    name="pow_domain",
    summary="`{op}` raises a negative number to a fractional power, or 0 to a negative one",
    matches=_pow_domain,
    explanation="""\
(-0.2) ** 0.3 is not real and gives nan; 0 ** -0.5 is a division by 0 and gives inf. A guard that replaces only inf
(degrees of isolated nodes) does not catch the NaN of a negative base.""",
    example=_POWER_EXAMPLE,
    repaired=_POWER_REPAIRED,
    near_miss=_POWER_NEAR_MISS,
    practice="""\
Products of powers in multi-scale structural similarity, gamma correction of images, degrees ** -0.5 of isolated nodes
in graph convolutions, and generalised means.""",
    help="clamp the base to a small positive number before the power, or take the power of its absolute value",
    references=("pyg-team/pytorch_geometric#61", "VainF/pytorch-msssim#7"),
)
