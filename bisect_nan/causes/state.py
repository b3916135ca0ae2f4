"""Faults that no operation makes: state or batch are bad before the step, memory was never written, or the program says so."""

from __future__ import annotations

import math

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import enough, literals, ops, result

_ALLOCATIONS = ops("empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize resize_as")


def _chosen_by_search(_: Evidence) -> Match | None:
    """State is no call: the search itself sees that a placeholder is non-finite and picks these entries by name."""
    return None


def _reads_unwritten_memory(evidence: Evidence) -> Match | None:
    if evidence.op not in _ALLOCATIONS or not evidence.kinds():
        return None
    blamed, total = int(evidence.mask.sum()), evidence.mask.numel()
    return Match(
        0.95, (f"{blamed} of {total} elements are read although nothing has written to them since the allocation",)
    )


def _written_down(evidence: Evidence) -> Match | None:
    """A number of the call itself that is not finite, and that the blamed elements show."""
    values = result(evidence)
    for name, number in literals(evidence):
        if enough(values.isnan() if math.isnan(number) else values.isinf()):
            return Match(0.85, (f"the argument `{name}` is {number}, and nothing on the way takes it out again",))
    return None


_INPUT_EXAMPLE = """\
import torch

def fails():
    batch = torch.tensor([[1.0, float("nan")], [0.5, 2.0]])
    weight = torch.ones(2, requires_grad=True)
    valid = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    return (batch @ weight * valid[:, 1]).mean()
"""

_INPUT_REPAIRED = """\
import torch

def repaired():
    batch = torch.tensor([[1.0, float("nan")], [0.5, 2.0]])
    weight = torch.ones(2, requires_grad=True)
    complete = batch.isfinite().all(-1)
    return (batch[complete] @ weight).mean()
"""

_INPUT_NEAR_MISS = """\
import torch

def near_miss():
    batch = torch.tensor([[1.0, float("nan")], [0.5, 2.0]])
    weight = torch.ones(2, requires_grad=True)
    return (batch.nan_to_num(0.0) @ weight).mean()
"""

INPUT_NONFINITE = Cause(
    name="input_nonfinite",
    summary="the batch holds a non-finite value before the step starts",
    matches=_chosen_by_search,
    explanation="""\
Something in the batch is NaN or infinite, and no operation of the step is to blame. Data sets mark missing measurements
with NaN, loaders divide a silent frame by its deviation of 0, a decoder returns a damaged file. A mask that is applied
by multiplication does not remove such a value: 0 * nan = nan.""",
    example=_INPUT_EXAMPLE,
    repaired=_INPUT_REPAIRED,
    near_miss=_INPUT_NEAR_MISS,
    practice="""\
Tables whose missing measurements are NaN, features that were divided by the deviation of a silent recording, depth
maps with holes, and images that a decoder could not read.""",
    help=(
        "repair or drop the named samples in the data loader; select valid values with `torch.where`, never by "
        "multiplying with a mask"
    ),
    references=(
        "prs-eth/Marigold#111",
        "philipperemy/deep-speaker#5",
        "huggingface/transformers#47885",
        "ecmwf/WeatherGenerator#2723",
    ),
)

_PARAMETER_EXAMPLE = """\
import torch

def fails():
    head = torch.nn.Linear(3, 1)
    with torch.no_grad():
        head.weight[0, 1] = float("nan")
    return head(torch.ones(2, 3)).mean()
"""

_PARAMETER_REPAIRED = """\
import torch

def repaired():
    head = torch.nn.Linear(3, 1)
    with torch.no_grad():
        head.weight[0, 1] = float("nan")
        if not head.weight.isfinite().all():
            head.reset_parameters()
    return head(torch.ones(2, 3)).mean()
"""

_PARAMETER_NEAR_MISS = """\
import torch

def near_miss():
    head = torch.nn.Linear(3, 1)
    with torch.no_grad():
        head.weight[0, 1] = 0.0
    return head(torch.ones(2, 3)).mean()
"""

PARAMETER_NONFINITE = Cause(
    name="parameter_nonfinite",
    summary="a parameter holds a non-finite value before the step starts",
    matches=_chosen_by_search,
    explanation="""\
A weight is NaN or infinite before the step runs, so every result that reads it is bad. It came from a damaged
checkpoint, from a layer that the checkpoint lacks and whose memory was left as allocated, or from an earlier update
that wrote a NaN.""",
    example=_PARAMETER_EXAMPLE,
    repaired=_PARAMETER_REPAIRED,
    near_miss=_PARAMETER_NEAR_MISS,
    practice="""\
Fine-tuning from a checkpoint that was saved after the training had diverged, a head that the checkpoint lacks and that
was allocated without initialisation, and weights that overflowed when they were converted to float16.""",
    help=(
        "check where the weight comes from: the checkpoint, the initialisation of a layer missing in it, or the "
        "previous update"
    ),
    references=("cardwing/Codes-for-PVKD#9", "huggingface/transformers#46002", "sgl-project/sglang#26772"),
)

