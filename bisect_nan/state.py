"""What running a step changes besides the contents of tensors: attributes, gradients, optimizer state, random generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch
from torch import nn


class Surroundings:
    """The Python side of a step, as it was when this object was made; `restore` puts it back, any number of times.

    Covered are the attributes of every module (one level deep: a list that the step appends to, a counter, a reassigned buffer),
    the gradients' place in `.grad`, the state, groups and attributes of the optimizer, and the generators of torch, Python and
    NumPy. With `contents` the elements of the tensors among them are copied as well; without, somebody else restores those.
    """

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None = None, *, contents: bool = False) -> None:
        """Remember the present state.

        Args:
            model: The module to be trained; anything else has no covered attributes.
            optimizer: Its optimizer, or None.
            contents: Whether to copy parameters, buffers and optimizer tensors.
        """
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        self._undo: list[Callable[[], None]] = [_attributes(module.__dict__) for module in modules]
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        tensors = [*parameters, *(model.buffers() if isinstance(model, nn.Module) else ())]
        if optimizer is not None:
            self._undo.append(_attributes(optimizer.__dict__))
            self._undo.extend(_container(group) for group in optimizer.param_groups)
            self._undo.append(_container(optimizer.state))
            self._undo.extend(_container(state) for state in optimizer.state.values() if isinstance(state, MutableMapping))
            tensors.extend(tensor for _, tensor in optimizer_tensors(optimizer))
        self._contents = [(tensor, tensor.detach().clone()) for tensor in tensors] if contents else []
        self._generators = Generators()

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, saved in self._contents:
                tensor.copy_(saved)
        self._generators.restore()


class Generators:
    """The states of torch's default generators, and of Python's and NumPy's, as they were when this object was made."""

    def __init__(self) -> None:
        """Remember the present states; NumPy's only where NumPy has been imported."""
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors that an optimizer keeps, with a readable path: its state per parameter, its groups, its attributes."""
    for number, state in enumerate(optimizer.state.values()):
        if isinstance(state, MutableMapping):
            yield from _named(f"state[{number}]", state.items())
    for number, group in enumerate(optimizer.param_groups):
        yield from _named(f"param_groups[{number}]", [item for item in group.items() if item[0] != "params"])
    known = {"state", "param_groups", "defaults"}
    yield from _named("optimizer", [(key, value) for key, value in optimizer.__dict__.items() if key not in known])


def _named(path: str, items: Iterable[tuple[Any, Any]]) -> Iterable[tuple[str, torch.Tensor]]:
    for key, value in items:
        if isinstance(value, torch.Tensor):
            yield f"{path}.{key}", value
        elif isinstance(value, list | tuple):
            yield from ((f"{path}.{key}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))


def _attributes(namespace: dict[str, Any]) -> Callable[[], None]:
    """Return a function that gives an object's `__dict__` its present entries back, and each container its present items."""
    before = dict(namespace)
    containers = [_container(value) for value in before.values() if isinstance(value, MutableMapping | MutableSequence | MutableSet)]

    def undo() -> None:
        for key in [key for key in namespace if key not in before]:
            del namespace[key]
        namespace.update(before)
        for restore in containers:
            restore()

    return undo


def _container(container: Any) -> Callable[[], None]:
    """Return a function that gives a dictionary, list or set its present items back, in place."""
    if isinstance(container, MutableMapping):
        items = dict(container)

        def undo() -> None:
            container.clear()
            container.update(items)

    elif isinstance(container, MutableSequence):
        sequence = list(container)

        def undo() -> None:
            container[:] = sequence

    else:
        members = set(container)

        def undo() -> None:
            container.clear()
            container.update(members)

    return undo
