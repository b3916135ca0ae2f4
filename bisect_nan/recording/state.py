"""What running a step changes besides the elements of tensors, and how to put it back.

That is attributes, gradients, the batch, optimizer state, and where tensors lie; random generators are in `generators.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping, MutableSequence, MutableSet
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree  # torch 2.6 to 2.13: tree_leaves

from bisect_nan import finite
from bisect_nan.recording.generators import ProcessGenerators, state_of

_GENERATORS = ("Generator", "Random")
"""How the names of classes of random generators begin; `state_of` looks closer."""


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
        others: Iterable[torch.Tensor] = (),
        contents: Iterable[torch.Tensor] = (),
    ) -> None:
        """Remember the present state.

        Args:
            model: The module to be trained; anything else has no covered attributes.
            optimizer: Its optimizer, or None.
            batch: Any pytree of tensors and plain values.
            others: Further tensors to cover.
            contents: Tensors whose elements are copied, too.
        """
        modules = list(model.modules()) if isinstance(model, nn.Module) else []
        tensors = [tensor for module in modules for tensor in [*_own(module, "_parameters"), *_own(module, "_buffers")]]
        tensors += [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        tensors += others
        tensors += [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]
        self._items = _Items()
        self._tensors = [_Shown(tensor, self._items) for tensor in {id(tensor): tensor for tensor in tensors}.values()]
        self._namespaces = [(module.__dict__, self._attributes(module.__dict__)) for module in modules]
        self._items.add_nested(batch)
        if optimizer is not None:
            self._namespaces.append((optimizer.__dict__, self._attributes(optimizer.__dict__)))
            self._items.add_nested(optimizer.param_groups)
            self._items.add_nested(optimizer.state)
        self._contents: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.copy(contents)
        self._generators = ProcessGenerators()

    def _attributes(self, namespace: dict[str, Any]) -> dict[str, Any]:
        """Return an object's present attributes; the items of containers among them, and the state of generators, are kept."""
        before = dict(namespace)
        for value in before.values():
            kind: Any = type(value)
            if _holds_items(kind):
                self._items.add(value)
            elif kind.__name__.startswith(_GENERATORS) and (undo := state_of(value)) is not None:
                self._items.undo.append(undo)
        return before

    def restore(self) -> None:
        """Put everything back."""
        for shown in self._tensors:
            shown.restore()
        for namespace, before in self._namespaces:
            for key in [key for key in namespace if key not in before]:
                del namespace[key]
            namespace.update(before)
        self._items.restore()
        with torch.no_grad():
            for tensor, saved in self._contents.values():
                # One that overlaps itself cannot be written to, not even by the step.
                if not finite.same(tensor, saved.to(tensor.device)):
                    tensor.copy_(saved)
        self._generators.restore()

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Remember the present elements of some tensors, too."""
        self.keep((tensor, tensor.detach().clone()) for tensor in tensors)

    def keep(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Remember the elements of some tensors by copies that were made before; these may lie on another device."""
        self._contents |= {id(tensor): (tensor, copy) for tensor, copy in copies}

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the elements that a tensor had; None when it was not among the `contents`."""
        return self._contents.get(id(tensor), (None, None))[1]


def buffers(model: Any) -> list[torch.Tensor]:
    """Return the buffers of a model, in a third of the time that `model.buffers()` takes; one under two names twice."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [buffer for module in modules for buffer in _own(module, "_buffers")]


def _own(module: nn.Module, kind: str) -> list[torch.Tensor]:
    """Return the tensors of one module without its children."""
    return [tensor for tensor in module.__dict__[kind].values() if tensor is not None]


def named_parameters(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a model's parameters by name, then those that only its optimizer knows (`param_groups[1].params[0]`)."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters()) if isinstance(model, nn.Module) else {}
    known = {id(parameter) for parameter in found.values()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                found[f"param_groups[{number}].params[{place}]"] = parameter
    return found


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the tensors that an optimizer keeps, with a readable path: its state per parameter, its groups, its attributes.

    The parameters, which it refers to as well, are none of them.
    """
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for path, tensor in _kept(optimizer):
        if id(tensor) not in parameters:
            yield path, tensor


def _kept(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
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


class _Items:
    """Containers and what they hold.

    A module has a dozen, most of them empty, and this is made before every step: nothing is allocated for an empty one, or the
    garbage collector would take longer than all the rest.
    """

    def __init__(self) -> None:
        self._empty: list[Any] = []
        self._full: list[tuple[Any, Any]] = []
        self.undo: list[Callable[[], object]] = []

    def add(self, container: Any) -> None:
        """Keep the items of a dictionary, list or set."""
        if container:
            self._full.append(
                (container, dict(container) if isinstance(container, MutableMapping) else list(container))
            )
        else:
            self._empty.append(container)

    def add_nested(self, tree: Any) -> None:
        """Keep the items of every container in a batch, or in an optimizer's state: a step may pop its labels."""
        kind: Any = type(tree)
        if _holds_items(kind):
            self.add(tree)
        if isinstance(tree, MutableMapping):
            tree = tree.values()
        elif not isinstance(tree, list | tuple):
            return
        for item in tree:
            self.add_nested(item)

    def restore(self) -> None:
        """Give every container its items back, in place."""
        for container in self._empty:
            _refill(container, ())
        for container, items in self._full:
            _refill(container, items)
        for undo in self.undo:
            undo()


def _refill(container: Any, items: Any) -> None:
    if isinstance(container, MutableMapping):
        container.clear()
        container.update(items)
    elif isinstance(container, MutableSet):
        container.clear()
        container |= set(items)
    else:
        while container:  # neither slices (deque) nor clear (array) are there for all
            container.pop()
        container.extend(items)


@functools.cache
def _holds_items(kind: type) -> bool:
    return issubclass(kind, MutableMapping | MutableSequence | MutableSet)


_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"  # torch 2.6 to 2.13


class _Shown:
    """What a tensor shows: its memory, its gradient, its hooks and whether it requires a gradient."""

    __slots__ = "_data", "_gradient", "_hooks", "_leaf", "_needs_gradient", "_tensor"

    def __init__(self, tensor: torch.Tensor, items: _Items) -> None:
        self._tensor, self._data, self._leaf, self._needs_gradient = (
            tensor,
            tensor.data,
            tensor.is_leaf,
            tensor.requires_grad,
        )
        self._gradient = tensor.grad if self._leaf else None  # reading the gradient of another tensor warns
        self._hooks = [getattr(tensor, name) for name in _HOOKS]
        for hooks in self._hooks:
            if hooks is not None:
                items.add(hooks)

    def restore(self) -> None:
        """Let the tensor show it again."""
        tensor = self._tensor
        if self._leaf and not tensor.is_leaf:
            tensor.detach_()  # the step wrote something into it that needs a gradient
        if not _same_view(tensor, self._data):
            tensor.data = self._data
        for name, hooks in zip(_HOOKS, self._hooks, strict=True):
            registered = getattr(tensor, name)
            if registered is not hooks:
                registered.clear()  # autograd goes on calling the old ones, whatever the attribute is set to
                setattr(tensor, name, hooks)
        if self._leaf:
            if tensor.requires_grad is not self._needs_gradient:
                tensor.requires_grad_(self._needs_gradient)
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    if is_lazy(one) or one.layout is not torch.strided or one.is_nested or other.layout is not torch.strided:
        return True  # nothing to compare; such tensors cannot be recorded anyway
    geometry = one.shape, one.stride(), one.storage_offset(), one.dtype
    return one.is_set_to(other) and geometry == (other.shape, other.stride(), other.storage_offset(), other.dtype)
