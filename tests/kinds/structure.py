"""Memory, precision, complex numbers, control flow, and tensors that came in bad."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bisect_nan import Phase
from kinds import INF, Batch, Model, filled, in_module, kind

# memory, views, in-place


@kind("empty", "new_empty", "empty_like")
def memory_read_before_it_was_written(m: Model, b: Batch) -> torch.Tensor:
    """The last column is never written."""
    y = m.features(b["x"])
    with filled():
        out = torch.empty(5, 6)  # CULPRIT
    out[:, :5] = y[:, :5]
    return out.mean()


@kind("log", rows=(3,))
def memory_that_is_written_in_time(m: Model, b: Batch) -> torch.Tensor:
    """Scratch memory full of NaN is overwritten; a logarithm is to blame."""
    with filled():
        out = torch.empty(5, 6)
    out.copy_(m.features(b["x"]))
    return (F.dropout(out, 0.1) + b["one"].log()).mean()  # CULPRIT


@kind("div", rows=(3,))
def division_through_a_view(m: Model, b: Batch) -> torch.Tensor:
    """One chunk is divided in place."""
    y = m.features(b["x"]).clone()
    left = y[:, :3]
    left.div_(b["one"][:, :3])  # CULPRIT
    return y.mean()


@kind("log", rows=(3,))
def logarithm_in_place(m: Model, b: Batch) -> torch.Tensor:
    """Afterwards the input is the result."""
    y = b["one"].clone()
    y.log_()  # CULPRIT
    y[1] = 0.5
    return (m.features(b["x"]) + y).mean()


@kind("div", rows=(3,))
def written_back_into_a_cache(m: Model, b: Batch) -> torch.Tensor:
    """A cache is filled row by row, read transposed, and partly overwritten."""
    cache = torch.zeros(2, 5, 6)
    for row in range(5):
        cache[0, row] = m.features(b["x"][row]) / b["one"][row]  # CULPRIT
    cache[1] = cache[0].flip(0)
    cache[0, :4] = 0
    return cache.transpose(0, 1).mean()


# precision


@kind("mm", "matmul", "addmm", rows=(3,))
def product_in_half_precision(m: Model, b: Batch) -> torch.Tensor:
    """One row of a half-precision product overflows."""
    y = (m.features(b["x"]) + torch.where(b["keep"], 0.0, 3e4)).half()
    return (y @ torch.ones(6, 6).half()).float().mean()  # CULPRIT


@kind("div", rows=(3,))
def epsilon_lost_in_half_precision(m: Model, b: Batch) -> torch.Tensor:
    """1e-8 is 0 in float16."""
    y = (m.features(b["x"]) * b["keep"]).half()
    return (y / (y.norm(dim=-1, keepdim=True) + 1e-8)).float().mean()  # CULPRIT


@kind("exp", rows=(3,))
def double_overflows(m: Model, b: Batch) -> torch.Tensor:
    """Double precision ends at 1.8e308."""
    y = m.features(b["x"]).double() + torch.where(b["keep"], 0.0, 800.0)
    return y.exp().mean()  # CULPRIT


@kind("pow", "square", "mul", rows=(3,))
def square_in_bfloat16(m: Model, b: Batch) -> torch.Tensor:
    """bfloat16 has the range of float32, and that can be left."""
    y = (m.features(b["x"]) + torch.where(b["keep"], 1.0, 1e20)).bfloat16()
    return y.square().float().mean()  # CULPRIT


# complex numbers


@kind("div", rows=(3,))
def complex_quotient(m: Model, b: Batch) -> torch.Tensor:
    """A transfer function has a pole on the circle."""
    y = torch.fft.fft(m.features(b["x"]))
    response = y / torch.complex(b["one"], torch.zeros(5, 6))  # CULPRIT
    return torch.fft.ifft(response).real.square().mean()


@kind("log", rows=(3,))
def complex_logarithm(m: Model, b: Batch) -> torch.Tensor:
    """The logarithm of a complex 0."""
    y = torch.complex(m.features(b["x"]), b["one"]) * b["one"]
    return torch.log(y).real.mean()  # CULPRIT


@kind("sqrt", phase=Phase.BACKWARD)
def complex_root(m: Model, b: Batch) -> torch.Tensor:
    """The root of a complex 0 has no derivative; angle and absolute value of it are fine."""
    y = torch.complex(m.features(b["x"]), m.features(b["x"])) * b["keep"]
    return (y.sqrt().abs() + y.angle() + y.abs()).mean()  # CULPRIT


# structure


@kind("exp", rows=(3,), module="layers.2")
def same_line_in_every_layer(m: Model, b: Batch) -> torch.Tensor:
    """The line overflows in every layer, and only behind the last layer nothing clamps."""
    x, total = b["x"], torch.zeros(())
    for place, layer in enumerate(m.layers):
        x = torch.tanh(x) + torch.where(b["keep"], 0.0, 200.0)
        x = in_module(layer, lambda inner, y: inner(y) * 0 + y.exp(), x)  # CULPRIT
        total = total + (x.clamp(max=2.0) if place < 2 else x[3:]).mean()
        x = x.clamp(max=2.0)
    return total


@kind("div")
def three_losses(m: Model, b: Batch) -> Any:
    """One of several losses is averaged over nothing."""
    y = m.head(m.features(b["x"]))
    chosen = b["label"] == 7
    per_row = F.cross_entropy(y, b["label"], reduction="none")
    third = (per_row * chosen).sum() / chosen.sum()  # CULPRIT
    return {"first": per_row.mean(), "second": y.square().mean(), "third": third}


@kind("div", rows=(3,))
def one_time_step(m: Model, b: Batch) -> torch.Tensor:
    """A loop over time: the fault is in the third step of row 3."""
    h, total = torch.zeros(5), torch.zeros(())
    for t in range(6):
        h = torch.tanh(h + m.features(b["x"])[:, t])
        total = total + ((1 + h) / b["one"][:, t]).mean()  # CULPRIT
    return total


@kind("acos", rows=(3,))
def angle_beyond_one(m: Model, b: Batch) -> torch.Tensor:
    """A cosine of 1.0000001."""
    cosine = torch.tanh(m.features(b["x"])) * 0 + torch.where(b["keep"], 0.5, 1.0000002)
    return torch.acos(cosine).mean()  # CULPRIT


@kind("var", "std", "var_mean")
def deviation_of_one_row(m: Model, b: Batch) -> torch.Tensor:
    """The deviation of a single row has no degree of freedom."""
    y = m.features(b["x"])[b["label"] == 1]
    return ((y - y.mean(0)) / (y.std(0) + 1e-5)).square().mean()  # CULPRIT


@kind("div", "nll_loss_forward", "nll_loss")
def all_labels_ignored(m: Model, b: Batch) -> torch.Tensor:
    """Nothing is left to be averaged."""
    label = torch.full((5,), -100)
    return F.cross_entropy(m.head(m.features(b["x"])), label)  # CULPRIT


@kind("_ctc_loss", "ctc_loss", rows=(3,))
def alignment_that_cannot_exist(m: Model, b: Batch) -> torch.Tensor:
    """Row 3 is to spell more than it has frames."""
    frames = m.features(b["x"]).T[:, :, None].expand(6, 5, 4).log_softmax(-1)
    lengths = torch.tensor([2, 1, 2, 6, 1])
    return F.ctc_loss(frames, torch.ones(5, 6, dtype=torch.long), torch.full((5,), 6), lengths)  # CULPRIT


@kind(
    "_softmax",
    "_safe_softmax",
    "_scaled_dot_product_flash_attention_for_cpu",
    "bmm",
    "baddbmm",
    "scaled_dot_product_attention",
)
def attention_layer_without_keys(m: Model, b: Batch) -> torch.Tensor:
    """All keys of row 3 are padding, inside a layer of the library."""
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(6, 2, batch_first=True).requires_grad_(requires_grad=False)
    y = m.features(b["x"])[:, None].expand(5, 6, 6) * 1
    return layer(y, y, y, key_padding_mask=~b["keep"])[0].mean()  # CULPRIT


@kind("mul", rows=(3,))
def zero_weight_times_an_infinite_value(m: Model, b: Batch) -> torch.Tensor:
    """The infinity is made earlier, so its line is to blame and not the product."""
    value = (m.features(b["x"]).abs() + 1e20) * torch.where(b["one"] > 0, 1.0, 1e20)  # CULPRIT
    return (value * (b["one"] > 0)).mean() * 1e-20


@kind("sqrt", "rsqrt", rows=(3,))
def variance_by_difference(m: Model, b: Batch) -> torch.Tensor:
    """E[x^2] - E[x]^2 of large numbers is negative."""
    y = m.features(b["x"]).double().float() * 0 + torch.where(b["keep"], b["x"], b["x"] * 0 + 3.3) + 0
    variance = y.square().mean(-1) - y.mean(-1).square() - 1e-6 * (b["gap"][:, 0] == 0)
    return variance.sqrt().mean()  # CULPRIT


@kind("log", rows=(3,))
def vectorised_over_rows(m: Model, b: Batch) -> torch.Tensor:
    """The step is written for one row and mapped over the batch."""

    def one(x: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x) + rate.log()).sum()  # CULPRIT

    return torch.vmap(one)(m.features(b["x"]), b["one"]).mean()


# what came in bad


@kind(rows=(3,), phase=Phase.INPUT)
def feature_is_nan(m: Model, b: Batch) -> torch.Tensor:
    """The data hold NaN."""
    return m.features(b["broken"]).mean()  # CULPRIT


@kind(rows=(3,), phase=Phase.INPUT)
def feature_is_infinite(m: Model, b: Batch) -> torch.Tensor:
    """Padding holds infinities, which a mask removes, and a real row holds one too."""
    y = torch.where(b["pad"], 0.0, b["energies"])
    return F.layer_norm(m.features(b["x"]) + y, (6,)).square().mean()


@kind("log", rows=(3,))
def feature_is_nan_and_masked(m: Model, b: Batch) -> torch.Tensor:
    """The NaN of the data are masked, and something else fails."""
    clean = torch.where(b["broken"].isfinite(), b["broken"], 0.0)
    return (m.features(clean) + b["one"].log()).mean()  # CULPRIT


@kind(phase=Phase.PARAMETER)
def row_of_a_table_is_nan(m: Model, b: Batch) -> torch.Tensor:
    """Only row 3 of the batch looks at it."""
    return m.table_with_nan(b["ids"]).mean()  # CULPRIT


@kind(phase=Phase.INPUT)
def constant_is_nan(m: Model, b: Batch) -> torch.Tensor:
    """The number was computed by NumPy."""
    with np.errstate(invalid="ignore"):
        factor = torch.from_numpy(np.sqrt(np.array([1.0, -1.0], dtype=np.float32)))
    return (m.features(b["x"])[:, :2] * factor).mean()  # CULPRIT


@kind("mul", "full", "masked_fill", rows=(3,))
def nan_as_a_mark(m: Model, b: Batch) -> torch.Tensor:
    """Missing values are marked by NaN, and not left out."""
    marked = m.features(b["x"]).masked_fill(b["one"] == 0, math.nan)  # CULPRIT
    return marked.mean()


# second helping


@kind("div", "reciprocal", "pow", rows=None)
def sparse_adjacency(m: Model, b: Batch) -> torch.Tensor:
    """A node without neighbours has an infinite inverse degree in a sparse matrix."""
    index = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]])
    weight = 1 / b["one"][:, 2]  # CULPRIT
    matrix = torch.sparse_coo_tensor(index, weight, (5, 5))
    return torch.sparse.mm(matrix, m.features(b["x"])).mean()


@kind("sqrt", "pow", "div", phase=Phase.BACKWARD)
def reentrant_checkpoint(m: Model, b: Batch) -> torch.Tensor:
    """The older kind of checkpoint runs the block without gradients first."""

    def block(x: torch.Tensor) -> torch.Tensor:
        y = m.features(x) * b["keep"]
        return y.square().sum(-1).sqrt()  # CULPRIT

    return checkpoint(block, b["x"] * m.zero.exp(), use_reentrant=True).mean()


@kind("sqrt", "pow", "div")
def gradient_for_every_row(m: Model, b: Batch) -> torch.Tensor:
    """A gradient per row, by function transforms."""

    def one(weight: torch.Tensor, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return ((weight @ x) * keep[:3]).square().sum().sqrt()  # CULPRIT

    each = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(m.head.weight, b["x"], b["keep"].float())
    return each.square().mean()


@kind("log", rows=(3,))
def innocent_in_control_flow(m: Model, b: Batch) -> torch.Tensor:
    """How many rows are kept depends on an innocent NaN, so neutralising that one leads elsewhere."""
    y = m.features(b["x"])
    doubtful = (b["spare"] / b["spare"])[:, 0]
    chosen = y[doubtful > 0.5]
    return chosen.square().mean() + (y + b["one"].log()).mean()  # CULPRIT


@kind("div", rows=(3,))
def rows_chosen_by_value(m: Model, b: Batch) -> torch.Tensor:
    """Only rows whose ratio is large are used, and the fault is the largest."""
    ratio = (1 + m.features(b["x"]).abs()) / b["one"]  # CULPRIT
    large = ratio[ratio > 1.5]
    return large.mean()


@kind("native_batch_norm", "batch_norm", "rsqrt", "sqrt")
def negative_running_variance(m: Model, b: Batch) -> torch.Tensor:
    """A running variance below zero, in evaluation."""
    norm = nn.BatchNorm1d(6).eval()
    norm.running_var[2] = -1.0
    return norm(m.features(b["x"])).mean()  # CULPRIT


@kind("mul")
def infinite_bias_from_a_mask(m: Model, b: Batch) -> torch.Tensor:
    """(1 - mask) * -inf is NaN where the mask is 1."""
    bias = (1 - b["keep"].float()) * -INF  # CULPRIT
    return (m.features(b["x"]) + bias).softmax(-1)[:3].mean()


@kind("log", "_log_softmax", "nll_loss_forward", "div", "sub", rows=None)
def label_of_a_masked_class(m: Model, b: Batch) -> torch.Tensor:
    """The right class of row 3 is masked."""
    logits = m.head(m.features(b["x"])).masked_fill(F.one_hot(torch.tensor([1, 1, 2, 0, 1]), 3).bool(), -INF)
    return F.cross_entropy(logits, b["label"])  # CULPRIT


@kind("sqrt", rows=(3,))
def packed_sequences(m: Model, b: Batch) -> torch.Tensor:
    """The fault enters a recurrent layer through a packed sequence."""
    torch.manual_seed(0)
    layer = nn.GRU(1, 4, batch_first=True)
    y = (m.features(b["x"]).square() - 9.0 * (b["one"] == 0)).sqrt()  # CULPRIT
    packed = nn.utils.rnn.pack_padded_sequence(y[:, :, None], torch.tensor([6, 5, 4, 3, 2]), batch_first=True)
    return layer(packed)[1].mean()


@kind("pow", "exp", "mul", "square", rows=(3,))
def harmful_and_harmless_overflow(m: Model, b: Batch) -> torch.Tensor:
    """Row 1 overflows too, and a minimum stops it."""
    y = torch.exp(m.features(b["x"]) + 100 * (b["gap"] == 0) + 100 * (b["spare"] == 0))  # CULPRIT
    return torch.minimum(y[:3], torch.ones(3, 6)).mean() + y[3:].mean()


@kind("sub", "_softmax", rows=(3,))
def distances_with_infinity(m: Model, b: Batch) -> torch.Tensor:
    """Unreachable pairs of the data are infinitely far: a row of nothing else cannot be normalised."""
    return (-b["far"] + m.features(b["x"])).softmax(-1).square().mean()  # CULPRIT


@kind("mul")
def constant_with_an_infinite_end(m: Model, b: Batch) -> torch.Tensor:
    """The last bound of a list is infinite on purpose."""
    bounds = torch.tensor([0.5, 1.0, INF])
    width = m.head(m.features(b["x"])) * 0 * bounds  # CULPRIT
    return width.mean()


@kind("linalg_inv", "linalg_inv_ex", "linalg_solve", "_linalg_solve_ex", "pow", "div", rows=(3,))
def inverse_square_root_of_degrees(m: Model, b: Batch) -> torch.Tensor:
    """Symmetric normalisation: inf * 0 is NaN where a degree is 0."""
    near = torch.ones(5, 5) * b["keep"][:, :1] * b["keep"][:, 0]
    degree = near.sum(-1)
    scale = degree.pow(-0.5)  # CULPRIT
    return (scale[:, None] * near * scale @ m.features(b["x"])).mean()


@kind("sqrt", "div", "pow", phase=Phase.BACKWARD, rows=(3,))
def distance_of_equal_points(m: Model, b: Batch) -> torch.Tensor:
    """All pairs, the diagonal included; torch's own cdist beside it is fine."""
    y = m.features(b["x"]) * b["keep"]
    own = torch.cdist(y, y).mean()
    pairs = (y - 0.0).square().sum(-1).sqrt()  # CULPRIT
    return own + pairs.mean()


@kind("div", "std", "var")
def whitening_by_batch_statistics(m: Model, b: Batch) -> torch.Tensor:
    """A feature that is constant over the batch has no deviation."""
    y = m.features(b["x"]) * (m.zero + torch.tensor([1.0, 1, 0, 1, 1, 1]))
    return ((y - y.mean(0)) / y.std(0)).square().mean()  # CULPRIT
