"""Small training steps, each with one thing that a recording has to cope with; `STEPS` is the table of all.

Each entry builds `(model, batch, step)`; the models are tiny, so that the whole table runs in seconds.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)  # sums are added up in one order, and kernels this small only lose time with more

Case = tuple[Any, Any, Callable[[Any, Any], Any]]
STEPS: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    """Add a builder to the table under its name."""
    STEPS[build.__name__] = build
    return build


def supervised(model: nn.Module, *shape: int, classes: int = 4) -> Case:
    """Return a classification step with random inputs of a shape."""
    batch = {"x": torch.randn(*shape), "y": torch.randint(0, classes, shape[:1])}
    return model, batch, lambda m, b: functional.cross_entropy(m(b["x"]), b["y"])


def squared(model: Any, batch: Any) -> torch.Tensor:
    """Return the mean square of a model's output, as a loss."""
    output = model(batch)
    return output.square().mean()


class Apply(nn.Module):
    """A linear layer, then any function of its output."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def applied(function: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    """Return a step whose model is a linear layer and a function."""
    return Apply(function), torch.randn(5, 6), squared


@case
def convolutions_with_batch_norm() -> Case:
    """Running statistics are written to in forward, and `relu` works in place."""
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(), nn.MaxPool2d(2)]
    return supervised(nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 4)), 4, 3, 8, 8)


@case
def transformer_with_dropout() -> Case:
    """Attention without a mask takes its fused kernel; dropout draws four times a layer."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.randn(3, 7, 16), squared


@case
def lstm_with_dropout() -> Case:
    """One call per layer (oneDNN), whose backward takes undefined gradients."""
    return nn.LSTM(8, 16, 2, dropout=0.3), torch.randn(5, 3, 8), lambda m, b: m(b)[0].square().mean()


@case
def bidirectional_gru() -> Case:
    """A recurrent layer that is written out step by step."""
    return nn.GRU(8, 16, 2, dropout=0.3, bidirectional=True), torch.randn(5, 3, 8), lambda m, b: m(b)[0].square().mean()


@case
def tied_embeddings() -> Case:
    """One parameter is used twice."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.embed(tokens)))

    tokens = torch.randint(0, 11, (3, 5))
    return Tied(), tokens, lambda m, b: functional.cross_entropy(m(b).flatten(0, 1), b.flatten())


class Checkpointed(nn.Module):
    """Two blocks with dropout whose activations are computed again in backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(), nn.Tanh()) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return functional.dropout(x)


@case
def checkpointing() -> Case:
    """Activations are computed again, with the generator rewound, through saved-tensor hooks."""
    return Checkpointed(reentrant=False), torch.randn(5, 6), squared


@case
def reentrant_checkpointing() -> Case:
    """Activations are computed again in a backward pass within the backward pass."""
    return Checkpointed(reentrant=True), torch.randn(5, 6), squared


class SafeLog(torch.autograd.Function):
    """A logarithm with a hand-written derivative."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        clamped = x.clamp(min=0.1)
        ctx.save_for_backward(clamped)
        return clamped.log()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (clamped,) = ctx.saved_tensors
        return grads[0] / clamped


@case
def custom_function() -> Case:
    """Forward and backward are Python."""
    return applied(SafeLog.apply)


@case
def in_place_on_views() -> Case:
    """Writes through slices, a transpose and a selection of one memory."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[1:3, ::2].mul_(2.0)
        y[0] = x[1] * 3
        y.t()[2].add_(x[:, 0])
        y.select(1, 3).sigmoid_()
        return y

    return applied(function)


@case
def data_dependent_control_flow() -> Case:
    """Branches, loop counts and factors depend on values."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            x = x * 2
        for _ in range(int(x.abs().sum().item()) % 3 + 1):
            x = torch.tanh(x)
        return x / x.detach().abs().max().item()

    return applied(function)


@case
def complex_spectrum() -> Case:
    """Complex numbers, lazily conjugated and negated views, Fourier transforms."""

    def function(x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft(x)
        z = z * torch.exp(1j * z.angle()) + z.conj() @ torch.randn(4, 4, dtype=torch.complex64)
        return torch.view_as_real(z).sum(-1) + z.conj().imag

    return applied(function)


@case
def per_sample_gradients() -> Case:
    """`vmap` of `grad`."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ weight).square().sum()

        return torch.func.vmap(torch.func.grad(loss), (None, 0))(model.weight, batch).square().mean()

    return nn.Linear(6, 6), torch.randn(5, 6), step


class Scriptable(nn.Module):
    """A model that `torch.jit.script` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if bool(y.sum() > 0):
            y = y * 2
        return torch.relu(y)


@case
def scripted() -> Case:
    """The model is TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(Scriptable())
    return model, torch.randn(5, 6), squared


