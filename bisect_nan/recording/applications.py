"""Watches the uses of Python autograd Functions while a step is recorded: what their backward code is given, runs and returns.

Inside of a Function autograd sees no calls, and its backward code is Python. To run a changed step under autograd again, that code
has to be replayed, so it must be known which recorded calls it consists of and where gradients enter and leave them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bisect_nan.recording.program import Application
from bisect_nan.recording.values import Values

RECOMPUTING = {"CheckpointFunctionBackward"}
"""Functions of torch whose backward pass is autograd's own for the calls of their forward pass."""


def is_python(function: Any) -> bool:
    """Whether an autograd node is that of a Function written in Python."""
    return isinstance(function, torch.autograd.function.BackwardCFunction)


class Applications:
    """The uses of Python autograd Functions met so far."""

    def __init__(self, values: Values, calls: Sequence[Any]) -> None:
        """Start without any.

        Args:
            values: The values of the recording.
            calls: The calls recorded so far, which grow.
        """
        self._values, self._calls = values, calls
        self._makers: dict[tuple[Any, int], int] = {}  # autograd node and position -> the value that it returned
        self._met: dict[Any, dict[str, Any]] = {}

    def seen(self, arguments: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Remember which values tracked arguments of a call inside of a Function are: the Function's inputs are among them."""
        for number, tensor in arguments:
            function: Any = tensor.grad_fn
            self._makers[function, tensor.output_nr] = number
            if is_python(function):  # what one Function returned is the input of another
                self.met(function, tensor.output_nr, number)

    def met(self, function: Any, output: int, number: int) -> str:
        """Note a value that a Function returned, and return the Function's name; at the first one, begin to watch its backward code."""
        name, known = type(function).__name__, self._met.get(function)
        if name in RECOMPUTING:
            return name
        if known is None:
            inputs = [self._input(*edge) for edge in function.next_functions]
            known = self._met[function] = {"name": name, "inputs": tuple(inputs), "outputs": {}}
            function.register_prehook(lambda given: self._enters(known, given))
            wanted = [maker is not None for maker, _ in function.next_functions]
            function.register_hook(lambda returned, _: self._leaves(known, returned, wanted))
        known["outputs"][output] = number
        return name

    def _input(self, maker: Any, output: int) -> int | None:
        if maker is None:
            return None
        variable = getattr(maker, "variable", None)  # of a leaf
        return self._makers.get((maker, output)) if variable is None else self._number(variable)

    def _enters(self, known: dict[str, Any], given: tuple[torch.Tensor | None, ...]) -> None:
        known["first"] = len(self._calls)
        known["given"] = tuple(map(self._number, given))

    def _leaves(self, known: dict[str, Any], returned: Sequence[torch.Tensor | None], wanted: Sequence[bool]) -> None:
        known["last"] = len(self._calls)
        places = zip(returned, wanted, strict=False)
        known["returned"] = tuple([self._number(gradient) if asked else None for gradient, asked in places])

    def _number(self, tensor: torch.Tensor | None) -> int | None:
        ref = None if tensor is None else self._values.known.get(self._values.shown(tensor))
        return None if ref is None else ref.value

    def __bool__(self) -> bool:
        """Whether any was met."""
        return bool(self._met)

    def finished(self) -> tuple[Application, ...]:
        """Return those whose backward code ran to its end, and whose tensors are all known."""
        found = []
        for known in self._met.values():
            if "last" not in known:
                continue
            outputs = tuple([known["outputs"].get(place) for place in range(len(known["given"]))])
            ways = [*zip(known["inputs"], known["returned"], strict=False), *zip(outputs, known["given"], strict=False)]
            if all(tensor is not None or gradient is None for tensor, gradient in ways):
                found.append(Application(**{**known, "outputs": outputs}))
        return tuple(found)
