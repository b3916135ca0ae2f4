"""Sums, products, contractions and casts beyond the range of their type."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from families import case, half, t

case("sum", "overflow", lambda x: x.sum(), t(3e38, 3e38))
case("sum fp16", "fp16_overflow", lambda x: x.sum(), half(6e4, 6e4))
case("mean fp16 ok", "clean", lambda x: x.mean(), half(6e4, 6e4))
case("norm ovf", "overflow", lambda x: x.norm(), t(1e30, 1e30))
case("norm fp16 ok", "clean", lambda x: x.norm(), half(300.0, 300.0))
case("prod", "overflow", lambda x: x.prod(), t(1e30, 1e30))
case("prod zero grad", "clean", lambda x: x.prod(), t(0.0, 0.0, 1.0))
case("cumsum", "overflow", lambda x: x.cumsum(0), t(3e38, 3e38))
case("cumsum fp16", "fp16_overflow", lambda x: x.cumsum(0), half(6e4, 6e4))
case("cumprod", "overflow", lambda x: x.cumprod(0), t(1e30, 1e30))
case("cumprod zero grad", "clean", lambda x: x.cumprod(0), t(0.0, 0.0, 1.0))
case("matmul", "overflow", lambda x: x @ x, torch.full((2, 2), 1e20))
case("bmm", "overflow", lambda x: torch.bmm(x, x), torch.full((1, 2, 2), 1e20))
case("addmm", "overflow", lambda x: torch.addmm(x, x, x), torch.full((2, 2), 1e20))
case("baddbmm", "overflow", lambda x: torch.baddbmm(x, x, x), torch.full((1, 2, 2), 1e20))
case("linear", "overflow", lambda x: F.linear(x, x), torch.full((2, 2), 1e20))
case("einsum", "overflow", lambda x: torch.einsum("ij,jk->ik", x, x), torch.full((2, 2), 1e20))
case("mv", "overflow", lambda x: x @ x[0], torch.full((2, 2), 1e20))
case("dot", "overflow", lambda x: x @ x, torch.full((2,), 1e20))
case("conv", "overflow", lambda x: F.conv1d(x, x), torch.full((1, 2, 3), 1e20))
case(
    "matmul mixed sign", "overflow", lambda x: x @ (t([1.0, 1.0], [-1.0, -1.0]) * 1e20 * 1e10), torch.full((2, 2), 1e30)
)
case("conv transposed", "overflow", lambda x: F.conv_transpose1d(x, x.transpose(0, 1)), torch.full((1, 2, 3), 1e20))
case(
    "matmul backward fp16",
    "grad_overflow_fp16",
    lambda x: (x @ torch.full((2, 1), 6e4, dtype=torch.float16)).float() * t(100.0),
    torch.full((2, 2), 1e-3, dtype=torch.float16),
)
case("avg_pool fp16", "clean", lambda x: F.avg_pool1d(x, 2), half([[6e4, 6e4]]))
case("to fp16", "fp16_overflow", lambda x: x.half().float(), t(7e4, 1.0))
case("to bf16", "overflow", lambda x: x.bfloat16().float(), t(3.4e38, 1.0))
case("f64 to f32", "overflow", lambda x: x.float(), t(1e300, 1.0, dtype=torch.float64))
case("copy_ fp16", "fp16_overflow", lambda x: torch.zeros(2, dtype=torch.float16).copy_(x).float(), t(7e4, 1.0))
case(
    "assign fp16",
    "fp16_overflow",
    lambda x: torch.zeros(2, dtype=torch.float16).index_put((torch.tensor([0]),), x[:1].half()).float(),
    t(7e4, 1.0),
)
case("type_as mul fp16", "fp16_overflow", lambda x: x * 1e5, half(1.0, 2.0))

for dtype, large, cause in ((torch.float16, 300.0, "fp16_overflow"), (torch.bfloat16, 1e20, "overflow")):
    name, square = str(dtype).removeprefix("torch."), torch.full((2, 2), large, dtype=dtype)
    case(f"matmul {name}", cause, lambda x: x @ x, square)
    case(f"linear {name}", cause, lambda x: F.linear(x, x), square)
    case(f"addmm {name}", cause, lambda x: torch.addmm(x, x, x), square)
    case(f"pow {name}", cause, lambda x: x**2, square)
    case(f"bmm {name}", cause, lambda x: torch.bmm(x, x), square[None])
    case(f"conv2d {name}", cause, lambda x: F.conv2d(x, x), square[None, None])
