"""What people of several fields meet: detection, rendering, reinforcement learning, sequences, transport, audio."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from bisect_nan import Phase
from kinds import INF, Batch, Model, kind


@kind("lgamma", rows=(3,))
def density_at_the_edge(m: Model, b: Batch) -> torch.Tensor:
    """The normalisation of a beta density has a pole at 0."""
    alpha = torch.where(b["keep"], m.features(b["x"]).abs() + 0.5, 0.0)
    return (torch.lgamma(alpha) + alpha).mean()  # CULPRIT


@kind("div", rows=(3,), phase=None)
def aspect_of_a_flat_box(m: Model, b: Batch) -> torch.Tensor:
    """The angle of an infinite aspect is finite, its derivative is not."""
    width = m.features(b["x"]).exp()
    height = width * b["keep"]
    angle = torch.atan(width / height)  # CULPRIT
    return (angle - 1).square().mean()


@kind("div", rows=(3,), phase=None)
def rotation_by_nothing(m: Model, b: Batch) -> torch.Tensor:
    """sin(x) / x is selected away at 0, its derivative is not."""
    angle = m.features(b["x"]) * b["keep"]
    return torch.where(angle.abs() > 0, angle.sin() / angle, 1.0).mean()  # CULPRIT


@kind("mul", rows=(3,))
def last_interval_of_a_ray(m: Model, b: Batch) -> torch.Tensor:
    """The last interval is infinite on purpose; where the density is 0 the product is NaN."""
    density = (m.features(b["x"]).abs() + 0.1) * b["keep"]
    interval = torch.cat([torch.full((5, 5), 0.1), torch.full((5, 1), INF)], 1)
    opacity = 1 - torch.exp(-density * interval)  # CULPRIT
    return opacity.mean()


@kind("exp", rows=(3,))
def ratio_of_policies(m: Model, b: Batch) -> torch.Tensor:
    """An action that the old policy thought impossible."""
    new = m.features(b["x"]).sum(-1)
    old = torch.where(b["keep"][:, 0], new.detach(), new.detach() - 100)
    ratio = (new - old).exp()  # CULPRIT
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


@kind("atanh", rows=(3,))
def action_at_its_bound(m: Model, b: Batch) -> torch.Tensor:
    """The density of a squashed action is taken where tanh is exactly 1."""
    action = torch.where(b["keep"], m.features(b["x"]).tanh() * 0.9, 1.0)
    before = torch.atanh(action)  # CULPRIT
    return (before - 1).square().mean()


@kind("reciprocal", "div", phase=Phase.BACKWARD)
def gradient_clipped_by_hand(m: Model, b: Batch) -> torch.Tensor:
    """A hook divides by the length of a gradient that is 0."""
    y = m.features(b["x"])
    branch = y * 1
    branch.register_hook(lambda gradient: gradient * (1 / gradient.norm()))  # CULPRIT
    return (branch * 0).sum() + y.mean()


@kind("div", rows=(3,), phase=None)
def mean_of_a_masked_row(m: Model, b: Batch) -> torch.Tensor:
    """A row without valid tokens is replaced after it was divided by their number."""
    y, weight = m.features(b["x"]), b["keep"].float() * m.zero.exp()
    row = (y * weight).sum(1) / weight.sum(1)  # CULPRIT
    return torch.where(b["keep"].any(1), row, 0.0).mean()


@kind("cosh", rows=(3,))
def logarithm_of_a_cosh(m: Model, b: Batch) -> torch.Tensor:
    """The intermediate value overflows, the result would not."""
    difference = m.features(b["x"]) + torch.where(b["keep"], 0.0, 200.0)
    return difference.cosh().log().mean()  # CULPRIT


@kind("exp", rows=(3,))
def softplus_by_hand(m: Model, b: Batch) -> torch.Tensor:
    """Here, too."""
    y = m.features(b["x"]) + torch.where(b["keep"], 0.0, 100.0)
    return torch.log(1 + torch.exp(y)).mean()  # CULPRIT


@kind("mul", rows=(3,))
def soft_targets_on_masked_logits(m: Model, b: Batch) -> torch.Tensor:
    """A target probability of 0 is multiplied by a log-probability of -inf inside the library's loss."""
    masked = torch.zeros(5, 3, dtype=torch.bool)
    masked[3, 0] = True
    logits = m.head(m.features(b["x"])).masked_fill(masked, -INF)
    target = torch.tensor([[0.5, 0.5, 0.0]] * 3 + [[0.0, 0.5, 0.5]] + [[0.5, 0.5, 0.0]])
    return F.cross_entropy(logits, target)  # CULPRIT


