"""A step -> Program: a dispatch mode that writes down every ATen call while the step runs once.

The recording specialises on the run that it sees: control flow, `.item()`, custom autograd Functions, checkpointing, vmap and
scripted modules all come out as a straight line of calls.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # torch 2.6 to 2.13

from bisect_nan.errors import RecordingError
from bisect_nan.finding import Phase
from bisect_nan.generators import Draws
from bisect_nan.lines import Lines
from bisect_nan.program import NO_STORAGE, Node, Program, Ref, Targets, tensors
from bisect_nan.traits import Traits
from bisect_nan.values import Values, shown

_Tensor = torch.Tensor
_PLAIN = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
"""Types of arguments that hold neither tensors nor generators."""

_current_autograd_node = torch._C._current_autograd_node  # torch 2.6 to 2.13
_next_sequence = torch.autograd._get_sequence_nr  # torch 2.6 to 2.13: number of the autograd node that will be made next
_clock = time.perf_counter


class Recorder(TorchDispatchMode):
    """Records the calls made while it is active.

    Attributes:
        phase: FORWARD, BACKWARD or OPTIMIZER: in which part of the step the calls run; set by whoever runs it.
        modules: Paths of the running modules, the innermost last; set by whoever runs it.
        values: The tensors met so far.
        nodes: The calls so far.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        """Start with an empty program."""
        super().__init__()
        self.phase = Phase.FORWARD
        self.modules: list[str] = []
        self.values = Values()
        self.nodes: list[Node] = []
        self._traits: dict[Any, Traits] = {}
        self._unwritten: dict[int, int] = {}  # storage that nobody has written to or read yet -> the `empty` call that made it
        self._by_sequence: dict[int, int] = {}  # sequence number of an autograd node -> the call that it is the derivative of
        self._draws = Draws()
        self._lines = Lines()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave out the wrapper against compilation, which costs 3 microseconds a call (torch 2.10 to 2.13)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run one ATen call and write it down."""
        if types:  # a subclass that wraps tensors takes itself apart, and its inner calls come back here
            return NotImplemented
        kwargs = kwargs or {}
        traits = self._traits.get(func)
        if traits is None:
            if not isinstance(func, torch._ops.OpOverload):
                return self._run_higher_order(func, args, kwargs)
            traits = self._traits[func] = Traits.of(func)
        if traits.moves:
            return self._move(func, args, kwargs)
        node_args = tuple([self._argument(item) for item in args])
        node_kwargs = {key: self._argument(item) for key, item in kwargs.items()} if kwargs else kwargs
        written = self._before_write(traits, args, kwargs) if traits.written else ()
        if self._unwritten and not traits.view:
            self._settle(traits, written, [*args, *kwargs.values()])
        state = self._draws.before(args, kwargs) if traits.random else None
        autograd, sequence = _current_autograd_node(), _next_sequence() - 1

        start = _clock()
        result = func(*args, **kwargs)
        cost = _clock() - start

        if traits.random:
            self._draws.after(args, kwargs)
        values, index = self.values, len(self.nodes)
        known = len(values.values)
        outputs = (self._result(result),) if isinstance(result, _Tensor) else self._results(result)
        if not written and len(values.values) == known:  # a detach, a question about sizes, a number read by the host
            if outputs and outputs[0] is not None:
                self._by_sequence.setdefault(sequence, values.makers[outputs[0]])
            return result
        self._by_sequence.setdefault(sequence, index)
        self._write_down(func, node_args, node_kwargs, outputs, written, cost, autograd, traits.random, state)
        if traits.uninitialized:
            self._unwritten[values.values[known].storage] = index
        return result

    def _write_down(
        self,
        target: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: tuple[int | None, ...],
        written: tuple[int, ...] = (),
        cost: float = 0.0,
        autograd: Any = None,
        random: bool = False,
        generator: torch.Tensor | None = None,
    ) -> None:
        values = self.values.values
        source = self._lines.caller()
        derived = -1 if autograd is None else self._by_sequence.get(autograd._sequence_nr(), -1)
        module = self.modules[-1] if self.modules else ""
        if derived >= 0 and not module:
            module = self.nodes[derived].module
        self.nodes.append(
            Node(
                index=len(self.nodes),
                target=target,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                writes=tuple({values[value].storage: None for value in written}) if written else (),
                written=written,
                phase=self.phase,
                autograd=None if autograd is None else autograd.name(),
                forward=derived if derived >= 0 and source is None else None,
                module=module,
                source=source,
                cost=cost,
                grad=torch.is_grad_enabled(),
                random=random,
                generator=generator,
            )
        )

    def number(self, tensor: torch.Tensor) -> int:
        """Return the value number of a tensor that the step ends with; one that no call has shown becomes a placeholder."""
        ref = self._reference(tensor)
        self._keep_uninitialized([ref.value])
        return ref.value

    def finish(self, targets: Targets) -> Program:
        """Return the program of everything recorded so far."""
        return Program(tuple(self.values.values), tuple(self.values.placeholders), tuple(self.nodes), targets)

    # --- arguments and results --------------------------------------------------------------------------------------

    def _argument(self, item: Any) -> Any:
        kind = type(item)
        if kind in _PLAIN:
            return item
        if isinstance(item, _Tensor):
            return self._reference(item)
        if kind is list or kind is tuple:
            return kind([self._argument(part) for part in item])
        if isinstance(item, torch.Generator):
            return self._draws.reference(item)
        return item

    def _reference(self, tensor: torch.Tensor) -> Ref:
        """Return the reference to an argument; one that no call returned came from outside, or is a view of what one did."""
        ref = self.values.known.get(shown(tensor))
        if ref is not None:
            return ref
        base = self.values.hidden(tensor)
        if base is not None:
            return self._hidden_view(tensor, base)
        source = self._lines.caller()
        return self.values.placeholder(tensor, f"constant at {source}" if source else "constant")

    def _hidden_view(self, tensor: torch.Tensor, base: Ref) -> Ref:
        """Write down a view that was made where the dispatcher does not see it (a saved tensor's alias, `.data`)."""
        dtype = self.values.values[base.value].dtype
        flags = self.values.values[base.value]
        if dtype != tensor.dtype or flags.conj or flags.neg or tensor.is_conj() or tensor.is_neg():
            raise RecordingError(
                f"a {tensor.dtype} view of {dtype} memory that was made outside of the dispatcher",
                "views made by torch operations",
                "make the view with tensor.view(dtype), torch.view_as_real or torch.view_as_complex",
            )
        geometry = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        ref = self.values.new(tensor, len(self.nodes))
        self._write_down(torch.ops.aten.as_strided.default, (base, *geometry), {}, (ref.value,))
        return ref

    def _result(self, tensor: torch.Tensor) -> int:
        ref = self.values.known.get(shown(tensor))
        return (self.values.new(tensor, len(self.nodes)) if ref is None else ref).value

    def _results(self, result: Any) -> tuple[int | None, ...]:
        if result is None:
            return ()
        return tuple([None if tensor is None else self._result(tensor) for tensor in tensors(result)])

    # --- memory that is written, and memory that never was ----------------------------------------------------------

    def _before_write(self, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """Return the values that a call is about to write to, once their memory is safe."""
        written: list[int] = []
        for tensor in traits.writes(args, kwargs):
            self.values.before_write(tensor)
            written.append(self._reference(tensor).value)
        return tuple(written)
