"""Scattering, segments, quantisation, distributions, and infinities that were meant."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import distributions

from families import INF, NAN, case, half, masked, t


def entropy(logp: torch.Tensor) -> torch.Tensor:
    """Compute the entropy as it is written in papers."""
    return -(logp.exp() * logp)


TABLE = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)

case(
    "embedding_bag empty mean",
    "clean",
    lambda x: F.embedding_bag(torch.tensor([0, 1]), x, torch.tensor([0, 0]), mode="mean"),
    TABLE,
)
case("embedding max_norm", "clean", lambda x: F.embedding(torch.tensor([0, 1]), x * 1, max_norm=1.0), torch.zeros(4, 3))
case(
    "scatter_reduce mean none",
    "clean",
    lambda x: torch.zeros(3).scatter_reduce(0, torch.tensor([0, 0]), x, "mean", include_self=False),
    t(1.0, 2.0),
)
case(
    "segment mean empty",
    "empty_reduction",
    lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([2, 0])),
    t(1.0, 2.0),
)
case(
    "segment max empty",
    "empty_reduction",
    lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([2, 0])),
    t(1.0, 2.0),
)
case(
    "scatter amax -inf",
    "inf_minus_inf",
    lambda x: torch.full((3,), -INF).scatter_reduce(0, torch.tensor([0, 0]), x, "amax"),
    t(1.0, 2.0),
)
case(
    "scatter amax inc self False",
    "inf_minus_inf",
    lambda x: torch.full((3,), -INF).scatter_reduce(0, torch.tensor([0, 0]), x, "amax", include_self=False),
    t(1.0, 2.0),
)
case(
    "scatter prod",
    "overflow",
    lambda x: torch.ones(3).scatter_reduce(0, torch.tensor([0, 0]), x, "prod"),
    t(1e30, 1e30),
)
case(
    "scatter prod grad",
    "clean",
    lambda x: torch.ones(3).scatter_reduce(0, torch.tensor([0, 0]), x, "prod"),
    t(0.0, 1.0),
)
case(
    "index_add fp16",
    "fp16_overflow",
    lambda x: torch.zeros(2, dtype=torch.float16).index_add(0, torch.tensor([0, 0]), x),
    half(6e4, 6e4),
)
case("scatter_add ovf", "overflow", lambda x: torch.zeros(2).scatter_add(0, torch.tensor([0, 0]), x), t(3e38, 3e38))
case(
    "maxpool all -inf",
    "inf_minus_inf",
    lambda x: F.max_pool1d(masked(x, [[[False, False, True, True]]]), 2),
    torch.zeros(1, 1, 4),
)
case("unfold gather", "clean", lambda x: x.gather(0, torch.tensor([0])), t(1.0, 2.0))
case("fake_quant scale 0", "clean", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.0, 0, -128, 127), t(1.0, 0.0))
case(
    "fake_quant tensor scale 0",
    "clean",
    lambda x: torch.fake_quantize_per_tensor_affine(x, torch.tensor(0.0), torch.tensor(0), -128, 127),
    t(1.0, 0.0),
)
case(
    "fake_quant channel",
    "clean",
    lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.zeros(2), torch.zeros(2, dtype=torch.int32), 0, -128, 127
    ),
    t(1.0, 0.0),
)
case("hand quant", "zero_over_zero", lambda x: (x / (x.abs().max() / 127)).round(), t(0.0, 0.0))
case(
    "grid_sample inf",
    "exp_overflow",
    lambda g: F.grid_sample(torch.ones(1, 1, 2, 2), (g * 100).exp().reshape(1, 1, 1, 2), align_corners=False),
    t(1.0, 1.0),
)
case(
    "interpolate ovf",
    "overflow",
    lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    torch.tensor([[[[3e38, -3e38], [-3e38, 3e38]]]]),
)
case(
    "normal scale 0",
    "log_of_zero, zero_over_zero",
    lambda s: distributions.Normal(t(0.0), s, validate_args=False).log_prob(t(0.0)),
    t(0.0),
)
case(
    "normal scale 0 x",
    "log_of_zero, division_by_zero",
    lambda s: distributions.Normal(t(0.0), s, validate_args=False).log_prob(t(1.0)),
    t(0.0),
)
case(
    "categorical zero",
    "zero_over_zero",
    lambda p: distributions.Categorical(p, validate_args=False).log_prob(torch.tensor(0)),
    t(0.0, 0.0),
)
case(
    "categorical entropy masked",
    "clean",
    lambda x: distributions.Categorical(logits=masked(x, [True, False])).entropy(),
    t(0.0, 0.0),
)
case("beta 0", "function_pole", lambda a: distributions.Beta(a, t(1.0), validate_args=False).log_prob(t(0.5)), t(0.0))
case("beta x 0", "log_of_zero", lambda a: distributions.Beta(a, t(2.0), validate_args=False).log_prob(t(0.0)), t(2.0))
case("gamma 0", "function_pole", lambda a: distributions.Gamma(a, t(1.0), validate_args=False).log_prob(t(0.5)), t(0.0))
case(
    "dirichlet 0",
    "function_pole",
    lambda a: distributions.Dirichlet(a, validate_args=False).log_prob(t(0.5, 0.5)),
    t(0.0, 1.0),
)
case(
    "kl normal 0",
    "log_of_zero",
    lambda s: distributions.kl_divergence(
        distributions.Normal(t(0.0), s, validate_args=False), distributions.Normal(t(0.0), t(1.0))
    ),
    t(0.0),
)
case(
    "bernoulli inf logits",
    "inf_minus_inf",
    lambda x: distributions.Bernoulli(logits=masked(x, [True, False]), validate_args=False).log_prob(t(1.0, 0.0)),
    t(0.0, 0.0),
)
case("mvn", "clean", lambda x: distributions.MultivariateNormal(x, torch.eye(2)).log_prob(t(0.0, 0.0)), t(0.0, 0.0))
case(
    "lognormal 0",
    "log_of_zero",
    lambda x: distributions.LogNormal(x, t(1.0), validate_args=False).log_prob(t(0.0)),
    t(0.0),
)
case("tanh inv", "trig_domain", lambda x: torch.atanh(torch.tanh(x)), t(20.0))
case("tanh logprob", "log_of_zero", lambda x: (1 - torch.tanh(x) ** 2).log(), t(20.0))
case(
    "poisson log_prob 0",
    "log_grad_at_zero",
    lambda r: distributions.Poisson(r, validate_args=False).log_prob(t(0.0)),
    t(0.0),
)
case("clamp nan bound", "zero_over_zero", lambda x: x.clamp(min=(x * 0) / (x * 0)), t(1.0, 2.0))
case("clamp nan const", "nonfinite_constant", lambda x: x.clamp(min=NAN), t(1.0, 2.0))
case("mul nan const", "nonfinite_constant", lambda x: x * NAN, t(1.0, 2.0))
case("0*inf", "exp_overflow", lambda x: (x * 100).exp() * t(0.0), t(1.0))
case("mask mult -inf", "zero_times_inf", lambda x: masked(x, [False, True]) * t(0.0, 1.0), t(1.0, 1.0))
case("entropy", "log_of_zero", lambda x: -(x.softmax(0) * x.softmax(0).log()), t(200.0, 0.0))
case("entropy masked", "zero_times_inf", lambda x: entropy(masked(x, [True, False]).log_softmax(0)), t(0.0, 0.0))
case("matmul -inf 0", "zero_times_inf", lambda x: masked(x, [[False, True]]) @ t([0.0], [1.0]), t([1.0, 1.0]))
case("inf - inf", "inf_minus_inf", lambda x: masked(x, [False, True]) - masked(x, [False, True]), t(1.0, 1.0))
case("mean -inf", "inf_minus_inf", lambda x: masked(x, [False, True]).mean(), t(1.0, 1.0))
case("var -inf", "inf_minus_inf", lambda x: masked(x, [False, True]).var(), t(1.0, 1.0))
case("layernorm -inf", "inf_minus_inf", lambda x: F.layer_norm(masked(x, [False, True]), [2]), t(1.0, 1.0))
case("cumsum -inf", "inf_minus_inf", lambda x: masked(x, [False, True]).cumsum(0), t(1.0, 1.0))
case("lerp", "overflow", lambda x: torch.lerp(x, -x, 0.5), t(3e38))
case("lerp nan", "inf_minus_inf", lambda x: torch.lerp(masked(x, [False]), x, 1.0), t(1.0))
case("addcmul ovf", "overflow", lambda x: torch.addcmul(x, x, x), t(1e30))
case("grad overflow", "grad_overflow", lambda x: x * 1e30 * 1e30, t(1e-35))
case("fp16 grad", "grad_overflow_fp16", lambda x: x.float() * 1e6, half(1.0))
case("nan_to_num grad", "where_masked_gradient", lambda x: x.sqrt().nan_to_num(0.0), t(-1.0, 1.0))
case("max of bad", "where_masked_gradient", lambda x: torch.maximum(x.log(), t(-5.0)), t(0.0, 1.0))
case("silu -inf", "zero_times_inf", lambda x: F.silu(masked(x, [False])), t(1.0))
case("gelu -inf", "zero_times_inf", lambda x: F.gelu(masked(x, [False])), t(1.0))
case("dropout p=1", "clean", lambda x: F.dropout(x, 1.0), t(1.0))
case("bilinear", "overflow", lambda x: F.bilinear(x, x, torch.full((1, 2, 2), 1e20)), torch.full((1, 2), 1e20))
case("quantile nan", "zero_over_zero", lambda x: (x / x).quantile(0.5), t(0.0, 1.0))
case("cross entropy T=0", "division_by_zero", lambda x: F.cross_entropy(x / 0.0, torch.tensor([0])), t([1.0, 2.0]))
case("corrcoef const", "zero_over_zero", torch.corrcoef, t([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]))
case("cov dof", "zero_over_zero", torch.cov, t([1.0], [2.0]))
case("trapz", "overflow, overflow", lambda x: torch.trapezoid(x * 1e38), t(3.0, 3.0))
case(
    "rnn relu ovf",
    "overflow",
    lambda w: torch.relu(torch.relu(torch.ones(1, 2) * 1e20 @ w) @ w),
    torch.full((2, 2), 1e10),
)
case("logcumsum", "exp_overflow", lambda x: x.exp().cumsum(0).log(), t(100.0, 1.0))
case("std of inf", "exp_overflow", lambda x: (x * 100).exp().std(), t(1.0, 2.0))
case(
    "xent label_smooth", "clean", lambda x: F.cross_entropy(x, torch.tensor([0]), label_smoothing=0.1), t([200.0, 0.0])
)
case("float to int", "clean", lambda x: x * (x * 100).exp().long().float().clamp(max=9.0), t(1.0, 2.0))
case(
    "label marked by nan",
    "nonfinite_constant",
    lambda x: (x - t(1.0, 2.0).masked_fill(t(0.0, 1.0) > 0, NAN)).square(),
    t(1.0, 2.0),
)
case("argmin over inf", "clean", lambda x: x[masked(x, [True, False]).argmax()], t(1.0, 2.0))