@kind("div", rows=(3,))
def temperature_of_zero(m: Model, b: Batch) -> torch.Tensor:
    """Scores are divided by a temperature that has reached 0."""
    temperature = b["keep"][:, :1].float()
    return (m.features(b["x"]) / temperature).softmax(-1).square().mean()  # CULPRIT


@kind("mm", rows=(3,))
def exploding_state(m: Model, b: Batch) -> torch.Tensor:
    """The state of one row grows without bound over the steps."""
    state = torch.where(b["keep"], 0.1, 1.0) * torch.ones(5, 6)
    grow = torch.eye(6) * 3e4
    for _ in range(12):
        state = state @ grow  # CULPRIT
        state = torch.where(b["keep"], state.clamp(-1, 1), state)
    return (state * m.zero.exp()).mean()


@kind("_weight_norm_interface")
def weight_of_length_zero(m: Model, b: Batch) -> torch.Tensor:
    """Weight normalisation of weights that start at 0."""
    layer = nn.Linear(6, 4)
    nn.init.zeros_(layer.weight)
    layer = nn.utils.parametrizations.weight_norm(layer)
    out: torch.Tensor = layer(m.features(b["x"]))  # CULPRIT
    return out.mean()


@kind("native_layer_norm", rows=(3,))
def normalisation_without_epsilon(m: Model, b: Batch) -> torch.Tensor:
    """A constant row, and no epsilon."""
    return F.layer_norm(m.features(b["x"]) * b["keep"], (6,), eps=0.0).square().mean()  # CULPRIT


@kind("mean")
def mean_of_nothing(m: Model, b: Batch) -> torch.Tensor:
    """No row has this label."""
    y = m.features(b["x"])
    return y.square().mean() + y[b["label"] > 5].mean()  # CULPRIT


@kind("div", rows=(3,), phase=None)
def phase_of_silence(m: Model, b: Batch) -> torch.Tensor:
    """A spectrum is divided by its absolute value."""
    spectrum = torch.fft.rfft(m.features(b["x"]) * b["keep"])
    return (spectrum / spectrum.abs()).real.mean()  # CULPRIT


@kind("pow", rows=(3,))
def gamma_of_a_negative_colour(m: Model, b: Batch) -> torch.Tensor:
    """A negative base has no fractional power."""
    colour = m.features(b["x"]).abs()
    colour = torch.where(b["one"] > 0, colour, -colour - 0.1)
    return (colour ** (1 / 2.4)).mean()  # CULPRIT


@kind("pow", rows=(3,), phase=None)
def focus_on_a_perfect_prediction(m: Model, b: Batch) -> torch.Tensor:
    """(1 - p) ** 0.5 has no derivative where p is 1."""
    p = torch.where(b["one"] > 0, m.features(b["x"]).sigmoid(), m.features(b["x"]) * 0 + 1.0)
    return ((1 - p) ** 0.5 * -torch.log(p)).mean()  # CULPRIT


@kind("reciprocal", "div")
def row_that_nothing_reaches(m: Model, b: Batch) -> torch.Tensor:
    """Scaling rows and columns in turn divides by the sum of an empty row, again in every round."""
    kernel = torch.exp(-m.features(b["x"]).square()) * b["keep"]
    rows = torch.ones(5)
    for _ in range(3):
        columns = 1 / (kernel.T @ rows)
        rows = 1 / (kernel @ columns)  # CULPRIT
    return (rows[:, None] * kernel * columns).sum()


