"""Softmax and its kin: rows without any score, by hand, fused, and in attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import attention

from families import INF, case, half, masked, t

QUERY = torch.linspace(-1.0, 1.0, 64).reshape(1, 2, 4, 8)
SEEN = torch.ones(4, 4, dtype=torch.bool)
SEEN[2] = False
BIAS = torch.zeros(4, 4).masked_fill(~SEEN, -INF)
ATTENTION = nn.MultiheadAttention(8, 2, batch_first=True)
PADDED = torch.tensor([[True] * 4, [False] * 4])


def in_steps(query: torch.Tensor) -> torch.Tensor:
    """Run attention as single operations."""
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, query, query, attn_mask=BIAS)


case(
    "softmax",
    "softmax_all_masked",
    lambda x: masked(x, [[True, True], [False, False]]).softmax(-1).square(),
    torch.zeros(2, 2),
)
case(
    "softmax grad only",
    "clean",
    lambda x: masked(x, [[True, True], [False, False]]).softmax(-1)[0].square(),
    torch.zeros(2, 2),
)
case(
    "log_softmax",
    "softmax_all_masked",
    lambda x: masked(x, [[True, True], [False, False]]).log_softmax(-1)[:, :1],
    torch.zeros(2, 2),
)
case("softmax +inf", "exp_overflow", lambda x: (x * 100).exp().softmax(-1).square(), t(1.0, 1.0))
case(
    "softmax fp16",
    "softmax_all_masked",
    lambda x: masked(x, [[True, True], [False, False]]).softmax(-1).square(),
    torch.zeros(2, 2).half(),
)
case(
    "softmax half_to_float",
    "softmax_all_masked",
    lambda x: masked(x, [[True, True], [False, False]]).softmax(-1, dtype=torch.float32).square(),
    torch.zeros(2, 2).half(),
)
case(
    "logsumexp value",
    "inf_minus_inf",
    lambda x: masked(x, [[True, True], [False, False]]).logsumexp(-1),
    torch.zeros(2, 2),
)
case(
    "logsumexp grad",
    "clean",
    lambda x: masked(x, [[True, True], [False, False]]).logsumexp(-1).masked_fill(torch.tensor([False, True]), 0.0),
    torch.zeros(2, 2),
)
case("sdpa bool mask", "clean", lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=SEEN), QUERY)
case("sdpa float mask", "clean", lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=BIAS), QUERY)
case("sdpa math", "clean", in_steps, QUERY)
case("sdpa fp16", "clean", lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=BIAS.half()), QUERY.half())
case("sdpa big f32", "overflow", lambda q: F.scaled_dot_product_attention(q, q, q), QUERY * 1e25)
case(
    "sdpa +inf bias",
    "inf_minus_inf",
    lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(4, 4) + INF),
    QUERY,
)
case(
    "mha key_padding",
    "softmax_all_masked",
    lambda x: ATTENTION(x, x, x, key_padding_mask=PADDED)[0].square(),
    torch.linspace(-1.0, 1.0, 64).reshape(2, 4, 8),
)
case(
    "mha no weights",
    "clean",
    lambda x: ATTENTION(x, x, x, key_padding_mask=PADDED, need_weights=False)[0].square(),
    torch.linspace(-1.0, 1.0, 64).reshape(2, 4, 8),
)
case(
    "mha attn_mask bool",
    "softmax_all_masked",
    lambda x: ATTENTION(x, x, x, attn_mask=~SEEN)[0].square(),
    torch.linspace(-1.0, 1.0, 64).reshape(2, 4, 8),
)
case(
    "softmin",
    "softmax_all_masked",
    lambda x: F.softmin(-masked(x, [[True, True], [False, False]]), -1).square(),
    torch.zeros(2, 2),
)
case(
    "gumbel",
    "softmax_all_masked",
    lambda x: F.gumbel_softmax(masked(x, [[True, True], [False, False]])).square(),
    torch.zeros(2, 2),
)
case("logcumsumexp value", "inf_minus_inf", lambda x: masked(x, [False, True]).logcumsumexp(0), torch.zeros(2))
case(
    "logaddexp grad",
    "clean",
    lambda x: torch.logaddexp(masked(x, [False, True]), masked(x, [False, True]))[1:],
    torch.zeros(2),
)
case(
    "masked softmax by add of finfo min fp16",
    "fp16_overflow",
    lambda x: x + torch.finfo(torch.float16).min,
    half(-100.0, 1.0),
)