_BUFFER_EXAMPLE = """\
import torch

def fails():
    norm = torch.nn.BatchNorm1d(3).eval()
    norm.running_var[2] = float("nan")
    return norm(torch.ones(2, 3)).mean()
"""

_BUFFER_REPAIRED = """\
import torch

def repaired():
    norm = torch.nn.BatchNorm1d(3).eval()
    norm.running_var[2] = float("nan")
    norm.reset_running_stats()
    return norm(torch.ones(2, 3)).mean()
"""

_BUFFER_NEAR_MISS = """\
import torch

def near_miss():
    norm = torch.nn.BatchNorm1d(3).eval()
    norm.running_var[2] = 0.0
    return norm(torch.ones(2, 3)).mean()
"""

BUFFER_NONFINITE = Cause(
    name="buffer_nonfinite",
    summary="a buffer holds a non-finite value before the step starts",
    matches=_chosen_by_search,
    explanation="""\
A buffer, most often the running mean or variance of a batch norm, is NaN or infinite before the step runs. One
overflowed batch is enough: the statistics average it in, and a skipped update does not take them back.""",
    example=_BUFFER_EXAMPLE,
    repaired=_BUFFER_REPAIRED,
    near_miss=_BUFFER_NEAR_MISS,
    practice="""\
Running statistics of batch norms after one overflowed batch in mixed precision: the scaler skips the update of the
weights, and the statistics keep the infinity. Training goes on, evaluation gives NaN.""",
    help=(
        "restore the buffer from a good checkpoint or reset the running statistics, then look for the step that "
        "spoiled them"
    ),
    references=("sharif-apu/BJDD_CVPR21#4", "pytorch/pytorch#88474", "pytorch/pytorch#10008"),
)

_MEMORY_EXAMPLE = """\
import torch

def fails():
    torch.use_deterministic_algorithms(True)  # fresh memory is filled with NaN
    try:
        out = torch.empty(3, 2)
    finally:
        torch.use_deterministic_algorithms(False)
    out[:2] = torch.ones(2, 2)
    return out.sum()
"""

_MEMORY_REPAIRED = """\
import torch

def repaired():
    out = torch.zeros(3, 2)
    out[:2] = torch.ones(2, 2)
    return out.sum()
"""

_MEMORY_NEAR_MISS = """\
import torch

def near_miss():
    out = torch.empty(3, 2)
    out.copy_(torch.ones(3, 2))
    return out.sum()
"""

UNINITIALIZED_MEMORY = Cause(
    name="uninitialized_memory",
    summary="memory from `{op}` is read before anything was written to it",
    matches=_reads_unwritten_memory,
    explanation="""\
`torch.empty` and its kin return memory with whatever it held before: zeros on one run, NaN, infinities or huge numbers
on the next. If a part of it is never written (a row without neighbours, the tail of a cache block) that garbage enters
the result. An additive -inf mask does not hide it: nan + -inf = nan.""",
    example=_MEMORY_EXAMPLE,
    repaired=_MEMORY_REPAIRED,
    near_miss=_MEMORY_NEAR_MISS,
    practice="""\
Padding of a key-value cache, rows of isolated nodes in hand-written scatter kernels, and buffers that are allocated
with `torch.empty` and filled in a loop that stops one element early.""",
    help="allocate with `torch.zeros` (or the neutral value of the reduction) instead of `torch.empty`",
    references=("deepbeepmeep/Wan2GP#1628", "pyg-team/pytorch_geometric#1129"),
)

_CONSTANT_EXAMPLE = """\
import torch

def fails():
    scores = torch.tensor([0.3, 0.9], requires_grad=True)
    missing = torch.tensor([True, False])
    return scores.masked_fill(missing, float("nan")).mean()
"""

_CONSTANT_REPAIRED = """\
import torch

def repaired():
    scores = torch.tensor([0.3, 0.9], requires_grad=True)
    missing = torch.tensor([True, False])
    return scores[~missing].mean()
"""

_CONSTANT_NEAR_MISS = """\
import torch

def near_miss():
    scores = torch.tensor([0.3, 0.9], requires_grad=True)
    missing = torch.tensor([True, False])
    return scores.masked_fill(missing, 0.0).mean()
"""

NONFINITE_CONSTANT = Cause(
    name="nonfinite_constant",
    summary="`{op}` brings in a NaN or an infinity that stands in the program",
    matches=_written_down,
    explanation="""\
The number is written in the code, or was computed by Python before it got into a tensor, and no operation takes it out
again before the loss. NaN spreads through every sum; -inf is fine under a softmax or a maximum and is not as a score
that a loss picks.""",
    example=_CONSTANT_EXAMPLE,
    repaired=_CONSTANT_REPAIRED,
    near_miss=_CONSTANT_NEAR_MISS,
    practice="""\
NaN as the mark for a missing value, `default=float("inf")` of a running minimum that never saw a value, a Python
quotient of `math.inf`, and torch itself, which answers with NaN where a loss has no element.""",
    help="select the valid elements instead of marking the others, or write a finite number",
    references=("pytorch/pytorch#64305", "pytorch/pytorch#50224"),
)
