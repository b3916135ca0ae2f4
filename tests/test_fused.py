"""The formulas of fused kernels compute what the kernels compute, and tell the step that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from observed import run_one

from bisect_nan.causes import diagnose
from bisect_nan.causes.evidence import Evidence
from bisect_nan.causes.fused import _FORMULAS, _arguments, inner_step

aten = torch.ops.aten
INF = float("inf")
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default

KERNELS: dict[str, Callable[[torch.Tensor], tuple[Any, ...]]] = {
    "_softmax": lambda x: (aten._softmax.default, x, -1, False),
    "_log_softmax": lambda x: (aten._log_softmax.default, x, 1, False),
    "native_layer_norm": lambda x: (aten.native_layer_norm.default, x, [x.shape[-1]], None, None, 1e-5),
    "native_group_norm": lambda x: (
        aten.native_group_norm.default,
        x,
        None,
        None,
        x.shape[0],
        4,
        x[0, 0].numel(),
        2,
        1e-5,
    ),
    "native_batch_norm": lambda x: (aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training": lambda x: (
        *(aten._native_batch_norm_legit_no_training.default, x, None, None, torch.zeros(4), torch.ones(4), 0.1, 1e-5),
    ),
    "_fused_rms_norm": lambda x: (aten._fused_rms_norm.default, x, [x.shape[-1]], None, None),
    "std": lambda x: (aten.std.correction, x, [1]),
    "var": lambda x: (aten.var.correction, x),
    "var_mean": lambda x: (aten.var_mean.correction, x, [0, 2]),
    "_weight_norm_interface": lambda x: (aten._weight_norm_interface.default, x, torch.ones(x.shape[0], 1, 1), 0),
    "binary_cross_entropy_with_logits": lambda x: (
        *(aten.binary_cross_entropy_with_logits.default, x, torch.full_like(x, 0.3), None, None, 0),
    ),
    "nll_loss_forward": lambda x: (
        *(
            aten.nll_loss_forward.default,
            x[0],
            torch.tensor([0, 1, -100, 1]),
            torch.arange(1.0, x.shape[2] + 1),
            1,
            -100,
        ),
    ),
    "nll_loss_forward, a sum": lambda x: (
        *(aten.nll_loss_forward.default, x[0], torch.tensor([0, 1, -100, 1]), None, 2, -100),
    ),
    "nll_loss2d_forward": lambda x: (
        *(aten.nll_loss2d_forward.default, x[None], torch.ones(1, *x.shape[1:], dtype=torch.long), None, 0, -100),
    ),
    "linalg_vector_norm": lambda x: (aten.linalg_vector_norm.default, x, 2, [-1], True),
    "linalg_vector_norm, p 3": lambda x: (aten.linalg_vector_norm.default, x, 3),
    "_euclidean_dist": lambda x: (aten._euclidean_dist.default, x[0], x[0] + 1.0),
    "attention": lambda x: (ATTENTION, x[None], x[None], x[None]),
    "attention of the past": lambda x: (ATTENTION, x[None], x[None], x[None], 0.0, True),
}


def formula(evidence: Evidence) -> torch.Tensor:
    """Return the last step of the formula for a call."""
    steps = next(steps for names, steps in _FORMULAS if evidence.op in names)
    return list(steps(_arguments(evidence, torch.float64)))[-1][1]


@pytest.mark.parametrize("name", KERNELS)
@given(seed=st.integers(0, 99), rows=st.integers(2, 3), width=st.integers(2, 5))
def test_a_formula_computes_what_its_kernel_computes(name: str, seed: int, rows: int, width: int) -> None:
    """On ordinary numbers the last step is the result."""
    x = torch.randn(rows, 4, width, generator=torch.Generator().manual_seed(seed))
    evidence = run_one(*KERNELS[name](x), blame_all=True)
    made = evidence.call.outputs[0]
    assert made is not None
    torch.testing.assert_close(formula(evidence).to(made.dtype), made, rtol=1e-4, atol=1e-4)
    assert inner_step(evidence) == ()


def test_every_formula_is_tried() -> None:
    """Each kernel with a formula is run here, but for those of other devices and the same formula under another name."""
    tried = {
        evidence.op for evidence in (run_one(*make(torch.ones(2, 4, 3)), blame_all=True) for make in KERNELS.values())
    }
    for names, _ in _FORMULAS:
        assert names & tried


FAILING: dict[str, tuple[Callable[[], Evidence], str]] = {
    "constant row": (
        lambda: run_one(aten.native_layer_norm.default, torch.ones(2, 3), [3], None, None, 0.0),
        "`1 / sqrt(variance + eps)` is the first to fail, with inf where `variance + eps` is 0; float64 changes nothing",
    ),
    "squares": (
        lambda: run_one(aten.var.correction, torch.tensor([1e30, -1e30])),
        "`sum of (x - mean)**2` is the first to fail, with inf where `x - mean` is 1e+30; in float64 it is 2e+60",
    ),
    "scores": (
        lambda: run_one(ATTENTION, *[torch.full((1, 1, 2, 4), 1e25)] * 3),
        "`query @ key * scale` is the first to fail, with inf; in float64 it is 2e+50",
    ),
    "mask": (
        lambda: run_one(aten._softmax.default, torch.tensor([[0.0, 1.0], [-INF, -INF]]), -1, half_to_float=False),
        "`score - row maximum` is the first to fail, with nan where `row maximum` is -inf; float64 changes nothing",
    ),
    "nothing scored": (
        lambda: run_one(aten.nll_loss_forward.default, torch.zeros(2, 3), torch.full((2,), -100), None, 1, -100),
        (
            "`sum of the losses / sum of the weights` is the first to fail, with nan where"
            " `sum of the weights of scored labels` is 0; float64 changes nothing"
        ),
    ),
    "a long vector": (
        lambda: run_one(aten.linalg_vector_norm.default, torch.tensor([1e30, 1.0])),
        "`|x|**2` is the first to fail, with inf; in float64 it is 1e+60",
    ),
    "one logit of many": (
        lambda: run_one(
            aten.binary_cross_entropy_with_logits.default, torch.tensor([0.0] * 99 + [-INF]), torch.ones(100)
        ),
        "`(1 - target) * logit` is the first to fail, with nan; float64 changes nothing",
    ),
}


@pytest.mark.parametrize("name", FAILING)
def test_the_step_that_failed_is_told(name: str) -> None:
    """The note names the step, what it was made of, and what float64 makes of it."""
    build, text = FAILING[name]
    _, match = diagnose(build())
    assert f"inside of the kernel {text}" in match.notes
