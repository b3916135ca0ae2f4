"""Infinities kept away from operations that cannot take them, and bad elements kept away from a derivative."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_map

from bisect_nan.recording.program import Arguments
from bisect_nan.remedies.proposal import Proposal, Site, operands, written
from bisect_nan.replaying.differentiable import Change

_SCORES = {
    "_softmax": "self",
    "_safe_softmax": "self",
    "_log_softmax": "self",
    "logsumexp": "self",
    "_scaled_dot_product_flash_attention_for_cpu": "attn_mask",
    "_scaled_dot_product_efficient_attention": "attn_bias",
    "_scaled_dot_product_attention_math": "attn_mask",
    "_scaled_dot_product_fused_attention_overrideable": "attn_bias",
    "_logcumsumexp": "self",
    "logcumsumexp": "self",
}
"""By op: the operand that holds scores, -Inf where masked."""

LARGE = {torch.float16: 3e4}
"""What stands for infinity in a finite mask; sums of two must still fit."""


def leave_one_score(site: Site) -> Iterator[Proposal]:
    """Give rows without any score a finite one."""
    name = _SCORES.get(site.op)
    if name is None or site.call is None:
        return

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        scores = arguments[name]
        if not isinstance(scores, torch.Tensor):
            return target(**arguments)
        lost = (scores == -math.inf).all(arguments.get("dim", -1), keepdim=True)
        return written(target, arguments, target(**{**arguments, name: scores.masked_fill(lost, 0)}))

    yield Proposal(
        "leave_one_score",
        "give rows whose scores are all -inf finite ones, and drop their result",
        f"{{x}}.masked_fill(({{x}} == -torch.inf).all({site.call.arguments.get('dim', -1)}, keepdim=True), 0)",
        name,
        changes=site.everywhere(change),
    )


def finite_mask(site: Site) -> Iterator[Proposal]:
    """Mask with a large finite number in the place of an infinity."""
    if site.node is None:
        return
    large = LARGE.get(site.dtype, 1e9)
    before = {*site.dependence.ancestors(site.node.index), *site.alike()}
    calls = [site.program.nodes[index] for index in sorted(before)]
    writers = [node for node in calls if any(map(math.isinf, node.literals))]
    constants = {
        p.value: _bounded(tensor, large)
        for p in site.program.placeholders
        if (tensor := site.tensors.get(p.value)) is not None
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and bool(tensor.isinf().any())
    }
    if not writers and not constants:
        return
    lines = sorted({str(node.source) for node in writers if node.source is not None})
    lines += [p.name for p in site.program.placeholders if p.value in constants and not p.constant]
    where = f" in {' and '.join(lines)}" if lines else ""
    yield Proposal(
        "finite_mask",
        f"mask with a number as large as {large:g} in the place of infinity{where}",
        changes={node.index: _with_finite_literals(large) for node in writers},
        placeholders=constants,
        local=False,
    )


def finite_numbers(site: Site) -> Iterator[Proposal]:
    """Put 0 in the place of a Python number that is NaN."""
    if site.node is None or not any(map(math.isnan, site.node.literals)):
        return
    yield Proposal(
        "finite_numbers",
        "find out why the number became NaN; tried with 0 in its place",
        changes=site.everywhere(_with_finite_literals(LARGE.get(site.dtype, 1e9))),
    )


def finite_operands(site: Site) -> Iterator[Proposal]:
    """Take infinities out of the operands before they meet what they cannot meet."""
    if site.call is None:
        return
    names = {
        name.partition("[")[0]
        for name, t in site.call.tensors().items()
        if t.is_floating_point() and _holds_infinity(t)
    }
    if not names:
        return
    large = LARGE.get(site.dtype, 1e9)
    (operand,) = names if len(names) == 1 else ("",)
    for wrap, edit in (
        ("{x}.masked_fill({x}.isinf(), 0)", lambda x: x.masked_fill(x.isinf(), 0)),
        (f"{{x}}.clamp(-{large:g}, {large:g})", lambda x: _bounded(x, large)),
    ):
        change = operands(**dict.fromkeys(names, lambda x, edit=edit: edit(x) if x.is_floating_point() else x))
        yield Proposal(
            "finite_operands",
            "replace infinite elements before the operation" + ("" if operand else f": {wrap.replace('{x}', 'x')}"),
            wrap if operand else "",
            operand,
            changes=site.everywhere(change),
        )


def double_where(site: Site) -> Iterator[Proposal]:
    """Replace operands by a safe value wherever the operation or its derivative is non-finite: `where` on the way in, too."""
    if site.call is None:
        return
    shape = next((t.shape for t in site.call.outputs if t is not None), torch.Size())
    names = [
        n for n, t in site.call.tensors().items() if t.is_floating_point() and "[" not in n and _broadcasts(t, shape)
    ]
    if not names:
        return
    for safe in (1.0, 0.5):
        for chosen in ([names[-1]], names):
            yield Proposal(
                "double_where",
                f"select before the operation as well as after it: torch.where(used, x, {safe:g}) for what goes in",
                changes=site.everywhere(_guarded(chosen, safe)),
            )
            if len(names) == 1:
                break


def _guarded(names: list[str], safe: float) -> Change:
    """Run a call with a safe value in the place of operand elements whose result or derivative is non-finite."""

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        bad = _troubled(target, arguments, names)
        replaced = {
            name: torch.where(mask, torch.full_like(arguments[name], safe), arguments[name])
            for name, mask in bad.items()
        }
        return written(target, arguments, target(**{**arguments, **replaced}))

    return change


def _troubled(target: torch._ops.OpOverload, arguments: Arguments, names: list[str]) -> dict[str, torch.Tensor]:
    """Return for each operand the elements that have a non-finite derivative, or whose result is non-finite."""
    leaves = {
        name: item.detach().clone().requires_grad_(item.is_floating_point()) if isinstance(item, torch.Tensor) else item
        for name, item in arguments.items()
    }
    with torch.enable_grad():
        inner = {name: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in leaves.items()}
        result = target(**inner)
        result = result if isinstance(result, torch.Tensor) else result[0]
        wanted = [leaves[name] for name in names]
        found: tuple[torch.Tensor | None, ...] = (None,) * len(names)
        if result.requires_grad:  # not below autograd, where the recorded backward pass runs
            found = torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
    masks = {}
    for name, leaf, gradient in zip(names, wanted, found, strict=True):
        mask = torch.zeros_like(leaf, dtype=torch.bool) if gradient is None else ~gradient.isfinite()
        if leaf.shape == result.shape:
            mask = mask | ~result.detach().isfinite()
        masks[name] = mask
    return masks


def _with_finite_literals(large: float) -> Change:
    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        return target(**pytree.tree_map(lambda item: _finite(item, large), arguments))

    return change


def _finite(item: Any, large: float) -> Any:
    if isinstance(item, float) and not math.isfinite(item):
        return 0.0 if math.isnan(item) else math.copysign(large, item)
    return item


def _bounded(x: torch.Tensor, large: float) -> torch.Tensor:
    return torch.where(x.isinf(), x.sign().nan_to_num() * large, x)


def _holds_infinity(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and bool(tensor.isinf().any())


def _broadcasts(operand: torch.Tensor, shape: torch.Size) -> bool:
    """Whether a call is element by element in an operand, as far as shapes tell."""
    sizes = list(zip(reversed(operand.shape), reversed(shape), strict=False))
    return operand.dim() <= len(shape) and all(own in (1, size) for own, size in sizes)
