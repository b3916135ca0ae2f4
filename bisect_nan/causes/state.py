"""Faults that no operation makes: the batch, a parameter or a buffer is bad before the step, or memory was never written."""

from __future__ import annotations

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import ops

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


_INPUT_EXAMPLE = """\
import torch

def fails():
    batch = torch.tensor([[1.0, float("nan")], [0.5, 2.0]])
    weight = torch.ones(2, requires_grad=True)
    valid = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    return (batch @ weight * valid[:, 1]).mean()
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
    near_miss=_INPUT_NEAR_MISS,
    help=(
        "repair or drop the named samples in the data loader; select valid values with `torch.where`, never by "
        "multiplying with a mask"
    ),
    references=("prs-eth/Marigold#111", "philipperemy/deep-speaker#5", "huggingface/transformers#47885"),
)

_PARAMETER_EXAMPLE = """\
import torch

def fails():
    head = torch.nn.Linear(3, 1)
    with torch.no_grad():
        head.weight[0, 1] = float("nan")
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
    near_miss=_PARAMETER_NEAR_MISS,
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
    near_miss=_BUFFER_NEAR_MISS,
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
    near_miss=_MEMORY_NEAR_MISS,
    help="allocate with `torch.zeros` (or the neutral value of the reduction) instead of `torch.empty`",
    references=("deepbeepmeep/Wan2GP#1628", "pyg-team/pytorch_geometric#1129"),
)
