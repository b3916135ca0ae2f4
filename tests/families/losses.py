"""Losses: nothing to score, targets that cannot be scored, probabilities at the edge."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from families import case, half, masked, t


def ctc(scores: torch.Tensor, frames: int, labels: list[int], **options: Any) -> torch.Tensor:
    """Score one transcript."""
    return F.ctc_loss(scores.log_softmax(-1), torch.tensor([labels]), [frames], [len(labels)], **options)


case("ce all ignored", "empty_reduction", lambda x: F.cross_entropy(x, torch.full((3,), -100)), torch.zeros(3, 5))
case(
    "ce weights zero",
    "empty_reduction",
    lambda x: F.cross_entropy(x, torch.tensor([0, 0]), weight=t(0.0, 1.0)),
    torch.zeros(2, 2),
)
case(
    "ce smoothing all ignored",
    "empty_reduction, zero_over_zero",
    lambda x: F.cross_entropy(x, torch.full((3,), -100), label_smoothing=0.1),
    torch.zeros(3, 5),
)
case(
    "ce 2d all ignored",
    "empty_reduction",
    lambda x: F.cross_entropy(x, torch.full((1, 3, 3), 255), ignore_index=255),
    torch.zeros(1, 2, 3, 3),
)
case("ce prob zero batch", "nonfinite_constant", lambda x: F.cross_entropy(x[:0], torch.zeros(0, 5)), torch.zeros(3, 5))
case(
    "ce masked class",
    "loss_target_invalid",
    lambda x: F.cross_entropy(masked(x, [[True, False], [True, True]]), torch.tensor([1, 0])),
    torch.zeros(2, 2),
)
case(
    "ce probs masked class",
    "zero_times_inf",
    lambda x: F.cross_entropy(masked(x, [[True, False], [True, True]]), t([1.0, 0.0], [0.0, 1.0])),
    torch.zeros(2, 2),
)
case(
    "ce smoothing masked class",
    "inf_minus_inf",
    lambda x: F.cross_entropy(masked(x, [[True, False], [True, True]]), torch.tensor([0, 0]), label_smoothing=0.1),
    torch.zeros(2, 2),
)
case("ce +inf logits", "exp_overflow", lambda x: F.cross_entropy((x * 100).exp(), torch.tensor([0])), t([1.0, 0.0]))
case("bce 0/1 grad", "clean", lambda x: F.binary_cross_entropy(torch.sigmoid(x), t(1.0, 0.0)), t(-200.0, 200.0))
case("bce direct prob", "clean", lambda x: F.binary_cross_entropy(x, t(1.0, 0.0)), t(0.0, 1.0))
case("bce fp16 grad", "grad_overflow_fp16", lambda x: F.binary_cross_entropy(x, half(1.0, 0.0)), half(0.0, 1.0))
case(
    "bcel inf logits",
    "inf_minus_inf",
    lambda x: F.binary_cross_entropy_with_logits(masked(x, [False, True]), t(0.0, 1.0)),
    t(0.0, 1.0),
)
case(
    "bcel inf logits t1",
    "zero_times_inf",
    lambda x: F.binary_cross_entropy_with_logits(masked(x, [False, True]), t(1.0, 1.0)),
    t(0.0, 1.0),
)
case(
    "bcel log overflow", "log_of_zero", lambda x: F.binary_cross_entropy_with_logits(x.log(), t(0.0, 1.0)), t(0.0, 1.0)
)
case("ctc", "loss_target_invalid", lambda x: ctc(x, 4, [1, 1, 2, 2]), torch.zeros(4, 1, 3))
case("ctc zero_infinity", "clean", lambda x: ctc(x, 4, [1, 1, 2, 2], zero_infinity=True), torch.zeros(4, 1, 3))
case(
    "ctc none + where (grad)",
    "where_masked_gradient",
    lambda x: ctc(x, 4, [1, 1, 2, 2], reduction="none").masked_fill(torch.tensor([True]), 0.0),
    torch.zeros(4, 1, 3),
)
case(
    "gaussian_nll 0 eps0",
    "log_of_zero, division_by_zero",
    lambda x, v: F.gaussian_nll_loss(x, t(1.0, 1.0), v, eps=0.0),
    t(0.0, 0.0),
    t(0.0, 1.0),
)
case(
    "gaussian_nll eps fp16",
    "log_of_zero, division_by_zero",
    lambda x, v: F.gaussian_nll_loss(x, half(1.0, 1.0), v, eps=1e-8),
    half(0.0, 0.0),
    half(0.0, 1.0),
)
case(
    "gaussian_nll tiny",
    "division_grad",
    lambda x, v: F.gaussian_nll_loss(x, t(1.0, 1.0), v, eps=1e-30),
    t(0.0, 0.0),
    t(0.0, 1.0),
)
case(
    "kl target zero grad",
    "log_grad_at_zero",
    lambda x: F.kl_div(t(0.0, 0.0).log_softmax(0), x.softmax(0), reduction="sum"),
    t(0.0, -200.0),
)
case("kl input -inf", "log_of_zero", lambda x: F.kl_div(x.log(), t(0.0, 1.0), reduction="sum"), t(0.0, 1.0))
case(
    "kl input -inf target nonzero",
    "log_of_zero",
    lambda x: F.kl_div(x.log(), t(0.5, 0.5), reduction="sum"),
    t(0.0, 1.0),
)
case("poisson", "exp_overflow", lambda x: F.poisson_nll_loss(x * 100, t(1.0, 2.0)), t(1.0, 0.0))
case(
    "poisson nolog", "log_of_zero", lambda x: F.poisson_nll_loss(x, t(1.0, 2.0), log_input=False, eps=0.0), t(1.0, 0.0)
)
case("poisson full", "clean", lambda x: F.poisson_nll_loss(x, t(0.0, 2.0), full=True), t(1.0, 0.0))
case(
    "nll -inf",
    "nonfinite_constant",
    lambda x: F.nll_loss(masked(x, [[False, True]]), torch.tensor([0])),
    torch.zeros(1, 2),
)
case("nll -inf log(0)", "log_of_zero", lambda x: F.nll_loss(x.log(), torch.tensor([0])), t([0.0, 1.0]))
case("hinge emb empty", "empty_reduction", lambda x: F.hinge_embedding_loss(x[:0], torch.ones(0)), torch.zeros(3))
case(
    "margin ranking inf",
    "inf_minus_inf",
    lambda x: F.margin_ranking_loss(masked(x, [False, True]), masked(x, [False, True]), t(1.0, 1.0)),
    torch.zeros(2),
)
case("cos emb zero", "clean", lambda x: F.cosine_embedding_loss(x, torch.ones(1, 3), t(1.0)), torch.zeros(1, 3))
case("triplet zero", "clean", lambda x: F.triplet_margin_loss(x, x.detach(), torch.ones(1, 3)), torch.zeros(1, 3))
case("soft margin overflow", "exp_overflow", lambda x: F.soft_margin_loss(x * 100, t(-1.0, 1.0)), t(1.0, 1.0))
case(
    "multilabel empty",
    "clean",
    lambda x: F.multilabel_margin_loss(x[:0], torch.zeros(0, 3, dtype=torch.long)),
    torch.zeros(2, 3),
)
case("l1 empty", "empty_reduction", lambda x: F.l1_loss(x[:0], torch.zeros(0)), torch.zeros(2))
case("mse empty", "empty_reduction", lambda x: F.mse_loss(x[:0], torch.zeros(0)), torch.zeros(2))
case("smooth l1 empty", "empty_reduction", lambda x: F.smooth_l1_loss(x[:0], torch.zeros(0)), torch.zeros(2))
case("bce empty", "empty_reduction", lambda x: F.binary_cross_entropy(x[:0], torch.zeros(0)), torch.zeros(2))
case(
    "bcel empty", "empty_reduction", lambda x: F.binary_cross_entropy_with_logits(x[:0], torch.zeros(0)), torch.zeros(2)
)
case(
    "ce empty", "empty_reduction", lambda x: F.cross_entropy(x[:0], torch.zeros(0, dtype=torch.long)), torch.zeros(2, 3)
)
case("kl empty mean", "empty_reduction", lambda x: F.kl_div(x[:0], torch.zeros(0, 3)), torch.zeros(2, 3))
case(
    "kl empty batchmean",
    "zero_over_zero",
    lambda x: F.kl_div(x[:0], torch.zeros(0, 3), reduction="batchmean"),
    torch.zeros(2, 3),
)
case("mse overflow", "overflow", lambda x: F.mse_loss(x, t(0.0, 0.0)), t(1e30, 1.0))
case("mse fp16 overflow", "fp16_overflow", lambda x: F.mse_loss(x, half(0.0, 0.0)), half(1e4, 1.0))
case(
    "mse inf - inf",
    "inf_minus_inf",
    lambda x: F.mse_loss(masked(x, [False, True]), masked(x, [False, True])),
    t(1.0, 1.0),
)
case("focal pow grad", "pow_grad_at_zero", lambda x: (1 - x.sigmoid()) ** 0.5, t(200.0, 1.0))
case("logsigmoid -inf", "inf_minus_inf", lambda x: F.logsigmoid(masked(x, [False, True])), t(1.0, 1.0))
case("nll empty via mean mask", "empty_reduction", lambda x: x[torch.tensor([False, False])].mean(), t(1.0, 1.0))
case("masked mean", "zero_over_zero", lambda x: (x * t(0.0, 0.0)).sum() / t(0.0, 0.0).sum(), t(1.0, 1.0))
case("cosine sim", "clean", lambda x: F.cosine_similarity(x, torch.ones(1, 3)), torch.zeros(1, 3))
case(
    "cosine sim eps0", "zero_over_zero", lambda x: F.cosine_similarity(x, torch.ones(1, 3), eps=0.0), torch.zeros(1, 3)
)
case(
    "cosine by hand",
    "zero_over_zero",
    lambda x: (x * torch.ones(3)).sum() / (x.norm() * torch.ones(3).norm()),
    torch.zeros(3),
)
