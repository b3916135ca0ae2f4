"""Every kind of fault that people meet, each as a small step whose guilty line is marked.

Each is located as it stands, and once more among innocent faults that come before and after the guilty one.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (the name that everybody uses)
from torch import nn
from torch.utils.checkpoint import checkpoint

from bisect_nan.driver import locate
from bisect_nan.finding import Phase, Verdict
from bisect_nan.snapshot import Snapshot

INF = float("inf")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A step and what has to be found in it: names that fit the culprit, rows of the batch, phase and module."""

    step: Callable[[Any, Any], torch.Tensor]
    ops: tuple[str, ...]
    rows: tuple[int, ...] | None
    phase: Phase | None
    module: str | None

    def lines(self) -> set[int]:
        """The marked lines."""
        text, first = inspect.getsourcelines(self.step)
        return {first + place for place, line in enumerate(text) if line.rstrip().endswith("# CULPRIT")}


KINDS: list[Kind] = []


def kind(
    *ops: str, rows: tuple[int, ...] | None = None, phase: Phase | None = Phase.FORWARD, module: str | None = None
) -> Callable[[Callable[[Any, Any], torch.Tensor]], Callable[[Any, Any], torch.Tensor]]:
    """Add a step to the kinds."""

    def add(step: Callable[[Any, Any], torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
        KINDS.append(Kind(step, ops, rows, phase, module))
        return step

    return add


class Model(nn.Module):
    """A few layers that steps can use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)
        self.table = nn.Embedding(9, 6)
        self.zero = nn.Parameter(torch.zeros(6))
        self.register_buffer("steps", torch.zeros(()))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch() -> dict[str, torch.Tensor]:
    """Five rows; row 3 of `gap` and of `scale` holds the zero that faults are made of, row 1 of `spare` one that harms nobody."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 6, generator=generator)
    gap, spare = torch.rand(5, 6, generator=generator) + 0.5, torch.rand(5, 6, generator=generator) + 0.5
    gap[3], spare[1] = 0.0, 0.0
    one = torch.rand(5, 6, generator=generator) + 0.5
    one[3, 2] = 0.0
    keep = torch.ones(5, 6, dtype=torch.bool)
    keep[3] = False
    part = torch.rand(5, 6, generator=generator) > 0.4
    part[:, 0] = True
    return {
        "x": x,
        "gap": gap,
        "one": one,
        "spare": spare,
        "keep": keep,
        "part": part,
        "label": torch.tensor([0, 2, 1, 0, 2]),
        "ids": torch.tensor([[0, 1], [2, 3], [4, 5], [8, 6], [7, 1]]),
        "group": torch.tensor([0, 0, 1, 3, 3]),
    }


def decoy(b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Innocent faults: selected away, clamped, scrubbed, sent through exp(-inf)."""
    spare = b["spare"]
    away = torch.where(spare > 0, 1 / spare, 0.0).mean()
    scrubbed = torch.nan_to_num(spare / spare).mean() + spare.log().clamp(-3, 3).mean() + spare.log().exp().mean()
    masked = b["x"].detach().masked_fill(~b["part"], -INF).softmax(-1)[:, 0].mean()
    return 0.01 * (away + scrubbed + masked)


# --- badness that passes through finite values ------------------------------------------------------------------------------------


@kind("reciprocal", "div", rows=(3,))
def quotient_by_infinity(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """An infinite temperature makes every score 0, and the scores are then divided by their sum."""
    temperature = 1 / b["gap"][:, :1]  # CULPRIT
    scores = m.features(b["x"]).exp() / temperature
    return (scores / scores.sum(-1, keepdim=True)).square().mean()


@kind("exp", rows=(3,))
def logarithm_of_what_infinity_left(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """An overflowed energy gives the probability 0."""
    energy = torch.exp(200.0 * (b["gap"] == 0) + m.features(b["x"]))  # CULPRIT
    return -torch.log(1 / (1 + energy)).mean()


@kind("log", rows=(3,))
def weights_from_logarithms(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """All log weights of a row are -inf, so all weights are 0."""
    weights = b["gap"].log()  # CULPRIT
    weights = weights.exp()
    return (m.features(b["x"]) * (weights / weights.sum(-1, keepdim=True))).sum()


@kind("div", rows=(3,))
def infinity_scrubbed_to_the_largest_number(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """`nan_to_num` turns an infinity into the largest number, which overflows one step later."""
    ratio = m.features(b["x"]).abs() / b["one"]  # CULPRIT
    return (torch.nan_to_num(ratio) * 4).mean()


@kind("div", rows=(3,))
def saturated_by_infinity(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """tanh(inf) is exactly 1."""
    score = (1 + m.features(b["x"]).abs()) / b["one"]  # CULPRIT
    return torch.log(1 - torch.tanh(score).square() + 0 * score.detach().clamp(max=1)).mean()


@kind("reciprocal", rows=(3,))
def root_at_what_infinity_left(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A deviation becomes 0 because it was divided by an infinite count; its root has no derivative."""
    count = 1 / b["one"]  # CULPRIT
    return ((m.features(b["x"]).square() + 0.1) / count).sqrt().mean()


@kind("sqrt", rows=(3,))
def mean_of_nothing_but_nan(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """`nanmean` of a row of NaN divides by the number of the others."""
    spread = (m.features(b["x"]).square() - 2.0 * (b["gap"] == 0)).sqrt()  # CULPRIT
    return torch.nanmean(spread, -1).mean()


# --- intended infinities ----------------------------------------------------------------------------------------------------------


@kind("mean", rows=(3,))
def mean_over_a_mask(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A mean takes in the -inf of a mask."""
    scores = m.features(b["x"]).masked_fill(~b["keep"], -INF)
    return scores.mean()  # CULPRIT


@kind("_softmax", rows=(3,))
def softmax_of_a_masked_row(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A row without anything left."""
    scores = m.features(b["x"]).masked_fill(~b["keep"], -INF)
    return scores.softmax(-1).square().mean()  # CULPRIT


@kind("sub", rows=(3,))
def mask_minus_its_maximum(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """-inf minus -inf, in a softmax by hand."""
    scores = m.features(b["x"]).masked_fill(~b["keep"], -INF)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()  # CULPRIT
    return (weights / weights.sum(-1, keepdim=True)).square().mean()


@kind("mul", rows=(3,))
def mask_times_zero(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A logit of -inf is multiplied by a weight of 0."""
    logits = m.features(b["x"]).masked_fill(b["one"] == 0, -INF)
    weighted = logits * (b["one"] > 0)  # CULPRIT
    return weighted.mean()


@kind("mul", rows=(3,))
def infinite_literal_times_zero(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The infinite factor is a Python number."""
    bound = b["one"] * INF  # CULPRIT
    return torch.minimum(m.features(b["x"]), bound).mean()


@kind("_softmax", rows=(3,))
def mask_in_the_batch(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The additive mask comes with the data."""
    return (m.features(b["x"]) + b["additive"]).softmax(-1).square().mean()  # CULPRIT


@kind("logsumexp", "log", "_log_softmax", phase=None)
def derivative_of_an_empty_logsumexp(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logarithm of a masked row's sum is -inf, which its exponential hides from the loss but not from the gradient."""
    scores = m.features(b["x"]) + b["additive"]
    top = scores.exp().sum(-1).log()  # CULPRIT
    return top.exp().mean()


# --- selections -------------------------------------------------------------------------------------------------------------------


@kind("sqrt", rows=(3,))
def nan_is_the_largest(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A maximum takes NaN for the largest value, and only row 3 is looked at."""
    scores = (m.features(b["x"]).square() - 9.0 * (b["one"] == 0) - 9.0 * (b["spare"] == 0)).sqrt()  # CULPRIT
    return scores.max(-1).values[2:].mean()


@kind("log", rows=(3,))
def infinity_is_the_smallest(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The smallest values of every row are kept."""
    scores = m.features(b["x"]) + b["one"].log()  # CULPRIT
    return scores.topk(2, -1, largest=False).values.mean()


@kind("div", rows=(3,))
def sorted_to_the_end(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sorting carries NaN to the last column, and only the rows from 2 on are used."""
    zero = b["one"] * b["spare"]
    ratio = m.features(b["x"]) * (zero / zero)  # CULPRIT
    return ratio.sort(-1).values[2:, -1].mean()


@kind("log", rows=(3,))
def median_of_logarithms(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Half of the row is -inf."""
    rates = b["one"].clone()
    rates[3, :4] = 0
    return (m.features(b["x"]).detach() * 0 + rates.log()).median(-1).values.mean() + m.features(b["x"]).mean()  # CULPRIT


@kind("div", rows=(3,))
def nan_chosen_by_index(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The best column of every row is gathered; the harmless infinities of row 1 are not."""
    ratio = m.features(b["x"]).abs() / (b["one"] * torch.where(b["spare"] > 0, 1.0, 0.0))  # CULPRIT
    columns = torch.tensor([0, 0, 1, 2, 0])
    picked = ratio.gather(1, columns[:, None])[:, 0]
    return picked[torch.tensor([0, 2, 3, 4])].mean()


# --- scatter, segments, running sums ------------------------------------------------------------------------------------------------


@kind("div")
def mean_of_an_empty_group(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Group 2 has no member."""
    total = torch.zeros(4, 6).index_add(0, b["group"], m.features(b["x"]))
    count = torch.zeros(4).index_add(0, b["group"], torch.ones(5))
    return (total / count[:, None]).square().sum(0).mean()  # CULPRIT


@kind("mean")
def maximum_of_an_empty_group(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The start value -inf of a group maximum stays where there is no member."""
    start = torch.full((4, 6), -INF)
    best = start.scatter_reduce(0, b["group"][:, None].expand(5, 6), m.features(b["x"]), "amax")
    return best.mean()  # CULPRIT


@kind("cumprod", "cumsum", "mul", rows=(3,))
def running_product_overflows(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Row 3 grows beyond the range in its last columns."""
    growth = m.features(b["x"]).abs() + torch.where(b["keep"], 1.0, 1e9)
    return growth.cumprod(-1).mean()  # CULPRIT


@kind("cumsum", rows=(3,))
def running_sum_in_half_precision(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The running sum of row 3 passes 65504."""
    growth = (m.features(b["x"]).abs() + torch.where(b["keep"], 1.0, 3e4)).half()
    return growth.cumsum(-1).float().mean()  # CULPRIT


@kind("log", rows=(3,))
def running_sum_over_infinity(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """-inf in column 2 spreads over the rest of its row, whose last value is used."""
    steps = m.features(b["x"]) + b["one"].log()  # CULPRIT
    return steps.cumsum(-1)[:, -1].mean()


# --- gradients --------------------------------------------------------------------------------------------------------------------


@kind("sqrt", rows=(3,), phase=Phase.BACKWARD)
def root_beside_a_norm(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The derivative of torch's own norm at 0 is masked by torch, that of the root by hand is not."""
    y = m.features(b["x"]) * b["keep"]
    length = y.square().sum(-1).sqrt()  # CULPRIT
    return (y.norm(dim=-1) + length).mean()


@kind("div", rows=(3,), phase=None)
def quotient_not_selected(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """`where` keeps the quotient out of the loss, not out of the gradient."""
    y = m.features(b["x"])
    scale = m.zero.exp() * b["gap"]
    return torch.where(b["gap"] > 0, y / scale, y).mean()  # CULPRIT


@kind("pow", rows=(3,), phase=None)
def power_with_a_fraction(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """0 ** 0.4 has no derivative."""
    y = m.features(b["x"]).abs() * b["keep"]
    return y.pow(0.4).mean()  # CULPRIT


@kind("sqrt", phase=Phase.BACKWARD, rows=(3,))
def clamp_at_its_bound(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A clamp passes the gradient exactly at its bound; a rectifier does not, so the other root is innocent."""
    y = m.features(b["x"])
    rectified = F.relu(y).sqrt()
    clamped = (y * b["keep"]).clamp(min=0).sqrt()  # CULPRIT
    return rectified.mean() + torch.where(y > 0, clamped, clamped).sum()


@kind("div", phase=Phase.BACKWARD)
def hook_on_a_gradient(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
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
def backward_of_a_function(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The line of the Function's own backward is to blame, or the one that applies it."""
    y = m.features(b["x"]).square() * b["keep"]
    return _Root.apply(y).mean()  # CULPRIT


@kind("sqrt", "pow", "div")
def forces_from_a_distance(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The derivative is taken inside the step: two points coincide."""
    points = (m.features(b["x"])[:, :3]).detach().requires_grad_()
    offset = points[b["group"]] - points[torch.tensor([1, 0, 2, 3, 1])]
    distance = offset.square().sum(-1).sqrt()  # CULPRIT
    energy = (m.head.weight.sum() * distance).sum()
    (force,) = torch.autograd.grad(energy, points, create_graph=True)
    return force.square().mean()


@kind("sqrt", "pow", phase=Phase.BACKWARD)
def penalty_on_a_gradient(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The length of a gradient that is exactly 0 for one row is differentiated once more."""
    x = b["x"].clone().requires_grad_()
    score = (m.features(x) * b["keep"]).sum()
    (gradient,) = torch.autograd.grad(score, x, create_graph=True)
    return (gradient.square().sum(-1).sqrt() - 1).square().mean()  # CULPRIT


@kind("sqrt", rows=(3,), phase=Phase.BACKWARD)
def checkpointed_root(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The forward pass is repeated in the backward pass."""

    def block(x: torch.Tensor) -> torch.Tensor:
        y = m.features(x) * b["keep"]
        return y.square().sum(-1).sqrt()  # CULPRIT

    return checkpoint(block, b["x"] * m.zero.exp(), use_reentrant=False).mean()


@kind("log", rows=(3,))
def checkpointed_logarithm(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A fault in the forward pass of a checkpointed block."""

    def block(x: torch.Tensor) -> torch.Tensor:
        return m.features(x) + b["one"].log()  # CULPRIT

    return checkpoint(block, b["x"] * m.zero.exp(), use_reentrant=False).mean()


@kind("_to_copy", "half", phase=Phase.BACKWARD)
def gradient_overflows_in_half(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient of a scaled loss leaves the range of float16 on its way back."""
    y = m.features(b["x"]).half().float()  # CULPRIT
    return (y * torch.where(b["one"] > 0, 1.0, 1e9)).sum()


@kind("linalg_eigh", "_linalg_eigh", phase=None)
def degenerate_spectrum(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Equal eigenvalues have no derivative of their vectors."""
    matrix = torch.eye(3) + 0 * (m.head.weight @ m.head.weight.T)
    values, vectors = torch.linalg.eigh(matrix)  # CULPRIT
    return vectors[0].abs().sum() + values.sum()


# --- memory, views, in-place --------------------------------------------------------------------------------------------------------


@kind("empty", "new_empty", "empty_like")
def memory_read_before_it_was_written(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last column is never written."""
    y = m.features(b["x"])
    with _filled():
        out = torch.empty(5, 6)  # CULPRIT
    out[:, :5] = y[:, :5]
    return out.mean()


@kind("log", rows=(3,))
def memory_that_is_written_in_time(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Scratch memory full of NaN is overwritten; a logarithm is to blame."""
    with _filled():
        out = torch.empty(5, 6)
    out.copy_(m.features(b["x"]))
    return (F.dropout(out, 0.1) + b["one"].log()).mean()  # CULPRIT


@kind("div", rows=(3,))
def division_through_a_view(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """One chunk is divided in place."""
    y = m.features(b["x"]).clone()
    left = y[:, :3]
    left.div_(b["one"][:, :3])  # CULPRIT
    return y.mean()


@kind("log", rows=(3,))
def logarithm_in_place(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Afterwards the input is the result."""
    y = b["one"].clone()
    y.log_()  # CULPRIT
    y[1] = 0.5
    return (m.features(b["x"]) + y).mean()


@kind("div", rows=(3,))
def written_back_into_a_cache(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A cache is filled row by row, read transposed, and partly overwritten."""
    cache = torch.zeros(2, 5, 6)
    for row in range(5):
        cache[0, row] = m.features(b["x"][row]) / b["one"][row]  # CULPRIT
    cache[1] = cache[0].flip(0)
    cache[0, :4] = 0
    return cache.transpose(0, 1).mean()


# --- precision ----------------------------------------------------------------------------------------------------------------------


@kind("mm", "matmul", "addmm", rows=(3,))
def product_in_half_precision(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """One row of a half-precision product overflows."""
    y = (m.features(b["x"]) + torch.where(b["keep"], 0.0, 3e4)).half()
    return (y @ torch.ones(6, 6).half()).float().mean()  # CULPRIT


@kind("div", rows=(3,))
def epsilon_lost_in_half_precision(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """1e-8 is 0 in float16."""
    y = (m.features(b["x"]) * b["keep"]).half()
    return (y / (y.norm(dim=-1, keepdim=True) + 1e-8)).float().mean()  # CULPRIT


@kind("exp", rows=(3,))
def double_overflows(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Double precision ends at 1.8e308."""
    y = m.features(b["x"]).double() + torch.where(b["keep"], 0.0, 800.0)
    return y.exp().mean()  # CULPRIT


@kind("pow", "square", "mul", rows=(3,))
def square_in_bfloat16(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """bfloat16 has the range of float32, and that can be left."""
    y = (m.features(b["x"]) + torch.where(b["keep"], 1.0, 1e20)).bfloat16()
    return y.square().float().mean()  # CULPRIT


# --- complex numbers ----------------------------------------------------------------------------------------------------------------


@kind("div", rows=(3,))
def complex_quotient(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A transfer function has a pole on the circle."""
    y = torch.fft.fft(m.features(b["x"]))
    response = y / torch.complex(b["one"], torch.zeros(5, 6))  # CULPRIT
    return torch.fft.ifft(response).real.square().mean()


@kind("log", rows=(3,))
def complex_logarithm(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The logarithm of a complex 0."""
    y = torch.complex(m.features(b["x"]), b["one"]) * b["one"]
    return torch.log(y).real.mean()  # CULPRIT


@kind("sqrt", phase=Phase.BACKWARD)
def complex_root(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The root of a complex 0 has no derivative; angle and absolute value of it are fine."""
    y = torch.complex(m.features(b["x"]), m.features(b["x"])) * b["keep"]
    return (y.sqrt().abs() + y.angle() + y.abs()).mean()  # CULPRIT


# --- structure ----------------------------------------------------------------------------------------------------------------------


@kind("exp", rows=(3,), module="layers.2")
def same_line_in_every_layer(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The line overflows in every layer, and only behind the last layer nothing clamps."""
    x, total = b["x"], torch.zeros(())
    for place, layer in enumerate(m.layers):
        x = torch.tanh(x) + torch.where(b["keep"], 0.0, 200.0)
        x = _in_module(m, layer, lambda inner, y: inner(y) * 0 + y.exp(), x)  # CULPRIT
        total = total + (x.clamp(max=2.0) if place < 2 else x[3:]).mean()
        x = x.clamp(max=2.0)
    return total


@kind("div")
def three_losses(m: Model, b: dict[str, torch.Tensor]) -> Any:
    """One of several losses is averaged over nothing."""
    y = m.head(m.features(b["x"]))
    chosen = b["label"] == 7
    per_row = F.cross_entropy(y, b["label"], reduction="none")
    third = (per_row * chosen).sum() / chosen.sum()  # CULPRIT
    return {"first": per_row.mean(), "second": y.square().mean(), "third": third}


@kind("div", rows=(3,))
def one_time_step(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loop over time: the fault is in the third step of row 3."""
    h, total = torch.zeros(5), torch.zeros(())
    for t in range(6):
        h = torch.tanh(h + m.features(b["x"])[:, t])
        total = total + ((1 + h) / b["one"][:, t]).mean()  # CULPRIT
    return total


@kind("acos", rows=(3,))
def angle_beyond_one(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A cosine of 1.0000001."""
    cosine = torch.tanh(m.features(b["x"])) * 0 + torch.where(b["keep"], 0.5, 1.0000002)
    return torch.acos(cosine).mean()  # CULPRIT


@kind("var", "std", "var_mean")
def deviation_of_one_row(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The deviation of a single row has no degree of freedom."""
    y = m.features(b["x"])[b["label"] == 1]
    return ((y - y.mean(0)) / (y.std(0) + 1e-5)).square().mean()  # CULPRIT


@kind("div", "nll_loss_forward", "nll_loss")
def all_labels_ignored(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Nothing is left to be averaged."""
    label = torch.full((5,), -100)
    return F.cross_entropy(m.head(m.features(b["x"])), label)  # CULPRIT


@kind("_ctc_loss", "ctc_loss", rows=(3,))
def alignment_that_cannot_exist(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Row 3 is to spell more than it has frames."""
    frames = m.features(b["x"]).T[:, :, None].expand(6, 5, 4).log_softmax(-1)
    lengths = torch.tensor([2, 1, 2, 6, 1])
    return F.ctc_loss(frames, torch.ones(5, 6, dtype=torch.long), torch.full((5,), 6), lengths)  # CULPRIT


@kind("_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu", "bmm", "baddbmm", "scaled_dot_product_attention")
def attention_layer_without_keys(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """All keys of row 3 are padding, inside a layer of the library."""
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(6, 2, batch_first=True).requires_grad_(requires_grad=False)
    y = m.features(b["x"])[:, None].expand(5, 6, 6) * 1
    return layer(y, y, y, key_padding_mask=~b["keep"])[0].mean()  # CULPRIT


@kind("mul", rows=(3,))
def zero_weight_times_an_infinite_value(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The infinity is made earlier, so its line is to blame and not the product."""
    value = (m.features(b["x"]).abs() + 1e20) * torch.where(b["one"] > 0, 1.0, 1e20)  # CULPRIT
    return (value * (b["one"] > 0)).mean() * 1e-20


@kind("sqrt", "rsqrt", rows=(3,))
def variance_by_difference(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """E[x^2] - E[x]^2 of large numbers is negative."""
    y = m.features(b["x"]).double().float() * 0 + torch.where(b["keep"], b["x"], b["x"] * 0 + 3.3) + 0
    variance = y.square().mean(-1) - y.mean(-1).square() - 1e-6 * (b["gap"][:, 0] == 0)
    return variance.sqrt().mean()  # CULPRIT


@kind("log", rows=(3,))
def vectorised_over_rows(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The step is written for one row and mapped over the batch."""

    def one(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) + rate.log()).sum()  # CULPRIT

    return torch.vmap(one)(m.features(b["x"]), b["one"]).mean()


# --- what came in bad ---------------------------------------------------------------------------------------------------------------


@kind(rows=(3,), phase=Phase.INPUT)
def feature_is_nan(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The data hold NaN."""
    return m.features(b["broken"]).mean()  # CULPRIT


@kind(rows=(3,), phase=Phase.INPUT)
def feature_is_infinite(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Padding holds infinities, which a mask removes, and a real row holds one too."""
    y = torch.where(b["pad"], 0.0, b["energies"])
    return F.layer_norm(m.features(b["x"]) + y, (6,)).square().mean()


@kind("log", rows=(3,))
def feature_is_nan_and_masked(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The NaN of the data are masked, and something else fails."""
    clean = torch.where(b["broken"].isfinite(), b["broken"], 0.0)
    return (m.features(clean) + b["one"].log()).mean()  # CULPRIT


@kind(phase=Phase.PARAMETER)
def row_of_a_table_is_nan(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Only row 3 of the batch looks at it."""
    return m.table_with_nan(b["ids"]).mean()  # CULPRIT


@kind(phase=Phase.INPUT)
def constant_is_nan(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The number was computed by NumPy."""
    with np.errstate(invalid="ignore"):
        factor = torch.from_numpy(np.sqrt(np.array([1.0, -1.0], dtype=np.float32)))
    return (m.features(b["x"])[:, :2] * factor).mean()  # CULPRIT


@kind("mul", "full", "masked_fill", rows=(3,))
def nan_as_a_mark(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Missing values are marked by NaN, and not left out."""
    marked = m.features(b["x"]).masked_fill(b["one"] == 0, math.nan)  # CULPRIT
    return marked.mean()


# --- second helping -----------------------------------------------------------------------------------------------------------------


@kind("div", "reciprocal", "pow", rows=None)
def sparse_adjacency(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A node without neighbours has an infinite inverse degree in a sparse matrix."""
    index = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    weight = 1 / b["one"][:, 2]  # CULPRIT
    matrix = torch.sparse_coo_tensor(index, weight, (5, 5))
    return torch.sparse.mm(matrix, m.features(b["x"])).mean()


@kind("sqrt", "pow", "div", phase=Phase.BACKWARD)
def reentrant_checkpoint(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The older kind of checkpoint runs the block without gradients first."""

    def block(x: torch.Tensor) -> torch.Tensor:
        y = m.features(x) * b["keep"]
        return y.square().sum(-1).sqrt()  # CULPRIT

    return checkpoint(block, b["x"] * m.zero.exp(), use_reentrant=True).mean()


@kind("sqrt", "pow", "div")
def gradient_for_every_row(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A gradient per row, by function transforms."""

    def one(weight: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return ((weight @ x) * keep[:3]).square().sum().sqrt()  # CULPRIT

    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(m.head.weight, b["x"], b["keep"].float())
    return each.square().mean()


@kind("log", rows=(3,))
def innocent_in_control_flow(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """How many rows are kept depends on an innocent NaN, so neutralising that one leads elsewhere."""
    y = m.features(b["x"])
    doubtful = (b["spare"] / b["spare"])[:, 0]
    chosen = y[doubtful > 0.5]
    return chosen.square().mean() + (y + b["one"].log()).mean()  # CULPRIT


@kind("div", rows=(3,))
def rows_chosen_by_value(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Only rows whose ratio is large are used, and the fault is the largest."""
    ratio = (1 + m.features(b["x"]).abs()) / b["one"]  # CULPRIT
    large = ratio[ratio > 1.5]
    return large.mean()


@kind("native_batch_norm", "batch_norm", "rsqrt", "sqrt")
def negative_running_variance(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A running variance below zero, in evaluation."""
    norm = nn.BatchNorm1d(6).eval()
    norm.running_var[2] = -1.0
    return norm(m.features(b["x"])).mean()  # CULPRIT


@kind("mul")
def infinite_bias_from_a_mask(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """(1 - mask) * -inf is NaN where the mask is 1."""
    bias = (1 - b["keep"].float()) * -INF  # CULPRIT
    return (m.features(b["x"]) + bias).softmax(-1)[:3].mean()


@kind("log", "_log_softmax", "nll_loss_forward", "div", "sub", rows=None)
def label_of_a_masked_class(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The right class of row 3 is masked."""
    logits = m.head(m.features(b["x"])).masked_fill(F.one_hot(torch.tensor([1, 1, 2, 0, 1]), 3).bool(), -INF)
    return F.cross_entropy(logits, b["label"])  # CULPRIT


@kind("sqrt", rows=(3,))
def packed_sequences(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The fault enters a recurrent layer through a packed sequence."""
    torch.manual_seed(0)
    layer = nn.GRU(1, 4, batch_first=True)
    y = (m.features(b["x"]).square() - 9.0 * (b["one"] == 0)).sqrt()  # CULPRIT
    packed = nn.utils.rnn.pack_padded_sequence(y[:, :, None], torch.tensor([6, 5, 4, 3, 2]), batch_first=True)
    return layer(packed)[1].mean()


@kind("pow", "exp", "mul", "square", rows=(3,))
def harmful_and_harmless_overflow(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Row 1 overflows too, and a minimum stops it."""
    y = torch.exp(m.features(b["x"]) + 100 * (b["gap"] == 0) + 100 * (b["spare"] == 0))  # CULPRIT
    return torch.minimum(y[:3], torch.ones(3, 6)).mean() + y[3:].mean()


@kind("sub", "_softmax", rows=(3,))
def distances_with_infinity(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Unreachable pairs of the data are infinitely far: a row of nothing else cannot be normalised."""
    return (-b["far"] + m.features(b["x"])).softmax(-1).square().mean()  # CULPRIT


@kind("mul")
def constant_with_an_infinite_end(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """The last bound of a list is infinite on purpose."""
    bounds = torch.tensor([0.5, 1.0, INF])
    width = m.head(m.features(b["x"])) * 0 * bounds  # CULPRIT
    return width.mean()


@kind("linalg_inv", "linalg_inv_ex", "linalg_solve", "_linalg_solve_ex", "pow", "div", rows=(3,))
def inverse_square_root_of_degrees(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """Symmetric normalisation: inf * 0 is NaN where a degree is 0."""
    near = torch.ones(5, 5) * b["keep"][:, :1] * b["keep"][:, 0]
    degree = near.sum(-1)
    scale = degree.pow(-0.5)  # CULPRIT
    return (scale[:, None] * near * scale @ m.features(b["x"])).mean()


@kind("sqrt", "div", "pow", phase=Phase.BACKWARD, rows=(3,))
def distance_of_equal_points(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """All pairs, the diagonal included; torch's own cdist beside it is fine."""
    y = m.features(b["x"]) * b["keep"]
    own = torch.cdist(y, y).mean()
    pairs = (y - 0.0).square().sum(-1).sqrt()  # CULPRIT
    return own + pairs.mean()


@kind("div", "std", "var")
def whitening_by_batch_statistics(m: Model, b: dict[str, torch.Tensor]) -> torch.Tensor:
    """A feature that is constant over the batch has no deviation."""
    y = m.features(b["x"]) * (m.zero + torch.tensor([1.0, 1, 0, 1, 1, 1]))
    return ((y - y.mean(0)) / y.std(0)).square().mean()  # CULPRIT


class _filled:  # noqa: N801  (reads like the context manager that it is)
    """torch fills new memory with NaN inside, as memory that was used before may be."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(mode=False)


def _in_module(model: nn.Module, layer: nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run code of a step as if it stood in a module's forward."""
    plain = layer.forward
    layer.forward = lambda y: run(plain, y)  # type: ignore[method-assign]
    try:
        return layer(x)  # type: ignore[no-any-return]
    finally:
        layer.forward = plain  # type: ignore[method-assign]


def _names(culprit: Any) -> set[str]:
    names = {culprit.op, culprit.kernel}
    return {name.removeprefix("aten.").split(".")[0].removesuffix("_") for name in names} | {(culprit.autograd or "").split("Backward")[0].lower()}


def prepared() -> tuple[Model, dict[str, torch.Tensor]]:
    """Return a model and a batch for any of the steps."""
    model, data = Model(), batch()
    model.table_with_nan = nn.Embedding(9, 6)
    with torch.no_grad():
        model.table_with_nan.weight[8, 1] = math.nan
    data["broken"] = data["x"].clone()
    data["broken"][3, 4] = math.nan
    data["far"] = torch.rand(5, 6) + 1
    data["far"][3], data["far"][1, 2:4] = INF, INF
    data["energies"] = torch.randn(5, 6)
    data["pad"] = torch.zeros(5, 6, dtype=torch.bool)
    data["pad"][1, 2:] = True
    data["energies"][1, 2:], data["energies"][3, 4] = -INF, -INF
    data["additive"] = torch.zeros(5, 6).masked_fill(~data["keep"], -INF)
    return model, data


@pytest.mark.filterwarnings("ignore:std", "ignore:Sparse invariant")
@pytest.mark.parametrize("among_innocents", [False, True], ids=["alone", "among innocents"])
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.step.__name__)
def test_the_marked_line_is_named(case: Kind, among_innocents: bool) -> None:  # noqa: FBT001  (a parameter of the test)
    """The culprit of every kind is its marked line, by its right name, with the rows that carry it, and nothing else is named."""
    model, data = prepared()

    def step(model: Model, data: dict[str, torch.Tensor]) -> Any:
        result = case.step(model, data)
        if not among_innocents:
            return result
        return {**result, "more": decoy(data)} if isinstance(result, dict) else result + decoy(data)

    torch.manual_seed(5)
    finding = locate(Snapshot.capture(model, data, step))
    assert finding.verdict is Verdict.LOCATED
    culprit = finding.culprits[0]
    assert culprit.source is not None
    if culprit.node >= 0:
        assert {c.source.line for c in finding.culprits if c.source} <= case.lines() or culprit.source.text.endswith("# BACKWARD")
    if case.ops:
        assert _names(culprit) & set(case.ops)
    if case.rows is not None:
        assert culprit.samples == case.rows
    if case.phase is not None:
        assert culprit.phase is case.phase
    if case.module is not None:
        assert culprit.module == case.module
