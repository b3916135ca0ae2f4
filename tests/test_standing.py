"""A record that stands over the training puts back the same as one that is made anew, and keeps nothing alive."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from operator import is_, itemgetter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bisect_nan.recording.holdings import Holdings
from bisect_nan.recording.state import Standing, Surroundings


class Keeper(nn.Module):
    """Keeps what modules keep: counters, containers, a buffer, nothing, a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last, self.flag = 0, None, True
        self.history: list[Any] = []
        self.cache: dict[Any, Any] = {"a": 1}
        self.recent: deque[int] = deque([1], maxlen=3)
        self.seen = {1, 2}
        self.dice = random.Random(1)  # noqa: S311
        self.register_buffer("total", torch.zeros(2))
        self.inner = nn.Linear(2, 2)


class Picture:
    """Objects that have to be the same, and values that have to be equal."""

    def __init__(self) -> None:
        self.objects: list[object] = []
        self.values: list[object] = []

    def look(self, item: Any, depth: int) -> None:
        """Add an object, and the items in it to some depth; attributes in any order."""
        self.objects.append(item)
        if depth and isinstance(item, dict):
            pairs = sorted(item.items(), key=itemgetter(0)) if "_modules" in item else list(item.items())
            self.values.append([key for key, _ in pairs if isinstance(key, str)])
            self.objects += [key for key, _ in pairs if not isinstance(key, str)]
            for _, value in pairs:
                self.look(value, depth - 1)
        elif depth and isinstance(item, list | tuple | deque | set):
            self.values.append((type(item), len(item)))
            for value in item:
                self.look(value, depth - 1)
        elif isinstance(item, random.Random):
            self.values.append(item.getstate())

    def shows(self, other: Picture) -> bool:
        """Whether both show the same."""
        same = len(self.objects) == len(other.objects) and all(map(is_, self.objects, other.objects))
        return same and self.values == other.values


class Training:
    """A model, its optimizer and a batch, with everything about them that may change."""

    def __init__(self) -> None:
        self.model = nn.Sequential(Keeper(), nn.BatchNorm1d(2), nn.Sequential(nn.Linear(2, 2), Keeper()), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batch = {"x": torch.ones(2), "more": [torch.ones(1), {"label": 1}]}

    def modules(self) -> list[nn.Module]:
        """Return all modules."""
        return list(self.model.modules())

    def picture(self) -> Picture:
        """Return what there is now."""
        seen = Picture()
        states = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
        seen.values += states
        for item in [*self.modules(), self.optimizer]:
            seen.look(vars(item), 2)
        for tree in (self.optimizer.param_groups, self.optimizer.state, self.batch):
            seen.look(tree, 9)
        for tensor in [*self.model.parameters(), *self.model.buffers(), self.batch["x"]]:
            seen.objects.append(tensor.grad if tensor.is_leaf else None)
            seen.values += [tensor.is_leaf, tensor.requires_grad, tensor.dtype]
            seen.values += [tensor.data_ptr(), tensor.shape, tensor.stride()]
            for hooks in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks):
                seen.look(hooks, 1)
        return seen


def _keeper(training: Training, number: int) -> Any:
    keepers = [module for module in training.modules() if isinstance(module, Keeper)]
    return keepers[number % len(keepers)]


def _layer(training: Training, number: int) -> Any:
    layers = [module for module in training.modules() if isinstance(module, nn.Linear)]
    return layers[number % len(layers)]


def _anything(training: Training, number: int) -> Any:
    modules = training.modules()
    return modules[number % len(modules)]


def _parameter(training: Training, number: int) -> Any:
    parameters = list(training.model.parameters())
    return parameters[number % len(parameters)]


def _rename(item: Any) -> None:
    """Let the last attribute have another name."""
    name, value = vars(item).popitem()
    vars(item)[f"{name}_" if len(name) < 40 else "short"] = value
    vars(item).setdefault(name, value)


def _move_item(one: Any) -> None:
    """Move an item from one container to the next, which leaves their items in a row as they were."""
    one.first, one.second = getattr(one, "first", [1]), getattr(one, "second", [2])
    if one.first:
        one.second.insert(0, one.first.pop())


