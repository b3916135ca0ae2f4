"""What a matcher may look at: the culprit's call with its live values, and the calls around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bisect_nan import finite
from bisect_nan.finding import Phase, SourceLine, Symptom

_LISTED = 1 << 20
"""Operands that cannot be aligned with the blamed elements are looked at up to this many elements."""


@dataclass(frozen=True, slots=True)
class Call:
    """One executed node with its live values.

    Attributes:
        target: The ATen overload.
        arguments: Every argument by its schema name, defaults included; tensors hold what they held before the call.
        outputs: The tensors that came out (for an in-place call: what it wrote), None where an output was undefined.
        phase: Where it ran.
        autograd: Name of the autograd node that ran it, or None.
        source: Its line.
        module: Path of the module that made the call.
    """

    target: torch._ops.OpOverload
    arguments: Mapping[str, Any]
    outputs: tuple[torch.Tensor | None, ...]
    phase: Phase
    autograd: str | None = None
    source: SourceLine | None = None
    module: str = ""

    @property
    def op(self) -> str:
        """The base name of the op, without namespace, overload and in-place mark: `div`, `_softmax`."""
        return base_name(str(self.target))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor arguments by schema name; those in lists as `name[0]`, `name[1]`."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, list | tuple):
                found.update({f"{name}[{i}]": item for i, item in enumerate(value) if isinstance(item, torch.Tensor)})
        return found


@dataclass(frozen=True, slots=True)
class Evidence:
    """A culprit under examination.

    Attributes:
        call: The call that made the bad value.
        output: Which of its outputs is blamed.
        mask: bool, shape of that output: the blamed elements.
        symptom: Where the failure shows.
        forward: For a call of the backward pass, the forward call whose derivative it computes; else None.
        intended: Lines that wrote the intended infinities among the inputs (empty when there is none).
        recompute: Runs the call again with every floating input cast to the given dtype and returns its outputs, or None
            where no such kernel exists.
        ancestors: Base names of the ops met on the way back from an argument (by schema name), the nearest first, through
            data movement, scaling and roots: what the operand *is* (a deviation, a norm, a count).
        selected_by: Base names of the ops behind the condition of the `where` that takes the value up next, the nearest first;
            none where no `where` does.
        loss_scale: The power of two that the step multiplies its loss with at the end; 1 when it does not.
        history: Numbers of the training, the latest last, as far as they are known: `step`, `loss`, `gradient_norm`,
            `parameter_norm`. The last one belongs to the step of the call.
    """

    call: Call
    output: int
    mask: torch.Tensor
    symptom: Symptom
    forward: Call | None
    intended: tuple[SourceLine, ...]
    recompute: Callable[[torch.dtype], tuple[torch.Tensor | None, ...] | None]
    ancestors: Callable[[str], tuple[str, ...]]
    selected_by: Callable[[], tuple[str, ...]] = tuple
    loss_scale: float = 1.0
    history: tuple[Mapping[str, float], ...] = ()

    @property
    def op(self) -> str:
        """Base name of the call's op."""
        return self.call.op

    @property
    def backward(self) -> bool:
        """Whether the bad value was made by the derivative of a forward op (not by Python code that runs in backward)."""
        return self.forward is not None

    @property
    def hidden(self) -> bool:
        """Whether a forward call made it, the loss is finite all the same, and a gradient is not."""
        return self.symptom.kind == "gradient" and self.call.phase is Phase.FORWARD

    @property
    def result(self) -> torch.Tensor:
        """1-D: the blamed elements' values."""
        output = self.call.outputs[self.output]
        assert output is not None
        return output[self.mask]

    def operand(self, name: str, call: Call | None = None) -> torch.Tensor | None:
        """Return an operand's values at the blamed elements.

        Args:
            name: Schema name of the argument (`self`, `other`, `exponent` ...).
            call: The call to look at; the blamed call when not given.

        Returns:
            1-D tensor aligned with `result` when the operand broadcasts to the blamed output; otherwise all of its elements
            (up to about a million). None when the argument is absent or no number.
        """
        value = (call or self.call).arguments.get(name)
        if isinstance(value, bool | int | float | complex):
            value = torch.tensor(value, device=self.mask.device)
        if not isinstance(value, torch.Tensor):
            return None
        try:
            return value.expand(self.mask.shape)[self.mask]
        except RuntimeError:
            return value.flatten()[:_LISTED]

    def recomputed(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the blamed elements when the call runs in `dtype` (1-D), or None where it cannot."""
        outputs = self.recompute(dtype)
        if outputs is None or outputs[self.output] is None:
            return None
        output = outputs[self.output]
        assert output is not None
        return output[self.mask] if output.shape == self.mask.shape else None

    def kinds(self) -> finite.NonFinite:
        """Which kinds of non-finite value the blamed elements hold."""
        return finite.kinds(self.result)

    def inputs_kinds(self) -> finite.NonFinite:
        """Which kinds of non-finite value the call's tensor inputs hold anywhere."""
        found = finite.NonFinite(0)
        for tensor in self.call.tensors().values():
            found |= finite.kinds(tensor)
        return found


def base_name(op: str) -> str:
    """`aten._softmax.default` -> `_softmax`; the in-place mark is dropped."""
    return op.removeprefix("aten.").split(".")[0].removesuffix("_")
