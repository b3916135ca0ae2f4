"""Recording a step leaves everything as it was, and says what came out of it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from steps import STEPS, applied, squared
from test_replay import same
from torch import nn

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.recording.capture import record, record_update, scalar_loss
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Run, own_generator
from bisect_nan.replaying.stretch import Stretch


def fingerprint(item: Any) -> Any:
    """Return everything that two states of an object can differ in, as nested plain values that compare with ==."""
    if isinstance(item, torch.Tensor):
        return tensor_fingerprint(item)
    if isinstance(item, nn.Module):
        return {name: fingerprint(vars(module)) for name, module in item.named_modules()}
    if isinstance(item, torch.optim.Optimizer):
        return fingerprint(vars(item) | {"state": list(item.state.items())})
    if isinstance(item, dict):
        pairs = [
            (fingerprint(key) if isinstance(key, torch.Tensor) else key, fingerprint(part))
            for key, part in item.items()
        ]
    elif isinstance(item, list | tuple):
        pairs = [fingerprint(part) for part in item]
    elif isinstance(item, torch.Generator | np.random.Generator):
        pairs = item.get_state().tolist() if isinstance(item, torch.Generator) else str(item.bit_generator.state)
    else:
        pairs = item if isinstance(item, int | float | str | set | None) else id(item)
    return pairs


def tensor_fingerprint(item: torch.Tensor) -> Any:
    """Return identity, place, geometry, elements, gradient and hooks of a tensor."""
    content = item.detach().to_dense().double().nan_to_num(123.0).tolist()
    hooks = [len(hooks) if hooks else 0 for hooks in (item._backward_hooks, item._post_accumulate_grad_hooks)]
    gradient = (id(item.grad), fingerprint(item.grad)) if item.is_leaf and item.grad is not None else None
    place = () if item.is_sparse else (item.data_ptr(), item.stride(), item.storage_offset())
    return id(item), place, tuple(item.shape), item.dtype, item.requires_grad, item.is_leaf, content, gradient, hooks


def generators() -> Any:
    """Return the states of the process's random generators."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("name", [name for name in STEPS if name != "scripted"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_recording_leaves_model_batch_and_generators_alone(name: str) -> None:
    """Recording any step of the table changes no tensor, attribute, gradient, hook or generator."""
    torch.manual_seed(1)
    model, batch, step = STEPS[name]()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    before = fingerprint(model), fingerprint(batch), generators()
    record(model, batch, step)
    assert (fingerprint(model), fingerprint(batch), generators()) == before


