"""Which inner step of a fused kernel failed: the kernel's formula is computed again, step by step and once more in float64.

A kernel that computes in one call what a formula takes five for shows operands and result only. Its formula is written here as a
sequence of named steps; the first of them that is bad at the blamed elements is told. Where the steps do not come out bad as the
kernel did, nothing is said. Kernels for half precision compute in float32 and round at the end, and so do the steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.operands import numbers, ops, show

Steps = Iterator[tuple[str, torch.Tensor]]

_MEAN, _EUCLIDEAN = 1, 2.0

_LARGEST = 1 << 20
"""Elements of operands up to which a kernel is computed again: attention holds a matrix of scores besides."""


def _rows(a: Mapping[str, Any]) -> Steps:
    """Softmax and log-softmax over one dimension."""
    yield from _softmax(a["self"], a["dim"] if a["self"].ndim else -1, log="log" in a["op"])


def _softmax(scores: torch.Tensor, dim: int, *, log: bool = False) -> Steps:
    top = scores.amax(dim, keepdim=True)
    yield "row maximum", top
    shifted = scores - top
    yield "score - row maximum", shifted
    raised = shifted.exp()
    total = raised.sum(dim, keepdim=True)
    yield "sum of exp(score - row maximum)", total
    yield ("log-softmax", shifted - total.log()) if log else ("softmax", raised / total)


def _attention(a: Mapping[str, Any]) -> Steps:
    query, key, value, bias = a["query"], a["key"], a["value"], a.get("attn_mask", a.get("attn_bias"))
    scale = a.get("scale")
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    yield "query @ key * scale", scores
    if a.get("is_causal"):
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~ones.tril(), -math.inf)
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype is torch.bool else scores + bias
        yield "score + mask", scores
    for name, step in _softmax(scores, -1):
        yield name, step
        weights = step
    yield "weights @ value", weights @ value


def _layer_norm(a: Mapping[str, Any]) -> Steps:
    dims = tuple(range(-len(a["normalized_shape"]), 0))
    yield from _standardised(a["input"], dims, a["eps"])


def _group_norm(a: Mapping[str, Any]) -> Steps:
    x = a["input"]
    for name, step in _standardised(x.reshape(x.shape[0], a["group"], -1), (-1,), a["eps"]):
        yield name, step.expand(x.shape[0], a["group"], x[0].numel() // a["group"]).reshape(x.shape)


def _batch_norm(a: Mapping[str, Any]) -> Steps:
    x, running = a["input"], (a.get("running_mean"), a.get("running_var"))
    shape = (-1, *[1] * (x.ndim - 2))
    given = None if a.get("training", False) or None in running else [part.reshape(shape) for part in running]  # type: ignore[union-attr]
    yield from _standardised(x, tuple(d for d in range(x.ndim) if d != 1), a["eps"], given)


def _standardised(x: torch.Tensor, dims: tuple[int, ...], eps: float, given: list[torch.Tensor] | None = None) -> Steps:
    mean = x.mean(dims, keepdim=True) if given is None else given[0]
    yield "mean", mean
    centred = x - mean
    yield "x - mean", centred
    variance = centred.square().mean(dims, keepdim=True) if given is None else given[1]
    yield "variance", variance
    yield "variance + eps", variance + eps
    root = (variance + eps).rsqrt()
    yield "1 / sqrt(variance + eps)", root
    yield "(x - mean) / sqrt(variance + eps)", centred * root


def _rms_norm(a: Mapping[str, Any]) -> Steps:
    x, eps = a["input"], torch.finfo(a["type"]).eps if a.get("eps") is None else a["eps"]
    mean = x.square().mean(tuple(range(-len(a["normalized_shape"]), 0)), keepdim=True)
    yield "mean of x**2", mean
    yield "mean of x**2 + eps", mean + eps
    root = (mean + eps).rsqrt()
    yield "1 / sqrt(mean of x**2 + eps)", root
    yield "x / sqrt(mean of x**2 + eps)", x * root


def _deviation(a: Mapping[str, Any]) -> Steps:
    x, dims = a["self"], a.get("dim")
    dims = tuple(range(x.ndim)) if not dims else tuple(dims)
    count = math.prod(x.shape[d] for d in dims)
    free = count - (1 if a.get("correction") is None else a["correction"])
    mean = x.mean(dims, keepdim=True)
    yield "mean", mean
    yield "x - mean", x - mean
    total = (x - mean).square().sum(dims, keepdim=bool(a.get("keepdim")))
    yield "sum of (x - mean)**2", total
    variance = total / max(free, 0)
    yield "sum / (count - correction)", variance
    if a["op"].startswith("std"):
        yield "root of the variance", variance.sqrt()


def _weight_norm(a: Mapping[str, Any]) -> Steps:
    v, kept = a["v"], a.get("dim", 0)
    length = torch.linalg.vector_norm(v, dim=[d for d in range(v.ndim) if d != kept % v.ndim], keepdim=True)
    yield "length of v", length
    yield "g / length", a["g"] / length
    yield "v * (g / length)", v * (a["g"] / length)


def _logits_loss(a: Mapping[str, Any]) -> Steps:
    logits, target = a["self"], a["target"]
    yield "(1 - target) * logit", (1 - target) * logits
    yield "log-sigmoid of the logit", torch.nn.functional.logsigmoid(logits)
    yield "loss of each element", (1 - target) * logits - torch.nn.functional.logsigmoid(logits)


def _picked(a: Mapping[str, Any]) -> Steps:
    """The negative log-likelihood of labels, as a sum or as a mean by the weights of their classes."""
    logp, target = a["self"], a["target"]
    scored, classes = target != a["ignore_index"], min(1, a["self"].ndim - 1)
    label = target.where(scored, 0)
    weight = logp.new_ones(logp.shape[classes]) if a.get("weight") is None else a["weight"]
    weights = weight[label] * scored
    losses = (-logp.gather(classes, label.unsqueeze(classes)).squeeze(classes) * weights).where(scored, 0.0)
    yield "weighted loss of each label", losses
    if a["reduction"]:
        yield "sum of the losses", losses.sum()
    if a["reduction"] == _MEAN:
        yield "sum of the weights of scored labels", weights.sum()
        yield "sum of the losses / sum of the weights", losses.sum() / weights.sum()


def _length(a: Mapping[str, Any]) -> Steps:
    power, dims = float(a["ord"]), a.get("dim")
    if not 0 < power < math.inf:
        return
    x = a["self"].abs()
    raised = x.square() if power == _EUCLIDEAN else x**power
    yield f"|x|**{power:g}", raised
    total = raised.sum(tuple(dims) if dims else tuple(range(x.ndim)), keepdim=bool(a.get("keepdim")))
    yield f"sum of |x|**{power:g}", total
    yield "root of the sum", total ** (1 / power)


def _distances(a: Mapping[str, Any]) -> Steps:
    x, y = a["x1"].unsqueeze(-2), a["x2"].unsqueeze(-3)
    yield "sum of (x - y)**2", (x - y).square().sum(-1)
    yield "root of the sum", (x - y).square().sum(-1).sqrt()


_FORMULAS: tuple[tuple[frozenset[str], Callable[[Mapping[str, Any]], Steps]], ...] = (
    (ops("_softmax _log_softmax"), _rows),
    (
        ops(
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
        ),
        _attention,
    ),
    (ops("native_layer_norm"), _layer_norm),
    (ops("native_group_norm"), _group_norm),
    (
        ops(
            "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm"
        ),
        _batch_norm,
    ),
    (ops("_fused_rms_norm"), _rms_norm),
    (ops("std var std_mean var_mean"), _deviation),
    (ops("_weight_norm_interface"), _weight_norm),
    (ops("binary_cross_entropy_with_logits"), _logits_loss),
    (ops("nll_loss_forward nll_loss2d_forward"), _picked),
    (ops("linalg_vector_norm"), _length),
    (ops("_euclidean_dist"), _distances),
)


def inner_step(evidence: Evidence) -> tuple[str, ...]:
    """Return a note on the inner step of a fused kernel that failed; none for other calls and where the steps do not fail."""
    formula = next((steps for names, steps in _FORMULAS if evidence.op in names), None)
    if formula is None or evidence.forward is not None or evidence.output != 0:
        return ()
    if sum(tensor.numel() for tensor in evidence.call.tensors().values()) > _LARGEST:
        return ()
    try:
        return _told(evidence, formula)
    except (
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
        KeyError,
    ):  # another layout or shape than the formula takes
        return ()


def _told(evidence: Evidence, formula: Callable[[Mapping[str, Any]], Steps]) -> tuple[str, ...]:
    narrow = torch.promote_types(evidence.result.dtype, torch.float32)
    steps = list(formula(_arguments(evidence, narrow)))
    values = [_blamed(evidence, step) for _, step in steps]
    bad = [(value.isnan() if _hides(evidence) else ~value.isfinite()) & seen for value, seen in values]
    place = next((place for place, found in enumerate(bad) if bool(found.any())), None)
    if place is None or not bool((~values[-1][0].isfinite() & values[-1][1]).any()):
        return ()
    note = (
        f"inside of the kernel `{steps[place][0]}` is the first to fail, with {show(values[place][0][bad[place]][0])}"
    )
    if place:
        before = values[place - 1][0]
        there = before[bad[place]] if before.shape == bad[place].shape else before.flatten()
        note += f" where `{steps[place - 1][0]}` is {show(there[0])}"
    wide = formula(_arguments(evidence, torch.float64))
    again = _blamed(evidence, next(itertools.islice(wide, place, None))[1])[0][bad[place]]
    whole = again[again.isfinite()]
    return (f"{note}; in float64 it is {show(whole[0])}" if len(whole) else f"{note}; float64 changes nothing",)


def _hides(evidence: Evidence) -> bool:
    """Whether infinities came in, which are no fault until they turn into NaN."""
    given = evidence.call.tensors().values()
    masks = any(tensor.dtype is torch.bool or bool(tensor.isinf().any()) for tensor in given)
    return masks and bool(evidence.result.isnan().any())


def _blamed(evidence: Evidence, step: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of a step, and which of them the blamed elements are made of; all, where the step has another shape."""
    try:
        spread = step.expand(evidence.mask.shape)
    except RuntimeError:
        return numbers(step), torch.ones(step.shape, dtype=torch.bool)
    return numbers(spread), evidence.mask.cpu()


def _arguments(evidence: Evidence, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments in a wider type, with the name of the op and the type of the result."""
    cast = {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in evidence.call.arguments.items()
    }
    return {**cast, "op": evidence.op, "type": evidence.result.dtype}