def mixed_precision(dtype: torch.dtype) -> Case:
    """Return a step that runs under autocast."""
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))

    def step(m: nn.Module, b: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return functional.cross_entropy(m(b["x"]) + m(b["x"] * 2), b["y"])

    return (*supervised(model, 5, 6)[:2], step)


STEPS["autocast_float16"] = functools.partial(mixed_precision, torch.float16)
STEPS["autocast_bfloat16"] = functools.partial(mixed_precision, torch.bfloat16)


@case
def frozen_layers() -> Case:
    """Only some parameters need gradients."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    model[0].requires_grad_(requires_grad=False)
    model[2].bias.requires_grad_(requires_grad=False)
    return supervised(model, 5, 6)


@case
def gradient_penalty() -> Case:
    """The step differentiates itself, and the result is differentiated again."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        score = model(x)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (gradient.norm(dim=1) - 1).square().mean()

    return nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.Linear(8, 1)), torch.randn(5, 6), step


@case
def named_losses() -> Case:
    """Two losses in a dictionary."""

    def step(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        output = model(batch)
        return {"fit": output.square().mean(), "size": output.abs().sum().reshape(1)}

    return nn.Linear(6, 6), torch.randn(5, 6), step


@case
def tuple_of_losses() -> Case:
    """Two losses in a tuple."""
    return nn.Linear(6, 6), torch.randn(5, 6), lambda m, b: (m(b).mean(), m(b).square().mean())


@case
def foreach_operations() -> Case:
    """Calls that take and return lists, one of them in place."""

    def function(x: torch.Tensor) -> torch.Tensor:
        parts = torch._foreach_mul([x, x + 1, x - 1], 2.0)
        with torch.no_grad():
            torch._foreach_add_([part.detach() for part in parts], 1.0)
        return torch.stack(torch._foreach_exp(parts)).sum(0)

    return applied(function)


@case
def explicit_generators() -> Case:
    """Draws from generators that are passed to calls, one of them reseeded."""
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        first.manual_seed(7)
        noise = torch.randn(5, 6, generator=first) + torch.rand(5, 6, generator=second) + torch.randn(5, 6)
        mask = torch.empty(5, 6).bernoulli_(0.5, generator=first)
        return (model(batch + noise) * mask).square().mean() + torch.randint(0, 5, (3,), generator=second).sum()

    return nn.Linear(6, 6), torch.randn(5, 6), step


@case
def reseeding() -> Case:
    """The default generator is seeded and forked in the middle."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x = functional.dropout(x)
        torch.manual_seed(5)
        x = x + torch.randn_like(x)
        with torch.random.fork_rng(devices=[]):
            x = x * torch.rand(6)
        return functional.dropout(x)

    return applied(function)


@case
def numpy_randomness() -> Case:
    """A mask is drawn by NumPy."""

    def function(x: torch.Tensor) -> torch.Tensor:
        mask = torch.from_numpy(np.random.rand(5, 6) < 0.5)  # noqa: NPY002  (the global generator is the point)
        return x.masked_fill(mask, 0.0)

    return applied(function)


@case
def reused_numpy_buffer() -> Case:
    """A literal's memory changes behind torch's back."""
    buffer = np.zeros(6, dtype=np.float32)

    def function(x: torch.Tensor) -> torch.Tensor:
        buffer[:] = 1.0
        first = torch.from_numpy(buffer)
        x = x - first
        buffer[:] = 2.0
        return x + torch.from_numpy(buffer)

    return applied(function)


@case
def parameters_through_data() -> Case:
    """Parameters are changed through `.data`, and given another one."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.weight.data.clamp_(-0.2, 0.2)
        model.bias.data = model.bias.data * 0.5
        return squared(model, batch)

    return nn.Linear(6, 6), torch.randn(5, 6), step


@case
def attention() -> Case:
    """A mask of minus infinity, dropout inside of attention, causal attention."""

    def function(x: torch.Tensor) -> torch.Tensor:
        q = x.view(5, 1, 3, 2)
        mask = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
        masked = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, dropout_p=0.1)
        return masked + functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    return applied(function)


@case
def embedding_bag() -> Case:
    """Bags of embeddings with offsets."""
    tokens = torch.randint(0, 11, (12,))
    return (
        nn.EmbeddingBag(11, 6, mode="mean", sparse=False),
        (tokens, torch.tensor([0, 3, 7])),
        lambda m, b: squared(lambda pair: m(*pair), b),
    )


@case
def embedding_bag_maximum() -> Case:
    """Bags of embeddings whose kernel keeps the places of the maxima."""
    tokens = torch.randint(0, 11, (4, 3))
    return nn.EmbeddingBag(11, 6, mode="max"), tokens, squared


@case
def sparse_gradients() -> Case:
    """The gradient has no storage."""
    tokens = torch.randint(0, 11, (4, 3))
    return nn.Embedding(11, 6, sparse=True), tokens, squared


@case
def sparse_product() -> Case:
    """The batch holds a sparse matrix."""
    adjacency = torch.eye(5).to_sparse()

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.sparse.mm(batch["adjacency"], model(batch["x"])).square().mean()

    return nn.Linear(6, 6), {"x": torch.randn(5, 6), "adjacency": adjacency}, step


