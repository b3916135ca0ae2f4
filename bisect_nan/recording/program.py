"""A recorded step: a straight line of ATen calls over numbered values.

Every tensor that the step made or met is a *value* with a number and a fixed geometry in a numbered *storage*; a call refers to
values by `Ref`. Views share a storage, in-place calls write to one: that is all an analysis has to know of aliasing.
`Program.graph()` is the same program as a plain `torch.fx.Graph`.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bisect_nan.finding import Phase, SourceLine
from bisect_nan.recording.targets import Targets

NO_STORAGE = -1
"""Storage number of values that own no memory (sparse tensors, implicit zeros)."""


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is value number `value`."""

    value: int


class Tracking(enum.IntEnum):
    """How autograd knew an argument when a call of the forward pass ran; one value is known differently before and after `detach`."""

    NO = 0
    GRAPH = 1
    LEAF = 2


@dataclass(frozen=True, slots=True)
class GeneratorRef:
    """An argument that is the step's random generator number `index` (0 is the default generator of the CPU)."""

    index: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program.

    Attributes:
        storage: Number of its storage.
        dtype: Element type.
        shape: Sizes.
        stride: Strides, in elements.
        offset: Offset into the storage, in elements.
        device: Where it lives.
        conj: Whether it is a lazily conjugated view.
        neg: Whether it is a lazily negated view.
        function: Name of the node of a Python autograd Function that returned it (`CheckpointFunctionBackward`); else "".
    """

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    device: torch.device
    conj: bool = False
    neg: bool = False
    function: str = ""


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A value that existed before the step, or that came from outside torch.

    Attributes:
        value: Its number.
        phase: INPUT, PARAMETER or BUFFER; OPTIMIZER for optimizer state.
        name: Path of the tensor (`layers.0.weight`, `batch['depth']`); for a constant, the line that first used it.
        constant: Whether the tensor was made by the step itself outside torch's dispatcher (a literal, a NumPy array).
    """

    value: int
    phase: Phase
    name: str
    constant: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One ATen call.

    Attributes:
        index: Its position in the program.
        target: The overload that was called.
        args: Positional arguments; tensors as `Ref`, generators as `GeneratorRef`, in nested lists and tuples where they were.
        kwargs: Keyword arguments, likewise.
        outputs: Value numbers of the returned tensors, flattened; None for an undefined tensor.
        writes: Storages that the call wrote to in place.
        written: Value numbers of the arguments that it wrote to.
        phase: In which part of the step it ran: FORWARD, BACKWARD or OPTIMIZER.
        autograd: Name of the autograd node that ran it (`SqrtBackward0`), None outside of any backward pass.
        forward: Index of the node whose derivative it computes; None for forward calls and for Python code run in backward.
        module: Path of the module whose `forward` made the call.
        source: Innermost Python line outside torch, or None for a derivative (see `Program.source`).
        cost: Seconds it took while recording.
        grad: Whether gradients were enabled: kernels may keep more for the backward pass then.
        tracked: How autograd knew each tensor argument, in the order of `inputs()`; empty where gradients were not enabled or
            nothing was tracked.
        random: Whether it draws random numbers.
        generator: State that the random generator must be set to before the call, where it is not the continuation of the
            previous random call; else None.
        memory: What uninitialised memory (`empty` and its kin) held when it was first read; None when it never was.
    """

    index: int
    target: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    writes: tuple[int, ...]
    written: tuple[int, ...]
    phase: Phase
    autograd: str | None
    forward: int | None
    module: str
    source: SourceLine | None
    cost: float
    grad: bool = False
    tracked: tuple[Tracking, ...] = ()
    random: bool = False
    generator: torch.Tensor | None = None
    memory: torch.Tensor | None = None

    def inputs(self) -> list[int]:
        """Return the value numbers of its tensor arguments, in order."""
        found: list[int] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(self.kwargs.values(), found)
        return found

    @property
    def literals(self) -> Iterator[float]:
        """The Python numbers among its arguments."""
        for item in _flat([*self.args, *self.kwargs.values()]):
            if isinstance(item, int | float) and not isinstance(item, bool):
                yield float(item)


@dataclass(frozen=True, slots=True)
class Application:
    """One use of a Python autograd Function: its backward code is part of the recorded backward pass.

    Attributes:
        name: Name of its autograd node (`MyFunctionBackward`).
        inputs: Value numbers of the tensors that it returns gradients for, by position; None for all else.
        outputs: Value numbers of what it returned, by position; None for what autograd does not track.
        given: Value numbers of the gradients that its backward code was given, by position of the outputs; None for none.
        returned: Value numbers of the gradients that it returned, by position of the inputs; None for none.
        first: Index of the first call of its backward code.
        last: Index of the call behind its last one.
    """

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]
    given: tuple[int | None, ...]
    returned: tuple[int | None, ...]
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Program:
    """A step as executed: placeholders, then calls in execution order, forward, backward and optimizer.

    Attributes:
        values: All values, by number.
        placeholders: Values that the step did not make itself.
        nodes: The calls; `nodes[i].index == i`.
        targets: What the step is judged by.
        applications: The uses of Python autograd Functions whose backward code was recorded.
    """

    values: Sequence[Value]
    placeholders: Sequence[Placeholder]
    nodes: Sequence[Node]
    targets: Targets
    applications: Sequence[Application] = ()

    def memory(self, number: int) -> int:
        """Return the number of the memory that a value lives in; one without a storage has a memory of its own, numbered below -1."""
        storage = self.values[number].storage
        return storage if storage != NO_STORAGE else NO_STORAGE - 1 - number

    def source(self, node: Node) -> SourceLine | None:
        """The line to look at: the node's own, or that of the forward node whose derivative it computes."""
        return self.origin(node).source

    def origin(self, node: Node) -> Node:
        """Return the node of the forward pass behind a derivative (through inner and double backward), or the node itself."""
        while node.source is None and node.forward is not None:
            node = self.nodes[node.forward]
        return node

    def graph(self) -> torch.fx.Graph:
        """Return the program as a `torch.fx.Graph`: one placeholder per outside value, one `call_function` per call.

        `meta` of a node holds `index`, `source`, `module` and `phase`. `torch.fx.Interpreter` runs it (without restoring
        generators or uninitialised memory, which only `bisect_nan.replaying.replay` does) and returns the loss, or the updated
        parameters, or what was looked at before the step raised.
        """
        graph = torch.fx.Graph()
        made: dict[int, torch.fx.Node] = {}
        for placeholder in self.placeholders:
            made[placeholder.value] = graph.placeholder(f"value_{placeholder.value}")
            made[placeholder.value].meta.update(name=placeholder.name, phase=placeholder.phase)
        for node in self.nodes:
            args, kwargs = substitute(node.args, made.__getitem__), substitute(dict(node.kwargs), made.__getitem__)
            call = graph.call_function(node.target, args, kwargs)
            call.meta.update(index=node.index, source=node.source, module=node.module, phase=node.phase)
            returns = node.target._schema.returns
            single = len(node.outputs) == 1 and len(returns) == 1 and str(returns[0].type) == "Tensor"
            for place, value in enumerate(node.outputs):
                if value is not None and value not in made:
                    made[value] = call if single else graph.call_function(operator.getitem, (call, place))
        targets = self.targets
        results = (
            [targets.loss] if targets.loss is not None else [*targets.parameters.values(), *targets.values.values()]
        )
        graph.output(tuple(made[value] for value in results))
        return graph


