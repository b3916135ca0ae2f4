"""Faults that only the backward pass shows, or that are made in it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bisect_nan import Phase
from kinds import Batch, Model, kind

# gradients


@kind("sqrt", rows=(3,), phase=Phase.BACKWARD)
def root_beside_a_norm(m: Model, b: Batch) -> torch.Tensor:
    """The derivative of torch's own norm at 0 is masked by torch, that of the root by hand is not."""
    y = m.features(b["x"]) * b["keep"]
    length = y.square().sum(-1).sqrt()  # CULPRIT
    return (y.norm(dim=-1) + length).mean()


@kind("div", rows=(3,), phase=None)
def quotient_not_selected(m: Model, b: Batch) -> torch.Tensor:
    """`where` keeps the quotient out of the loss, not out of the gradient."""
    y = m.features(b["x"])
    scale = m.zero.exp() * b["gap"]
    return torch.where(b["gap"] > 0, y / scale, y).mean()  # CULPRIT


@kind("pow", rows=(3,), phase=None)
def power_with_a_fraction(m: Model, b: Batch) -> torch.Tensor:
    """0 ** 0.4 has no derivative."""
    y = m.features(b["x"]).abs() * b["keep"]
    return y.pow(0.4).mean()  # CULPRIT


@kind("sqrt", phase=Phase.BACKWARD, rows=(3,))
def clamp_at_its_bound(m: Model, b: Batch) -> torch.Tensor:
    """A clamp passes the gradient exactly at its bound; a rectifier does not, so the other root is innocent."""
    y = m.features(b["x"])
    rectified = F.relu(y).sqrt()
    clamped = (y * b["keep"]).clamp(min=0).sqrt()  # CULPRIT
    return rectified.mean() + torch.where(y > 0, clamped, clamped).sum()


@kind("div", phase=Phase.BACKWARD)
def hook_on_a_gradient(m: Model, b: Batch) -> torch.Tensor:
    """A hook divides the gradient by its length, which is 0."""
    y = m.features(b["x"])

    def scale(gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()  # CULPRIT

    branch = y * 2.0
    branch.register_hook(scale)
    return y.mean() + (branch * 0.0).sum()


class _Root(torch.autograd.Function):
    """A root with a derivative of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient / (2 * y)  # BACKWARD


@kind("div", phase=Phase.BACKWARD)
def backward_of_a_function(m: Model, b: Batch) -> torch.Tensor:
    """The line of the Function's own backward is to blame, or the one that applies it."""
    y = m.features(b["x"]).square() * b["keep"]
    return _Root.apply(y).mean()  # CULPRIT


@kind("sqrt", "pow", "div")
def forces_from_a_distance(m: Model, b: Batch) -> torch.Tensor:
    """The derivative is taken inside the step: two points coincide."""
    points = (m.features(b["x"])[:, :3]).detach().requires_grad_()
    offset = points[b["group"]] - points[torch.tensor([1, 0, 2, 3, 1])]
    distance = offset.square().sum(-1).sqrt()  # CULPRIT
    energy = (m.head.weight.sum() * distance).sum()
    (force,) = torch.autograd.grad(energy, points, create_graph=True)
    return force.square().mean()


@kind("sqrt", "pow", phase=Phase.BACKWARD)
def penalty_on_a_gradient(m: Model, b: Batch) -> torch.Tensor:
    """The length of a gradient that is exactly 0 for one row is differentiated once more."""
    x = b["x"].clone().requires_grad_()
    score = (m.features(x) * b["keep"]).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    return (gradient.square().sum(-1).sqrt() - 1).square().mean()  # CULPRIT


@kind("sqrt", rows=(3,), phase=Phase.BACKWARD)
def checkpointed_root(m: Model, b: Batch) -> torch.Tensor:
    """The forward pass is repeated in the backward pass."""

    def block(x: torch.Tensor) -> torch.Tensor:
        y = m.features(x) * b["keep"]
        return y.square().sum(-1).sqrt()  # CULPRIT

    return checkpoint(block, b["x"] * m.zero.exp(), use_reentrant=False).mean()


@kind("log", rows=(3,))
def checkpointed_logarithm(m: Model, b: Batch) -> torch.Tensor:
    """A fault in the forward pass of a checkpointed block."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return m.features(x) + b["one"].log()  # CULPRIT

    return checkpoint(block, b["x"] * m.zero.exp(), use_reentrant=False).mean()


@kind("_to_copy", "half", phase=Phase.BACKWARD)
def gradient_overflows_in_half(m: Model, b: Batch) -> torch.Tensor:
    """The gradient of a scaled loss leaves the range of float16 on its way back."""
    y = m.features(b["x"]).half().float()  # CULPRIT
    return (y * torch.where(b["one"] > 0, 1.0, 1e9)).sum()


@kind("linalg_eigh", "_linalg_eigh", phase=None)
def degenerate_spectrum(m: Model, b: Batch) -> torch.Tensor:
    """Equal eigenvalues have no derivative of their vectors."""
    matrix = torch.eye(3) * (m.features(b["x"]).sum() * 0 + 1)
    values, vectors = torch.linalg.eigh(matrix)  # CULPRIT
    return vectors[0].abs().sum() + values.sum()


@kind("_standard_gamma", rows=(3,), phase=Phase.BACKWARD)
def draw_with_a_vanished_concentration(m: Model, b: Batch) -> torch.Tensor:
    """A gamma variable of concentration 0 is 0, and does not depend on it in a way that has a slope."""
    concentration = F.softplus(m.features(b["x"])) * b["keep"]
    return torch.distributions.Gamma(concentration, 1.0, validate_args=False).rsample().mean()  # CULPRIT