@case
def compiled() -> Case:
    """The model is compiled."""
    model = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    return torch.compile(model, backend="eager"), torch.randn(5, 6), squared


@case
def conditional_operator() -> Case:
    """`torch.cond`, with and without gradients."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.mean() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x,))
        with torch.no_grad():
            z = torch.cond(x.sum() > 100, lambda x: x.exp(), lambda x: x.tanh(), (x,))
        return y * z

    return applied(function)


@case
def flex_attention_without_gradients() -> Case:
    """A higher-order operator with a Python function inside."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            q = x.detach().view(1, 1, 5, 6)
            y = flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score + (i - j))  # noqa: ARG005
        return x * y[0, 0]

    return applied(function)


@case
def higher_order_loops() -> Case:
    """Loops that are operators."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            _, y = while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y * 1.5), (torch.tensor(0), x.detach()))
        return x * y + associative_scan(torch.add, x, 0, combine_mode="generic")

    return applied(function)


@case
def hooks_that_change_gradients() -> Case:
    """A hook computes in the backward pass."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01) * 3)
        return x.exp()

    return applied(function)


@case
def moved_in_place() -> Case:
    """`t_`, `squeeze_`, `set_` and `resize_` change what a tensor shows."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        z = y.view(6, 5)
        y.t_()
        y.unsqueeze_(0).squeeze_(0)
        y = y * 2 + z
        with torch.no_grad():
            w = torch.empty(0)
            w.set_(y.detach().clone())
            w.transpose_(0, 1)
            w.resize_(2, 3)
        return y.mean(0) * w.sum()

    return applied(function)


@case
def resized_and_out_arguments() -> Case:
    """`out=` and `resize_` give memory to empty tensors."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            grown = torch.empty(0)
            torch.add(x, 1, out=grown)
            other = torch.empty(0)
            other.resize_(5, 6)
            other.copy_(grown)
            torch.mul(other, grown, out=grown)
        return x * grown + other

    return applied(function)


@case
def overlapping_batch() -> Case:
    """Two inputs share memory, and one is written to."""
    whole = torch.randn(12, 6)

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["first"].mul_(0.5)
        return (model(batch["first"]) + model(batch["second"])).square().mean()

    return nn.Linear(6, 6), {"first": whole[:8], "second": whole[4:]}, step


@case
def batch_with_gradient() -> Case:
    """Inputs need gradients."""
    batch = {"x": torch.randn(5, 6, requires_grad=True), "scale": torch.tensor(2.0, requires_grad=True)}
    return nn.Linear(6, 6), batch, lambda m, b: (m(b["x"]) * b["scale"]).square().mean()


@case
def parameter_in_the_batch() -> Case:
    """An input is a parameter."""
    model = nn.Linear(6, 6)
    return model, {"x": torch.randn(5, 6), "w": model.weight}, lambda m, b: (m(b["x"]) @ b["w"]).square().mean()


@case
def one_buffer_under_two_names() -> Case:
    """A buffer that is written to has two names."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(6))
            self.register_buffer("alias", self.count)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.alias.add_(1)
            return self.linear(x) * self.count

    return Shared(), torch.randn(5, 6), squared


@case
def loss_without_parameters() -> Case:
    """The loss depends on no parameter."""
    return nn.Linear(6, 6), torch.randn(5, 6), lambda _, b: b.square().mean()


@case
def zero_sized() -> Case:
    """Tensors without elements."""

    def function(x: torch.Tensor) -> torch.Tensor:
        nothing = x[:0]
        return torch.cat([nothing * 2, x, torch.zeros(0, 6)]) + nothing.sum()

    return applied(function)


@case
def module_outside_of_the_model() -> Case:
    """The step holds a module of its own."""
    outside = nn.Linear(6, 3)
    return nn.Linear(6, 6), torch.randn(5, 6), lambda m, b: outside(m(b)).square().mean()


@case
def returned_by_reference() -> Case:
    """Calls that return what they were given, or views of it."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(x, inplace=True)
        first, *rest = y.unbind(0)
        return first + torch.stack(rest).chunk(2)[0].sum() + y.expand(2, 5, 6).mean() + y.contiguous().to(torch.float32)

    return applied(function)


@case
def pooling_and_norms() -> Case:
    """Layers with randomness and running statistics."""
    model = nn.Sequential(
        nn.Conv1d(4, 6, 3, padding=1, groups=2),
        nn.GroupNorm(2, 6),
        nn.RReLU(),
        nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        nn.AdaptiveMaxPool1d(4),
        nn.AlphaDropout(0.2),
        nn.Flatten(),
        nn.BatchNorm1d(24),
        nn.Linear(24, 4),
    )
    return supervised(model, 5, 4, 8)


@case
def custom_operator() -> Case:
    """An operator that is not of ATen."""
    return applied(shift)


@torch.library.custom_op("bisect_nan_tests::shift", mutates_args=())
def shift(x: torch.Tensor) -> torch.Tensor:
    """Return x + 1, as an operator of its own."""
    return x + 1


shift.register_autograd(lambda _, gradient: gradient)