def substitute(item: Any, tensor: Callable[[int], Any], generator: Callable[[int], Any] = GeneratorRef) -> Any:
    """Replace every `Ref` in nested lists, tuples and dicts by `tensor(number)`, every `GeneratorRef` by `generator(index)`."""
    if isinstance(item, Ref):
        return tensor(item.value)
    if isinstance(item, GeneratorRef):
        return generator(item.index)
    if isinstance(item, list | tuple):
        return type(item)([substitute(part, tensor, generator) for part in item])
    if isinstance(item, Mapping):
        return {key: substitute(part, tensor, generator) for key, part in item.items()}
    return item


Arguments = dict[str, Any]
"""The arguments of a call by schema name, defaults included."""


def named(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
    """Return the arguments of a call by schema name, with the defaults of those that it was not given."""
    found: Arguments = {}
    for place, argument in enumerate(target._schema.arguments):
        if place < len(args):
            found[argument.name] = args[place]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def tensors(item: Any) -> list[torch.Tensor | None]:
    """Return the tensors of an argument or a result, flattened in order; None where one is undefined."""
    if isinstance(item, torch.Tensor) or item is None:
        return [item]
    if isinstance(item, list | tuple):
        return [tensor for part in item for tensor in tensors(part)]
    return []


def _flat(items: Any) -> Iterator[Any]:
    for item in items:
        if isinstance(item, list | tuple):
            yield from _flat(item)
        else:
            yield item


def _collect(items: Iterable[Any], found: list[int]) -> None:
    """Add the value numbers of references in nested lists and tuples; every analysis of a program asks for them."""
    for item in items:
        if type(item) is Ref:
            found.append(item.value)
        elif isinstance(item, list | tuple):
            _collect(item, found)
