"""Updates that are made with gradients which were bad before the optimizer started."""

from __future__ import annotations

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import enough, literals, result
from bisect_nan.finding import Phase
from bisect_nan.finite import NonFinite


def _infinite_before(evidence: Evidence) -> Match | None:
    """Infinities that an update turns into NaN and did not make; the search itself picks the entry where it sees the gradient.

    Parameters and the optimizer's own tensors were finite before, so it is the gradient that holds them.
    """
    if evidence.call.phase is not Phase.OPTIMIZER or literals(evidence):
        return None
    if not evidence.inputs_kinds() & NonFinite.INF or not enough(result(evidence).isnan()):
        return None
    return Match(0.7, (f"infinities go into `{evidence.op}` that the update did not make: the gradient holds them",))


_APPLIED_EXAMPLE = """\
import torch

def fails():
    weight = torch.tensor([0.0, 4.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sqrt().sum().backward()  # the gradient at 0 is infinite
    torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)  # inf / inf = nan, and 0.25 / inf = 0
    optimizer.step()
    optimizer.zero_grad()
    return weight.sum()
"""

_APPLIED_REPAIRED = """\
import torch

def repaired():
    weight = torch.tensor([0.0, 4.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sqrt().sum().backward()
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    if norm.isfinite():
        optimizer.step()
    optimizer.zero_grad()
    return weight.sum()
"""

_APPLIED_NEAR_MISS = """\
import torch

def near_miss():
    weight = torch.tensor([1e-20, 4.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sqrt().sum().backward()  # 5e9, which is clipped to 1
    torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return weight.sum()
"""

GRADIENT_NONFINITE_APPLIED = Cause(
    name="gradient_nonfinite_applied",
    summary="a gradient was not finite before the update, and the update was made with it",
    matches=_infinite_before,
    explanation="""\
The gradient was bad before the optimizer started, and the step that computes it gives a finite one when it is run again:
something changed it in between, or it was left over. The optimizer writes it into the parameters, where it stays. Clipping
does not stop it: the norm is infinite or NaN, so the infinite elements become inf / inf = nan and all others 0.""",
    example=_APPLIED_EXAMPLE,
    repaired=_APPLIED_REPAIRED,
    near_miss=_APPLIED_NEAR_MISS,
    practice="""\
Loops without a check of the norm, gradients averaged over processes of which one had a bad batch, gradients that were
unscaled twice or by a scale of 0, and accumulation over micro-batches of which one was bad.""",
    help=(
        "look for what made the gradient bad, and skip the update as long as the norm is not finite (`if norm.isfinite():"
        " optimizer.step()`)"
    ),
    references=("facebookresearch/habitat-lab#2226", "thu-ml/tianshou#19"),
)
