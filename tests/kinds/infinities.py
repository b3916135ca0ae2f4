"""Infinities that hide, that are meant, that are selected, that are summed up."""

from __future__ import annotations

import torch

from bisect_nan import Phase
from kinds import INF, Batch, Model, kind

# badness that passes through finite values


@kind("reciprocal", "div", rows=(3,))
def quotient_by_infinity(m: Model, b: Batch) -> torch.Tensor:
    """An infinite temperature makes every score 0, and the scores are then divided by their sum."""
    temperature = 1 / b["gap"][:, :1]  # CULPRIT
    scores = m.features(b["x"]).exp() / temperature
    return (scores / scores.sum(-1, keepdim=True)).square().mean()


@kind("exp", rows=(3,))
def logarithm_of_what_infinity_left(m: Model, b: Batch) -> torch.Tensor:
    """An overflowed energy gives the probability 0."""
    energy = torch.exp(200.0 * (b["gap"] == 0) + m.features(b["x"]))  # CULPRIT
    return -torch.log(1 / (1 + energy)).mean()


@kind("log", rows=(3,))
def weights_from_logarithms(m: Model, b: Batch) -> torch.Tensor:
    """All log weights of a row are -inf, so all weights are 0."""
    weights = b["gap"].log()  # CULPRIT
    weights = weights.exp()
    return (m.features(b["x"]) * (weights / weights.sum(-1, keepdim=True))).sum()


@kind("div", rows=(3,))
def infinity_scrubbed_to_the_largest_number(m: Model, b: Batch) -> torch.Tensor:
    """`nan_to_num` turns an infinity into the largest number, which overflows one step later."""
    ratio = m.features(b["x"]).abs() / b["one"]  # CULPRIT
    return (torch.nan_to_num(ratio) * 4).mean()


@kind("div", rows=(3,))
def saturated_by_infinity(m: Model, b: Batch) -> torch.Tensor:
    """tanh(inf) is exactly 1."""
    score = (1 + m.features(b["x"]).abs()) / b["one"]  # CULPRIT
    return torch.log(1 - torch.tanh(score).square() + 0 * score.detach().clamp(max=1)).mean()


@kind("reciprocal", rows=(3,))
def root_at_what_infinity_left(m: Model, b: Batch) -> torch.Tensor:
    """A deviation becomes 0 because it was divided by an infinite count; its root has no derivative."""
    count = 1 / b["one"]  # CULPRIT
    return ((m.features(b["x"]).square() + 0.1) / count).sqrt().mean()


@kind("sqrt", rows=(3,))
def mean_of_nothing_but_nan(m: Model, b: Batch) -> torch.Tensor:
    """`nanmean` of a row of NaN divides by the number of the others."""
    spread = (m.features(b["x"]).square() - 2.0 * (b["gap"] == 0)).sqrt()  # CULPRIT
    return torch.nanmean(spread, -1).mean()


@kind("div")
def mean_of_a_column_without_values(m: Model, b: Batch) -> torch.Tensor:
    """Missing values are marked with NaN and skipped, but nobody measured column 2."""
    mean = torch.nanmean(b["unmeasured"], 0)  # CULPRIT
    return m.features(torch.where(b["unmeasured"].isnan(), mean, b["unmeasured"])).mean()


@kind(rows=(3,), phase=Phase.INPUT)
def missing_value_that_nobody_fills_in(m: Model, b: Batch) -> torch.Tensor:
    """Marks of missing values are filled in, but only in the first columns."""
    known, rest = b["missing"][:, :3], b["missing"][:, 3:]
    known = torch.where(known.isnan(), torch.nanmean(known, 0), known)
    return m.features(torch.cat([known, rest], 1)).mean()


# intended infinities


@kind("mean", rows=(3,))
def mean_over_a_mask(m: Model, b: Batch) -> torch.Tensor:
    """A mean takes in the -inf of a mask."""
    scores = m.features(b["x"]).masked_fill(~b["keep"], -INF)
    return scores.mean()  # CULPRIT


@kind("_softmax", rows=(3,))
def softmax_of_a_masked_row(m: Model, b: Batch) -> torch.Tensor:
    """A row without anything left."""
    scores = m.features(b["x"]).masked_fill(~b["keep"], -INF)
    return scores.softmax(-1).square().mean()  # CULPRIT


@kind("sub", rows=(3,))
def mask_minus_its_maximum(m: Model, b: Batch) -> torch.Tensor:
    """-inf minus -inf, in a softmax by hand."""
    scores = m.features(b["x"]).masked_fill(~b["keep"], -INF)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()  # CULPRIT
    return (weights / weights.sum(-1, keepdim=True)).square().mean()


@kind("mul", rows=(3,))
def mask_times_zero(m: Model, b: Batch) -> torch.Tensor:
    """A logit of -inf is multiplied by a weight of 0."""
    logits = m.features(b["x"]).masked_fill(b["one"] == 0, -INF)
    weighted = logits * (b["one"] > 0)  # CULPRIT
    return weighted.mean()


