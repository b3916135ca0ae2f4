"""Normalisations, norms and deviations of values that do not differ, or that are too large."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from families import case, half, t

case("layer_norm eps0", "zero_variance", lambda x: F.layer_norm(x, [3], eps=0.0), torch.ones(2, 3))
case("layer_norm fp16 eps", "zero_variance", lambda x: F.layer_norm(x, [3], eps=0.0), torch.ones(2, 3).half())
case(
    "batch_norm eval neg var",
    "sqrt_of_negative",
    lambda x: F.batch_norm(x, torch.zeros(3), torch.full((3,), -1.0)),
    torch.ones(2, 3),
)
case("group_norm eps0", "zero_variance", lambda x: F.group_norm(x, 1, eps=0.0), torch.ones(2, 4, 3))
case("rms eps0", "zero_variance", lambda x: F.rms_norm(x, [3], eps=0.0), torch.zeros(2, 3))
case("layer_norm overflow", "overflow", lambda x: F.layer_norm(x, [3]), t([3e38, -3e38, 1.0]))
case("layer_norm sq overflow", "clean", lambda x: F.layer_norm(x, [3]), t([1e25, -1e25, 1.0]))
case("rms overflow", "clean", lambda x: F.rms_norm(x, [3]), t([1e25, -1e25, 1.0]))
case("weight_norm", "zero_variance", lambda x: torch._weight_norm(x, torch.ones(2, 1), 0), torch.zeros(2, 3))
case("normalize eps0", "zero_over_zero", lambda x: F.normalize(x, dim=-1, eps=0.0), torch.zeros(2, 3))
case("normalize grad", "clean", lambda x: F.normalize(x, dim=-1), torch.zeros(2, 3))
case("lrn", "zero_over_zero", lambda x: F.local_response_norm(x, 2, k=0.0), torch.zeros(1, 3, 4))
case("x/std", "zero_variance", lambda x: (x - x.mean()) / x.std(), torch.ones(4))
case("x/sqrt var", "zero_variance", lambda x: (x - x.mean()) / x.var().sqrt(), torch.ones(4))
case("sqrt var grad", "sqrt_grad_at_zero", lambda x: (x - x.mean()) / (x.var().sqrt() + 1e-6), torch.ones(4))
case("hand var", "zero_variance", lambda x: (x - x.mean()) / ((x - x.mean()) ** 2).mean().sqrt(), torch.ones(4))
case("hand var rsqrt", "zero_variance", lambda x: (x - x.mean()) * torch.rsqrt(x.var(correction=0)), torch.ones(4))
case(
    "hand var in two lines",
    "zero_variance",
    lambda x: (x - x.mean(-1, keepdim=True)) / (x - x.mean(-1, keepdim=True)).square().sum(-1, keepdim=True).sqrt(),
    torch.ones(2, 4),
)
case("distance by hand", "zero_over_zero", lambda x: (x - 1.0) / (x - 1.0).square().sum().sqrt(), torch.ones(4))
case("x/norm", "zero_over_zero", lambda x: x / x.norm(), torch.zeros(4))
case("1/norm", "zero_variance", lambda x: 1 / x.norm(), torch.zeros(4))
case("minmax", "zero_over_zero", lambda x: (x - x.min()) / (x.max() - x.min()), torch.ones(4))
case("cdist quotient", "zero_variance", lambda x: 1 / torch.cdist(x, x), t([0.1, 0.2], [0.5, 0.3], [0.7, 0.9]))
case("var_mean dof", "degenerate_dof", lambda x: torch.var_mean(x, 0)[0], torch.ones(1, 3))
case("std dof", "degenerate_dof", lambda x: x.std(0), torch.ones(1, 3))
case("std overflow", "overflow", lambda x: x.std(), t(3e38, -3e38))
case("var overflow", "overflow", lambda x: x.var(), t(1e30, -1e30, 0.0))
case("std fp16", "fp16_overflow", lambda x: x.var(), half(6e4, -6e4))
case(
    "norm grad second",
    "norm_grad_at_zero",
    lambda x: (torch.autograd.grad(x.norm(), x, create_graph=True)[0].norm() - 1) ** 2,
    torch.zeros(3),
)
case("norm p=3 grad", "clean", lambda x: x.norm(3), torch.zeros(3))
case("norm p=.5 grad", "clean", lambda x: x.norm(0.5), torch.zeros(3))
case("nuclear norm", "clean", lambda x: torch.linalg.matrix_norm(x, "nuc"), torch.zeros(3, 3))
case("cdist grad", "clean", lambda x: torch.cdist(x, x.detach()), torch.zeros(3, 2))
case("cdist p=.5", "clean", lambda x: torch.cdist(x, x.detach(), p=0.5), torch.zeros(3, 2))
case("hand norm grad", "sqrt_grad_at_zero", lambda x: x.square().sum().sqrt(), torch.zeros(3))
case("pairwise", "clean", lambda x: F.pairwise_distance(x, x.detach()), torch.zeros(3, 2))
case("dist", "clean", lambda x: torch.dist(x, x.detach()), torch.zeros(3))
case("complex abs", "clean", lambda x: x.abs(), torch.zeros(3, dtype=torch.complex64))
case("renorm zero", "clean", lambda x: x.renorm(2, 0, 1.0), torch.zeros(3, 2))
