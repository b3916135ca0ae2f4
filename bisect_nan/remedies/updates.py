"""Changes to the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_map

from bisect_nan.finding import Phase
from bisect_nan.recording.program import Arguments, Node
from bisect_nan.remedies.proposal import Proposal, Site, operands
from bisect_nan.replaying.differentiable import Types

_SENSIBLE = 1e-3
"""A learning rate, or any other hyper-parameter, that is a number at all."""


def finite_hyperparameter(site: Site) -> Iterator[Proposal]:
    """Put a number in the place of hyper-parameters that are none."""
    if not site.program.targets.parameters:
        return
    yield Proposal(
        "finite_hyperparameter",
        f"find out what set the hyper-parameter; tried with {_SENSIBLE:g} in its place",
        types=_Hyperparameters(),
        local=False,
    )


def larger_eps(site: Site) -> Iterator[Proposal]:
    """Give the optimizer an eps that the parameter's type can hold."""
    name = {"addcdiv": "tensor2", "div": "other"}.get(site.op.removeprefix("_foreach_"))
    if name is None:
        return
    wider = ", or keep its state in float32" if site.dtype in (torch.float16, torch.bfloat16) else ""
    for eps in (1e-4,) if site.dtype is torch.float16 else (1e-8, 1e-4):
        yield Proposal(
            "larger_eps",
            f"give the optimizer eps={eps:g}{wider}",
            changes=site.everywhere(operands(**{name: lambda x, eps=eps: x + eps})),
            local=not site.op.startswith("_foreach_"),  # one of those returns nothing, so the step has to show it
        )


def some_eps(site: Site) -> Iterator[Proposal]:
    """Give an optimizer of torch's, which was made with eps=0, an eps: its line is the call of `step`, where nothing can be clamped."""
    if site.op == "addcdiv" and site.node is not None and site.node.phase is Phase.OPTIMIZER:
        yield from larger_eps(site)


def lower_rate(site: Site) -> Iterator[Proposal]:
    """Make the step that an update takes smaller."""
    if site.node is None or site.node.phase is not Phase.OPTIMIZER:
        return

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        sizes = {name: item * 1e-6 for name, item in arguments.items() if name in {"alpha", "value"} and item}
        return target(**{**arguments, **sizes})

    parameters = {p.value for p in site.program.placeholders if p.phase is Phase.PARAMETER}
    moves = [index for index in site.alike() if parameters.intersection(site.program.nodes[index].written)]
    if site.node.index not in moves:
        return  # weight decay, momentum: no learning rate
    yield Proposal(
        "lower_learning_rate",
        "lower the learning rate, or look for what grew over the last steps; tried with a millionth of it",
        changes=dict.fromkeys(moves, change),
        local=False,
    )


def scale_back(site: Site) -> Iterator[Proposal]:
    """Take the parameters back to the size that they had before they grew."""
    history = () if site.evidence is None else site.evidence.history
    sizes = [numbers["parameter_norm"] for numbers in history if numbers.get("parameter_norm", 0.0) > 0]
    if len(sizes) < 2 or not min(sizes) < sizes[-1]:  # noqa: PLR2004
        return
    share = min(sizes) / sizes[-1]
    # Momentum has grown with them, and would undo it in the same update.
    there = {
        p.value: site.tensors[p.value]
        for p in site.program.placeholders
        if p.value in site.tensors and site.tensors[p.value].is_floating_point()
        if p.phase is Phase.PARAMETER or (p.phase is Phase.OPTIMIZER and site.tensors[p.value].dim() > 0)
    }
    yield Proposal(
        "scale_back",
        "lower the learning rate or clip the gradients, and start again from weights before they grew; tried with the weights"
        f" scaled back from the norm {sizes[-1]:.3g} to {min(sizes):.3g}, which they had before",
        placeholders={n: tensor * share for n, tensor in there.items()},
        local=False,
    )


def skip_update(site: Site) -> Iterator[Proposal]:
    """Leave out an update whose gradient is non-finite."""
    gradients = [p for p in site.program.placeholders if p.phase is Phase.INPUT and p.name.startswith("gradient of ")]
    bad = {p.value: site.tensors[p.value] for p in gradients if p.value in site.tensors}
    bad = {value: tensor for value, tensor in bad.items() if not bool(tensor.isfinite().all())}
    if bad:
        zeros = {value: torch.zeros_like(tensor) for value, tensor in bad.items()}
        text = "skip optimizer.step() when a gradient is non-finite, and look for the fault in the backward pass"
        yield Proposal("skip_update", text, placeholders=zeros, local=False)


class _Hyperparameters(Types):
    """Replaces Python numbers, and scalars from outside, that are NaN or infinite."""

    def placeholder(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a scalar that is no number."""
        scalar = tensor.numel() == 1 and tensor.is_floating_point() and not bool(tensor.isfinite().all())
        return torch.full_like(tensor, _SENSIBLE) if scalar else tensor

    def before(self, node: Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace numbers that are none."""
        del node
        replaced: tuple[Any, Any] = pytree.tree_map(_sensible, (args, kwargs))
        return replaced


def _sensible(item: Any) -> Any:
    if isinstance(item, float) and not math.isfinite(item):
        return math.copysign(_SENSIBLE, item) if math.isinf(item) else _SENSIBLE
    return item
