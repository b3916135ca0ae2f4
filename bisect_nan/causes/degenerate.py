"""Derivatives of norms, deviations, spectra and log-sums where what they measure is 0, equal or empty."""

from __future__ import annotations

import torch

from bisect_nan import finite
from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Call, Evidence
from bisect_nan.causes.operands import enough, numbers, ops, show, where, written_by

_NORMS = ops(
    "linalg_vector_norm norm cdist _cdist_forward _euclidean_dist linalg_matrix_norm _weight_norm_interface hypot"
)
_NORM_NODES = ("LinalgVectorNormBackward", "NormBackward", "CdistBackward", "EuclideanDistBackward")
_SPREADS = frozenset({"std", "var", "std_mean", "var_mean"})
_SPREAD_NODES = ("StdBackward", "VarBackward", "StdMeanBackward", "VarMeanBackward")
_SPECTRA = {"_linalg_eigh": 0, "_linalg_svd": 1, "linalg_eig": 0, "_linalg_eigvals": 0}
_LOG_SUMS = frozenset({"logsumexp", "logaddexp", "logaddexp2", "logcumsumexp"})


def _measures_zero(evidence: Evidence, names: frozenset[str], nodes: tuple[str, ...]) -> bool:
    """Whether the derivative is that of a measure which is 0: of one of `names`, or of a division that `nodes` do.

    torch masks the first derivative of a norm or deviation of 0, but the division inside of it is differentiated again.
    """
    forward = evidence.forward
    if forward is None or not evidence.kinds():
        return False
    if forward.op in names:
        measured = forward.outputs[1 if forward.op == "_weight_norm_interface" else 0]
    elif (forward.autograd or "").startswith(nodes) and forward.op == "div":
        measured = forward.arguments.get("other")
    else:
        return False
    if not isinstance(measured, torch.Tensor):
        return False
    zero = _spread_back(measured == 0, forward, evidence.mask.shape)
    return bool((measured == 0).any()) if zero is None else enough(zero[evidence.mask])


def _spread_back(reduced: torch.Tensor, forward: Call, shape: torch.Size) -> torch.Tensor | None:
    """Spread what a reduction gave over the elements that it was made of; None where the shapes do not tell how."""
    dims = forward.arguments.get("dim")
    if reduced.ndim < len(shape) and isinstance(dims, list | tuple | int):
        for dim in sorted(d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)):
            reduced = reduced.unsqueeze(dim)
    try:
        return reduced.expand(shape)
    except RuntimeError:
        return None


def _norm_at_zero(evidence: Evidence) -> Match | None:
    if not _measures_zero(evidence, _NORMS, _NORM_NODES):
        return None
    return Match(0.9, (f"the norm is exactly 0{where(evidence)}",))


def _std_at_zero(evidence: Evidence) -> Match | None:
    if not _measures_zero(evidence, _SPREADS, _SPREAD_NODES):
        return None
    return Match(0.9, (f"the deviation is exactly 0{where(evidence)}",))


def _equal_spectrum(evidence: Evidence) -> Match | None:
    forward = evidence.forward
    if forward is None or forward.op not in _SPECTRA or not evidence.kinds():
        return None
    spectrum = forward.outputs[_SPECTRA[forward.op]]
    if spectrum is None or spectrum.shape[-1] == 0:
        return None
    values = numbers(spectrum)
    values = values.real if values.is_complex() else values
    ordered = values.sort(-1).values
    scale = ordered.abs().amax(-1, keepdim=True)
    blamed = _matrices(evidence.mask, values.shape[:-1])
    close = (ordered.diff(dim=-1) <= 4 * torch.finfo(spectrum.dtype).eps * scale) & blamed
    word = "singular values" if forward.op == "_linalg_svd" else "eigenvalues"
    if close.any():
        value = show(ordered[..., 1:][close][0])
        return Match(0.95, (f"{int(close.sum())} neighbouring pairs of {word} are equal, the first pair at {value}",))
    zero = (ordered == 0) & blamed
    if word == "singular values" and bool(zero.any()):
        return Match(0.9, (f"{int(zero.sum())} {word} are exactly 0",))
    return None


