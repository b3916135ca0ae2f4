"""What modules and optimizers hold, their attributes and the containers among them, without reading it again before every step.

A step leaves nearly all of it alone. What was read stays true as long as every attribute and item is still the same object, which
is told by identity at the speed of C; only what belongs to a module where something differs is read again.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence, MutableSet, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

_GENERATORS = ("Generator", "Random")
"""How the names of classes of random generators begin; `generators.state_of` looks closer."""

_STRUCTURE = "_parameters", "_buffers", "_modules"  # torch 2.6 to 2.13
"""The attributes of a module that tell which tensors and modules belong to it."""

_TOGETHER = 8
"""Modules that are compared, and read again, together: comparing more at once is faster, reading fewer again is."""

_END = object()
"""What two rows of objects end with, so that none passes for the beginning of another."""

_chain = itertools.chain.from_iterable


@dataclass(slots=True, eq=False)
class Holding:
    """What some objects hold, as it was when it was read. It is not changed any more then, so many moments share it.

    Attributes:
        owners: The objects.
        namespaces: Their attributes, and how they were.
        full: The containers that tell what belongs to the owners, unless they were empty, and how they were.
        empty: All containers that were empty.
        loose: All others; their items are read anew for every moment.
        generators: Attributes that may be random generators.
        plain: Tensors that are attributes, but neither parameters nor buffers.
        tensors: Parameters and buffers.
        opaque: Whether owners keep these where nothing can be compared, as scripted modules do.
    """

    owners: list[Any] = field(default_factory=list)
    namespaces: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    full: list[tuple[Any, Any]] = field(default_factory=list)
    empty: list[Any] = field(default_factory=list)
    loose: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    plain: list[torch.Tensor] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    opaque: bool = False
    # For comparing: what is there in rows, and how it was. `_now` and `_then` are attributes, and keys and items of `full`.
    _spaces: list[dict[str, Any]] = field(default_factory=list)
    _names: list[list[str]] = field(default_factory=list)
    _full: list[Any] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _now: list[Iterable[Any]] = field(default_factory=list)
    _then: list[Any] = field(default_factory=list)

    def read(self, owner: Any, structure: Iterable[str]) -> None:
        """Add an object's attributes and, one level deep, the containers among them.

        Args:
            owner: The object.
            structure: The attributes that tell what belongs to it, which are read by `read_items`.
        """
        namespace = vars(owner)
        before = dict(namespace)
        self.owners.append(owner)
        self.namespaces.append((namespace, before))
        self._spaces.append(namespace)
        self._names.append(list(before))
        self._now.append(namespace.values())
        self._then += before.values()
        for name, value in before.items():
            kind: Any = type(value)
            if holds_items(kind):
                if name not in structure:
                    (self.loose if value else self.empty).append(value)
            elif kind.__name__.startswith(_GENERATORS):
                self.generators.append(value)

    def read_items(self, container: Any) -> None:
        """Add a container that tells what belongs to the owners."""
        if not container:
            self.empty.append(container)
            return
        items = copied(container)
        self.full.append((container, items))
        self._full.append(container)
        self._sizes.append(len(items))
        self._now.append(container)
        self._then += items
        if isinstance(items, dict):
            self._now.append(container.values())
            self._then += items.values()

    def read_nested(self, tree: Any) -> None:
        """Add all containers in groups or state of an optimizer."""
        for container in nested(tree):
            self.read_items(container)

    def is_true(self) -> bool:
        """Whether everything is still as it was read; items of `loose` and states of generators are no part of that."""
        return (
            not self.opaque
            and not any(self.empty)
            and list(map(list, self._spaces)) == self._names
            and list(map(len, self._full)) == self._sizes
            and all(map(is_, _chain([*self._now, [_END]]), [*self._then, _END]))
            and all(map(is_, map(vars, self.owners), self._spaces))
        )

    def restore(self) -> None:
        """Put everything back but the items of `loose`."""
        for namespace, before in self.namespaces:
            for name in [name for name in namespace if name not in before]:
                del namespace[name]
            namespace.update(before)
        for container in self.empty:
            refill(container, ())
        for container, items in self.full:
            refill(container, items)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a model and its optimizer hold at one moment.

    Attributes:
        parts: All of it.
        tensors: Parameters and buffers by their `id`.
        buffers: The dictionaries of buffers that are not empty.
        loose: Containers of which the items are to be remembered, too.
        generators: Attributes that may be random generators.
        plain: Tensors that are attributes, but neither parameters nor buffers.
    """

    parts: Sequence[Holding]
    tensors: Mapping[int, torch.Tensor]
    buffers: Sequence[Mapping[str, torch.Tensor | None]]
    loose: Sequence[Any]
    generators: Sequence[Any]
    plain: Sequence[torch.Tensor]

    def restore(self) -> None:
        """Put everything back but the items of `loose` and the generators."""
        for part in self.parts:
            part.restore()


