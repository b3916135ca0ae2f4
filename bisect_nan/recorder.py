"""A step -> Program: a dispatch mode that writes down every ATen call while the step runs once.

The recording specialises on the run that it sees: control flow, `.item()`, custom autograd Functions, checkpointing, vmap and
scripted modules all come out as a straight line of calls.

Tensors are told apart by the memory that they show (storage, offset, sizes, strides, dtype), not by their Python object: autograd
hands back saved tensors as new objects. A weak reference to every storage keeps its address from being used again.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.lines import Lines
from bisect_nan.program import NO_STORAGE, GeneratorRef, Node, Placeholder, Program, Ref, Targets, Value

_UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_OVERWRITES = {
    *("copy_", "fill_", "zero_", "bernoulli_", "normal_", "uniform_", "random_", "exponential_", "log_normal_"),
    *("geometric_", "cauchy_"),
}
"""Calls that replace all of their first argument without reading it."""

_UNDECLARED = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
"""Arguments that a call writes to in training although its schema does not say so: the running statistics (torch 2.6 to 2.13)."""
_TRAINING = 5
"""Position of their argument `training`."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Traits:
    """What a call of an overload does besides returning a value; read once from its schema and tags."""

    written: tuple[int | str, ...]
    only_in_training: bool
    random: bool
    uninitialized: bool
    overwrites: bool
    view: bool

    @classmethod
    def of(cls, target: torch._ops.OpOverload) -> _Traits:
        schema = target._schema
        written = [
            argument.name if argument.kwarg_only else place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        name = schema.name.split("::")[1]
        return cls(
            written=(*written, *_UNDECLARED.get(name, ())),
            only_in_training=name in _UNDECLARED,
            random=torch.Tag.nondeterministic_seeded in target.tags,
            uninitialized=name in _UNINITIALIZED,
            overwrites=name in _OVERWRITES,
            view=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        )


@dataclasses.dataclass(slots=True)
class _Memory:
    """A storage that the recording has met."""

    number: int
    reference: StorageWeakRef
    base: int = -1  # a value that lives in it, from which an unseen view can be made
    outside: bool = False  # belongs to a placeholder: must be as before when the recording ends
    original: torch.UntypedStorage | None = None  # its bytes before the first write
    unwritten: int | None = None  # index of the `empty` call that made it, until it is written or read


class Recorder(TorchDispatchMode):
    """Records the calls made while it is active; `phase` says in which part of the step they run.

    Attributes:
        phase: FORWARD, BACKWARD or OPTIMIZER; set by whoever runs the step.
        tensors: The placeholders' tensors, by value number.
        nodes: The calls so far.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Start with an empty program."""
        super().__init__()
        self.phase = Phase.FORWARD
        self.values: list[Value] = []
        self.placeholders: list[Placeholder] = []
        self.nodes: list[Node] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.modules: list[str] = []
        self._names: dict[int, tuple[Phase, str]] = {}  # storage address -> what the user calls it
        self._numbers: dict[Any, int] = {}  # what a tensor shows -> value number
        self._memories: dict[int, _Memory] = {}  # storage address -> memory
        self._storages: list[_Memory] = []
        self._alive: list[torch.Tensor] = []  # tensors without memory are known by identity, so they must not die
        self._traits: dict[Any, _Traits] = {}
        self._by_sequence: dict[int, int] = {}  # sequence number of an autograd node -> node that was recorded with it
        self._generators: list[torch.Generator] = [torch.default_generator]
        self._continuation: dict[int, torch.Tensor] = {}  # generator -> its state after the latest random call
        self._lines = Lines()

    def name(self, tensor: torch.Tensor, phase: Phase, name: str) -> None:
        """Say what a tensor from outside is called; the first name of a shared memory wins."""
        address = _address(tensor)
        if address is not None:
            self._names.setdefault(address, (phase, name))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # noqa: ARG002
        """Run one ATen call and write it down."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            return self._run_higher_order(func, args, kwargs)
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _Traits.of(func)
        node_args = tuple([self._argument(item) for item in args])
        node_kwargs = {key: self._argument(item) for key, item in kwargs.items()} if kwargs else kwargs
        written = self._before_write(traits, args, kwargs) if traits.written else ()
        self._settle_unwritten(traits, args, kwargs, written)
        state = self._generator_state(args, kwargs) if traits.random else None
        autograd = torch._C._current_autograd_node()
        sequence = torch.autograd._get_sequence_nr() - 1

        start = time.perf_counter()
        result = func(*args, **kwargs)
        cost = time.perf_counter() - start

        if traits.random:
            self._remember_generator(args, kwargs)
        index, known = len(self.nodes), len(self.values)
        outputs = tuple([None if item is None else self._number(item) for item in _tensors(result)])
        if not traits.written and len(self.values) == known:
            return result  # made nothing new: a detach, a metadata query, a number read by the host
        source = self._lines.caller()
        forward = None
        if autograd is not None and source is None:
            forward = self._by_sequence.get(autograd._sequence_nr())
        self._by_sequence.setdefault(sequence, index)
        module = self.modules[-1] if self.modules else ""
        if forward is not None and not module:
            module = self.nodes[forward].module
        self.nodes.append(
            Node(
                index=index,
                target=func,
                args=node_args,
                kwargs=node_kwargs,
                outputs=outputs,
                writes=tuple(dict.fromkeys(self.values[value].storage for value in written)),
                written=written,
                phase=self.phase,
                autograd=None if autograd is None else autograd.name(),
                forward=forward,
                module=module,
                source=source,
                cost=cost,
                grad=torch.is_grad_enabled(),
                random=traits.random,
                generator=state,
            )
        )
        if traits.uninitialized:
            self._storages[self.values[outputs[0]].storage].unwritten = index  # type: ignore[index]
        return result

    def finish(self, targets: Targets) -> Program:
        """Return the program of everything recorded so far."""
        return Program(tuple(self.values), tuple(self.placeholders), tuple(self.nodes), targets)

    def number(self, tensor: torch.Tensor) -> int:
        """Return a tensor's value number; a tensor that no call has shown becomes a placeholder."""
        return self._number(tensor, outside=True)

    def seen(self, tensor: torch.Tensor) -> int | None:
        """Return a tensor's value number, or None when no recorded call has shown this tensor."""
        return self._numbers.get(self._key(tensor))

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether a recorded call wrote to a placeholder's memory."""
        memory = self._memories.get(_address(tensor) or 0)
        return memory is not None and memory.original is not None

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a placeholder's memory held before the first recorded write, seen through `tensor`."""
        memory = self._memories.get(_address(tensor) or 0)
        if memory is None or memory.original is None:
            return tensor.detach()
        shown = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return shown.set_(memory.original, tensor.storage_offset(), tensor.shape, tensor.stride())

    def restore(self) -> None:
        """Put back what the step wrote into memory from outside: parameters, buffers, batch, optimizer state."""
        outside = {self.values[number].storage: tensor for number, tensor in self.tensors.items()}
        for memory in self._storages:
            if memory.original is not None and memory.number in outside:
                outside[memory.number].untyped_storage().copy_(memory.original)

    # --- arguments and values -------------------------------------------------------------------------------------------

    def _argument(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return Ref(self._number(item, outside=True))
        if isinstance(item, list | tuple):
            return type(item)([self._argument(part) for part in item])
        if isinstance(item, torch.Generator):
            return GeneratorRef(self._generator_index(item))
        return item

    def _key(self, tensor: torch.Tensor) -> Any:
        address = _address(tensor)
        if address is None:
            return id(tensor)
        flags = (tensor.is_conj(), tensor.is_neg()) if tensor.is_complex() or tensor.is_neg() else False
        return address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, flags

    def _number(self, tensor: torch.Tensor, *, outside: bool = False) -> int:
        """Number a tensor. `outside`: it is an argument, so one that was never returned came from outside or is a hidden view."""
        key = self._key(tensor)
        number = self._numbers.get(key)
        if number is not None:
            return number
        memory = self._memory(tensor)
        if outside and memory is not None and memory.base >= 0:
            return self._hidden_view(tensor, memory, key)
        number = self._numbers[key] = self._new_value(tensor, memory)
        if outside:
            self._new_placeholder(number, tensor, memory)
        return number

    def _memory(self, tensor: torch.Tensor) -> _Memory | None:
        address = _address(tensor)
        if address is None:
            self._alive.append(tensor)
            return None
        memory = self._memories.get(address)
        if memory is None:
            memory = _Memory(len(self._storages), StorageWeakRef(tensor.untyped_storage()))
            self._memories[address] = memory
            self._storages.append(memory)
        return memory

    def _new_value(self, tensor: torch.Tensor, memory: _Memory | None) -> int:
        number = len(self.values)
        if memory is None:
            stride: tuple[int, ...] = ()
            self.values.append(Value(NO_STORAGE, tensor.dtype, tuple(tensor.shape), stride, 0, tensor.device))
            return number
        self.values.append(
            Value(
                storage=memory.number,
                dtype=tensor.dtype,
                shape=tuple(tensor.shape),
                stride=tensor.stride(),
                offset=tensor.storage_offset(),
                device=tensor.device,
                conj=tensor.is_conj(),
                neg=tensor.is_neg(),
            )
        )
        if memory.base < 0:
            memory.base = number
        return number

    def _new_placeholder(self, number: int, tensor: torch.Tensor, memory: _Memory | None) -> None:
        named = self._names.get(_address(tensor) or 0)
        if memory is not None:
            memory.outside = True
        self.tensors[number] = tensor.detach()
        if named is not None:
            self.placeholders.append(Placeholder(number, *named))
            return
        source = self._lines.caller()
        self.placeholders.append(Placeholder(number, Phase.INPUT, f"constant at {source}" if source else "constant", constant=True))

    def _hidden_view(self, tensor: torch.Tensor, memory: _Memory, key: Any) -> int:
        """Write down a view that was made where the dispatcher does not see it (a saved tensor's alias, `.data`)."""
        base = self.values[memory.base]
        if base.dtype != tensor.dtype or tensor.is_conj() or tensor.is_neg() or base.conj or base.neg:
            raise RecordingError(
                f"a {tensor.dtype} view of {base.dtype} memory that was made outside of the dispatcher",
                "views made by torch operations",
                "make the view with tensor.view(dtype), torch.view_as_real or torch.view_as_complex",
            )
        number = self._numbers[key] = self._new_value(tensor, memory)
        value = self.values[number]
        self.nodes.append(
            Node(
                index=len(self.nodes),
                target=torch.ops.aten.as_strided.default,
                args=(Ref(memory.base), list(value.shape), list(value.stride), value.offset),
                kwargs={},
                outputs=(number,),
                writes=(),
                written=(),
                phase=self.phase,
                autograd=None,
                forward=None,
                module=self.modules[-1] if self.modules else "",
                source=self._lines.caller(),
                cost=0.0,
            )
        )
        return number

    # --- memory that is written, and memory that never was ---------------------------------------------------------------

    def _before_write(self, traits: _Traits, args: Any, kwargs: Any) -> tuple[int, ...]:
        """Return the values that a call is about to write to; keep the bytes of memory from outside before the first write."""
        written: list[int] = []
        if traits.only_in_training and not args[_TRAINING]:
            return ()
        for place in traits.written:
            item = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in _tensors(item):
                if tensor is None:
                    continue
                written.append(self._number(tensor, outside=True))
                memory = self._memories.get(_address(tensor) or 0)
                if memory is not None and memory.outside and memory.original is None:
                    memory.original = tensor.untyped_storage().clone()
        return tuple(written)

    def _settle_unwritten(self, traits: _Traits, args: Any, kwargs: Any, written: tuple[int, ...]) -> None:
        """Keep what uninitialised memory holds when it is first read; forget it when it is overwritten as a whole before."""
        for tensor in [*_tensors(args), *_tensors(list(kwargs.values()))]:
            memory = self._memories.get(_address(tensor) or 0) if tensor is not None else None
            if memory is None or memory.unwritten is None or traits.view:
                continue
            assert tensor is not None
            index, memory.unwritten = memory.unwritten, None
            node = self.nodes[index]
            whole = len(written) == 1 and written[0] == node.outputs[0]
            if not (whole and traits.overwrites and tensor is args[0]):
                value = self.values[node.outputs[0]]  # type: ignore[index]
                base = torch.empty(0, dtype=value.dtype, device=value.device).set_(
                    tensor.untyped_storage(), value.offset, value.shape, value.stride
                )
                self.nodes[index] = dataclasses.replace(node, memory=base.clone(memory_format=torch.preserve_format))

    # --- random generators ----------------------------------------------------------------------------------------------

    def _generator_index(self, generator: torch.Generator) -> int:
        for index, known in enumerate(self._generators):
            if known is generator:
                return index
        self._generators.append(generator)
        return len(self._generators) - 1

    def _generator(self, args: Any, kwargs: Any) -> torch.Generator:
        for item in [*args, *kwargs.values()]:
            if isinstance(item, torch.Generator):
                return item
        devices = [t.device for t in _tensors([*args, *kwargs.values()]) if t is not None]
        devices += [torch.device(kwargs["device"])] if kwargs.get("device") is not None else []
        for device in devices:
            if device.type == "cuda":
                return torch.cuda.default_generators[device.index or 0]
        return torch.default_generator

    def _generator_state(self, args: Any, kwargs: Any) -> torch.Tensor | None:
        generator = self._generator(args, kwargs)
        state, expected = generator.get_state(), self._continuation.get(self._generator_index(generator))
        return None if expected is not None and torch.equal(state, expected) else state

    def _remember_generator(self, args: Any, kwargs: Any) -> None:
        generator = self._generator(args, kwargs)
        self._continuation[self._generator_index(generator)] = generator.get_state()

    # --- higher-order operators -----------------------------------------------------------------------------------------

    def _run_higher_order(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a higher-order operator's own eager implementation with the recording on, so that its calls are seen."""
        if func is torch.ops.higher_order.cond:
            predicate, if_true, if_false, operands = args
            with self:
                return (if_true if bool(predicate) else if_false)(*operands)
        kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if kernel is None:
            raise RecordingError(
                f"the higher-order operator {func} without an eager implementation", "a step that runs eagerly", "run it in eager mode"
            )
        with self:
            return kernel(*args, **kwargs)


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's storage object, or None for tensors without memory of their own."""
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return None
    address: int = tensor.untyped_storage()._cdata
    return address


def _tensors(item: Any) -> Iterator[torch.Tensor | None]:
    """Yield the tensors of an argument or result, in order; None where a returned tensor is undefined."""
    if isinstance(item, torch.Tensor) or item is None:
        yield item
    elif isinstance(item, list | tuple):
        for part in item:
            yield from _tensors(part)