def _matrices(mask: torch.Tensor, batch: torch.Size) -> torch.Tensor:
    """Which matrices of a batch hold blamed elements, as a column of bools; all of them where the shapes do not tell."""
    rows = mask.cpu().reshape(*batch, -1).any(-1) if mask.shape[: len(batch)] == batch else torch.ones(batch).bool()
    return rows.unsqueeze(-1)


def _log_sum_of_nothing(evidence: Evidence) -> Match | None:
    forward = evidence.forward
    if forward is None or forward.op not in _LOG_SUMS or not enough(numbers(evidence.result).isnan()):
        return None
    value = forward.outputs[0]
    if value is None or not finite.has([value], finite.NonFinite.NEG_INF):
        return None
    empty = finite.mask(value, finite.NonFinite.NEG_INF)
    rows = _spread_back(empty, forward, evidence.mask.shape)
    if rows is not None and not enough(rows[evidence.mask]):
        return None
    count = f"{int(empty.sum())} of {value.numel()} rows hold only -inf"
    note = f"{count}: their log-sum is -inf and the derivative exp(-inf - -inf)"
    return Match(0.96, (note, *written_by(evidence)))


_NORM_EXAMPLE = """\
import torch

def fails():
    x = torch.zeros(3, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.linalg.vector_norm(x), x, create_graph=True)
    return (slope.norm() - 1.0) ** 2  # a gradient penalty differentiates the norm twice
"""

_NORM_REPAIRED = """\
import torch

def repaired():
    x = torch.zeros(3, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.sqrt(x.square().sum() + 1e-12), x, create_graph=True)
    return ((slope.square().sum() + 1e-12).sqrt() - 1.0) ** 2
"""

_NORM_NEAR_MISS = """\
import torch

def near_miss():
    x = torch.full((3,), 0.5, requires_grad=True)
    (slope,) = torch.autograd.grad(torch.linalg.vector_norm(x), x, create_graph=True)
    return (slope.norm() - 1.0) ** 2
"""

NORM_GRAD_AT_ZERO = Cause(
    name="norm_grad_at_zero",
    summary="the derivative of `{op}`, a norm, is undefined at a vector of zeros",
    matches=_norm_at_zero,
    explanation="""\
A norm has a kink at 0: its derivative is x / |x| = 0 / 0. torch sets the first derivative to 0 there, but the second
derivative (a gradient penalty, forces inside a loss) divides by the norm again, and a norm written by hand has no such
protection.""",
    example=_NORM_EXAMPLE,
    repaired=_NORM_REPAIRED,
    near_miss=_NORM_NEAR_MISS,
    practice="""\
Gradient penalties of adversarial networks, forces as derivatives of an energy of distances, and eikonal losses of
signed distance fields.""",
    help=(
        "keep the vector away from 0: `sqrt(x.square().sum() + eps)`, or leave out the rows that are 0 before taking "
        "the norm"
    ),
    references=("atomistic-machine-learning/schnetpack#5", "atomistic-machine-learning/schnetpack#301"),
)

_STD_EXAMPLE = """\
import torch

def fails():
    x, gain = torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)
    (slope,) = torch.autograd.grad((gain * x.std()).sum(), x, create_graph=True)
    return slope.sum()
"""

_STD_REPAIRED = """\
import torch

def repaired():
    x, gain = torch.ones(3, requires_grad=True), torch.ones(1, requires_grad=True)
    (slope,) = torch.autograd.grad((gain * (x.var() + 1e-6).sqrt()).sum(), x, create_graph=True)
    return slope.sum()
"""

_STD_NEAR_MISS = """\
import torch

def near_miss():
    x, gain = torch.arange(3.0, requires_grad=True), torch.ones(1, requires_grad=True)
    (slope,) = torch.autograd.grad((gain * x.std()).sum(), x, create_graph=True)
    return slope.sum()
"""

STD_GRAD_AT_ZERO = Cause(
    name="std_grad_at_zero",
    summary="the derivative of `{op}`, a deviation, is undefined where all values are the same",
    matches=_std_at_zero,
    explanation="""\
A standard deviation is the root of a variance, and the root has an infinite derivative at 0. torch sets the first
derivative of `std` to 0 there; the second derivative, and `var(...).sqrt()` written by hand, are not protected.""",
    example=_STD_EXAMPLE,
    repaired=_STD_REPAIRED,
    near_miss=_STD_NEAR_MISS,
    practice="""\
Regularisers that keep a spread up (variance terms of self-supervised losses, minibatch deviations of adversarial
networks) under a second derivative.""",
    help="add eps to the variance before taking the root: `(x.var() + eps).sqrt()`",
    references=("pytorch/pytorch#4320",),
)