class Holdings:
    """What a model and its optimizer hold, kept over the training."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read nothing yet.

        Args:
            model: A module; anything else holds nothing.
            optimizer: An optimizer, or None.
        """
        self._model, self._optimizer = model, optimizer
        self._parts: dict[tuple[int, ...], tuple[Sequence[Any], Holding]] = {}
        self._held: Held | None = None

    def present(self) -> Held:
        """Return what they hold now."""
        true = {key: known for key, known in self._parts.items() if known[1].is_true()}
        if self._held is None or len(true) < len(self._parts):
            sources = {tuple(map(id, part)): part for part in self._sources()}
            self._parts = {key: true.get(key) or (part, _read(part)) for key, part in sources.items()}
            parts = [part for _, part in self._parts.values()]
            self._held = Held(
                parts,
                tensors={id(tensor): tensor for part in parts for tensor in part.tensors},
                buffers=[held for part in parts for held in map(_buffers_of, part.owners) if held],
                loose=[container for part in parts for container in part.loose],
                generators=[item for part in parts for item in part.generators],
                plain=[tensor for part in parts for tensor in part.plain],
            )
        return self._held

    def buffers(self) -> list[torch.Tensor]:
        """Return the buffers as they are, of those modules that had some at the latest `present`."""
        kept = () if self._held is None else self._held.buffers
        return [buffer for buffers in kept for buffer in buffers.values() if buffer is not None]

    def plain(self) -> Sequence[torch.Tensor]:
        """Return the tensors that were attributes at the latest `present`, but neither parameters nor buffers."""
        return () if self._held is None else self._held.plain

    def _sources(self) -> Iterator[list[Any]]:
        """Yield what is read together: some modules, the optimizer, its state (which changes less often than its groups)."""
        modules = list(self._model.modules()) if isinstance(self._model, nn.Module) else []
        yield from (modules[start : start + _TOGETHER] for start in range(0, len(modules), _TOGETHER))
        if self._optimizer is not None:
            yield [self._optimizer]
            yield [self._optimizer.state]


def _read(sources: Sequence[Any]) -> Holding:
    found = Holding()
    for source in sources:
        if isinstance(source, nn.Module):
            _read_module(found, source)
        elif isinstance(source, torch.optim.Optimizer):
            _read_optimizer(found, source)
        else:
            found.read_nested(source)
    return found


def _read_module(found: Holding, module: nn.Module) -> None:
    found.read(module, _STRUCTURE)
    for name in _STRUCTURE:
        container = vars(module)[name]
        if isinstance(container, dict):
            found.read_items(container)
        else:
            found.opaque = True
    found.tensors += own_tensors(module, "_parameters") + own_tensors(module, "_buffers")
    found.plain += plain_tensors(module)


def _read_optimizer(found: Holding, optimizer: torch.optim.Optimizer) -> None:
    found.read(optimizer, ("param_groups", "state"))
    found.read_nested(optimizer.param_groups)
    found.tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not {"param_groups", "state"} <= vars(optimizer).keys():
        found.opaque = True  # it hands out another's, as wrappers of optimizers do


def _buffers_of(owner: Any) -> Any:
    return vars(owner)["_buffers"] if isinstance(owner, nn.Module) else None


def own_tensors(module: nn.Module, kind: str) -> list[torch.Tensor]:
    """Return the parameters (`_parameters`) or buffers (`_buffers`) of one module without its children."""
    return [tensor for tensor in vars(module)[kind].values() if tensor is not None]


def plain_tensors(module: Any) -> list[torch.Tensor]:
    """Return the tensors that are attributes of one module without its children, but neither parameters nor buffers."""
    return [value for value in vars(module).values() if isinstance(value, torch.Tensor)]


def nested(tree: Any) -> list[Any]:
    """Return every container of a batch, or of an optimizer's state, that can be refilled: a step may pop its labels."""
    kind: Any = type(tree)
    found = [tree] if holds_items(kind) else []
    if _is_mapping(kind):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return found
    for item in tree:
        found += nested(item)
    return found


def copied(container: Any) -> Any:
    """Return the items of a dictionary, list or set."""
    kind: Any = type(container)
    return dict(container) if _is_mapping(kind) else list(container)


def refill(container: Any, items: Any) -> None:
    """Give a container its items back, in place."""
    kind: Any = type(container)
    if _is_mapping(kind):
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
def holds_items(kind: type) -> bool:
    """Whether objects of this type are containers that can be refilled."""
    return issubclass(kind, MutableMapping | MutableSequence | MutableSet)


@functools.cache
def _is_mapping(kind: type) -> bool:
    return issubclass(kind, MutableMapping)
