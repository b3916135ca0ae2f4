"""Numbers for tensors: which value of the program a tensor is, and what its memory held before the step.

Tensors are told apart by what they show (storage, offset, sizes, strides, dtype), not by their Python object: autograd hands back
saved tensors as new objects, and one object can be made to show something else (`t_`, `set_`, `.data = ...`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase, SourceLine
from bisect_nan.recording.memory import Memory
from bisect_nan.recording.program import NO_STORAGE, Placeholder, Ref, Value, tensors

_CONJUGATED, _NEGATED = 1, 2

_HELD, _SMALL = 64, 2**16
"""How many of the latest memories are held, for a step that raises because of one (`recording/raised.py`), and their bytes at most."""


class Values:
    """The values, memories and placeholders of a program under construction.

    Attributes:
        known: Reference to every tensor that has a number, by what it shows.
        storages: Number of the storage of every value; NO_STORAGE for those without.
        memories: The storages, by number.
        makers: Index of the call that made each value; -1 for placeholders.
        placeholders: The values from outside.
        tensors: The placeholders' tensors, by value number.
        leaves: Tensors without a name that gradients are left in (of a module outside of the model), by where they were used.
        functions: Names of the Python autograd Functions that returned values, by value number.
        without_memory: Tensors that own no storage; known by identity, they must not die.
    """

    def __init__(self) -> None:
        """Start without any."""
        self.known: dict[Hashable, Ref] = {}
        self.storages: list[int] = []
        self.makers: list[int] = []
        self.placeholders: list[Placeholder] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self._facts: list[Value | tuple[Any, torch.device]] = []  # turned into a `Value` once the step is over
        self._names: dict[Hashable, tuple[Phase, str]] = {}
        self._memories: dict[int, Memory] = {}  # by identity of the storage, dead ones too
        self.memories: list[Memory] = []
        self.leaves: dict[str, torch.Tensor] = {}
        self.without_memory: list[torch.Tensor] = []
        self.functions: dict[int, str] = {}
        self._latest: deque[torch.UntypedStorage] = deque(maxlen=_HELD)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # of the leaves, at first

    def name(self, tensor: torch.Tensor, phase: Phase, name: str) -> None:
        """Say what a tensor from outside is called; of several names for the same the first wins.

        Raises:
            RecordingError: It is nested, a wrapper of tensors, or a parameter that waits for its first input.
        """
        require_plain(tensor, name)
        key = self.shown(tensor)
        self._names.setdefault(key, (phase, name))
        if isinstance(key, tuple):
            self._names.setdefault(key[0], (phase, name))
        else:
            self.without_memory.append(tensor)

    def shown(self, tensor: torch.Tensor) -> Hashable:
        """Return what a tensor shows: equal for tensors that are the same view of the same storage.

        For tensors without a storage of their own (sparse ones) it is their identity.

        Raises:
            RecordingError: The tensor is nested: its sizes are not those of a tensor.
        """
        try:
            storage = tensor.untyped_storage()
            memory = self._memories.get(id(storage))
            if memory is None or memory.reference() is not storage:
                memory = self._remember(storage)
            return (
                memory.number,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
                tensor.is_conj() * _CONJUGATED + tensor.is_neg() * _NEGATED,
            )
        except NotImplementedError:
            return f"object {id(tensor)}"
        except RuntimeError as problem:
            raise _unsupported("a nested tensor") from problem

    def _remember(self, storage: torch.UntypedStorage) -> Memory:
        memory = self._memories[id(storage)] = Memory(len(self.memories), weakref.ref(storage))
        self.memories.append(memory)
        if storage.nbytes() <= _SMALL:
            self._latest.append(storage)
        return memory

    def result(self, tensor: torch.Tensor, maker: int) -> int:
        """Return the number of a tensor that the call with index `maker` returned.

        Raises:
            RecordingError: The tensor is nested or quantised.
        """
        key = self.shown(tensor)
        ref = self.known.get(key)
        return (self._add(tensor, key, maker) if ref is None else ref).value

    def _add(self, tensor: torch.Tensor, key: Hashable, maker: int) -> Ref:
        """Give a number to a tensor that has none yet."""
        number = len(self.storages)
        if isinstance(key, tuple):
            memory = self.memories[key[0]]
            if memory.base < 0:
                memory.base = number
            if tensor.is_quantized:
                raise _unsupported("a quantised tensor")
            self.storages.append(memory.number)
            self._facts.append((key, tensor.device))
        else:
            self.without_memory.append(tensor)
            self.storages.append(NO_STORAGE)
            self._facts.append(Value(NO_STORAGE, tensor.dtype, tuple(tensor.shape), (), 0, tensor.device))
        self.makers.append(maker)
        ref = self.known[key] = Ref(number)
        return ref

    def value(self, number: int) -> Value:
        """Return what the program says of a value."""
        facts = self._facts[number]
        if isinstance(facts, Value):
            return facts
        (_, offset, shape, stride, dtype, flags), device = facts
        conj, neg = flags & _CONJUGATED > 0, flags & _NEGATED > 0
        options = device, conj, neg, self.functions.get(number, "")
        return Value(self.storages[number], dtype, tuple(shape), stride, offset, *options)

    def all(self) -> tuple[Value, ...]:
        """Return what the program says of all values, by number."""
        return tuple([self.value(number) for number in range(len(self.storages))])

    def hidden(self, tensor: torch.Tensor) -> Ref | None:
        """Return a value with the same memory, when this new tensor is a view that no recorded call made; else None.

        A tensor with a name of its own is a placeholder even when another one shows the same memory.
        """
        key = self.shown(tensor)
        memory = self._memory_of(key)
        return None if memory is None or memory.base < 0 or key in self._names else Ref(memory.base)

    def placeholder(self, tensor: torch.Tensor, line: SourceLine | None) -> Ref:
        """Give a number to a new tensor that no call has made.

        Args:
            tensor: The tensor.
            line: Where the step first used it; names it when it has no name.
        """
        key = self.shown(tensor)
        ref, memory = self._add(tensor, key, -1), self._memory_of(key)
        named = self._names.get(key)
        if memory is not None:
            named = named or self._names.get(memory.number)
            memory.owner = tensor.untyped_storage()
        self.tensors[ref.value] = tensor.detach()
        if named is not None:
            self.placeholders.append(Placeholder(ref.value, *named))
        elif tensor.requires_grad and tensor.is_leaf:
            name = f"parameter {len(self.leaves)} from {line or 'outside of the model'}"
            self.leaves[name] = tensor
            self._gradients.append((tensor, tensor.grad))
            self.placeholders.append(Placeholder(ref.value, Phase.PARAMETER, name))
        else:
            if memory is not None and not tensor.untyped_storage().resizable():
                self.tensors[ref.value] = _copied(tensor)  # NumPy may write to it again before the step ends
            name = f"constant at {line}" if line else "constant"
            self.placeholders.append(Placeholder(ref.value, Phase.INPUT, name, constant=True))
        return ref

    def seen(self, tensor: torch.Tensor) -> bool:
        """Whether a recorded call has shown this tensor."""
        return self.shown(tensor) in self.known

    # --- memory -----------------------------------------------------------------------------------------------------

    def whole(self, number: int) -> torch.Tensor:
        """Return all of a memory that is alive as one row, in the type of the first value in it."""
        memory = self.memories[number]
        value, storage = self.value(memory.base), memory.reference()
        assert storage is not None
        return torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)

    def size(self, number: int) -> int:
        """Return how many elements a value brought; none when it shows memory that was there."""
        facts = self._facts[number]
        if isinstance(facts, Value) or self.memories[self.storages[number]].base != number:
            return 0
        elements: int = facts[0][2].numel()
        return elements

    def before_write(self, number: int) -> None:
        """Keep the bytes of memory from outside before they are written to for the first time.

        Raises:
            RecordingError: The memory is that of a sparse tensor.
        """
        storage = self.storages[number]
        if storage == NO_STORAGE or self.memories[storage].sparse:
            raise _unsupported("an in-place change of a sparse tensor")
        memory = self.memories[storage]
        if memory.owner is not None and memory.original is None:
            memory.original = _copy(memory.owner)

    def watch_sparse(self, given: list[Any], made: Any, *, view: bool) -> None:
        """Mark the memory that a call shows through a dense and through a sparse tensor.

        Args:
            given: The call's arguments.
            made: Its results.
            view: Whether they are views of what it was given.
        """
        dense_made, sparse_made = _by_layout(made)
        dense_given, sparse_given = _by_layout(given)
        shared = [*(dense_given if sparse_made else []), *(dense_made if view and sparse_given else [])]
        for tensor in shared:
            memory = self._memory_of(self.shown(tensor))
            if memory is not None:
                memory.sparse = True

    def renew(self, tensor: torch.Tensor) -> None:
        """Treat the memory of a tensor, empty until now, as another one: nothing that showed it showed any element."""
        self._memories.pop(id(tensor.untyped_storage()))

    def wrote(self, tensor: torch.Tensor) -> bool:
        """Whether a recorded call wrote to a placeholder's memory."""
        memory = self._memory_of(self.shown(tensor))
        return memory is not None and memory.original is not None

    def before(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a placeholder's memory held before the first recorded write, seen through `tensor`."""
        memory = self._memory_of(self.shown(tensor))
        if memory is None or memory.original is None:
            return tensor.detach()
        return _through(memory.original, tensor)

    def restore(self) -> None:
        """Put back what the step wrote into memory from outside (parameters, buffers, batch), and the gradients of `leaves`."""
        for memory in self.memories:
            if memory.owner is not None and memory.original is not None:
                if memory.owner.nbytes() != memory.original.nbytes():
                    memory.owner.resize_(memory.original.nbytes())
                memory.owner.copy_(memory.original)
        for leaf, gradient in self._gradients:
            leaf.grad = gradient

    def _memory_of(self, key: Hashable) -> Memory | None:
        return self.memories[key[0]] if isinstance(key, tuple) else None


def _through(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Return what a storage shows when it is seen as `like` sees its own."""
    seen = torch.empty(0, dtype=like.dtype, device=like.device)
    return seen.set_(storage, like.storage_offset(), like.shape, like.stride())


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same view of a copy of the tensor's whole memory."""
    return _through(_copy(tensor.untyped_storage()), tensor)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    with torch._C._DisableTorchDispatch():  # noqa: SLF001  (another recorder may be active around this one; torch 2.6 to 2.13)
        return storage.clone()  # type: ignore[no-untyped-call,no-any-return]


def _by_layout(item: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the dense tensors of an argument or a result, and the others."""
    found = [tensor for tensor in tensors(item) if tensor is not None]
    return [t for t in found if t.layout is torch.strided], [t for t in found if t.layout is not torch.strided]


def require_plain(tensor: torch.Tensor, name: str) -> None:
    """Raise RecordingError for a tensor without memory: one that wraps others, or a parameter that waits for its first input."""
    kind = type(tensor)
    if is_lazy(tensor):
        do = "run the model on one batch before the step is recorded"
        raise RecordingError(f"{name} is a {kind.__name__}", "parameters with a shape", do)
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise _unsupported(f"{name}, which is a {kind.__name__}")


def _unsupported(what: str) -> RecordingError:
    return RecordingError(f"the step uses {what}", "dense tensors", "run the step with dense tensors in its place")