def _take_step(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.is_leaf and parameter.requires_grad and parameter.is_floating_point():
            parameter.grad = torch.ones_like(parameter)
    training.optimizer.step()


CHANGES: dict[str, Callable[[Training, int], object]] = {
    "nothing": lambda *_: None,
    "count": lambda t, n: setattr(_keeper(t, n), "count", _keeper(t, n).count + 1),
    "equal value": lambda t, n: setattr(_keeper(t, n), "flag", 1),
    "equal list": lambda t, n: setattr(_keeper(t, n), "history", list(_keeper(t, n).history)),
    "new attribute": lambda t, n: setattr(_anything(t, n), f"new{n % 3}", object()),
    "delete attribute": lambda t, n: vars(_anything(t, n)).pop(f"new{n % 3}", None),
    "rename attribute": lambda t, n: _rename(_keeper(t, n)),
    "move item": lambda t, n: _move_item(_keeper(t, n)),
    "tensor attribute": lambda t, n: setattr(_keeper(t, n), "last", torch.ones(3)),
    "append": lambda t, n: _keeper(t, n).history.append(object()),
    "clear": lambda t, n: _keeper(t, n).history.clear(),
    "dictionary": lambda t, n: _keeper(t, n).cache.update({n % 3: object()}),
    "pop": lambda t, n: _keeper(t, n).cache.pop(n % 3, None),
    "deque": lambda t, n: _keeper(t, n).recent.append(n),
    "set": lambda t, n: _keeper(t, n).seen.symmetric_difference_update({n % 5}),
    "dice": lambda t, n: _keeper(t, n).dice.random(),
    "rebind buffer": lambda t, n: setattr(_keeper(t, n), "total", torch.ones(2)),
    "new buffer": lambda t, n: _keeper(t, n).register_buffer(f"buffer{n % 2}", torch.ones(1)),
    "replace parameter": lambda t, n: setattr(_layer(t, n), "weight", nn.Parameter(torch.ones(2, 2))),
    "no bias": lambda t, n: setattr(_layer(t, n), "bias", None),
    "add module": lambda t, n: t.model.add_module(f"added{n % 3}", nn.Linear(2, 2)),
    "delete module": lambda t, n: t.model._modules.pop(f"added{n % 3}", None),
    "swap modules": lambda t, _: t.model[2]._modules.update({"0": nn.Linear(2, 2), "1": t.model[2]._modules["1"]}),
    "reorder modules": lambda t, _: t.model._modules.update({"3": t.model._modules.pop("3")}),
    "evaluate": lambda t, n: t.model.train(bool(n % 2)),
    "forward hook": lambda t, n: _anything(t, n).register_forward_hook(lambda *_: None),
    "new namespace": lambda t, n: object.__setattr__(_keeper(t, n), "__dict__", dict(vars(_keeper(t, n)))),
    "freeze": lambda t, n: _parameter(t, n).requires_grad_(n % 2 == 0),
    "tensor hook": lambda t, n: _parameter(t, n).requires_grad_().register_hook(lambda g: g),
    "post hook": lambda t, n: _parameter(t, n).requires_grad_().register_post_accumulate_grad_hook(lambda _: None),
    "data": lambda t, n: setattr(_parameter(t, n), "data", _parameter(t, n).data.clone()),
    "transpose data": lambda t, n: setattr(_layer(t, n).weight, "data", _layer(t, n).weight.data.t()),
    "gradient": lambda t, n: setattr(_parameter(t, n), "grad", torch.ones_like(_parameter(t, n))),
    "clear gradients": lambda t, _: t.optimizer.zero_grad(),
    "optimizer step": lambda t, _: _take_step(t),
    "learning rate": lambda t, n: t.optimizer.param_groups[0].update(lr=float(n)),
    "add group": lambda t, _: t.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    "remove group": lambda t, _: t.optimizer.param_groups.pop() if len(t.optimizer.param_groups) > 1 else None,
    "new state": lambda t, _: setattr(t.optimizer, "state", t.optimizer.state.copy()),
    "load state": lambda t, n: t.optimizer.load_state_dict(t.optimizer.state_dict()) if n % 2 else None,
    "batch": lambda t, n: t.batch.update({"x": torch.zeros(2), "added": n}),
    "pop label": lambda t, _: t.batch["more"][-1].clear(),
    "torch": lambda *_: torch.rand(1),
    "python": lambda _, n: random.gauss(0, 1) if n % 2 else random.random(),  # noqa: S311
    "numpy": lambda _, n: np.random.standard_normal() if n % 2 else np.random.rand(),  # noqa: NPY002
}
"""What a step, or a loop between two steps, may do; the number says to which module, parameter or value."""

between = st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 20)), max_size=4)
within = between.map(lambda listed: [change for change in listed if change[0] != "new namespace"])  # not covered


