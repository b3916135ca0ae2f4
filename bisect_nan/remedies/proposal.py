"""What a remedy is before it is tried: a change of the recorded step, with the words that tell a user how to write it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bisect_nan.causes.evidence import Call, Evidence
from bisect_nan.finding import Culprit
from bisect_nan.recording.program import Arguments, Node, Program, Ref, named
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.differentiable import Change, Types
from bisect_nan.replaying.stretch import Env


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change to try.

    Attributes:
        name: Says the kind of change (`clamp`, `float32_island`).
        text: What to do, in one sentence.
        wrap: How the operand is written after the change, with `{x}` for how it is written now; "" where that is not all.
        operand: Schema name of that operand.
        whole: Whether `wrap` stands for the whole call.
        node: The call whose line is changed, where it is not the culprit's.
        changes: By program index: what runs in the place of a call.
        placeholders: Tensors in the place of those from outside, by value number.
        types: In which element types the step runs; None for the recorded ones.
        scale: What the loss is multiplied by for the backward pass.
        check: For a change that is not one to calls: what to run in the place of the culprit's call to see if it helps.
        local: Whether the call alone shows already if the change helps.
        moves: Whether healthy results of the call may change, as those of a decomposition do.
    """

    name: str
    text: str
    wrap: str = ""
    operand: str = "self"
    whole: bool = False
    node: Node | None = None
    changes: Mapping[int, Change] = field(default_factory=dict)
    placeholders: Env = field(default_factory=dict)
    types: Types | None = None
    scale: float = 1.0
    check: Change | None = None
    local: bool = True
    moves: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """A culprit as a change sees it.

    Attributes:
        program: The step.
        dependence: Of the program.
        tensors: The placeholders' tensors by value number.
        culprit: What was found.
        node: The call that a user would change: the culprit's own, or the forward call whose derivative failed; None for state.
        call: Its live arguments; None for state.
        evidence: What the cause was told by; None for state.
        value: The placeholder's number, for state; else -1.
    """

    program: Program
    dependence: Dependence
    tensors: Mapping[int, torch.Tensor]
    culprit: Culprit
    node: Node | None
    call: Call | None
    evidence: Evidence | None
    value: int = -1

    @property
    def op(self) -> str:
        """Base name of the op to change."""
        return "" if self.call is None else self.call.op

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the call: that of its first floating tensor argument, else of its result."""
        tensors = [] if self.call is None else [*self.call.tensors().values(), *self.call.outputs]
        found = [t.dtype for t in tensors if t is not None and t.is_floating_point()]
        return found[0] if found else torch.float32

    def alike(self, node: Node | None = None) -> list[int]:
        """The calls that the same line makes to the same operator: who changes the line changes all of them."""
        node = node or self.node
        assert node is not None
        if node.source is None:
            return [node.index]
        return [n.index for n in self.program.nodes if n.target is node.target and n.source == node.source]

    def everywhere(self, change: Change, node: Node | None = None) -> dict[int, Change]:
        """Put a change in the place of every call of the line: the culprit's, or that of another call."""
        return dict.fromkeys(self.alike(node), change)

    def made_by(self, name: str, node: Node | None = None) -> Iterator[Node]:
        """Yield the calls behind an operand, the nearest first, as long as each has one floating operand of its own."""
        node = node or self.node
        assert node is not None
        operand, before = named(node.target, node.args, node.kwargs).get(name), node.index
        while isinstance(operand, Ref):
            found = self.dependence.needed(operand.value, before)
            if len(found) != 1 or found[0] >= before:
                return
            node = self.program.nodes[found[0]]
            yield node
            operands = [n for n in node.inputs() if self.program.values[n].dtype.is_floating_point]
            if len(operands) != 1:
                return
            operand, before = Ref(operands[0]), node.index


Strategy = Callable[[Site], Iterator[Proposal]]
"""Yields the proposals of one kind that fit a site, the smallest change first."""


def operands(**edits: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change that runs the call on edited operands.

    Args:
        edits: By schema name: what to make of the operand; must return another tensor. Python numbers are edited as tensors.
    """

    def change(target: torch._ops.OpOverload, arguments: Arguments) -> Any:
        replaced = {name: _edited(arguments[name], edit) for name, edit in edits.items() if name in arguments}
        return written(target, arguments, target(**{**arguments, **replaced}))

    return change


def instead(compute: Callable[[Arguments], Any]) -> Change:
    """Return a change that computes something else from the arguments of the call."""
    return lambda target, arguments: written(target, arguments, compute(arguments))


def written(target: torch._ops.OpOverload, arguments: Arguments, result: Any) -> Any:
    """Return a result, after writing it to the argument that the call changes in place."""
    in_place = str(target).split(".")[1].endswith("_")
    if not in_place or not isinstance(result, torch.Tensor):
        return result
    destination: torch.Tensor = arguments["self"]
    return destination if result is destination else destination.copy_(result)


def type_name(dtype: torch.dtype) -> str:
    """Return what users call an element type: `float16`."""
    return str(dtype).removeprefix("torch.")


def _edited(operand: Any, edit: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(operand, torch.Tensor):
        return edit(operand)
    if isinstance(operand, int | float):
        return edit(torch.tensor(float(operand), dtype=torch.float64)).item()
    if isinstance(operand, list | tuple):
        return [_edited(part, edit) for part in operand]
    return operand