class Restless(nn.Module):
    """A model whose forward pass changes everything that it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("replaced", torch.zeros(3))
        self.calls = 0
        self.history: list[int] = []
        self.seen: set[int] = set()
        self.noise = np.random.default_rng(3)
        self.dice = random.Random(3)  # noqa: S311  (no secret)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.seen.add(self.calls)
        self.fresh = self.noise.random() + self.dice.random() + random.random()  # noqa: S311  (no secret)
        self.replaced = self.replaced + 1
        self.linear.weight.data = self.linear.weight.data * 2
        self.linear.bias.data.fill_(1.0)
        self.linear.bias.register_hook(lambda gradient: gradient * 2)
        self.linear.weight.register_post_accumulate_grad_hook(lambda _: None)
        self.norm.register_forward_hook(lambda *_: None)
        x = self.norm(self.linear(x)) + torch.rand(6, generator=self.generator)
        self.norm.eval()
        self.linear.extra = nn.Parameter(torch.ones(6))
        self.norm.weight.requires_grad_(requires_grad=False)
        np.random.rand()  # noqa: NPY002
        return x * self.linear.extra


def restless(model: Restless, batch: dict[str, Any]) -> torch.Tensor:
    """Take the batch apart, too."""
    x = batch.pop("x")
    batch["list"].append(3)
    batch["list"][0].mul_(2.0)
    batch["view"].t_()
    batch["nested"]["y"] = x.requires_grad_()
    batch["target"].mul_(model(x).mean())
    return model(x).square().mean() + batch["target"].sum()


def restless_case() -> tuple[Restless, dict[str, Any]]:
    """Return the model and a batch to take apart."""
    model = Restless()
    model.linear.weight.grad = torch.ones(6, 6)
    batch = {"x": torch.randn(5, 6), "list": [torch.ones(2), 2], "nested": {"y": 1}, "view": torch.randn(2, 3)}
    batch["target"] = torch.ones(3)
    return model, batch


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back(raises: bool) -> None:
    """Counters, lists, hooks, modes, reassigned buffers, `.data`, the batch: all are as before, also after an error."""
    model, batch = restless_case()

    def step(m: Restless, b: dict[str, Any]) -> torch.Tensor:
        loss = restless(m, b)
        if raises:
            raise KeyError("on purpose")
        return loss

    before = fingerprint(model), fingerprint(batch), generators()
    if raises:
        with pytest.raises(KeyError, match="on purpose"):
            record(model, batch, step)
    else:
        record(model, batch, step)
    assert fingerprint(model) == before[0]
    assert fingerprint(batch) == before[1]
    assert generators() == before[2]


def test_recording_twice_gives_the_same_program_and_values() -> None:
    """A second recording of a step that changes everything sees what the first one saw."""
    model, batch = restless_case()
    first, second = record(model, batch, restless), record(model, batch, restless)
    assert first.loss == second.loss
    assert [node.target for node in first.program.nodes] == [node.target for node in second.program.nodes]


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_torch_itself_is_put_back_after_an_error(phase: str) -> None:
    """After a step or a backward pass that raises, no mode, patch or hook of the recording is left."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            if phase == "forward":
                raise RuntimeError("on purpose")
            return x.clone()

        @staticmethod
        def backward(_: Any, *__: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("on purpose")

    call, compiler = nn.Module.__call__, torch.compile
    with pytest.raises(RuntimeError, match="on purpose"):
        record(*applied(Failing.apply))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert nn.Module.__call__ is call
    assert torch.compile is compiler


class Doubled(nn.Module):
    """A linear layer whose gradient is set by hand."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor


@given(factor=st.sampled_from([1.0, math.inf, math.nan, 1e30]))
def test_what_is_observed_is_what_training_would_show(factor: float) -> None:
    """The loss if it is non-finite, else the gradients, else nothing."""
    model, batch = Doubled(factor), torch.randn(5, 6)
    recording = record(model, batch, squared)
    loss = squared(model, batch).detach()
    assert recording.loss == float(loss) or math.isnan(recording.loss)
    if math.isfinite(loss):
        assert recording.observed is None
        assert set(recording.program.targets.gradients) == {"linear.weight", "linear.bias"}
    else:
        assert recording.observed is not None
        assert recording.observed.symptom.kind == "loss"
        assert recording.program.targets.gradients == {}


def test_a_gradient_is_observed_where_it_was_finished_first() -> None:
    """Of several bad gradients the one nearest to the loss stands in front."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    batch = torch.zeros(5, 6)
    recording = record(model, batch, lambda m, b: (m(b) * 0).norm())
    del recording
    bad = record(model, batch, lambda m, b: (m(b) - m(b).detach()).square().sum().sqrt())
    assert bad.observed is not None
    assert bad.observed.names[0].startswith("1.")
    assert bad.observed.symptom.others == len(bad.observed.names) - 1
    assert bool(torch.isnan(bad.observed.tensor).any())


def test_a_buffer_that_goes_bad_is_observed() -> None:
    """A running statistic that a finite step makes non-finite is a symptom; one that was bad before is none."""

    class Statistic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.register_buffer("worst", torch.ones(()))
            self.register_buffer("old", torch.tensor(math.nan))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.worst.div_(0.0)
                self.old.add_(1.0)
            return self.linear(x)

    recording = record(Statistic(), torch.randn(5, 6), squared)
    assert recording.observed is not None
    assert recording.observed.symptom.kind == "buffer"
    assert recording.observed.names == ("worst",)


@pytest.mark.parametrize(
    "result",
    [
        None,
        1.5,
        torch.zeros(3),
        torch.tensor(3),
        {"total": torch.zeros(3)},
        [],
        "loss",
        torch.tensor(1j),
    ],
)
def test_a_step_without_a_scalar_loss_is_refused(result: Any) -> None:
    """Anything but real scalars ends in an error that says what was returned."""
    with pytest.raises(RecordingError, match="returned"):
        scalar_loss(result)


def test_losses_are_found_in_what_steps_return() -> None:
    """A scalar, a mapping's loss, or the sum of several scalars."""
    one, two = torch.tensor(1.0), torch.tensor([2.0])
    assert scalar_loss(one) is one
    assert scalar_loss({"loss": one, "logits": torch.zeros(3)}) is one
    assert float(scalar_loss({"a": one, "b": two})) == float(scalar_loss((one, two))) == 3.0


# --- the optimizer's step ----------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True, amsgrad=True),
    "adam_for_loop": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop_centered": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
}


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_is_bit_exact_and_leaves_no_trace(name: str, steps_before: int) -> None:
    """Replayed parameters and optimizer state equal those of the real update, before which nothing has changed."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    batch, optimizer = torch.randn(5, 6), OPTIMIZERS[name](model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = squared(model, batch)
        loss.backward()
        return loss

    for _ in range(steps_before):
        closure()
        optimizer.step(closure)
    loss = closure()
    closure_or_none = closure if name == "lbfgs" else None
    before = fingerprint(model), fingerprint(optimizer), generators()
    recording = record_update(model, optimizer, float(loss.detach()), closure_or_none)
    assert (fingerprint(model), fingerprint(optimizer), generators()) == before

    program = recording.program
    numbers = [*program.targets.parameters.values(), *program.targets.optimizer.values()]
    stretch = Stretch(program, Dependence(program).slice(numbers), numbers)
    with own_generator():
        run = Run(stretch, stretch.start(recording.tensors))
        run.advance(len(stretch))
    optimizer.step(closure_or_none)
    assert set(program.targets.parameters) == {name for name, _ in model.named_parameters()}
    for name_, parameter in model.named_parameters():
        assert same(run.env[program.targets.parameters[name_]], parameter.detach()), name_
    assert all(node.phase is Phase.OPTIMIZER for node in program.nodes)


def test_the_inputs_of_an_update_are_named() -> None:
    """Gradients, parameters and optimizer state are placeholders under their paths."""
    model = nn.Linear(6, 6)
    optimizer = torch.optim.Adam(model.parameters())
    squared(model, torch.randn(5, 6)).backward()
    optimizer.step()
    names = {item.name: item.phase for item in record_update(model, optimizer, 1.0).program.placeholders}
    assert names["gradient of weight"] is Phase.INPUT
    assert names["bias"] is Phase.PARAMETER
    assert names["state[0].exp_avg"] is Phase.OPTIMIZER


def test_an_update_that_raises_leaves_no_trace() -> None:
    """An optimizer that fails half way has changed nothing."""
    model = nn.Linear(6, 6)

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.state[model.weight]["more"] = 1
            raise RuntimeError("on purpose")

    optimizer = Failing(model.parameters(), lr=0.1)
    squared(model, torch.randn(5, 6)).backward()
    before = fingerprint(model), fingerprint(optimizer)
    with pytest.raises(RuntimeError, match="on purpose"):
        record_update(model, optimizer, 1.0)
    assert (fingerprint(model), fingerprint(optimizer)) == before
    assert copy.deepcopy(optimizer.state_dict())["state"] == {}


class Average(nn.Module):
    """Keeps an average in a buffer: written to in place, or by another tensor in its stead."""

    def __init__(self, *, in_place: bool, divisor: float) -> None:
        super().__init__()
        self.linear, self.in_place, self.divisor = nn.Linear(6, 6), in_place, divisor
        self.register_buffer("average", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_place:
            self.average.div_(self.divisor)
        else:
            self.average = self.average / self.divisor
        return self.linear(x).square()  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_goes_bad_is_a_symptom(in_place: bool) -> None:
    """However it was written; the buffer itself is afterwards as it was."""
    model = Average(in_place=in_place, divisor=0.0)
    held = model.average
    recording = record(model, torch.randn(5, 6), lambda m, b: m(b).mean())
    assert recording.observed is not None
    assert recording.observed.symptom.kind == "buffer"
    assert recording.observed.symptom.name == "average"
    assert model.average is held
    assert held.tolist() == [1.0, 1.0]
    assert record(Average(in_place=in_place, divisor=2.0), torch.randn(5, 6), lambda m, b: m(b).mean()).observed is None


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_was_bad_before_is_none(in_place: bool) -> None:
    """What the step did not spoil is no symptom of it."""
    model = Average(in_place=in_place, divisor=2.0)
    model.average.fill_(math.inf)
    assert record(model, torch.randn(5, 6), lambda m, b: m(b).mean()).observed is None


def test_compiling_inside_the_step_is_left_out() -> None:
    """A step that compiles its model itself is recorded as if it had not."""

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        compiled = torch.compile(model, backend="eager")
        doubled = torch.compile(lambda x: x * 2)
        halved = torch.compile(dynamic=True)(lambda x: x / 2)
        return halved(doubled(compiled(batch))).square().mean()

    model, batch = nn.Linear(6, 6), torch.randn(5, 6)
    plain = record(model, batch, lambda m, b: (m(b) * 2 / 2).square().mean())
    targets = [node.target for node in record(model, batch, step).program.nodes]
    assert targets == [node.target for node in plain.program.nodes]
