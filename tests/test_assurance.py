"""Where an update is assured, it leaves parameters and state finite; in an ordinary training every update is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bisect_nan import finite
from bisect_nan.loop.assurance import Assurance, unknown_sources
from bisect_nan.loop.growth import GROWTHS, PARAMETER, RATIO, REST, SCALARS, SIGNED, Bounds, Group, Range, after
from bisect_nan.loop.training import Training
from bisect_nan.norms import norms

KINDS: list[Any] = list(GROWTHS)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FUSED: list[Any] = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]

NASTY: dict[str, list[Any]] = {
    "lr": [1e-3, 0.0, 1.0, 1e30, 1e38, -0.1, 1e-45, math.inf, math.nan, 10**400, torch.tensor(0.01)],
    "eps": [1e-8, 0.0, 1e-50, 1e-38, 1e-4, 1.0, -1e-8, 1e30],
    "betas": [(0.9, 0.999), (0.0, 0.0), (0.999999, 0.9999999), (1.0, 1.0), (0.999, 0.5), (-0.5, 0.9), (0.9, 1.1)],
    "weight_decay": [0.0, 0.01, 1e-30, 1e20, -0.1, 10.0, math.nan],
    "momentum": [0.0, 0.9, 1.5, -0.5, 1e30],
    "dampening": [0.0, 0.5, -3.0, 1e30],
    "alpha": [0.99, 0.0, 1.0, 1.5, -1.0, 0.75],
    "rho": [0.9, 0.0, 1.0, 1.1],
    "lr_decay": [0.0, 1.0, -1.0, 1e30],
    "lambd": [1e-4, 0.0, -1.0, 1e30],
    "t0": [1e6, 0.0, 1.0, -5.0],
    "momentum_decay": [4e-3, 0.0, -1e3, 1e30],
    "nesterov": [False, True],
    "amsgrad": [False, True],
    "maximize": [False, True],
    "decoupled_weight_decay": [False, True],
    "centered": [False, True],
    "foreach": [False, True, None],
}
"""Settings of optimizers: usual ones first, then those that none accepts but somebody may write into a group."""

MAGNITUDES = [
    0.0,
    1e-45,
    1e-38,
    1e-30,
    1e-22,
    1e-15,
    1e-8,
    1e-3,
    0.5,
    1.0,
    30.0,
    1e3,
    6e4,
    1e7,
    1e15,
    1e18,
    1e19,
    1e30,
    1e38,
]


def made(kind: Any, dtype: torch.dtype, sizes: tuple[float, ...] = (1.0, -0.5, 0.0), **options: Any) -> Training:
    """Return a training of two parameters."""
    model = nn.ParameterList(
        [nn.Parameter(torch.tensor(sizes, dtype=dtype)), nn.Parameter(torch.tensor(0.25, dtype=dtype))]
    )
    return Training(model, kind(model.parameters(), **options))


def backward(training: Training, make: Callable[[], float]) -> float:
    """Set gradients, and return their norm."""
    for parameter in training.parameters():
        values = [make() for _ in range(parameter.numel())]
        parameter.grad = torch.tensor(values, dtype=torch.float64).to(parameter.dtype).view_as(parameter)
    return norms(training.gradients())[0]


def stepped(training: Training) -> bool:
    """Update; return whether that went without an error."""
    try:
        training.optimizer.step()
    except (ArithmeticError, RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def all_finite(training: Training) -> bool:
    """Whether parameters and state are."""
    return not finite.probe([*training.parameters(), *training.state()])


@st.composite
def trainings(draw: st.DrawFn) -> tuple[Training, st.SearchStrategy[float]]:
    """Return a training with some odd settings, and what its gradients are made of."""
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES))
    sizes = st.sampled_from([size for size in MAGNITUDES if size < torch.finfo(dtype).max])
    numbers = draw(st.sampled_from([st.tuples(sizes, st.sampled_from([1.0, -1.0])).map(math.prod), st.floats(-1, 1)]))
    options = {"fused": True} if kind in FUSED and draw(st.booleans()) else {}
    training = made(kind, dtype, (draw(numbers), draw(numbers), 0.0), **options)
    group = training.optimizer.param_groups[0]
    for name in draw(st.lists(st.sampled_from(sorted(NASTY.keys() & group)), max_size=4, unique=True)):
        if name != "foreach" or not options:
            group[name] = draw(st.sampled_from(NASTY[name]))
    return training, numbers


# A negative base under a root, which torch tells once in a process.
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@settings(max_examples=300, deadline=None)
@given(trainings(), st.integers(1, 6), st.data())
def test_an_assured_update_leaves_everything_finite(
    case: tuple[Training, st.SearchStrategy[float]], updates: int, data: st.DataObject
) -> None:
    """Whatever the optimizer, its settings, the types and the gradients."""
    training, numbers = case
    assurance = Assurance(training)
    for _ in range(updates):
        norm = backward(training, lambda: data.draw(numbers))
        held = math.isfinite(norm) and assurance.holds(norm)
        if not stepped(training):
            assert not held
            return
        if held:
            assert all_finite(training)
            assurance.advance()


@settings(max_examples=300, deadline=None)
@given(trainings(), st.integers(1, 6), st.data())
def test_bounds_stay_above_what_they_bound(
    case: tuple[Training, st.SearchStrategy[float]], updates: int, data: st.DataObject
) -> None:
    """Moved on from one update to the next, from a state that does not exist yet, they are never less than the numbers."""
    training, numbers = case
    group = Group(training.optimizer.param_groups[0], training.optimizer.defaults)
    kinds = Range.of(frozenset(parameter.dtype for parameter in training.parameters()))
    bounds: Bounds | None = {PARAMETER: max(finite.largest(parameter.detach()) for parameter in training.parameters())}
    for _ in range(updates):
        backward(training, lambda: data.draw(numbers))
        steepest = max(finite.largest(gradient) for gradient in training.gradients()) + 1e-18
        bounds = after(group, bounds, steepest, kinds, GROWTHS[type(training.optimizer)])
        if bounds is None:
            return
        assert stepped(training)
        assert all(finite.largest(parameter.detach()) <= bounds[PARAMETER] for parameter in training.parameters())
        for state in training.optimizer.state.values():
            for name, value in state.items():
                low, high = (float(end) for end in torch.aminmax(value))
                assert max(-low, high) <= SCALARS.get(name, bounds.get(name, math.inf))
                assert low >= 0 or name in SIGNED
            if RATIO in bounds:
                related = bounds[RATIO] * state["exp_avg_sq"].double().sqrt() + bounds[REST]
                assert (state["exp_avg"].double().abs() <= related).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_an_ordinary_training_is_assured(kind: Any, dtype: torch.dtype) -> None:
    """With the settings that an optimizer has by itself, every update is, also of gradients that explode and vanish."""
    training = made(kind, dtype)
    assurance, random = Assurance(training), torch.Generator().manual_seed(0)
    for number in range(50):
        size = 5e5 * 10.0 ** -(number % 9)
        norm = backward(training, lambda size=size: size * float(torch.randn((), generator=random)))
        assert assurance.holds(min(norm, 1e6))
        training.optimizer.step()
        assurance.advance()
    assert all_finite(training)


def trained(training: Training, updates: int) -> list[bool]:
    """Train on gradients of ones, and return which updates were assured."""
    assurance, found = Assurance(training), []
    for _ in range(updates):
        found.append(assurance.holds(backward(training, lambda: 1.0)))
        training.optimizer.step()
        if found[-1]:
            assurance.advance()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay(kind: Any) -> None:
    """It makes gradients depend on parameters, which drives the bounds of some optimizers up; these are measured again."""
    assert all(trained(made(kind, torch.float32, weight_decay=0.01), 300))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
        (torch.optim.SGD, {"momentum": 0.9, "fused": True, "maximize": True}),
        (torch.optim.Adam, {"amsgrad": True, "lr": torch.tensor(1e-3)}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "foreach": True}),
        (torch.optim.ASGD, {"t0": 2.0, "foreach": True}),
    ],
)
def test_variants(kind: Any, options: dict[str, Any]) -> None:
    """Momentum, the implementations, and a rate that is a tensor on the CPU are assured."""
    assert all(trained(made(kind, torch.float32, **options), 20))


def test_float16() -> None:
    """Plain descent is assured in float16, and Adam is not, whose eps rounds to 0 there, unless it is given a larger one."""
    assert all(trained(made(torch.optim.SGD, torch.float16), 10))
    assert not any(trained(made(torch.optim.Adam, torch.float16), 10))
    assert all(trained(made(torch.optim.Adam, torch.float16, eps=1e-3), 10))


class Subclass(torch.optim.SGD):
    """May do anything."""


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Subclass, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.SGD, {"differentiable": False, "lr": math.inf}),
        (torch.optim.Adam, {"eps": 0.0}),
        (torch.optim.Adam, {"eps": 1e-50}),
        (torch.optim.Adam, {"lr": 1e37}),
        (torch.optim.Adam, {"betas": (0.9, 1 - 1e-12)}),
    ],
)
def test_what_is_not_assured(kind: Any, options: dict[str, Any]) -> None:
    """Other classes, and settings that may make a number non-finite, though they need not."""
    assert not any(trained(made(kind, torch.float32, **options), 3))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "step"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_resumed_state_is_measured(name: str, value: float) -> None:
    """State that came from elsewhere is assured only when it is finite, and not negative where a root is taken of it."""
    first = made(torch.optim.Adam, torch.float32)
    assert all(trained(first, 3))
    saved = first.optimizer.state_dict()
    second = made(torch.optim.Adam, torch.float32)
    second.optimizer.load_state_dict(saved)
    assert all(trained(second, 3))
    saved["state"][0][name] = torch.full_like(saved["state"][0][name], value)
    second.optimizer.load_state_dict(saved)
    assert Assurance(second).holds(backward(second, lambda: 1.0)) == (name == "exp_avg" and value == -1.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda training: training.parameters()[0].detach().fill_(1e38),
        lambda training: setattr(training.parameters()[0], "data", torch.full((3,), 1e38)),
        lambda training: training.optimizer.state[training.parameters()[0]]["exp_avg_sq"].fill_(-1.0),
        lambda training: training.optimizer.state[training.parameters()[0]].update(exp_avg=torch.full((3,), math.nan)),
        lambda training: training.optimizer.add_param_group({"params": nn.Parameter(torch.tensor(1e38))}),
        lambda training: training.optimizer.register_step_pre_hook(lambda *_: None),
        lambda training: setattr(training.optimizer, "step", lambda: None),
        lambda training: setattr(training.optimizer, "grad_scale", torch.tensor(2.0)),
        lambda training: setattr(training.parameters()[0], "grad", torch.ones(3).to_sparse()),
        lambda training: training.optimizer.param_groups[0].update(lr=1e38),
        lambda training: training.optimizer.param_groups[0].update(lr="0.1"),
    ],
)
def test_changes_from_outside(change: Callable[[Training], object]) -> None:
    """What is written between updates, replaced, or put before them is noticed; here all of it makes an update unsafe."""
    training = made(torch.optim.Adam, torch.float32)
    assurance = Assurance(training)
    norm = backward(training, lambda: 1.0)
    assert assurance.holds(norm)
    training.optimizer.step()
    assurance.advance()
    assert assurance.holds(norm)
    change(training)
    assert not assurance.holds(norm)


@pytest.mark.parametrize("told", [False, True])
def test_writes_that_torch_does_not_count(told: bool) -> None:
    """A write through `.data` has to be told about."""
    training = made(torch.optim.SGD, torch.float32)
    assurance = Assurance(training)
    assert assurance.holds(backward(training, lambda: 1.0))
    training.optimizer.step()
    assurance.advance()
    training.parameters()[0].data.fill_(1e38)
    if told:
        assurance.forget()
    assert assurance.holds(1.0) != told


def test_an_update_that_was_not_assured() -> None:
    """What it left is measured: a fused update counts as no write."""
    training = made(torch.optim.SGD, torch.float32, momentum=0.9, dampening=-9.0, fused=True)
    assert trained(training, 2) == [True, True]
    assurance = Assurance(training)
    assert assurance.holds(backward(training, lambda: 1.0))
    training.optimizer.step()
    assurance.advance()
    assert not assurance.holds(backward(training, lambda: 3e38))
    training.optimizer.step()
    assert not all_finite(training)
    assert not assurance.holds(backward(training, lambda: 1.0))


def test_shared_memory() -> None:
    """A parameter that shows another's memory is moved twice by an update, which no bound covers."""
    weight = nn.Parameter(torch.ones(4))
    model = nn.ParameterList([weight, nn.Parameter(weight.detach()[2:])])
    assert not any(trained(Training(model, torch.optim.SGD(model.parameters())), 2))


