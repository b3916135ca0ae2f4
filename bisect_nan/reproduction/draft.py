"""A script in the making: literal tensors, then calls on them, then what has to come out non-finite."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bisect_nan.reproduction.literals import Var, argument_text


class Mode(enum.Enum):
    """Where a script shows the fault."""

    FORWARD = "forward"
    """In the result of its last call."""

    BACKWARD = "backward"
    """In the gradient of one of its tensors."""

    UPDATE = "update"
    """In a tensor that a call writes to, as an optimizer does."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to call an operator.

    Attributes:
        callee: Python for what is called (`torch.sqrt`), or the name of a method of the first argument.
        method: Whether it is one.
    """

    callee: str
    method: bool = False

    def text(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return a call as Python."""
        callee, rest = self.callee, args
        if self.method:
            callee, rest = f"{argument_text(args[0])}.{self.callee}", args[1:]
        parts = [*map(argument_text, rest), *(f"{key}={argument_text(item)}" for key, item in kwargs.items())]
        return f"{callee}({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Literal:
    """A tensor that the script writes down.

    Attributes:
        name: Its variable.
        tensor: What it holds.
        grad: Whether the script asks for its gradient.
        recipe: Python that makes it, where it is not written down number by number.
    """

    name: str
    tensor: torch.Tensor
    grad: bool = False
    recipe: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A line of the script: `name = form(args)`, or without a name a call that writes to its first argument."""

    name: str
    form: Form
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def text(self) -> str:
        """Return the line."""
        call = self.form.text(self.args, self.kwargs)
        return f"{self.name} = {call}" if self.name else call


@dataclass(frozen=True, slots=True)
class Draft:
    """A script.

    Attributes:
        literals: Its tensors.
        steps: Its calls.
        mode: Where the fault shows.
        result: The blamed result (FORWARD) or the tensor that is written to (UPDATE).
        element: Index of the blamed element in a FORWARD result.
        loss: The scalar that BACKWARD begins with, as Python.
        slope_of: The tensor whose gradient is the loss instead, so that BACKWARD takes a derivative of a derivative; empty for none.
    """

    literals: tuple[Literal, ...]
    steps: tuple[Step, ...]
    mode: Mode
    result: Var | None = None
    element: tuple[int, ...] = ()
    loss: str = ""
    slope_of: str = ""

    def calls(self) -> list[str]:
        """Return the lines of the calls, and that of the loss."""
        lines = [step.text() for step in self.steps]
        if self.slope_of:
            lines.append(f"slope = torch.autograd.grad({self.loss}, {self.slope_of}, create_graph=True)[0]")
            return [*lines, "loss = slope.sum()"]
        return [*lines, f"loss = {self.loss}"] if self.loss else lines
