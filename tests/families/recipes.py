"""Formulas as people write them: losses, distances, attention and normalisations by hand, in full and in half precision."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from families import INF, case, half, masked, t

ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def whiten(values: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Put the inverse root of a matrix together."""
    return (vectors * values.rsqrt()) @ vectors.mT


case(
    "softmax dim 0",
    "softmax_all_masked",
    lambda x: masked(x, [[True, False], [True, False]]).softmax(0).square(),
    torch.zeros(2, 2),
)
case(
    "softmax 1 of batch",
    "softmax_all_masked",
    lambda x: masked(x, [[[True, False], [True, True]], [[False, False], [True, True]]]).softmax(-1).square(),
    torch.zeros(2, 2, 2),
)
case(
    "sdpa causal+pad bool gqa",
    "clean",
    lambda q: F.scaled_dot_product_attention(
        q, q, q, attn_mask=(torch.ones(4, 4).tril().bool() & torch.tensor([False, True, True, True]))
    ),
    torch.linspace(-1.0, 1.0, 64).reshape(1, 2, 4, 8),
)
case(
    "enc layer src pad",
    "clean",
    lambda x: ENCODER(x, src_key_padding_mask=torch.tensor([[True] * 4, [False] * 4])),
    torch.linspace(-1.0, 1.0, 64).reshape(2, 4, 8),
)
case("layernorm tiny eps grad", "clean", lambda x: F.layer_norm(x, [3], eps=1e-40) * t(1.0, 2.0, 3.0), torch.ones(1, 3))
case(
    "layernorm dropped row",
    "where_masked_gradient",
    lambda x: F.layer_norm(x, [3], eps=0.0)[1:].square(),
    t([1.0, 1.0, 1.0], [1.0, 2.0, 4.0]),
)
case(
    "bn eps tiny",
    "clean",
    lambda x: F.batch_norm(x, None, None, training=True, eps=1e-50) * t(1.0, 2.0, 3.0),
    torch.ones(2, 3),
)
case(
    "bn eval zero var eps0",
    "zero_variance",
    lambda x: F.batch_norm(x, torch.zeros(3), torch.zeros(3), eps=0.0),
    torch.ones(2, 3),
)
case("rms one row", "zero_variance", lambda x: F.rms_norm(x, [3], eps=0.0), t([0.0, 0.0, 0.0], [1.0, 2.0, 3.0]))
case(
    "norm one row second",
    "norm_grad_at_zero",
    lambda x: (torch.autograd.grad(x.norm(dim=-1).sum(), x, create_graph=True)[0].norm(dim=-1) - 1) ** 2,
    t([0.0, 0.0, 0.0], [1.0, 2.0, 3.0]),
)
case(
    "eigh batch",
    "degenerate_spectrum_grad",
    lambda x: torch.linalg.eigh(x)[1][:, 0],
    torch.stack([torch.eye(3), torch.diag(t(1.0, 2.0, 3.0))]),
)
case("svd rank1 2x2", "clean", lambda x: torch.linalg.svd(x)[0][0], t([1.0, 1.0], [1.0, 1.0]))
case(
    "svd U wide",
    "degenerate_spectrum_grad",
    lambda x: torch.linalg.svd(x, full_matrices=False)[2][0],
    t([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]),
)
case("inv batch", "singular_matrix", lambda x: torch.linalg.inv_ex(x)[0], torch.stack([torch.eye(2), torch.ones(2, 2)]))
case("inverse of tiny", "overflow", lambda x: torch.linalg.inv_ex(x)[0], torch.diag(t(1e-40, 1e-40)))
case("pinv grad", "clean", torch.linalg.pinv, torch.zeros(3, 2))
case("matrix_rank", "clean", lambda x: x * torch.linalg.matrix_rank(x), torch.zeros(2, 2))
case("matrix norm 2", "clean", lambda x: torch.linalg.matrix_norm(x, 2), torch.eye(2))
case("whiten", "division_by_zero", lambda x: whiten(*torch.linalg.eigh(x)), torch.zeros(2, 2))
case("whiten neg", "sqrt_of_negative", lambda x: whiten(*torch.linalg.eigh(x)), t([1.0, 2.0], [2.0, 1.0]))
case(
    "logsumexp part grads", "clean", lambda x: masked(x, [[True, False], [True, True]]).logsumexp(-1), torch.zeros(2, 2)
)
case(
    "logsumexp grad dropped by index",
    "logsumexp_grad_all_neginf",
    lambda x: (x + t([0.0, 0.0], [-INF, -INF])).logsumexp(-1)[:1],
    torch.zeros(2, 2),
)
case(
    "logaddexp chain",
    "logsumexp_grad_all_neginf",
    lambda x: torch.logaddexp(x + t(-INF, 0.0), x + t(-INF, 0.0))[1:],
    torch.zeros(2),
)
case("logcumsumexp grad", "logsumexp_grad_all_neginf", lambda x: (x + t(-INF, 0.0)).logcumsumexp(0)[1:], torch.zeros(2))
case(
    "log_softmax grad dropped",
    "softmax_all_masked",
    lambda x: (x + t([0.0, 0.0], [-INF, -INF])).log_softmax(-1)[:1],
    torch.zeros(2, 2),
)
case(
    "softmax grad dropped",
    "softmax_all_masked",
    lambda x: (x + t([0.0, 0.0], [-INF, -INF])).softmax(-1)[:1].square(),
    torch.zeros(2, 2),
)
case("cumprod grad", "clean", lambda x: x.cumprod(0), t(0.0, 0.0, 2.0))
case("prod grad inf", "overflow", lambda x: x.prod() * 0, t(1e30, 1e30, 0.0))
case("var grad single masked", "where_masked_gradient", lambda x: x.var().nan_to_num(0.0) + x.sum(), t(1.0))
case("mean empty masked", "clean", lambda x: x[:0].mean().nan_to_num(0.0) + x.sum(), t(1.0))
case(
    "bce hand",
    "log_of_zero",
    lambda x: -(t(1.0, 0.0) * x.sigmoid().log() + (1 - t(1.0, 0.0)) * (1 - x.sigmoid()).log()),
    t(200.0, 200.0),
)
case(
    "bce hand 0*inf",
    "log_of_zero",
    lambda x: -(t(1.0, 1.0) * x.sigmoid().log() + (1 - t(1.0, 1.0)) * (1 - x.sigmoid()).log()),
    t(200.0, 200.0),
)
case(
    "kl probs",
    "log_of_zero",
    lambda x: x.softmax(0) * (x.softmax(0).log() - t(0.0, 0.0).softmax(0).log()),
    t(200.0, 0.0),
)
case("kl 0/0", "zero_over_zero", lambda x: x.softmax(0) * (x.softmax(0) / t(1.0, 0.0)).log(), t(200.0, 0.0))
case("js", "log_grad_at_zero", lambda x: torch.xlogy(x.softmax(0), x.softmax(0)), t(200.0, 0.0))
case(
    "nll ignore one inf",
    "clean",
    lambda x: F.nll_loss((x + t([0.0, -INF])).log_softmax(-1), torch.tensor([0])),
    torch.zeros(1, 2),
)
case(
    "ce masked class fp16",
    "loss_target_invalid",
    lambda x: F.cross_entropy(masked(x, [[True, False], [True, True]]), torch.tensor([1, 0])),
    torch.zeros(2, 2).half(),
)
case("gaussian nll exp", "exp_overflow", lambda x: (-x).exp() * 4, t(-100.0))
case("poisson exp grad only", "where_masked_gradient", lambda x: x.exp().clamp(max=1e9), t(100.0, 1.0))
case("cosh ce", "exp_overflow", lambda x: x.cosh().log(), t(100.0))
case("huber inf", "clean", lambda x: F.huber_loss(x * 1e10, t(0.0)), t(1e25))
case("mse grad ovf", "overflow", lambda x: F.mse_loss(x * 1e20, t(0.0)), t(1.0))
case(
    "dice per sample",
    "zero_over_zero",
    lambda x: (
        1
        - (2 * (x.relu() * t([0.0, 0.0], [1.0, 1.0])).sum(-1)) / (x.relu().sum(-1) + t([0.0, 0.0], [1.0, 1.0]).sum(-1))
    ),
    t([-1.0, -1.0], [1.0, 1.0]),
)
case(
    "iou zero boxes",
    "zero_over_zero",
    lambda b: (b[:, 2] - b[:, 0]).clamp(0) * (b[:, 3] - b[:, 1]).clamp(0) / ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])),
    t([1.0, 1.0, 1.0, 1.0]),
)
case(
    "aspect atan",
    "where_masked_gradient",
    lambda b: torch.atan((b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1])),
    t([1.0, 1.0, 2.0, 1.0]),
)
case(
    "aspect 0/0",
    "zero_over_zero",
    lambda b: torch.atan((b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1])),
    t([1.0, 1.0, 1.0, 1.0]),
)
case("log wh", "log_of_zero", lambda b: torch.log((b[:, 2] - b[:, 0]) / 4.0), t([1.0, 1.0, 1.0, 1.0]))
case("inv depth", "division_by_zero", lambda d: 1 / d, t(0.0, 1.0))
case(
    "inv depth grad masked",
    "where_masked_gradient",
    lambda d: torch.where(d > 0, 1 / d.clamp(min=0), torch.zeros(2)),
    t(0.0, 1.0),
)
case("normalise by max", "zero_over_zero", lambda x: x / x.max(), torch.zeros(3))
case("degree norm", "pow_domain", lambda x: x * x.sum(-1).pow(-0.5), torch.zeros(2, 2))
case("softmax by hand", "exp_overflow", lambda x: x.exp() / x.exp().sum(), t(100.0, 1.0))
case("softmax by hand under", "zero_over_zero", lambda x: x.exp() / x.exp().sum(), t(-200.0, -200.0))
case("logmeanexp", "log_of_zero", lambda x: x.exp().mean().log(), t(-200.0, -200.0))
case("quat", "sqrt_of_negative", lambda x: (1 + x).sqrt() / 2, t(-1.0000001, 1.0))
case("angle cos", "clean", lambda x: torch.acos(F.cosine_similarity(x, x, dim=0)), t(1.0, 1.0, 1.0001))
case("rotation log", "zero_over_zero", lambda x: torch.acos(x) / (2 * torch.acos(x).sin()), t(1.0))
case("slerp", "zero_over_zero", lambda x: torch.sin(0.5 * torch.acos(x)) / torch.sin(torch.acos(x)), t(1.0))
case(
    "gram diag sqrt",
    "sqrt_grad_at_zero",
    lambda x: (x.square().sum(1)[:, None] + x.square().sum(1)[None] - 2 * x @ x.T).clamp(min=0).sqrt(),
    torch.ones(2, 3),
)
case(
    "gram sqrt neg",
    "sqrt_grad_at_zero",
    lambda x: (x.square().sum(1)[:, None] + x.square().sum(1)[None] - 2 * x @ x.T).sqrt(),
    torch.full((2, 3), 0.1) * t([1.0], [1.0001]),
)
case("focal", "log_of_zero", lambda x: -((1 - x.sigmoid()) ** 2 * x.sigmoid().log()), t(-200.0))
case(
    "focal gamma<1 grad",
    "pow_grad_at_zero",
    lambda x: (1 - x.sigmoid()) ** 0.5 * (x.sigmoid().clamp(min=1e-6)).log(),
    t(200.0),
)
case("gem", "pow_grad_at_zero", lambda x, p: x.clamp(min=0).pow(p).mean().pow(1 / p), t(0.0, 0.0), t(3.0))
case("ppo ratio", "exp_overflow", lambda x: (x - t(0.0)).exp() * 2, t(100.0))
case(
    "ratio clipped",
    "where_masked_gradient",
    lambda x: torch.min((x).exp() * 1.0, x.exp().clamp(0.8, 1.2) * 1.0),
    t(100.0),
)
case("weights*inf", "zero_times_inf", lambda x: x.softmax(0) @ t(1.0, INF), t(0.0, -INF))
case("attn 0*inf", "fp16_overflow", lambda x: (x * half(0.0)) @ (x * 3e4 * half(4.0))[:, None], half(1.0, 1.0))
case("temperature 0", "zero_over_zero", lambda x: (x / 0.0).softmax(0).square(), t(1.0, 0.0))
case("temperature underflow", "overflow", lambda x, heat: (x / heat).softmax(0).square(), t(1.0, 0.0), t(1e-40))
case("ema debias", "division_by_zero", lambda x: x / (1 - 0.999**0), t(1.0))
case("std 1e-8 fp16", "zero_variance", lambda x: (x - x.mean()) / (x.std() + 1e-8), torch.ones(4).half())
case("logvar div", "division_by_zero", lambda m, lv: m**2 / lv.exp(), t(1.0), t(-200.0))
case("logvar div2", "overflow", lambda m, lv: m**2 / lv.exp(), t(1e10), t(-80.0))
case("asin hav", "trig_domain", lambda a: torch.asin(a.sqrt()), t(1.0000002))
case("fp16 sum", "fp16_overflow", lambda x: x.sum() / 4, half(3e4, 3e4, 3e4, 3e4))
case("fp16 var", "fp16_overflow", lambda x: ((x - x.mean()) ** 2).mean(), half(600.0, -600.0))
case("fp16 layernorm", "clean", lambda x: F.layer_norm(x, [2]), half(6e4, -6e4))
case("fp16 add residual", "fp16_overflow", lambda x: x + x, half(6e4))
case(
    "fp16 mask -1e9",
    "fp16_overflow",
    lambda x: x.float().masked_fill(torch.tensor([True, False]), -1e9).half(),
    half(1.0, 1.0),
)
case("fp16 mul const", "fp16_overflow", lambda x: x * -1e9, half(1.0, 1.0))
case("fp16 gelu tanh grad", "grad_overflow_fp16", lambda x: torch.tanh(x * 0.1).float() * 1e6, half(1.0))
case("complex abs log", "log_of_zero", lambda x: torch.fft.rfft(x).abs().log(), torch.zeros(4))
case("complex angle grad", "clean", lambda x: torch.fft.rfft(x).angle(), torch.zeros(4))
case("atan2 by hand", "zero_over_zero", lambda x, y: torch.atan(y / x), t(0.0), t(0.0))
case("polar div", "zero_over_zero", lambda x: x / x.abs(), torch.zeros(2, dtype=torch.complex64))
case("sgn", "clean", lambda x: x.sgn(), torch.zeros(2, dtype=torch.complex64))
case("interp nan", "zero_over_zero", lambda x: F.interpolate((x / x)[None, None], scale_factor=2), t(0.0, 1.0))
case("conv 0/0", "zero_over_zero", lambda x: F.conv1d((x / x)[None, None], torch.ones(1, 1, 1)), t(0.0, 1.0, 2.0))
case("sparse mm", "zero_over_zero", lambda x: torch.sparse.mm(torch.eye(2).to_sparse(), (x / x)[:, None]), t(0.0, 1.0))
case("diff both", "inf_minus_inf", lambda x: (x + t(-INF, -INF)).diff(), t(0.0, 0.0))
case("max-x inf", "inf_minus_inf", lambda x: (x + t(-INF, -INF)) - (x + t(-INF, -INF)).max(), t(0.0, 0.0))
case("weighted mean", "zero_over_zero", lambda x, w: (x * w.relu()).sum() / w.relu().sum(), t(1.0, 2.0), t(-1.0, -1.0))
case("batch renorm", "zero_variance", lambda x: (x - x.mean(0)) / x.var(0, correction=0).sqrt(), torch.ones(3, 2))
case(
    "pearson",
    "zero_over_zero",
    lambda x: ((x - x.mean()) * (t(1.0, 2.0, 3.0) - 2)).sum() / ((x - x.mean()).norm() * (t(1.0, 2.0, 3.0) - 2).norm()),
    torch.ones(3),
)
case("coef var", "zero_over_zero", lambda x: x.std() / x.mean(), torch.zeros(3))
case(
    "snr log10",
    "division_by_zero",
    lambda x: 10 * torch.log10(x.square().sum() / (x - x.detach()).square().sum()),
    t(1.0, 2.0),
)
case("psnr", "log_of_zero", lambda x: -10 * torch.log10((x - x.detach()).square().mean()), t(1.0, 2.0))