@kind("div")
def balance_of_gradients(m: Model, b: Batch) -> torch.Tensor:
    """The weight of a loss is a ratio of gradient lengths, one of which is 0."""
    y = m.features(b["x"])
    first, second = y.square().mean(), (y * 0).sum()
    lengths = [torch.autograd.grad(part, m.layers[0].weight, retain_graph=True)[0].norm() for part in (first, second)]
    weight = lengths[0] / lengths[1]  # CULPRIT
    return first + weight * second


@kind("log", rows=(3,))
def density_that_underflows(m: Model, b: Batch) -> torch.Tensor:
    """All components of a mixture are too far away."""
    away = torch.where(b["keep"], 0.0, 50.0)
    density = torch.exp(-0.5 * (m.features(b["x"]) + away).square())
    return -torch.log(density.mean(-1)).mean()  # CULPRIT


@kind("div", rows=(3,))
def standardised_and_dropped(m: Model, b: Batch) -> torch.Tensor:
    """A constant row has no deviation; dropout cannot remove the NaN."""
    y = m.features(b["x"]) * b["keep"]
    y = (y - y.mean(-1, keepdim=True)) / y.std(-1, keepdim=True)  # CULPRIT
    return F.dropout(y, 0.5).square().mean()


@kind("reciprocal", rows=(3,))
def inverse_depth(m: Model, b: Batch) -> torch.Tensor:
    """An interpolation spreads the infinity."""
    depth = m.features(b["x"]).exp() * b["keep"]
    inverse = 1 / depth  # CULPRIT
    return F.interpolate(inverse[:, None], scale_factor=2, mode="linear").mean()


@kind("bmm")
def scores_in_half_precision(m: Model, b: Batch) -> torch.Tensor:
    """The scores of one row overflow before they are turned into float32."""
    query = (m.features(b["x"])[:, :, None] * torch.where(b["keep"], 1.0, 3e3)[:, :, None]).half()
    scores = query @ query.transpose(1, 2)  # CULPRIT
    return (scores.float().softmax(-1) @ query.float()).mean()


@kind("logdet")
def volume_of_a_mirroring_map(m: Model, b: Batch) -> torch.Tensor:
    """Two rows of a map are exchanged, so its determinant is negative."""
    mixing = torch.eye(6)[[1, 0, 2, 3, 4, 5]] + 0.01 * m.layers[0].weight
    volume = torch.logdet(mixing)  # CULPRIT
    return (m.features(b["x"]) @ mixing).mean() - volume


@kind("_to_copy", rows=(3,))
def activation_beyond_float8(m: Model, b: Batch) -> torch.Tensor:
    """Activations are rounded to float8 without a scale."""
    h = m.features(b["x"]) * torch.where(b["keep"], 1.0, 1e6)
    rounded = h.to(torch.float8_e5m2).to(h.dtype)  # CULPRIT
    return (h + (rounded - h).detach()).mean()


@kind("softplus")
def sharpness_annealed_to_nothing(m: Model, b: Batch) -> torch.Tensor:
    """The sharpness of a softplus is its divisor."""
    sharpness = float(m.steps)
    return F.softplus(m.features(b["x"]), beta=sharpness).mean()  # CULPRIT


@kind("nll_loss_forward", rows=(3,))
def label_that_the_mask_rules_out(m: Model, b: Batch) -> torch.Tensor:
    """The right class of a row is among those that are masked."""
    scores = m.head(m.features(b["x"])).masked_fill(F.one_hot(b["label"], 3).bool() & ~b["keep"][:, :1], -INF)
    return F.cross_entropy(scores, b["label"])  # CULPRIT


@kind("segment_reduce")
def mean_of_an_empty_segment(m: Model, b: Batch) -> torch.Tensor:
    """One of the segments that rows are put together to has no row."""
    lengths = torch.bincount(b["group"], minlength=4)
    return torch.segment_reduce(m.features(b["x"]), "mean", lengths=lengths).square().mean()  # CULPRIT


@kind("_to_copy", rows=(3,))
def cast_to_half(m: Model, b: Batch) -> torch.Tensor:
    """Activations of bfloat16 go into float16 as they are."""
    h = (m.features(b["x"]) * torch.where(b["keep"], 1.0, 1e6)).bfloat16()
    h = h.to(torch.float16)  # CULPRIT
    return (h.float() / 1e5).mean()
