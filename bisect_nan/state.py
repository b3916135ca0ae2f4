"""What running a step changes besides the elements of tensors, and how to put it back.

That is attributes, gradients, the batch, optimizer state, and where tensors lie; random generators are in `generators.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves

from bisect_nan.generators import ProcessGenerators, state_of

Undo = Callable[[], None]


class Surroundings:
    """The Python side of a step, as it was when this object was made; `restore` puts it back, any number of times.

    Covered are the attributes of every module (one level deep: a list that the step appends to, a counter, a reassigned buffer),
    the batch's containers, of every tensor among them its gradient, hooks, `requires_grad` and `.data`, the state, groups and
    attributes of the optimizer, and the generators of torch, Python and NumPy. The elements of tensors are copied only where
    asked for; else somebody else restores those.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        batch: Any = None,
        buffers: bool = False,
        contents: bool = False,
    ) -> None:
        """Remember the present state.

        Args:
            model: The module to be trained; anything else has no covered attributes.
            optimizer: Its optimizer, or None.
            batch: Any pytree of tensors and plain values.
            buffers: Whether to copy the buffers, which a forward pass writes to.
            contents: Whether to copy parameters, buffers and optimizer tensors.
        """
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        copied = list(model.buffers()) if isinstance(model, nn.Module) else []
        inputs = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        self._undo: list[Undo] = [_tensor(tensor) for tensor in [*parameters, *copied, *inputs]]
        self._undo.extend(_attributes(module.__dict__) for module in modules)
        self._undo.extend(_containers(batch))
        copied += parameters if contents else []
        if optimizer is not None:
            self._undo.append(_attributes(optimizer.__dict__))
            self._undo.extend(_container(group) for group in optimizer.param_groups)
            self._undo.extend(_container(state) for state in optimizer.state.values() if isinstance(state, MutableMapping))
            copied += [tensor for _, tensor in optimizer_tensors(optimizer)]
        self._contents = [(tensor, tensor.detach().clone()) for tensor in copied] if contents or buffers else []
        self._generators = ProcessGenerators()

    def restore(self) -> None:
        """Put everything back."""
        for undo in self._undo:
            undo()
        with torch.no_grad():
            for tensor, saved in self._contents:
                tensor.copy_(saved)
        self._generators.restore()


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


def _tensor(tensor: torch.Tensor) -> Undo:
    """Return a function that lets a tensor show the memory that it shows now, with its gradient, hooks and `requires_grad`."""
    data, needs_gradient, leaf = tensor.data, tensor.requires_grad, tensor.is_leaf
    gradient = tensor.grad if leaf else None  # reading the gradient of another tensor warns
    hooks = [(name, getattr(tensor, name)) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")]  # torch 2.6 to 2.13
    entries = [_container(registered) for _, registered in hooks if registered is not None]

    def undo() -> None:
        if leaf and not tensor.is_leaf:
            tensor.detach_()  # the step wrote something into it that needs a gradient
        if not _same_view(tensor, data):
            tensor.data = data
        for name, registered in hooks:
            if getattr(tensor, name) is not registered:
                setattr(tensor, name, registered)
        for restore in entries:
            restore()
        if leaf:
            tensor.requires_grad_(needs_gradient)
            tensor.grad = gradient

    return undo


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is not torch.strided or one.is_nested or other.layout is not torch.strided:
        return True  # nothing to compare; such tensors cannot be recorded anyway
    geometry = one.shape, one.stride(), one.storage_offset(), one.dtype
    return one.is_set_to(other) and geometry == (other.shape, other.stride(), other.storage_offset(), other.dtype)


def _attributes(namespace: dict[str, Any]) -> Undo:
    """Return a function that gives an object's `__dict__` its present entries back.

    The containers among them get their present items back, the random generators their state.
    """
    before = dict(namespace)
    undoes = [_container(value) if _holds_items(type(value)) else state_of(value) for value in before.values()]

    def undo() -> None:
        for key in [key for key in namespace if key not in before]:
            del namespace[key]
        namespace.update(before)
        for restore in undoes:
            if restore is not None:
                restore()

    return undo


@functools.cache
def _holds_items(kind: type) -> bool:
    return issubclass(kind, MutableMapping | MutableSequence | MutableSet)


def _containers(batch: Any) -> Iterable[Undo]:
    """Yield what gives every container in a batch its present items back: a step may pop its labels."""
    if _holds_items(type(batch)):
        yield _container(batch)
    if isinstance(batch, MutableMapping):
        batch = batch.values()
    elif not isinstance(batch, list | tuple):
        return
    for item in batch:
        yield from _containers(item)


def _container(container: Any) -> Undo:
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