def apply(training: Training, listed: Iterable[tuple[str, int]]) -> None:
    """Make changes; one that no longer fits what the others left (a group of other parameters) is left out."""
    for name, number in listed:
        with contextlib.suppress(*([ValueError, RuntimeError] if name in ("load state", "optimizer step") else [])):
            CHANGES[name](training, number)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(between, within), min_size=1, max_size=4))
def test_the_standing_record_puts_back_the_same_as_a_new_one(steps: list[tuple[Any, Any]]) -> None:
    """Whatever is changed between the steps and in them, both put back exactly what there was."""
    training = Training()
    standing = Standing(training.model, training.optimizer)
    for earlier, later in steps:
        apply(training, earlier)
        kept = standing.now(batch=training.batch)
        fresh = Surroundings(training.model, training.optimizer, batch=training.batch)
        before = training.picture()
        for surroundings in (kept, fresh, kept):
            apply(training, later)
            surroundings.restore()
            assert before.shows(training.picture())
        apply(training, later)


@pytest.mark.parametrize("name", sorted({*CHANGES} - {"new namespace"}))
def test_each_change_alone(name: str) -> None:
    """A change between two steps is noticed, and the same change within a step is taken back."""
    for number in range(4):
        training = Training()
        standing = Standing(training.model, training.optimizer)
        standing.now()
        apply(training, [(name, number)])
        before = training.picture()
        kept = standing.now(batch=training.batch)
        apply(training, [(name, number), (name, number + 1)])
        kept.restore()
        assert before.shows(training.picture())


def test_another_namespace_is_noticed() -> None:
    """Attributes may have been given to a module as a whole, as unpickling does."""
    training = Training()
    standing = Standing(training.model)
    standing.now()
    apply(training, [("new namespace", 0)])
    before, kept = training.picture(), standing.now()
    apply(training, [("count", 0), ("tensor attribute", 0)])
    kept.restore()
    assert before.shows(training.picture())


def test_the_same_objects_under_another_name_or_elsewhere_are_noticed() -> None:
    """Objects in a row may all be the same though one has another name, or has moved to the next container."""
    training = Training()
    training.model.last, training.optimizer.state["own"] = None, {"one": [1], "two": [2]}
    holdings, own = Holdings(training.model, training.optimizer), training.optimizer.state["own"]
    first = holdings.present()
    training.model.other = vars(training.model).pop("last")
    second = holdings.present()
    own["one"].append(own["two"].pop())
    own["two"].append(3)
    third = holdings.present()
    own["two"].insert(0, own["one"].pop())
    assert len({id(held) for held in (first, second, third, holdings.present())}) == 4


def test_what_does_not_change_is_not_read_again() -> None:
    """Records are shared as long as everything is the same, and those of other modules when something differs."""
    training = Training()
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    holdings = Holdings(model, training.optimizer)
    first = holdings.present()
    assert holdings.present() is first
    model[0].count = 1
    second = holdings.present()
    assert [one is other for one, other in zip(first.parts, second.parts, strict=True)].count(False) == 1


def test_nothing_but_the_latest_is_kept_alive() -> None:
    """Batches, gradients, and what modules held before, are gone once their surroundings are."""
    training = Training()
    standing = Standing(training.model, training.optimizer)
    gone = []
    for _ in range(3):
        batch, kept = {"x": torch.ones(3)}, torch.ones(4)
        training.model[0].last = kept
        _take_step(training)
        standing.now(batch=batch, contents=[kept])
        gone += [weakref.ref(item) for item in (batch["x"], kept, training.model[0].inner.weight.grad)]
        del batch, kept
    training.optimizer.zero_grad()
    training.model[0].last = None
    standing.now()
    gc.collect()
    assert [item() for item in gone] == [None] * 9


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_read_every_time() -> None:
    """They keep their parameters where nothing can be compared."""
    model = torch.jit.script(nn.Linear(2, 2))
    standing = Standing(model)
    standing.now()
    model.weight = nn.Parameter(torch.ones(2, 2))
    model.weight.grad = gradient = torch.ones(2, 2)
    before = standing.now()
    model.weight.grad = None
    before.restore()
    assert model.weight.grad is gradient