def test_a_schedule() -> None:
    """A scheduler wraps `optimizer.step`, which changes nothing; the rates that it sets are read for every update."""
    training = made(torch.optim.SGD, torch.float32)
    torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.9)
    assurance = Assurance(training)
    for rate, assured in ((0.1, True), (1e38, False), (0.1, True)):
        training.optimizer.param_groups[0]["lr"] = rate
        assert assurance.holds(backward(training, lambda: 1.0)) == assured


def test_how_often_elements_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in a healthy training, and more and more seldom where it is of no use."""
    reads: list[torch.Tensor] = []
    extremes = finite.extremes
    monkeypatch.setattr(finite, "extremes", lambda values: reads.append(values) or extremes(values))
    assert all(trained(made(torch.optim.Adam, torch.float32), 100))
    assert len(reads) == 2  # the parameters; the state begins with zeros
    assert not any(trained(made(torch.optim.SGD, torch.float32, (1e38, 0.0, 0.0)), 100))
    assert len(reads) == 2 + 2 * 6  # after 1, 3, 7, 15, 31 updates without


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_of_the_optimizers_is_the_one_that_was_read(kind: Any) -> None:
    """Whoever changes the release of torch reads what changed, corrects the bounds, and then adds the hash."""
    if not torch.__version__.startswith("2.13"):
        pytest.skip("other releases are not assured before somebody has read their optimizers")
    assert unknown_sources(kind) == []


def test_other_code_is_not_assured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another source nor a method that somebody put into the class."""
    monkeypatch.setattr(torch.optim.SGD, "step", lambda _: None)
    assert unknown_sources(torch.optim.SGD) == ["step"]
    monkeypatch.setattr("bisect_nan.loop.assurance.KNOWN", frozenset())
    assert unknown_sources(torch.optim.AdamW) == ["torch.optim.adam", "torch.optim.adamw", "torch.optim.optimizer"]
    assert not any(trained(made(torch.optim.AdamW, torch.float32), 1))
