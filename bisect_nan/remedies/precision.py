"""The same arithmetic in a type with a wider range, or at another scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_map

from bisect_nan.recording.program import Arguments, Node, Program, tensors
from bisect_nan.remedies.proposal import Proposal, Site, operands, type_name
from bisect_nan.replaying.differentiable import Change, Types

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WRITTEN = {torch.float32: ".float()", torch.float64: ".double()"}


def island(site: Site) -> Iterator[Proposal]:
    """Run the call in a wider type, and all that follows until the values fit again."""
    wide = _WIDER.get(site.dtype)
    if wide is None:
        return
    yield Proposal(
        "float32_island" if wide is torch.float32 else "float64_island",
        f"compute in {type_name(wide)} from here (x{_WRITTEN[wide]} on every operand) until the values fit into"
        f" {type_name(site.dtype)} again",
        types=Island(site.program, site.dtype, wide, site.alike()),
        check=_widened(site.dtype, wide),
    )


def saturate(site: Site) -> Iterator[Proposal]:
    """Cut off before a cast what the narrower type cannot hold."""
    made = site.call.outputs[0] if site.call is not None and site.op == "_to_copy" else None
    if made is None or not made.is_floating_point() or torch.finfo(made.dtype).max >= torch.finfo(site.dtype).max:
        return
    top = torch.finfo(made.dtype).max
    if float(torch.tensor(top, dtype=site.dtype)) > top:  # bfloat16 rounds 65504 up
        top = float(torch.tensor(top * (1 - torch.finfo(site.dtype).eps), dtype=site.dtype))

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        narrows = arguments.get("dtype") is made.dtype  # a line may cast back as well
        return target(**{**arguments, "self": arguments["self"].clamp(-top, top)} if narrows else arguments)

    yield Proposal(
        "saturate",
        f"scale the values into the range of {type_name(made.dtype)}, or cut them off before the cast",
        f"{{x}}.clamp(-{top:g}, {top:g})",
        changes=site.everywhere(change),
    )


def whole(site: Site) -> Iterator[Proposal]:
    """Run the whole step in a wider type."""
    wide = _WIDER.get(site.dtype)
    if wide is None:
        return
    yield Proposal(
        f"{type_name(wide)}_step",
        f"run the step in {type_name(wide)}"
        + ("" if wide is torch.float64 else ", or in bfloat16, which has the same range"),
        types=Everywhere(site.dtype, wide),
        local=False,
    )


def clamp_operand(site: Site) -> Iterator[Proposal]:
    """Keep operands so small that the result fits."""
    if site.call is None:
        return
    names = [n for n, t in site.call.tensors().items() if t.is_floating_point() and "[" not in n]
    top = torch.finfo(site.dtype).max
    limit = 10.0 ** math.floor(math.log10(top) * 0.45)  # sums of squares still fit
    edits = dict.fromkeys(names, lambda x: x.clamp(-limit, limit) if x.is_floating_point() else x)
    text = f"keep what goes in below {limit:g}, or find out why it grew"
    wrap = f"{{x}}.clamp(-{limit:g}, {limit:g})" if len(names) == 1 else ""
    yield Proposal("clamp_operands", text, wrap, changes=site.everywhere(operands(**edits)))


def lower_scale(site: Site) -> Iterator[Proposal]:
    """Scale the loss down for the backward pass."""
    power = _halvings(site)
    yield Proposal(
        "lower_loss_scale",
        f"scale the loss by 2**-{power} before backward and the gradients back before the update, or lower the scaler's scale so",
        scale=2.0**-power,
        local=False,
    )


def _halvings(site: Site) -> int:
    """How often a gradient has to be halved to fit, by what it would be in double precision; 16 where that cannot be told."""
    exact = None if site.evidence is None else site.evidence.recomputed(torch.float64)
    top = 0.0 if exact is None or not exact.numel() else float(exact.abs().nan_to_num(posinf=0).max())
    limit = torch.finfo(site.dtype).max
    return 4 + max(0, math.ceil(math.log2(top / limit))) if top > limit else 16


def _widened(narrow: torch.dtype, wide: torch.dtype) -> Change:
    """Run a call in the wide type, and return what fits in the narrow one."""
    types = Everywhere(narrow, wide)

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        return target(**pytree.tree_map(types.widened, arguments))

    return change


class Everywhere(Types):
    """Runs all calls in a wider type where they were recorded in a narrow one."""

    def __init__(self, narrow: torch.dtype, wide: torch.dtype) -> None:
        """Choose the types."""
        self._narrow, self._wide = narrow, wide

    def placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in the wider type."""
        return tensor.to(self._wide) if tensor.dtype == self._narrow else tensor

    def before(self, node: Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Ask for the wide type where the narrow one was asked for."""
        del node
        widened: tuple[Any, Any] = pytree.tree_map(self.widened, (args, kwargs))
        return widened

    def widened(self, item: Any) -> Any:
        """Return an argument in the wider type."""
        if item == self._narrow and isinstance(item, torch.dtype):
            return self._wide
        if isinstance(item, torch.Tensor) and item.dtype == self._narrow:
            return item.to(self._wide)
        return item


class Island(Types):
    """Runs some calls in a wider type, and what follows them until the values fit again."""

    def __init__(self, program: Program, narrow: torch.dtype, wide: torch.dtype, first: list[int]) -> None:
        """Choose the types and where the islands begin, by program index."""
        self._values, self._narrow, self._wide, self._first = program.values, narrow, wide, frozenset(first)
        self._everywhere = Everywhere(narrow, wide)
        self._inside = False

    def before(self, node: Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Widen the arguments of a call that begins an island or is given a value of one."""
        self._inside = not node.written and (node.index in self._first or self._is_given_wide(node, args, kwargs))
        return self._everywhere.before(node, args, kwargs) if self._inside else (args, kwargs)

    def after(self, node: Node, result: Any) -> Any:
        """Return to the narrow type where everything fits."""
        del node
        return pytree.tree_map(self._narrowed, result) if self._inside else result

    def _is_given_wide(self, node: Node, args: Any, kwargs: Any) -> bool:
        given = [tensor for tensor in tensors([*args, *kwargs.values()]) if tensor is not None]
        recorded = [self._values[number].dtype for number in node.inputs()]
        return any(r == self._narrow and t.dtype == self._wide for r, t in zip(recorded, given, strict=False))

    def _narrowed(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or item.dtype != self._wide or not item.numel():
            return item
        largest = item.detach().abs().max()
        return item.to(self._narrow) if bool(largest <= torch.finfo(self._narrow).max / 2) else item
