"""Every entry of the catalog of causes on single calls: it fires on its fault, and is silent on what only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from observed import GRADIENT, LOSS, PARAMETER, births, evidence_of, observe, run_one

from bisect_nan.causes import CAUSES, Evidence, diagnose, find
from bisect_nan.finding import Phase, Symptom

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
ONES = torch.ones(2, 1)
BY_SEARCH = {"input_nonfinite", "parameter_nonfinite", "buffer_nonfinite"}
"""Entries that the search picks itself; they have no matcher."""


def t(*values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor of the given numbers."""
    return torch.tensor(values, dtype=dtype)


def half(*values: Any) -> torch.Tensor:
    """Make a float16 tensor of the given numbers."""
    return t(*values, dtype=torch.float16)


def derivative(function: Callable[..., torch.Tensor], *leaves: torch.Tensor, symptom: Symptom = GRADIENT) -> Evidence:
    """Run a function forward and backward; the evidence for the first birth of the backward pass."""

    def fails() -> torch.Tensor:
        return function(*(leaf.clone().requires_grad_() for leaf in leaves)).real.sum()

    _, _, seen = observe(fails)
    found = (birth for birth in births(seen) if birth[0].forward is not None and "empty" not in birth[0].call.op)
    observed, output, mask = next(found)
    return evidence_of(observed, mask, output=output, symptom=symptom)


def hidden(evidence: Evidence) -> Evidence:
    """Let the gradient be the symptom of a call of the forward pass."""
    return replace(evidence, symptom=GRADIENT)


def unwritten(content: torch.Tensor) -> Evidence:
    """Evidence for an allocation that found the given content in memory."""
    evidence = run_one(aten.empty_like.default, content, blame_all=True)
    return replace(evidence, call=replace(evidence.call, outputs=(content,)))


