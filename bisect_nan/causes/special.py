"""Special functions at a pole, and matrices that have no inverse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bisect_nan.causes.entry import Cause, Match
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import aligned, base_op, enough, first, numbers, where


def _gamma_pole(x: torch.Tensor) -> torch.Tensor:
    """0 and the negative whole numbers, where the gamma function has its poles."""
    return (x <= 0) & (x == x.floor()) & x.isfinite()


_POLES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "lgamma": ("self", _gamma_pole),
    "digamma": ("self", _gamma_pole),
    "polygamma": ("self", _gamma_pole),
    "_standard_gamma_grad": ("self", lambda x: x <= 0),
    "special_zeta": ("self", lambda x: x == 1),
    **dict.fromkeys(
        (
            *("special_bessel_y0", "special_bessel_y1", "special_modified_bessel_k0", "special_modified_bessel_k1"),
            *("special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1"),
        ),
        ("self", lambda x: x == 0),
    ),
}
"""Op: the argument that decides, and where its poles are."""

_MATRICES = {
    "linalg_inv_ex": "A",
    "_linalg_solve_ex": "A",
    "linalg_solve_triangular": "self",
    "triangular_solve": "A",
    "cholesky_solve": "input2",
    "linalg_lu_solve": "LU",
}
"""Op: the matrix that it inverts, or solves with."""

_BY_DIAGONAL = frozenset({"linalg_solve_triangular", "triangular_solve", "cholesky_solve", "linalg_lu_solve"})
"""They are handed a triangle, which has an inverse if no element of its diagonal is 0."""


def _function_pole(evidence: Evidence) -> Match | None:
    name, is_pole = _POLES.get(base_op(evidence.call), ("", _gamma_pole))
    name = "x" if name and name not in evidence.call.arguments else name  # as some of them call it
    argument = aligned(evidence, name) if name else None
    if argument is None or argument.is_complex() or not evidence.kinds() or not enough(is_pole(argument)):
        return None
    pole = is_pole(argument)
    of = (evidence.forward or evidence.call).op.strip(
        "_"
    )  # a sample is drawn by one call, and its derivative is another
    return Match(0.97, (f"the argument is {first(argument, pole)}{where(evidence, pole)}, a pole of `{of}`",))


def _singular_matrix(evidence: Evidence) -> Match | None:
    matrix = evidence.call.arguments.get(_MATRICES.get(evidence.op, ""))
    if not isinstance(matrix, torch.Tensor) or not evidence.kinds() or not matrix.isfinite().all():
        return None
    values = numbers(matrix)
    if evidence.op in _BY_DIAGONAL:
        diagonal = values.diagonal(dim1=-2, dim2=-1)
        singular, words = (diagonal == 0).any(-1), "an element of its diagonal is exactly 0"
    else:
        spread = torch.linalg.svdvals(values)
        singular = spread[..., -1] <= spread[..., 0] * torch.finfo(matrix.dtype).eps
        words = "its smallest singular value is 0 within rounding"
    blamed = evidence.mask.flatten(-2).any(-1).cpu() if evidence.mask.ndim == matrix.ndim else None
    if blamed is not None and blamed.shape == singular.shape:
        singular = singular & blamed
    if not singular.any():
        return None
    count = f"{int(singular.sum())} of {singular.numel()} matrices have" if singular.numel() > 1 else "the matrix has"
    through = "the derivative solves with it; " if evidence.forward is not None else ""
    return Match(0.95, (f"{through}{count} no inverse: {words}",))


_POLE_EXAMPLE = """\
import torch

def fails():
    concentration = torch.relu(torch.tensor([-0.3, 1.5], requires_grad=True))  # exactly 0, and 1.5
    return torch.lgamma(concentration).sum()
"""

_POLE_REPAIRED = """\
import torch

def repaired():
    concentration = torch.relu(torch.tensor([-0.3, 1.5], requires_grad=True)) + 1e-3
    return torch.lgamma(concentration).sum()
"""

_POLE_NEAR_MISS = """\
import torch

def near_miss():
    concentration = torch.tensor([-0.3, 1.5], requires_grad=True)  # between two poles the function is finite
    return torch.lgamma(concentration).sum()
"""

FUNCTION_POLE = Cause(
    name="function_pole",
    summary="`{op}` is evaluated at a pole, where the function is infinite",
    matches=_function_pole,
    explanation="""\
The gamma function is infinite at 0 and at every negative whole number, and so are its logarithm `lgamma` and the
derivatives of that, `digamma` and `polygamma`; the zeta function is infinite at 1. Arguments that count or that are
concentrations become exactly 0 when a ReLU, a clamp or an underflow makes them.""",
    example=_POLE_EXAMPLE,
    repaired=_POLE_REPAIRED,
    near_miss=_POLE_NEAR_MISS,
    practice="""\
Concentrations of Beta, Gamma and Dirichlet distributions, evidence of 0 in evidential networks, negative binomial
likelihoods of counts with a dispersion that underflowed.""",
    help="keep the argument away from 0: add 1 or a small number to it, or predict it through `softplus(x) + eps`",
    references=("ReactiveBayes/ExponentialFamily.jl#137",),
)

_SINGULAR_EXAMPLE = """\
import torch

def fails():
    points = torch.tensor([0.5, 0.5], requires_grad=True)  # one point, given twice
    kernel = torch.exp(-((points[:, None] - points) ** 2))
    triangle, _ = torch.linalg.cholesky_ex(kernel)
    return torch.linalg.solve_triangular(triangle, torch.ones(2, 1), upper=False).sum()
"""

_SINGULAR_REPAIRED = """\
import torch

def repaired():
    points = torch.tensor([0.5, 0.5], requires_grad=True)
    kernel = torch.exp(-((points[:, None] - points) ** 2)) + 1e-3 * torch.eye(2)
    triangle, _ = torch.linalg.cholesky_ex(kernel)
    return torch.linalg.solve_triangular(triangle, torch.ones(2, 1), upper=False).sum()
"""

_SINGULAR_NEAR_MISS = """\
import torch

def near_miss():
    points = torch.tensor([0.5, 0.9], requires_grad=True)
    kernel = torch.exp(-((points[:, None] - points) ** 2))
    triangle, _ = torch.linalg.cholesky_ex(kernel)
    return torch.linalg.solve_triangular(triangle, torch.ones(2, 1), upper=False).sum()
"""

SINGULAR_MATRIX = Cause(
    name="singular_matrix",
    summary="`{op}`, or its derivative, inverts a matrix that has no inverse",
    matches=_singular_matrix,
    explanation="""\
Solving with a triangle divides by the elements of its diagonal. A matrix whose columns depend on each other has a 0
there: the solution is 0 / 0 or x / 0. `torch.linalg.solve` and `inv` raise an error on the CPU; `solve_triangular`, the
variants that end with `_ex` and the derivatives of `qr` and `cholesky`, which solve with the triangle that they
found, do not.""",
    example=_SINGULAR_EXAMPLE,
    repaired=_SINGULAR_REPAIRED,
    near_miss=_SINGULAR_NEAR_MISS,
    practice="""\
Covariances of fewer samples than features, kernel matrices of Gaussian processes with a point given twice, layers that
are kept orthogonal by a QR decomposition and start with equal columns.""",
    help="add a small multiple of the identity before factorising (jitter), or solve in the least-squares sense",
    references=("pytorch/pytorch#42792", "pytorch/pytorch#56326"),
)
