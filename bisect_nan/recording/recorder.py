"""A step -> Program: a dispatch mode that writes down every ATen call while the step runs once.

The recording specialises on the run that it sees: control flow, `.item()`, custom autograd Functions, checkpointing, vmap and
scripted modules all come out as a straight line of calls.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.6 to 2.13

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.recording.applications import RECOMPUTING, Applications, is_python
from bisect_nan.recording.calls import Call, Effects, tracking
from bisect_nan.recording.frontiers import Frontiers
from bisect_nan.recording.generators import Draws
from bisect_nan.recording.lines import Lines
from bisect_nan.recording.program import Program, Ref, Targets, Tracking, tensors
from bisect_nan.recording.traits import Traits
from bisect_nan.recording.uninitialized import Uninitialized
from bisect_nan.recording.values import Values, require_plain

_Tensor = torch.Tensor
_PLAIN = frozenset(
    {int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types of arguments that hold neither tensors nor generators."""

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}  # noqa: SLF001  (public; what Python does next may depend on them)
_current_autograd_node = torch._C._current_autograd_node  # torch 2.6 to 2.13
# torch 2.6 to 2.13: the number of the autograd node that will be made next
_next_sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_clock, _thread = time.perf_counter, threading.get_ident
_NOTHING_ELSE = Effects()
_TRAITS: dict[Any, Traits] = {}  # of every overload that any recording has met


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__ has no annotations
    """Records the calls made while it is active.

    Attributes:
        phase: FORWARD, BACKWARD or OPTIMIZER: in which part of the step the calls run; set by whoever runs it.
        modules: Paths of the running modules, the innermost last; set by whoever runs it.
        values: The tensors met so far.
        frontiers: What was alive on the way.
        calls: The calls so far.
        unfollowed: Whether gradients pass through a Python autograd Function whose result no call made.
    """

    supports_higher_order_operators = True

    def __init__(self, *, frontiers: bool = False) -> None:
        """Start with an empty program.

        Args:
            frontiers: Whether to keep what is alive on the way.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = Phase.FORWARD
        self.modules: list[str] = []
        self.values = Values()
        self.calls: list[Call] = []
        self._uninitialized = Uninitialized(self.values)
        # thread and number of an autograd node -> call that it differentiates
        self._forwards: dict[tuple[int, int], int] = {}
        self._threads: dict[int, int] = {}  # thread -> the newest of its autograd nodes that is known
        self._known, self._shown = self.values.known, self.values.shown
        self._without_graph: set[int] = set()  # values made while gradients were not enabled
        self.unfollowed = False
        self.applications = Applications(self.values, self.calls)
        self._draws = Draws()
        self.frontiers = Frontiers(self.values, active=frontiers)
        self._lines = Lines()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper against compilation, which costs 3 microseconds a call (torch 2.10 to 2.13)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one ATen call and write it down."""
        kwargs = kwargs or {}
        if types and any(kind.__torch_dispatch__ is not _Tensor.__torch_dispatch__ for kind in types):
            return self._run_on_subclass(func, types, args, kwargs)
        traits = _TRAITS.get(func)
        if traits is None:
            if not isinstance(func, torch._ops.OpOverload):
                return self._run_higher_order(func, args, kwargs)
            traits = _TRAITS[func] = Traits.of(func)
        return self._move(func, args, kwargs) if traits.moves else self._run(func, traits, args, kwargs)

    def _run(self, func: torch._ops.OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node_args = tuple([item if type(item) in _PLAIN else self._argument(item) for item in args])
        node_kwargs = {key: self._argument(item) for key, item in kwargs.items()} if kwargs else kwargs
        written = traits.writes(node_args, node_kwargs) if traits.written else ()
        for number in written:
            self.values.before_write(number)
            self.frontiers.before_write(self.values.storages[number])
        if self._uninitialized and not traits.view:
            self._uninitialized.used(self._paired([*args, *kwargs.values()]), written if traits.overwrites else ())
        state = self._draws.before(args, kwargs) if traits.random else None
        items = [*args, *kwargs.values()]
        tracked = tracking(items) if torch.is_grad_enabled() else ()
        self._watch_functions(items, tracked)
        (autograd, derived), made_for = self._running_derivative(), (_thread(), _next_sequence() - 1)

        start = _clock()
        result = func(*args, **kwargs)
        cost = _clock() - start

        if traits.random:
            self._draws.after(args, kwargs)
        values, index = self.values, len(self.calls)
        known = len(values.storages)
        outputs = (values.result(result, index),) if isinstance(result, _Tensor) else self._results(result, index)
        if written or len(values.storages) > known or func in READS:
            self._remember_forward(made_for, index)
            effects = Effects(written, autograd, derived, cost, tracked, traits.random, state)
            self._write_down(func, node_args, node_kwargs, outputs, effects)
            if traits.uninitialized:
                self._uninitialized.made(known, index)
                self.frontiers.unwritten(known)
            if values.without_memory:
                values.watch_sparse(items, result, view=traits.view)
            if self.frontiers.made(known):
                self.frontiers.keep(len(self.calls), self._draws.states())
        elif outputs and outputs[0] is not None:  # made nothing: its derivative belongs to what made its result
            maker = values.makers[outputs[0]]
            self._remember_forward(made_for, maker if maker >= 0 else derived)
        return result

    def _remember_forward(self, made_for: tuple[int, int], index: int) -> None:
        """Remember which call the newest autograd nodes of a thread differentiate: the first that was seen after they were made.

        Function transforms (`torch.func.grad`) make a node at each of their levels for the same call.
        """
        thread, newest = made_for
        latest = self._threads.get(thread, newest - 1)
        for number in range(latest + 1, newest + 1):
            self._forwards[thread, number] = index
        self._threads[thread] = max(latest, newest)

    def _running_derivative(self) -> tuple[str | None, int]:
        """Return the name of the autograd node that runs now, and the call that it is the derivative of (else -1).

        Every thread numbers the nodes that it makes, and a node does not tell which thread made it: where the engine recomputes
        activations in a thread of its own (reentrant checkpointing on a GPU), the name has to decide.
        """
        node: Any = _current_autograd_node()
        if node is None:
            return None, -1
        name, number = node.name(), node._sequence_nr()
        found = [self._forwards.get((thread, number), -1) for thread in self._threads]
        if len(found) > 1:
            found.sort(key=lambda index: index < 0 or not self.calls[index].has_derivative(name))
        return name, found[0] if found else -1

    def _write_down(
        self,
        target: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[int | None, ...],
        effects: Effects = _NOTHING_ELSE,
    ) -> None:
        module = (self.modules or [""])[-1] or (self.calls[effects.derived].module if effects.derived >= 0 else "")
        source, grad = self._lines.caller(), torch.is_grad_enabled()
        if not grad and self.phase is Phase.FORWARD:
            self._without_graph.update([number for number in outputs if number is not None])
        self.calls.append(Call(target, args, kwargs, outputs, effects, self.phase, module, source, grad))

    def _watch_functions(self, items: list[Any], tracked: tuple[Tracking, ...]) -> None:
        """Follow tensors into Python autograd Functions, and out of them; few are, and only those are looked up."""
        inside = self.phase is Phase.FORWARD and not torch.is_grad_enabled()
        made = [t for t in tensors(items) if t is not None and t.grad_fn is not None] if tracked or inside else []
        self.applications.seen(self._paired(made) if inside else ())
        for number, tensor in self._paired([t for t in made if is_python(t.grad_fn)]) if tracked else ():
            function = tensor.grad_fn
            if number in self._without_graph:
                self.values.functions.setdefault(number, self.applications.met(function, tensor.output_nr, number))
            elif type(function).__name__ not in RECOMPUTING:
                self.unfollowed = True

    def number(self, tensor: torch.Tensor) -> int:
        """Return the value number of a tensor that the step ends with; one that no call has shown becomes a placeholder.

        Raises:
            RecordingError: It is a wrapper of tensors.
        """
        require_plain(tensor, "a result of the step")
        number = self._reference(tensor).value
        self._uninitialized.used([(number, tensor)], ())
        self._watch_functions([tensor], (Tracking.GRAPH,))
        return number

    def restore(self) -> None:
        """Put back what the step wrote into memory from outside, and the generators that it passed to calls."""
        self.values.restore()
        self._draws.restore()

    def finish(self, targets: Targets) -> Program:
        """Return the program of everything recorded so far."""
        storages, kept = self.values.storages, self._uninitialized.kept
        nodes = tuple([call.node(index, storages, kept.get(index)) for index, call in enumerate(self.calls)])
        values = self.values
        return Program(values.all(), tuple(values.placeholders), nodes, targets, self.applications.finished())

    # --- arguments and results --------------------------------------------------------------------------------------

    def _argument(self, item: Any) -> Any:
        if isinstance(item, _Tensor):
            return self._known.get(self._shown(item)) or self._reference(item)
        if isinstance(item, list | tuple):
            return type(item)([part if type(part) in _PLAIN else self._argument(part) for part in item])
        if isinstance(item, torch.Generator):
            return self._draws.reference(item)
        return item

    def _reference(self, tensor: torch.Tensor) -> Ref:
        """Return the reference to an argument; one that no call returned came from outside, or is a view of what one did."""
        ref = self._known.get(self._shown(tensor))
        if ref is not None:
            return ref
        base = self.values.hidden(tensor)
        if base is not None:
            return self._hidden_view(tensor, base)
        return self.values.placeholder(tensor, self._lines.caller())

    def _hidden_view(self, tensor: torch.Tensor, base: Ref) -> Ref:
        """Write down a view that was made where the dispatcher does not see it (a saved tensor's alias, `.data`)."""
        whole = self.values.value(base.value)
        if whole.dtype != tensor.dtype or whole.conj or whole.neg or tensor.is_conj() or tensor.is_neg():
            got = f"a {tensor.dtype} view of {whole.dtype} memory that was made outside of the dispatcher"
            do = "make the view with tensor.view(dtype), torch.view_as_real or torch.view_as_complex"
            raise RecordingError(got, "views made by torch operations", do)
        geometry = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        number = self.values.result(tensor, len(self.calls))
        effects = Effects(tracked=tracking([tensor]))
        self._write_down(torch.ops.aten.as_strided.default, (base, *geometry), {}, (number,), effects)
        return Ref(number)

    def _results(self, result: Any, index: int) -> tuple[int | None, ...]:
        if result is None:
            return ()
        return tuple([None if tensor is None else self.values.result(tensor, index) for tensor in tensors(result)])

    def _paired(self, items: list[Any]) -> list[tuple[int, torch.Tensor]]:
        return [(self._reference(tensor).value, tensor) for tensor in tensors(items) if tensor is not None]

    # --- calls that are not written down as they are ----------------------------------------------------------------

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that changes what a tensor shows (`t_`, `set_`, `resize_`): in the program, another view of memory.

        Raises:
            RecordingError: Memory that holds something grows.
        """
        tensor: torch.Tensor = args[0]
        self._reference(tensor)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        result = func(*args, **kwargs)
        if storage.nbytes() == size:
            self._reference(tensor)
            return result
        if size:
            got = f"the step makes a tensor grow from {size} to {storage.nbytes()} bytes in place"
            raise RecordingError(got, "resize_ of empty tensors only", "allocate it in its final size")
        self.values.renew(tensor)
        index = len(self.calls)
        number = self.values.result(tensor, index)
        options = {"dtype": tensor.dtype, "device": tensor.device}
        geometry = list(tensor.shape), list(tensor.stride())
        self._write_down(torch.ops.aten.empty_strided.default, geometry, options, (number,))
        self._uninitialized.made(number, index)
        self.frontiers.unwritten(number)
        return result

    def _run_higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a higher-order operator's own eager implementation with the recording on, so that its calls are seen.

        Raises:
            RecordingError: It has none.
        """
        kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)  # torch 2.6 to 2.13
        if kernel is None:
            got = f"the higher-order operator {func} without an eager implementation"
            raise RecordingError(got, "a step that runs eagerly", "write it with plain torch operations")
        try:
            with self:
                return kernel(*args, **kwargs)
        except AssertionError as problem:
            if "Mode should never be enabled" not in str(problem):  # some refuse to run under any mode (`scan`)
                raise
            got = f"the higher-order operator {func}, which cannot be recorded: {problem}"
            raise RecordingError(got, "a step that runs eagerly", "write it with plain torch operations") from problem

    def _run_on_subclass(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that a class of tensors handles itself.

        A wrapper takes itself apart, and its inner calls come back here. Where higher-order operators trace their own derivative
        with fake tensors, nothing is computed that belongs to the step.

        Raises:
            RecordingError: What the class does cannot be seen.
        """
        if any(kind.__module__.startswith("torch._subclasses") for kind in types):
            return func(*args, **kwargs)
        hidden = [kind.__qualname__ for kind in types if not hasattr(kind, "__tensor_flatten__")]
        if hidden:
            got = f"the step uses {hidden[0]}, a class of tensors that computes in its own __torch_dispatch__"
            expected = "plain tensors, or wrappers with __tensor_flatten__"
            raise RecordingError(got, expected, "run the step on plain tensors")
        return NotImplemented