def optimizing(target: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Evidence:
    """Run one call as part of an optimizer's update."""
    return run_one(target, *args, phase=Phase.OPTIMIZER, symptom=PARAMETER, **kwargs)


def after(evidence: Evidence, **numbers: Sequence[float]) -> Evidence:
    """Let evidence come after steps with these numbers (`parameter_norm=[1, 2]`)."""
    rows = zip(*numbers.values(), strict=True)
    return replace(evidence, history=tuple(dict(zip(numbers, row, strict=True)) for row in rows))


def too_large() -> Evidence:
    """Evidence for an exponential that overflows."""
    return run_one(aten.exp.default, t(1000.0))


def ctc(frames: int, labels: Sequence[int]) -> Evidence:
    """Run a CTC loss of uniform frames for one sample."""
    scores = torch.full((frames, 1, 4), 0.25).log()
    targets = torch.tensor([labels])
    return run_one(aten._ctc_loss.default, scores, targets, [frames], [len(labels)], blame_all=True)


def rows(*scores: Sequence[float], log: bool = False, blame_all: bool = False) -> Evidence:
    """Run a softmax over rows of scores."""
    target = aten._log_softmax.default if log else aten._softmax.default
    return run_one(target, torch.tensor(scores), -1, half_to_float=False, blame_all=blame_all)


def custom(target: torch._ops.OpOverload, *args: Any, ancestors: tuple[str, ...]) -> Evidence:
    """Run one call as Python code of a custom autograd Function's backward."""
    return run_one(
        target, *args, phase=Phase.BACKWARD, symptom=GRADIENT, autograd="ArcoshBackward", ancestors={"other": ancestors}
    )


def determinant_below_zero() -> Evidence:
    """Evidence for the NaN that `logdet` keeps at hand and selects where the sign is -1."""
    return replace(run_one(aten.scalar_tensor.default, NAN), selected_by=lambda: ("eq", "_linalg_slogdet"))


FIRING: list[tuple[str, Callable[[], Evidence]]] = [
    ("learning_rate_explosion", lambda: after(too_large(), parameter_norm=[5, 7, 25, 3e4])),
    ("learning_rate_explosion", lambda: after(too_large(), parameter_norm=[5, 300])),
    ("learning_rate_explosion", lambda: after(too_large(), loss=[-2, -3, 5e3], gradient_norm=[1, 2, 1e4])),
    (
        "learning_rate_explosion",
        lambda: after(run_one(aten.mul.Tensor, half(6e4), half(3.0)), parameter_norm=[5, 7, 100]),
    ),
    (
        "learning_rate_explosion",
        lambda: after(optimizing(aten.add_.Tensor, t(3e38), t(-3e38), alpha=-1.0), parameter_norm=[1e3, 1e18, 1e36]),
    ),
    (
        "learning_rate_explosion",
        lambda: after(run_one(aten.mm.default, t([1e30, 1e30]), t([1e30], [1.0])), parameter_norm=[1, 2, 1e9]),
    ),
    ("uninitialized_memory", lambda: unwritten(t(NAN, 1.0))),
    ("learning_rate_nonfinite", lambda: optimizing(aten.add_.Tensor, t(1.0), t(0.0), alpha=NAN)),
    ("learning_rate_nonfinite", lambda: optimizing(aten.mul.Tensor, t(1.0, 2.0), torch.tensor(NAN))),
    (
        "learning_rate_nonfinite",
        lambda: optimizing(aten._foreach_addcdiv.ScalarList, [t(1.0)], [t(1.0)], [t(1.0)], [NAN]),
    ),
    (
        "optimizer_eps_underflow",
        lambda: optimizing(
            aten.addcdiv_.default,
            half(1.0, 1.0),
            half(0.1, 0.0),
            half(0.0, 0.0),
            ancestors={"tensor2": ("add", "sqrt")},
        ),
    ),
    (
        "optimizer_eps_underflow",
        lambda: optimizing(
            aten._foreach_addcdiv.Scalar,
            [half(1.0), half(1.0)],
            [half(0.1), half(0.0)],
            [half(1.0), half(0.0)],
            output=1,
            ancestors={"tensor2[1]": ("_foreach_add", "_foreach_sqrt")},
        ),
    ),
    (
        "optimizer_eps_underflow",
        lambda: optimizing(
            aten.addcdiv_.default, half(1.0), half(0.1), half(0.0), ancestors={"tensor2": ("mul", "_foreach_maximum")}
        ),
    ),
    ("gradient_nonfinite_applied", lambda: optimizing(aten.addcdiv_.default, t(1.0), t(INF), t(INF))),
    ("zero_times_inf", lambda: run_one(aten.addcdiv.default, t(1.0), t(INF), t(INF))),
    ("softmax_all_masked", lambda: rows([0.0, 1.0], [-INF, -INF])),
    ("softmax_all_masked", lambda: rows([-INF, -INF], log=True)),
    ("softmax_all_masked", lambda: hidden(rows([-INF, -INF]))),
    ("softmax_all_masked", lambda: run_one(aten._softmax.default, torch.tensor(-INF), -1, half_to_float=False)),
    ("fp16_overflow", lambda: run_one(aten.mul.Tensor, half(300.0), half(300.0))),
    ("fp16_overflow", lambda: run_one(aten.add.Tensor, half(-65504.0), half(-40.0))),
    ("fp16_overflow", lambda: run_one(aten.mm.default, half([300.0, 300.0]), half([300.0], [300.0]))),
    ("fp16_overflow", lambda: run_one(aten._to_copy.default, t(7e4), dtype=torch.float16)),
    ("fp16_overflow", lambda: run_one(aten.copy_.default, half(0.0), t(7e4))),
    ("fp16_overflow", lambda: run_one(aten.div.Tensor, half(100.0), half(1e-4))),
    ("fp16_overflow", lambda: hidden(run_one(aten.pow.Tensor_Scalar, half(300.0), 2))),
    ("grad_overflow_fp16", lambda: derivative(lambda x: x.float() * 1e6, half(1.0))),
    ("grad_overflow_fp16", lambda: derivative(lambda x: torch.tanh(x**3), half(170.0))),
    (
        "grad_overflow_fp16",
        lambda: run_one(
            aten.add.Tensor,
            half(6e4),
            half(6e4),
            phase=Phase.BACKWARD,
            symptom=GRADIENT,
            autograd="torch::autograd::AccumulateGrad",
        ),
    ),
    ("sqrt_grad_at_zero", lambda: derivative(torch.sqrt, t(0.0, 4.0))),
    ("sqrt_grad_at_zero", lambda: derivative(torch.sqrt, t(0.0, 4.0), symptom=LOSS)),
    ("sqrt_grad_at_zero", lambda: derivative(torch.sqrt, t(0.0, 1.0, dtype=torch.complex64))),
    ("log_grad_at_zero", lambda: derivative(torch.xlogy, t(0.0), t(0.0))),
    ("log_grad_at_zero", lambda: derivative(torch.log, t(0.0), symptom=LOSS)),
    ("log_grad_at_zero", lambda: derivative(torch.special.entr, t(0.0))),
    ("pow_grad_at_zero", lambda: derivative(lambda x: x**0.5, t(0.0))),
    ("pow_grad_at_zero", lambda: derivative(torch.pow, t(0.0), t(0.5))),
    ("pow_grad_at_zero", lambda: derivative(lambda x: x**0.5, t(0.0, dtype=torch.complex64))),
    ("trig_grad_at_boundary", lambda: derivative(torch.acos, t(1.0, 0.5))),
    ("trig_grad_at_boundary", lambda: derivative(torch.asin, t(-1.0))),
    ("trig_grad_at_boundary", lambda: derivative(torch.acosh, t(1.0))),
    ("trig_grad_at_boundary", lambda: custom(aten.div.Tensor, t(1.0), t(0.0), ancestors=("sqrt", "rsub", "mul"))),
    (
        "trig_grad_at_boundary",
        lambda: custom(aten.div.Tensor, t(0.0), t(0.0), ancestors=("sqrt", "clamp", "sub", "mul", "sum")),
    ),
    ("degenerate_spectrum_grad", lambda: derivative(lambda x: torch.linalg.eigh(x)[1], torch.eye(3))),
    ("degenerate_spectrum_grad", lambda: derivative(lambda x: torch.linalg.svd(x)[0], torch.eye(3))),
    ("logsumexp_grad_all_neginf", lambda: derivative(lambda x: x.logsumexp(-1), t([-INF, -INF], [0.0, 1.0]))),
    ("logsumexp_grad_all_neginf", lambda: derivative(torch.logaddexp, t(-INF), t(-INF))),
    ("where_masked_gradient", lambda: derivative(torch.div, t(0.0), t(0.0))),
    ("where_masked_gradient", lambda: derivative(torch.log, t(0.0))),
    ("where_masked_gradient", lambda: hidden(run_one(aten.div.Tensor, t(1.0), t(0.0)))),
    ("where_masked_gradient", lambda: hidden(run_one(aten.exp.default, t(100.0)))),
    ("where_masked_gradient", lambda: hidden(run_one(aten.pow.Tensor_Scalar, t(-1.0), 1 / 3))),
    ("division_grad", lambda: derivative(torch.div, t(1e-15), t(1e-30))),
    ("division_grad", lambda: derivative(torch.div, t(1.0), t(0.0), symptom=LOSS)),
    ("division_grad", lambda: custom(aten.div.Tensor, t(1.0), t(0.0), ancestors=("exp",))),
    ("loss_target_invalid", lambda: ctc(4, [1, 1, 2, 2])),
    ("loss_target_invalid", lambda: ctc(2, [1, 2, 3])),
    (
        "loss_target_invalid",
        lambda: run_one(aten.nll_loss_forward.default, t([0.0, -INF], [0.0, 0.0]), torch.tensor([1, 0]), None, 1, -100),
    ),
    ("empty_reduction", lambda: run_one(aten.mean.default, torch.zeros(0))),
    ("empty_reduction", lambda: run_one(aten.mean.dim, torch.zeros(2, 0), [1])),
    ("empty_reduction", lambda: run_one(aten.var.correction, torch.zeros(0))),
    ("empty_reduction", lambda: run_one(aten.segment_reduce.default, t(1.0), "mean", lengths=torch.tensor([1, 0]))),
    ("empty_reduction", lambda: run_one(aten.segment_reduce.default, t(1.0), "max", offsets=torch.tensor([0, 0, 1]))),
    ("empty_reduction", lambda: run_one(aten.binary_cross_entropy_with_logits.default, torch.zeros(0), torch.zeros(0))),
    ("empty_reduction", lambda: run_one(aten.mse_loss.default, torch.zeros(0), torch.zeros(0))),
    (
        "empty_reduction",
        lambda: run_one(aten.nll_loss_forward.default, torch.zeros(2, 3), torch.full((2,), -100), None, 1, -100),
    ),
    (
        "empty_reduction",
        lambda: run_one(aten.nll_loss_forward.default, torch.zeros(1, 2), torch.tensor([0]), t(0.0, 1.0), 1, -100),
    ),
    ("degenerate_dof", lambda: run_one(aten.std.correction, t(3.0))),
    ("degenerate_dof", lambda: run_one(aten.var_mean.correction, t([1.0], [2.0]), [1])),
    ("degenerate_dof", lambda: run_one(aten.var.correction, t(1.0, 2.0), correction=2)),
    ("log_of_zero", lambda: run_one(aten.log.default, t(0.0, 1.0))),
    ("log_of_zero", lambda: run_one(aten.log1p.default, t(-1.0))),
    ("log_of_zero", lambda: run_one(aten.xlogy.Tensor, t(1.0), t(0.0))),
    ("log_of_zero", lambda: run_one(aten.logit.default, t(1.0))),
    ("log_of_zero", lambda: run_one(aten.log.default, t(0.0, dtype=torch.complex64))),
    ("log_of_zero", lambda: run_one(aten._foreach_log.default, [t(1.0), t(0.0)], output=1)),
    ("log_of_zero", lambda: run_one(aten._linalg_slogdet.default, torch.zeros(2, 2), output=1)),
    ("log_of_negative", lambda: run_one(aten.log2.default, t(-1.0))),
    ("log_of_negative", lambda: run_one(aten.special_entr.default, t(-1.0, 1.0))),
    ("log_of_negative", determinant_below_zero),
    ("log_of_negative", lambda: run_one(aten.log.default, half(-1.0))),
    (
        "log_of_negative",
        lambda: run_one(
            aten.where.self,
            torch.tensor(True),
            torch.tensor(NAN),
            torch.tensor(0.0),
            ancestors={"condition": ("eq", "_linalg_slogdet")},
        ),
    ),
    ("sqrt_of_negative", lambda: run_one(aten.sqrt.default, t(-1e-7), ancestors={"self": ("sub",)})),
    ("sqrt_of_negative", lambda: run_one(aten.rsqrt.default, t(-1.0))),
    ("sqrt_of_negative", lambda: optimizing(aten.sqrt_.default, t(-2e-14))),
    (
        "sqrt_of_negative",
        lambda: run_one(
            aten._native_batch_norm_legit_no_training.default, torch.ones(2, 1), None, None, t(0.0), t(-1.0), 0.1, 1e-5
        ),
    ),
    ("pow_domain", lambda: run_one(aten.pow.Tensor_Scalar, t(-0.5), 0.3)),
    ("pow_domain", lambda: run_one(aten.pow.Tensor_Scalar, t(0.0), -0.5)),
    ("pow_domain", lambda: run_one(aten.pow.Tensor_Tensor, t(-0.5), t(1.5))),
    ("trig_domain", lambda: run_one(aten.acos.default, t(1.0000002))),
    ("trig_domain", lambda: run_one(aten.atanh.default, t(1.0))),
    ("trig_domain", lambda: run_one(aten.acosh.default, t(0.5))),
    ("trig_domain", lambda: run_one(aten.erfinv.default, t(1.5))),
    ("trig_domain", lambda: run_one(aten.sin.default, t(INF))),
    ("zero_variance", lambda: run_one(aten.reciprocal.default, t(0.0), ancestors={"self": ("std",)})),
    ("zero_variance", lambda: run_one(aten.div.Tensor, t(1.0), t(0.0), ancestors={"other": ("clamp", "norm")})),
    ("zero_variance", lambda: run_one(aten.rsqrt.default, t(0.0), ancestors={"self": ("add", "mean", "pow")})),
    ("zero_variance", lambda: run_one(aten.native_layer_norm.default, torch.ones(2, 3), [3], None, None, 0.0)),
    (
        "zero_variance",
        lambda: run_one(aten.native_group_norm.default, torch.ones(2, 4, 3), None, None, 2, 4, 3, 2, 0.0),
    ),
    (
        "zero_variance",
        lambda: run_one(aten.native_layer_norm.default, torch.ones(2, 3), [3], None, None, 0.0, output=2),
    ),
    ("zero_variance", lambda: run_one(aten._fused_rms_norm.default, torch.zeros(2, 3), [3], None, 0.0, output=1)),
    ("zero_variance", lambda: run_one(aten._weight_norm_interface.default, torch.zeros(2, 3), torch.ones(2, 1), 0)),
    ("zero_over_zero", lambda: run_one(aten.div.Tensor, t(0.0), t(0.0))),
    ("zero_over_zero", lambda: run_one(aten.div.Tensor, t(0.0), t(0.0), ancestors={"other": ("sum",)})),
    (
        "zero_over_zero",
        lambda: run_one(aten.div.Tensor, half(0.0), half(0.0), ancestors={"other": ("linalg_vector_norm",)}),
    ),
    ("zero_over_zero", lambda: run_one(aten._foreach_div.List, [t(1.0), t(0.0)], [t(1.0), t(0.0)], output=1)),
    ("zero_over_zero", lambda: optimizing(aten.addcdiv_.default, t(1.0), t(0.0), t(0.0))),
    ("zero_over_zero", lambda: custom(aten.div.Tensor, t(0.0), t(0.0), ancestors=("linalg_vector_norm",))),
    ("division_by_zero", lambda: run_one(aten.div.Tensor, t(2.0, 1.0), t(0.0, 1.0))),
    ("division_by_zero", lambda: run_one(aten.reciprocal.default, t(0.0))),
    ("division_by_zero", lambda: run_one(aten.rsqrt.default, t(0.0))),
    ("division_by_zero", lambda: run_one(aten.div.Scalar, t(2.0), 0.0)),
    ("division_by_zero", lambda: run_one(aten.div.Tensor, t(2.0), torch.tensor(1e-50, dtype=torch.float64))),
    ("division_by_zero", lambda: run_one(aten.remainder.Tensor, t(2.0), t(0.0))),
    ("division_by_zero", lambda: run_one(aten.div.Tensor, t(1j, dtype=torch.complex64), t(0j, dtype=torch.complex64))),
    ("zero_times_inf", lambda: run_one(aten.mul.Tensor, t(0.0), t(-INF))),
    ("zero_times_inf", lambda: run_one(aten.div.Tensor, t(INF), t(INF))),
    ("zero_times_inf", lambda: run_one(aten.mm.default, t([0.0, 1.0]), t([-INF], [1.0]))),
    ("zero_times_inf", lambda: run_one(aten.silu.default, t(-INF, 1.0))),
    ("zero_times_inf", lambda: run_one(aten.gelu.default, t(-INF))),
    ("zero_times_inf", lambda: run_one(aten.binary_cross_entropy_with_logits.default, t(-INF, 0.0), t(1.0, 1.0))),
    ("inf_minus_inf", lambda: run_one(aten.binary_cross_entropy_with_logits.default, t(-INF, 0.0), t(0.0, 1.0))),
    ("zero_times_inf", lambda: run_one(aten.mv.default, t([0.0, 1.0]), t(-INF, 1.0))),
    ("inf_minus_inf", lambda: run_one(aten.mm.default, t([1.0, 1.0], [0.0, 1.0]), t([INF], [-INF]))),
    ("inf_minus_inf", lambda: run_one(aten.sub.Tensor, t(-INF), t(-INF))),
    ("inf_minus_inf", lambda: run_one(aten.sum.default, t(INF, -INF))),
    ("inf_minus_inf", lambda: run_one(aten.mean.default, t(1.0, -INF))),
    ("inf_minus_inf", lambda: rows([INF, 1.0])),
    ("inf_minus_inf", lambda: run_one(aten.var.correction, t(INF, 1.0))),
    ("exp_overflow", lambda: run_one(aten.exp.default, t(100.0))),
    ("exp_overflow", lambda: run_one(aten.sinh.default, t(-200.0))),
    ("exp_overflow", lambda: run_one(aten.exp.default, t(100.0, dtype=torch.complex64))),
    ("exp_overflow", lambda: run_one(aten.soft_margin_loss.default, t(1.0, 100.0), t(1.0, -1.0))),
    ("exp_overflow", lambda: run_one(aten.exp.default, t(1000.0, dtype=torch.float64))),
    ("grad_overflow", lambda: derivative(lambda x: x * 1e30 * 1e30, t(1e-35))),
    ("overflow", lambda: run_one(aten.mul.Tensor, t(1e30), t(1e30))),
    ("overflow", lambda: run_one(aten.mm.default, t([1e30, 1e30]), t([1e30], [-1e30]))),
    ("overflow", lambda: run_one(aten.div.Tensor, t(1.0), t(1e-42))),
    ("overflow", lambda: run_one(aten._fft_r2c.default, torch.full((4,), 3e38), [0], 0, True)),
    ("overflow", lambda: run_one(aten.abs.default, t(3e38 + 3e38j, dtype=torch.complex64))),
    ("overflow", lambda: run_one(aten.mul.Tensor, t(1e200, dtype=torch.float64), t(1e200, dtype=torch.float64))),
    ("overflow", lambda: run_one(aten.add.Tensor, t(-3.3e38, dtype=torch.bfloat16), t(-3e38, dtype=torch.bfloat16))),
    ("function_pole", lambda: run_one(aten.lgamma.default, t(0.0, 1.0))),
    ("function_pole", lambda: run_one(aten.lgamma.default, t(-3.0))),
    ("function_pole", lambda: run_one(aten.digamma.default, half(0.0))),
    ("function_pole", lambda: run_one(aten.special_modified_bessel_k0.default, t(0.0))),
    ("log_of_zero", lambda: run_one(aten.logit.default, t(0.0), 0.0)),
    ("zero_over_zero", lambda: run_one(aten.remainder.Scalar, half(0.0), 1e-30)),
    ("overflow", lambda: run_one(aten.pow.Tensor_Scalar, t(2.0), 1e6)),
    ("overflow", lambda: run_one(aten.i0.default, t(7e4))),
    ("function_pole", lambda: run_one(aten.polygamma.default, 1, t(0.0))),
    ("singular_matrix", lambda: run_one(aten.linalg_inv_ex.default, torch.ones(2, 2))),
    ("singular_matrix", lambda: run_one(aten._linalg_solve_ex.default, torch.zeros(2, 2), torch.ones(2))),
    (
        "singular_matrix",
        lambda: run_one(aten.linalg_solve_triangular.default, t([1.0, 0.0], [1.0, 0.0]), ONES, upper=False),
    ),
    (
        "singular_matrix",
        lambda: run_one(aten.linalg_solve_triangular.default, torch.eye(2)[None] * t(1.0, 0.0), ONES, upper=True),
    ),
    ("singular_matrix", lambda: derivative(lambda x: torch.linalg.qr(x)[0], torch.ones(3, 2))),
    ("singular_matrix", lambda: derivative(lambda x: torch.linalg.cholesky_ex(x)[0], torch.ones(2, 2))),
    ("nonfinite_constant", lambda: run_one(aten.masked_fill.Scalar, t(1.0, 2.0), torch.tensor([True, False]), NAN)),
    ("nonfinite_constant", lambda: run_one(aten.mul.Tensor, t(1.0), NAN)),
    ("nonfinite_constant", lambda: run_one(aten.clamp.default, t(1.0), NAN)),
    ("unclassified", lambda: run_one(aten.igamma.default, t(1.0), t(-1.0))),
]
"""Evidence, and the entry that is to be found first."""

SILENT: list[tuple[str, Callable[[], Evidence]]] = [
    ("learning_rate_explosion", too_large),
    ("learning_rate_explosion", lambda: after(too_large(), parameter_norm=[1e9])),
    ("learning_rate_explosion", lambda: after(too_large(), parameter_norm=[5, 7, 6, 8])),
    ("learning_rate_explosion", lambda: after(too_large(), parameter_norm=[5, 5, 500, 5])),
    ("learning_rate_explosion", lambda: after(too_large(), parameter_norm=[0, 0.1, 2])),
    ("learning_rate_explosion", lambda: after(too_large(), loss=[2, 3, 5e3], gradient_norm=[1, 2, 3])),
    ("learning_rate_explosion", lambda: after(too_large(), loss=[1e9, 1e6, 1e3], gradient_norm=[1e9, 1e6, 1e3])),
    ("learning_rate_explosion", lambda: after(run_one(aten.log.default, t(0.0)), parameter_norm=[5, 7, 3e4])),
    ("learning_rate_explosion", lambda: after(run_one(aten.div.Tensor, t(1.0), t(0.0)), parameter_norm=[5, 7, 3e4])),
    ("learning_rate_explosion", lambda: after(run_one(aten.exp.default, t(INF)), parameter_norm=[5, 7, 3e4])),
    ("uninitialized_memory", lambda: unwritten(t(0.0, 1e30))),
    ("uninitialized_memory", lambda: run_one(aten.full.default, [2], NAN)),
    ("learning_rate_nonfinite", lambda: run_one(aten.mul.Tensor, t(1.0), torch.tensor(NAN))),
    ("learning_rate_nonfinite", lambda: optimizing(aten.addcdiv_.default, t(1.0), t(1.0), t(0.0), value=1e-3)),
    ("optimizer_eps_underflow", lambda: optimizing(aten.addcdiv_.default, t(1.0), t(1.0), t(0.0))),
    ("gradient_nonfinite_applied", lambda: run_one(aten.addcdiv.default, t(1.0), t(INF), t(INF))),
    ("gradient_nonfinite_applied", lambda: optimizing(aten.addcdiv_.default, t(1.0), t(0.0), t(0.0))),
    ("gradient_nonfinite_applied", lambda: optimizing(aten.add_.Tensor, t(1.0), t(0.0), alpha=INF)),
    ("softmax_all_masked", lambda: rows([-INF, INF])),
    ("softmax_all_masked", lambda: rows([-INF, NAN])),
    ("softmax_all_masked", lambda: rows([-INF, 0.0], blame_all=True)),
    ("fp16_overflow", lambda: run_one(aten.log.default, half(0.0))),
    ("fp16_overflow", lambda: run_one(aten.mul.Tensor, t(1e30), t(1e30))),
    ("fp16_overflow", lambda: derivative(lambda x: x.float() * 1e6, half(1.0))),
    ("grad_overflow_fp16", lambda: derivative(torch.sqrt, half(0.0))),
    ("grad_overflow_fp16", lambda: run_one(aten.mul.Tensor, half(300.0), half(300.0))),
    ("sqrt_grad_at_zero", lambda: derivative(torch.log, t(0.0))),
    ("sqrt_grad_at_zero", lambda: run_one(aten.div.Tensor, t(1.0), t(0.0), ancestors={"other": ("sqrt",)})),
    ("log_grad_at_zero", lambda: derivative(torch.log, t(0.0))),
    ("pow_grad_at_zero", lambda: derivative(lambda x: x**-1.0, t(0.0))),
    ("trig_grad_at_boundary", lambda: derivative(torch.atanh, t(1.0))),
    ("trig_grad_at_boundary", lambda: custom(aten.div.Tensor, t(0.0), t(0.0), ancestors=("sqrt", "sum", "sub"))),
    ("norm_grad_at_zero", lambda: derivative(torch.sqrt, t(0.0))),
    ("std_grad_at_zero", lambda: derivative(torch.sqrt, t(0.0))),
    ("degenerate_spectrum_grad", lambda: derivative(torch.div, t(0.0), t(0.0))),
    ("logsumexp_grad_all_neginf", lambda: derivative(lambda x: x.logsumexp(-1), t([INF, 1.0]))),
    ("where_masked_gradient", lambda: derivative(torch.sqrt, t(0.0))),
    ("where_masked_gradient", lambda: run_one(aten.div.Tensor, t(1.0), t(0.0))),
    ("where_masked_gradient", lambda: hidden(run_one(aten.div.Tensor, t(1.0), t(1.0), blame_all=True))),
    ("division_grad", lambda: run_one(aten.div.Tensor, t(1.0), t(0.0))),
    ("division_grad", lambda: custom(aten.div.Tensor, t(0.0), t(0.0), ancestors=("std",))),
    ("loss_target_invalid", lambda: ctc(6, [1, 1, 2, 2])),
    ("loss_target_invalid", lambda: run_one(aten.binary_cross_entropy.default, t(0.5), t(1.0), blame_all=True)),
    ("empty_reduction", lambda: run_one(aten.mean.default, t(NAN))),
    ("empty_reduction", lambda: run_one(aten.sum.default, torch.zeros(0), blame_all=True)),
    (
        "empty_reduction",
        lambda: run_one(aten.nll_loss_forward.default, t([NAN, 0.0]), torch.tensor([0]), None, 1, -100),
    ),
    ("degenerate_dof", lambda: run_one(aten.std.correction, t(NAN, 1.0))),
    ("degenerate_dof", lambda: run_one(aten.std.correction, t(3.0), correction=0, blame_all=True)),
    ("log_of_zero", lambda: run_one(aten.log.default, t(1e-45, 1.0), blame_all=True)),
    ("log_of_zero", lambda: run_one(aten.log.default, t(-1.0))),
    ("log_of_zero", lambda: run_one(aten.xlogy.Tensor, t(0.0), t(1.0), blame_all=True)),
    ("log_of_negative", lambda: run_one(aten.log.default, t(-1.0, dtype=torch.complex64), blame_all=True)),
    ("sqrt_of_negative", lambda: run_one(aten.sqrt.default, t(-0.0), blame_all=True)),
    ("sqrt_of_negative", lambda: run_one(aten.sqrt.default, t(-1.0, dtype=torch.complex64), blame_all=True)),
    ("pow_domain", lambda: run_one(aten.pow.Tensor_Scalar, t(-2.0), 3.0, blame_all=True)),
    ("pow_domain", lambda: run_one(aten.pow.Tensor_Scalar, t(1e30), 2.0)),
    ("trig_domain", lambda: run_one(aten.acos.default, t(1.0, -1.0), blame_all=True)),
    ("zero_variance", lambda: run_one(aten.div.Tensor, t(1.0), t(1e-42), ancestors={"other": ("std",)})),
    ("zero_variance", lambda: run_one(aten.div.Tensor, t(1.0), t(0.0), ancestors={"other": ("sub", "std")})),
    (
        "zero_variance",
        lambda: run_one(aten.native_layer_norm.default, torch.ones(2, 3), [3], None, None, 1e-5, blame_all=True),
    ),
    ("zero_over_zero", lambda: run_one(aten.div.Tensor, t(1e-45), t(0.0))),
    ("zero_over_zero", lambda: run_one(aten.div.Tensor, t(NAN), t(0.0))),
    ("division_by_zero", lambda: run_one(aten.div.Tensor, t(0.0), t(0.0))),
    ("division_by_zero", lambda: run_one(aten.div.Tensor, t(1.0), t(1e-42))),
    ("zero_times_inf", lambda: run_one(aten.mul.Tensor, t(2.0), t(INF))),
    ("zero_times_inf", lambda: run_one(aten.mul.Tensor, t(NAN), t(INF))),
    ("zero_times_inf", lambda: run_one(aten.mm.default, t([0.0, 1.0]), t([NAN], [1.0]))),
    ("inf_minus_inf", lambda: run_one(aten.add.Tensor, t(INF), t(INF))),
    ("inf_minus_inf", lambda: run_one(aten.sum.default, t(NAN, 1.0))),
    ("function_pole", lambda: run_one(aten.lgamma.default, t(-0.5, 1e-30), blame_all=True)),
    ("function_pole", lambda: run_one(aten.lgamma.default, t(3e38))),
    ("singular_matrix", lambda: run_one(aten.linalg_inv_ex.default, 1e-6 * torch.eye(2), blame_all=True)),
    ("singular_matrix", lambda: run_one(aten.linalg_inv_ex.default, t([NAN, 0.0], [0.0, 1.0]), blame_all=True)),
    (
        "singular_matrix",  # the singular matrix of the batch is another one than the blamed one
        lambda: run_one(aten.linalg_inv_ex.default, torch.stack([torch.zeros(2, 2), torch.full((2, 2), NAN)])),
    ),
    (
        "nonfinite_constant",
        lambda: run_one(aten.masked_fill.Scalar, t(1.0), torch.tensor([True]), 1e30, blame_all=True),
    ),
    ("nonfinite_constant", lambda: run_one(aten.clamp.default, t(1.0), -INF, blame_all=True)),
    ("exp_overflow", lambda: run_one(aten.exp.default, t(88.0), blame_all=True)),
    ("exp_overflow", lambda: run_one(aten.exp.default, t(INF))),
    ("grad_overflow", lambda: run_one(aten.mul.Tensor, t(1e30), t(1e30))),
    ("overflow", lambda: run_one(aten.sqrt.default, t(-1.0))),
    ("overflow", lambda: run_one(aten.acos.default, t(1.0000002))),
    ("overflow", lambda: run_one(aten.mul.Tensor, t(INF), t(1.0))),
]
"""Evidence, and an entry that must not fire on it."""


def ids(table: list[tuple[str, Callable[[], Evidence]]]) -> list[str]:
    """Number the lines of a table within each entry."""
    return [f"{name}-{sum(other == name for other, _ in table[:i])}" for i, (name, _) in enumerate(table)]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of the very thing: std of one value, mean of none
@pytest.mark.parametrize(("name", "build"), FIRING, ids=ids(FIRING))
def test_fault_is_named(name: str, build: Callable[[], Evidence]) -> None:
    """The first entry that fits a fault is its own, with a fact to show for it."""
    evidence = build()
    cause, match = diagnose(evidence)
    for other in CAUSES:
        other.matches(evidence)  # none raises
    assert cause.name == name
    assert match.notes
    assert 0.5 <= match.confidence <= 1 or name == "unclassified"


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "build"), SILENT, ids=ids(SILENT))
def test_near_miss_is_passed_over(name: str, build: Callable[[], Evidence]) -> None:
    """An entry says nothing about a call that only looks like its fault."""
    assert find(name).matches(build()) is None


