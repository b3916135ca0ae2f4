"""Operands brought back to where the operation and its derivative are finite."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bisect_nan.causes.evidence import base_name
from bisect_nan.recording.program import Arguments
from bisect_nan.remedies.proposal import Proposal, Site, instead, operands, type_name

_TINY = torch.finfo(torch.float32).tiny
_MARGINS = {
    torch.float64: (1e-8, 1e-12, 1e-4),
    torch.float32: (1e-6, 1e-8, 1e-12, 1e-4, 1e-2, _TINY),
    torch.bfloat16: (1e-4, 1e-8, 1e-2),
    torch.float16: (1e-4, 1e-7, 1e-2),
}
"""How far inside of the edge of a domain operands are kept: what is usual in public code. The first one that leaves healthy results
as they are is taken, and a large one first: quotients and derivatives at the edge grow with its inverse."""

_EDGES: dict[str, tuple[str, float, float]] = {
    "log": ("self", 0, math.inf),
    "log2": ("self", 0, math.inf),
    "log10": ("self", 0, math.inf),
    "log1p": ("self", -1, math.inf),
    "sqrt": ("self", 0, math.inf),
    "rsqrt": ("self", 0, math.inf),
    "pow": ("self", 0, math.inf),
    "acos": ("self", -1, 1),
    "asin": ("self", -1, 1),
    "atanh": ("self", -1, 1),
    "erfinv": ("self", -1, 1),
    "special_erfinv": ("self", -1, 1),
    "acosh": ("self", 1, math.inf),
    "logit": ("self", 0, 1),
    "xlogy": ("other", 0, math.inf),
    "special_xlogy": ("other", 0, math.inf),
    "special_xlog1py": ("other", -1, math.inf),
    "special_entr": ("self", 0, math.inf),
    "lgamma": ("self", 0, math.inf),
    "digamma": ("self", 0, math.inf),
    "polygamma": ("self", 0, math.inf),
    "_standard_gamma": ("self", 0, math.inf),
    "igamma": ("other", 0, math.inf),
    "igammac": ("other", 0, math.inf),
    "special_ndtri": ("self", 0, 1),
    "binary_cross_entropy": ("self", 0, 1),
    "native_batch_norm": ("running_var", 0, math.inf),
    "_native_batch_norm_legit_no_training": ("running_var", 0, math.inf),
    "cudnn_batch_norm": ("running_var", 0, math.inf),
}
"""By op: the operand that has a domain, and its open interval."""

_EXPONENTIALS = {"exp": math.e, "expm1": math.e, "sinh": math.e, "cosh": math.e, "exp2": 2.0}
_DIVISORS = dict.fromkeys(("div", "true_divide", "floor_divide", "remainder", "fmod", "atan2"), "other")
_DIVISORS |= {"reciprocal": "self", "rsqrt": "self", "addcdiv": "tensor2", "softplus": "beta"}
_MATRICES = {
    "linalg_inv_ex": "A",
    "inverse": "self",
    "_linalg_solve_ex": "A",
    "linalg_solve_triangular": "self",
    "triangular_solve": "A",
    "linalg_cholesky_ex": "self",
    "cholesky": "self",
    "cholesky_solve": "input2",
    "cholesky_inverse": "self",
    "_linalg_det": "A",
    "_linalg_slogdet": "A",
    "_linalg_eigh": "A",
    "linalg_eig": "self",
    "_linalg_svd": "A",
    "linalg_qr": "A",
    "linalg_lstsq": "self",
    "linalg_pinv": "self",
    "linalg_lu_factor_ex": "A",
}


def margins(dtype: torch.dtype) -> tuple[float, ...]:
    """Return the margins to try for an element type."""
    return _MARGINS.get(dtype, _MARGINS[torch.float32])


def clamp(site: Site) -> Iterator[Proposal]:
    """Keep the operand inside of the domain."""
    if site.op not in _EDGES:
        return
    name, low, high = _EDGES[site.op]
    for margin in margins(site.dtype):
        least = None if low == -math.inf else low + margin
        most = None if high == math.inf else high - margin
        if torch.tensor(1.0, dtype=site.dtype) - margin == 1 and {low, high} & {1, -1}:  # lost to rounding
            continue
        complex_valued = site.call is not None and _is_complex(site.call.arguments.get(name))
        limits = ", ".join(f"{side}={_short(x)}" for side, x in (("min", least), ("max", most)) if x is not None)
        yield Proposal(
            "clamp",
            f"keep the operand of {site.op.lstrip('_')} inside of its domain",
            _away(margin) if complex_valued else f"{{x}}.clamp({limits})",
            name,
            changes=site.everywhere(operands(**{name: lambda x, a=least, b=most: _clamped(x, a, b)})),
            local=site.node is None or torch.Tag.nondeterministic_seeded not in site.node.target.tags,
        )


def clamp_exponent(site: Site) -> Iterator[Proposal]:
    """Keep an exponent small enough for the type."""
    if site.op not in _EXPONENTIALS:
        return
    top = math.log(torch.finfo(site.dtype).max, _EXPONENTIALS[site.op])
    for share in (0.2, 0.45, 0.9):
        limit = math.floor(top * share)
        both = site.op in {"sinh", "cosh"}
        change = operands(self=lambda x, most=limit, both=both: x.clamp(-most if both else None, most))  # type: ignore[misc]
        yield Proposal(
            "clamp_exponent",
            f"keep the exponent below the range of {type_name(site.dtype)}",
            f"{{x}}.clamp(-{limit}, {limit})" if both else f"{{x}}.clamp(max={limit})",
            changes=site.everywhere(change),
        )


def inside_the_root(site: Site) -> Iterator[Proposal]:
    """Keep what is under the root of a divisor away from zero: a floor on the root itself leaves its derivative infinite."""
    name = _DIVISORS.get(site.op)
    if name is None or site.node is None:
        return
    for node in site.made_by(name):
        op = base_name(str(node.target))
        if op in {"sqrt", "linalg_vector_norm", "norm"} and any(node.tracked):
            break
        if op not in _MOVING:
            return
    else:
        return
    for margin in margins(site.dtype)[:2]:
        if op == "sqrt":
            change, wrap = operands(self=lambda x, m=margin: x.clamp(min=m)), f"{{x}}.clamp(min={_short(margin)})"  # type: ignore[misc]
        else:
            change, wrap = instead(lambda given, m=margin: _norm(given, m)), ""  # type: ignore[misc]
        yield Proposal(
            "eps_under_root",
            "keep what is under the root of the divisor away from 0",
            wrap,
            node=node,
            changes=site.everywhere(change, node),
            local=False,
        )


_MOVING = {"view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "permute", "t", "transpose", "select", "slice"} | {
    "index",
    "index_select",
    "gather",
    "clone",
    "mul",
    "add",
    "clamp",
    "clamp_min",
    "detach",
    "_to_copy",
}
"""Calls that leave a divisor what it is."""


def safe_divisor(site: Site) -> Iterator[Proposal]:
    """Keep a divisor away from zero."""
    name = _DIVISORS.get(site.op)
    if name is None or site.call is None:
        return
    divisor = site.call.arguments.get(name)
    positive = counts = False
    if isinstance(divisor, torch.Tensor) and not divisor.is_complex():
        positive = bool((divisor >= 0).all())
        counts = positive and bool((divisor == divisor.double().round()).all() and (divisor > 0).any())
        counts = counts and not _is_learned(site, name)
    whole = isinstance(divisor, torch.Tensor) and not (divisor.is_floating_point() or divisor.is_complex())
    for least in (1.0,) if whole else ((1.0,) if counts else ()) + margins(site.dtype):
        wrap = f"{{x}}.clamp(min={_short(least)})"
        if not isinstance(divisor, torch.Tensor):
            wrap = f"max({{x}}, {_short(least)})"
        elif not positive:
            wrap = _away(least)
        change = operands(**{name: lambda x, least=least: _away_from_zero(x, least)})
        what = f"`{name}`" if name == "beta" else "the divisor"
        yield Proposal("safe_divisor", f"keep {what} away from 0", wrap, name, changes=site.everywhere(change))


def _is_learned(site: Site, name: str) -> bool:
    """Whether autograd follows an operand: a scale that is trained may be 1 everywhere, and is no count."""
    if site.call is None or site.node is None:
        return False
    return bool(dict(zip(site.call.tensors(), site.node.tracked, strict=False)).get(name))


def epsilon(site: Site) -> Iterator[Proposal]:
    """Give a normalisation an eps that its type can hold."""
    if site.call is None or "eps" not in site.call.arguments:
        return
    for eps in (1e-5, 1e-3):
        yield Proposal(
            "epsilon",
            f"give the normalisation eps={_short(eps)}",
            changes=site.everywhere(operands(eps=lambda x, e=eps: x.clamp(min=e))),  # type: ignore[misc]
        )


def jitter(site: Site) -> Iterator[Proposal]:
    """Add a small diagonal with distinct entries: the matrix is then regular, and its spectrum simple."""
    name = _MATRICES.get(site.op)
    if name is None:
        return

    def jittered(matrix: torch.Tensor, size: float) -> torch.Tensor:
        rank = min(matrix.shape[-2:])
        steps = torch.arange(1, rank + 1, device=matrix.device, dtype=matrix.real.dtype) / rank
        diagonal = torch.zeros(matrix.shape[-2:], dtype=matrix.dtype, device=matrix.device)
        diagonal[: len(steps), : len(steps)] = torch.diag(steps).to(matrix.dtype)
        return matrix + size * diagonal

    for size in (1e-4, 1e-2) if site.dtype is not torch.float64 else (1e-8, 1e-4):
        yield Proposal(
            "jitter",
            f"add {_short(size)} * torch.diag(torch.arange(1, n + 1) / n) to the matrix: it is then regular, its spectrum simple",
            changes=site.everywhere(operands(**{name: lambda m, size=size: jittered(m, size)})),
            moves=True,
        )


def root_of_sum(site: Site) -> Iterator[Proposal]:
    """Put an eps under the root of a norm or a deviation."""
    if site.call is None or site.op not in {"linalg_vector_norm", "norm", "std"}:
        return
    arguments = site.call.arguments
    dims, keep = arguments.get("dim") or None, bool(arguments.get("keepdim", False))
    over = f"dim={dims}, keepdim={keep}"
    if site.op == "std":
        total, compute, what = f"{{x}}.var({over}, correction={_correction(arguments)})", _deviation, "deviation"
    else:
        total, compute, what = f"{{x}}.square().sum({over})", _norm, "norm"
    euclidean = site.op == "std" or _order(arguments) == 2  # noqa: PLR2004
    for eps in margins(site.dtype):
        yield Proposal(
            "eps_under_root",
            f"write the {what} with an eps of {_short(eps)} under the root",
            f"({total} + {_short(eps)}).sqrt()" if euclidean else "",
            whole=True,
            changes=site.everywhere(instead(lambda given, eps=eps: compute(given, eps))),  # type: ignore[misc]
        )


def _order(arguments: Mapping[str, Any]) -> float:
    order = arguments.get("ord", arguments.get("p"))
    return 2.0 if order is None else float(order)


def _norm(arguments: Arguments, eps: float) -> torch.Tensor:
    x: torch.Tensor = arguments["self"]
    order = _order(arguments)
    dims, keep = arguments.get("dim") or list(range(x.dim())), bool(arguments.get("keepdim", False))
    if order == 2:  # noqa: PLR2004
        return (x.abs().square().sum(dims, keepdim=keep) + eps).sqrt()
    return (x.abs().square().add(eps).pow(order / 2).sum(dims, keepdim=keep) + eps).pow(1 / order)


def _correction(arguments: Mapping[str, Any]) -> float:
    if "unbiased" in arguments:
        return int(arguments["unbiased"])
    correction: float | None = arguments.get("correction")
    return 1 if correction is None else correction


def _deviation(arguments: Arguments, eps: float) -> torch.Tensor:
    x: torch.Tensor = arguments["self"]
    dims, keep = arguments.get("dim") or list(range(x.dim())), bool(arguments.get("keepdim", False))
    return (x.var(dims, correction=_correction(arguments), keepdim=keep) + eps).sqrt()


def _clamped(x: torch.Tensor, least: float | None, most: float | None) -> torch.Tensor:
    if x.is_complex():
        return x if least is None else _away_from_zero(x, least)
    return x.clamp(min=least, max=most)


def _away_from_zero(x: torch.Tensor, least: float) -> torch.Tensor:
    if not x.is_floating_point() and not x.is_complex():
        return x.clamp(min=max(1, math.ceil(least)))
    if not x.is_complex() and bool((x >= 0).all()):
        return x.clamp(min=least)
    return torch.where(x.abs() < least, torch.full_like(x, least), x)


def _away(least: float) -> str:
    return f"torch.where({{x}}.abs() < {_short(least)}, {_short(least)}, {{x}})"


def _is_complex(item: object) -> bool:
    return isinstance(item, torch.Tensor) and item.is_complex()


def _short(number: float) -> str:
    return f"{number:g}".replace("e-0", "e-")