_SPECTRUM_EXAMPLE = """\
import torch

def fails():
    covariance = torch.eye(3, requires_grad=True)
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors @ torch.diag(values.rsqrt()) @ vectors.mT)[0].sum()
"""

_SPECTRUM_REPAIRED = """\
import torch

def repaired():
    covariance = torch.eye(3, requires_grad=True)
    apart = torch.diag(torch.tensor([0.0, 1e-3, 2e-3]))
    values, vectors = torch.linalg.eigh(covariance + apart)
    return (vectors @ torch.diag(values.rsqrt()) @ vectors.mT)[0].sum()
"""

_SPECTRUM_NEAR_MISS = """\
import torch

def near_miss():
    covariance = torch.eye(3, requires_grad=True)
    return torch.linalg.eigvalsh(covariance).rsqrt().sum()  # equal values are harmless without their vectors
"""

DEGENERATE_SPECTRUM_GRAD = Cause(
    name="degenerate_spectrum_grad",
    summary="the derivative of `{op}` divides by the difference of equal eigenvalues or singular values",
    matches=_equal_spectrum,
    explanation="""\
The derivative of eigenvectors holds 1 / (w_i - w_j) for every pair. Equal values make it 0 / 0 = nan: the vectors are
not unique there. A covariance that is a multiple of the identity, a matrix whose rank is lower by two or more, a
dropped group of channels.""",
    example=_SPECTRUM_EXAMPLE,
    repaired=_SPECTRUM_REPAIRED,
    near_miss=_SPECTRUM_NEAR_MISS,
    practice="""\
Whitening and decorrelated batch norms at initialisation, procrustes alignment of symmetric point sets, and covariance
pooling with fewer samples than channels.""",
    help=(
        "break the tie with small distinct numbers on the diagonal, use only the eigenvalues, or compute the inverse "
        "root iteratively"
    ),
    references=("pytorch/pytorch#49886",),
)

_LOG_SUM_EXAMPLE = """\
import torch

def fails():
    scores = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.tensor([[False], [True]])
    total = torch.logsumexp(scores + torch.zeros(2, 1).masked_fill(nothing, float("-inf")), -1)
    return torch.where(nothing[:, 0], torch.zeros(2), total).sum()
"""

_LOG_SUM_REPAIRED = """\
import torch

def repaired():
    scores = torch.zeros(2, 3, requires_grad=True)
    nothing = torch.tensor([[False], [True]])
    filled = scores.masked_fill(nothing, 0.0)  # a finite number in the rows that are dropped below
    return torch.where(nothing[:, 0], torch.zeros(2), torch.logsumexp(filled, -1)).sum()
"""

_LOG_SUM_NEAR_MISS = """\
import torch

def near_miss():
    scores = torch.zeros(2, 3, requires_grad=True)
    partly = torch.tensor([[False, False, False], [False, True, True]])
    return torch.logsumexp(scores + torch.zeros(2, 3).masked_fill(partly, float("-inf")), -1).sum()
"""

LOGSUMEXP_GRAD_ALL_NEGINF = Cause(
    name="logsumexp_grad_all_neginf",
    summary="the derivative of `{op}` over a row of only -inf is undefined",
    matches=_log_sum_of_nothing,
    explanation="""\
The log-sum of nothing is log(0) = -inf, which is right and may be dropped later. Its derivative is exp(x -
logsumexp(x)) = exp(-inf - -inf) = nan. Dynamic programs over masked lattices and partition functions of empty sets meet
it.""",
    example=_LOG_SUM_EXAMPLE,
    repaired=_LOG_SUM_REPAIRED,
    near_miss=_LOG_SUM_NEAR_MISS,
    practice="""\
Forward algorithms over lattices with unreachable states (CTC, conditional random fields, hidden Markov models) that
use -inf as the logarithm of 0, and contrastive losses whose set of negatives is empty.""",
    help="fill rows without any entry with a finite number before the log-sum and select afterwards",
    references=("pytorch/pytorch#31829", "pytorch/pytorch#49724"),
)