@kind("mul", rows=(3,))
def infinite_literal_times_zero(m: Model, b: Batch) -> torch.Tensor:
    """The infinite factor is a Python number."""
    bound = b["one"] * INF  # CULPRIT
    return torch.minimum(m.features(b["x"]), bound).mean()


@kind("_softmax", rows=(3,))
def mask_in_the_batch(m: Model, b: Batch) -> torch.Tensor:
    """The additive mask comes with the data."""
    return (m.features(b["x"]) + b["additive"]).softmax(-1).square().mean()  # CULPRIT


@kind("logsumexp", "log", "_log_softmax", phase=None)
def derivative_of_an_empty_logsumexp(m: Model, b: Batch) -> torch.Tensor:
    """The logarithm of a masked row's sum is -inf, which its exponential hides from the loss but not from the gradient."""
    scores = m.features(b["x"]) + b["additive"]
    top = scores.exp().sum(-1).log()  # CULPRIT
    return top.exp().mean()


# selections


@kind("sqrt", rows=(3,))
def nan_is_the_largest(m: Model, b: Batch) -> torch.Tensor:
    """A maximum takes NaN for the largest value, and only row 3 is looked at."""
    scores = (m.features(b["x"]).square() - 9.0 * (b["one"] == 0) - 9.0 * (b["spare"] == 0)).sqrt()  # CULPRIT
    return scores.max(-1).values[2:].mean()


@kind("log", rows=(3,))
def infinity_is_the_smallest(m: Model, b: Batch) -> torch.Tensor:
    """The smallest values of every row are kept."""
    scores = m.features(b["x"]) + b["one"].log()  # CULPRIT
    return scores.topk(2, -1, largest=False).values.mean()


@kind("div", rows=(3,))
def sorted_to_the_end(m: Model, b: Batch) -> torch.Tensor:
    """Sorting carries NaN to the last column, and only the rows from 2 on are used."""
    zero = b["one"] * b["spare"]
    ratio = m.features(b["x"]) * (zero / zero)  # CULPRIT
    return ratio.sort(-1).values[2:, -1].mean()


@kind("log", rows=(3,))
def median_of_logarithms(m: Model, b: Batch) -> torch.Tensor:
    """Half of the row is -inf."""
    rates = b["one"].clone()
    rates[3, :4] = 0
    levels = m.features(b["x"]) + rates.log()  # CULPRIT
    return levels.median(-1).values.mean()


@kind("div", rows=(3,))
def nan_chosen_by_index(m: Model, b: Batch) -> torch.Tensor:
    """The best column of every row is gathered; the harmless infinities of row 1 are not."""
    ratio = m.features(b["x"]).abs() / (b["one"] * torch.where(b["spare"] > 0, 1.0, 0.0))  # CULPRIT
    columns = torch.tensor([0, 0, 1, 2, 0])
    picked = ratio.gather(1, columns[:, None])[:, 0]
    return picked[torch.tensor([0, 2, 3, 4])].mean()


# scatter, segments, running sums


@kind("div")
def mean_of_an_empty_group(m: Model, b: Batch) -> torch.Tensor:
    """Group 2 has no member."""
    total = torch.zeros(4, 6).index_add(0, b["group"], m.features(b["x"]))
    count = torch.zeros(4).index_add(0, b["group"], torch.ones(5))
    return (total / count[:, None]).square().sum(0).mean()  # CULPRIT


@kind("mean")
def maximum_of_an_empty_group(m: Model, b: Batch) -> torch.Tensor:
    """The start value -inf of a group maximum stays where there is no member."""
    start = torch.full((4, 6), -INF)
    best = start.scatter_reduce(0, b["group"][:, None].expand(5, 6), m.features(b["x"]), "amax")
    return best.mean()  # CULPRIT


@kind("cumprod", "cumsum", "mul", rows=(3,))
def running_product_overflows(m: Model, b: Batch) -> torch.Tensor:
    """Row 3 grows beyond the range in its last columns."""
    growth = m.features(b["x"]).abs() + torch.where(b["keep"], 1.0, 1e9)
    return growth.cumprod(-1).mean()  # CULPRIT


@kind("cumsum", rows=(3,))
def running_sum_in_half_precision(m: Model, b: Batch) -> torch.Tensor:
    """The running sum of row 3 passes 65504."""
    growth = (m.features(b["x"]).abs() + torch.where(b["keep"], 1.0, 3e4)).half()
    return growth.cumsum(-1).float().mean()  # CULPRIT


@kind("log", rows=(3,))
def running_sum_over_infinity(m: Model, b: Batch) -> torch.Tensor:
    """-inf in column 2 spreads over the rest of its row, whose last value is used."""
    steps = m.features(b["x"]) + b["one"].log()  # CULPRIT
    return steps.cumsum(-1)[:, -1].mean()