def test_every_matcher_is_tried_both_ways() -> None:
    """Each entry with a matcher has a firing line and a near miss in the tables, or an example for both."""
    firing, silent = {name for name, _ in FIRING}, {name for name, _ in SILENT}
    names = {cause.name for cause in CAUSES} - BY_SEARCH
    assert names - firing == {"norm_grad_at_zero", "std_grad_at_zero"}  # second derivatives: their examples fire
    assert names - silent == {"unclassified"}


@pytest.mark.parametrize(
    ("above", "below", "told"),
    [
        (torch.ones(4, 6), torch.zeros(4, 1), "at 4 of 4 elements, first at [0, 0]"),
        (torch.ones(4, 6), torch.tensor([1.0, 0.0, 0.0, 1.0])[:, None], "at 2 of 4 elements, first at [1, 0]"),
        (torch.ones(4, 6), torch.zeros(6), "at 6 of 6 elements, first at [0]"),
        (torch.ones(2, 3), torch.zeros(2, 3), "at 6 of 6 elements, first at [0, 0]"),
        (torch.ones(4, 6), torch.zeros(()), "is exactly 0;"),
    ],
)
def test_a_divisor_is_counted_once(above: torch.Tensor, below: torch.Tensor, told: str) -> None:
    """Its own elements, not those of the result that it is broadcast to."""
    _, match = diagnose(run_one(torch.ops.aten.div.Tensor, above, below))
    assert told in match.notes[0]


def test_growth_is_told_in_order() -> None:
    """The last numbers go up to the one that is named, beside how it compares to the steps before."""
    history = [27.6, 30.0, 27.0, 26.0, 3.74, 51.5, 4e3]
    _, match = diagnose(after(too_large(), parameter_norm=history))
    assert (
        match.notes[0]
        == "the norm of all parameters grew to 4000, 147 times the median of the steps before; step by step 26, 3.74, 51.5, 4e+03"
    )
