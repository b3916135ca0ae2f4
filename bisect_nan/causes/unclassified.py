"""The entry for what the catalog does not know: it names no cause and gives the facts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import enough, first_index, numbers, operand, result, show, written_by


def _facts(evidence: Evidence) -> Iterator[str]:
    yield f"first bad element at {first_index(evidence)}" if evidence.mask.ndim else "the result is a single number"
    for name, value in evidence.call.arguments.items():
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex()):
            values = operand(evidence, name)
            if values is not None and values.numel():
                yield f"`{name}` is {show(values[0])} there"
        elif isinstance(value, float):
            yield f"the argument `{name}` is {value}"
    again = evidence.recomputed(torch.float64) if evidence.result.is_floating_point() else None
    if again is not None and enough(numbers(again).isfinite()):
        yield "it is finite when computed in float64"


def _anything(evidence: Evidence) -> Match:
    certain = 0.3 if evidence.kinds() and result(evidence).numel() else 0.1
    return Match(certain, (*_facts(evidence), *written_by(evidence)))


_EXAMPLE = """\
import torch

def fails():
    x = torch.tensor([-1.0, 1.5], requires_grad=True)
    return torch.special.gammainc(torch.ones(2), x.detach()).sum() + x.sum()  # defined from 0 on
"""

_REPAIRED = """\
import torch

def repaired():
    x = torch.tensor([-1.0, 1.5], requires_grad=True)
    return torch.special.gammainc(torch.ones(2), x.detach().clamp(min=0.0)).sum() + x.sum()
"""

_NEAR_MISS = """\
import torch

def near_miss():
    x = torch.tensor([1.0, 1.5], requires_grad=True)
    return torch.special.gammainc(torch.ones(2), x.detach()).sum() + x.sum()
"""

UNCLASSIFIED = Cause(
    name="unclassified",
    summary="`{op}` makes a non-finite value, for a reason that is not in the catalog",
    matches=_anything,
    explanation="""\
The search found the operation and confirmed it by intervention; the catalog has no entry that explains its operands.
The notes say what went in.""",
    example=_EXAMPLE,
    repaired=_REPAIRED,
    near_miss=_NEAR_MISS,
    practice="""\
Rare functions outside of their domain, operators of other libraries, and kernels with a fault of their own.""",
    help="look at the operands in the notes; the operation is right to fail on one of them",
    references=(),
)
