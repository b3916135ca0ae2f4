"""The draft of a script that holds some of the calls around a culprit, and writes down what these need from all others."""

from __future__ import annotations

import keyword
from collections.abc import Sequence

import torch

from bisect_nan.errors import ReproductionError
from bisect_nan.recording.program import Node, Tracking, named, substitute
from bisect_nan.reproduction.draft import Draft, Literal, Mode, Step
from bisect_nan.reproduction.literals import Var
from bisect_nan.reproduction.spelling import in_place
from bisect_nan.reproduction.surroundings import Surroundings, Unit, numbers_in

_NAMES = {"self": "x", "input": "x", "tensors": "x"}
"""What the arguments of operators are called in a script, where their own name says little."""

_TAKEN = {"torch", "loss", "inf", "nan", "complex", "y", "upstream", "slope"}

_HALVES = (torch.float16, torch.bfloat16)


class Drafting:
    """Writes one draft."""

    def __init__(self, around: Surroundings, selection: Sequence[Unit], mode: Mode) -> None:
        """Write the calls.

        Args:
            around: The calls.
            selection: Those that the script holds, in order.
            mode: Where the fault shall show.
        """
        self._around, self._mode = around, mode
        self._literals: dict[tuple[int, int], Literal] = {}
        self._vars: dict[Unit, str] = {}
        self._read: set[Unit] = set()
        self._steps: list[Step] = []
        self._updated: Var | None = None
        for count, unit in enumerate(selection, 1):
            self._write(unit, "" if count == len(selection) else str(count))

    def draft(self, element: Sequence[int], upstream: torch.Tensor | None = None, *, twice: bool = False) -> Draft:
        """Return the draft.

        Args:
            element: Index of the element of a FORWARD result that it shall show.
            upstream: What the result is multiplied with before it is summed up to the loss; nothing when None.
            twice: Whether the loss is a derivative already.

        Raises:
            ReproductionError: These calls cannot show a fault in this way.
        """
        core, literals = self._around.core, list(self._literals.values())
        if self._mode is Mode.UPDATE:
            if self._updated is None:
                raise _no_way("a call that writes to a tensor")
            return Draft(tuple(literals), tuple(self._steps), self._mode, self._updated)
        if self._mode is Mode.FORWARD:
            end = core if core not in self._read else [unit for unit in self._vars if unit not in self._read][-1]
            result = self._var(end, self._around.blamed if end == core else 0)
            return Draft(tuple(literals), tuple(self._steps), self._mode, result, tuple(element))
        differentiable = [literal.name for literal in literals if literal.grad]
        if not differentiable:
            raise _no_way("a tensor with a gradient")
        if upstream is not None:
            literals.append(Literal("upstream", upstream.detach().clone()))
        ends = [unit for unit in self._vars if unit not in self._read]
        loss = " + ".join(
            term for unit in ends if (term := self._term(unit, "upstream" if upstream is not None else ""))
        )
        if not loss:
            raise _no_way("a result that a gradient comes from")
        slope_of = differentiable[0] if twice else ""
        return Draft(tuple(literals), tuple(self._steps), self._mode, loss=loss, slope_of=slope_of)

    def _write(self, unit: Unit, number: str) -> None:
        """Write a line; the last one has no number, and is the one that may write to a tensor."""
        written = self._around.written(unit)
        assert written is not None
        node = self._around.program.nodes[unit[0]]
        args, kwargs = substitute((written.args, dict(written.kwargs)), lambda number: self._argument(number, node))
        form, name = written.form, f"y{number}"
        if self._mode is Mode.UPDATE and not number:
            literal = bool(args) and any(args[0] == Var(known.name) for known in self._literals.values())
            changed = in_place(node) if literal else None
            if changed is not None:
                self._updated = args[0]
                form, name = changed, ""
        self._steps.append(Step(name, form, tuple(args), kwargs))
        self._vars[unit] = name or str(args[0])

    def _argument(self, number: int, node: Node) -> Var:
        """Return the variable that holds a value as a call reads it."""
        made = self._around.maker(number, node.index)
        if made is not None and made[0] in self._vars:
            var = self._var(*made)
            if var is not None:
                self._read.add(made[0])
                return var
        version = self._around.version(number, node.index)
        if version not in self._literals:
            tensor = self._around.executed[node.index].inputs[number].detach().resolve_conj().resolve_neg()
            tensor = tensor.clone(memory_format=torch.contiguous_format)
            self._literals[version] = Literal(
                self._name(number, node), tensor, self._wants_gradient(number, node, tensor)
            )
        return Var(self._literals[version].name)

    def _var(self, unit: Unit, place: int) -> Var | None:
        written = self._around.written(unit)
        assert written is not None
        if not written.single:
            return Var(self._vars[unit], place)
        alone = len([n for n in self._around.program.nodes[unit[0]].outputs if n is not None]) <= 1
        return Var(self._vars[unit]) if place == 0 or alone or unit == self._around.core else None

    def _wants_gradient(self, number: int, node: Node, tensor: torch.Tensor) -> bool:
        if self._mode is not Mode.BACKWARD or not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        known = dict(zip(node.inputs(), node.tracked, strict=False))
        return known.get(number, Tracking.GRAPH) is not Tracking.NO

    def _name(self, number: int, node: Node) -> str:
        arguments = named(node.target, node.args, node.kwargs)
        holder = next((name for name, item in arguments.items() if number in numbers_in(item)), "self")
        name = _NAMES.get(holder, holder).lower()
        name = name if name.isidentifier() and not keyword.iskeyword(name) and name not in _TAKEN else "x"
        taken = {literal.name for literal in self._literals.values()}
        return next(n for n in (name, *(f"{name}{i}" for i in range(2, 1000))) if n not in taken)

    def _term(self, unit: Unit, upstream: str) -> str:
        """Return what a result adds to the loss; nothing for one that has no gradient."""
        executed, var = self._around.executed[unit[0]], self._vars[unit]
        numbers = [n for n in executed.node.outputs if n is not None and n in executed.content]
        written = self._around.written(unit)
        assert written is not None
        terms = []
        for place, number in enumerate(numbers[:1] if written.single else numbers):
            tensor = executed.content[number]
            text = var if written.single else f"{var}[{place}]"
            text = f"{text}.real" if tensor.is_complex() else text
            if upstream:
                text = f"({text} * {upstream})"
            if tensor.is_floating_point() or tensor.is_complex():
                terms.append(f"{text}.float().sum()" if tensor.dtype in _HALVES else f"{text}.sum()")
        return " + ".join(terms[:1] if upstream else terms)


def _no_way(what: str) -> ReproductionError:
    return ReproductionError("got calls that cannot show the fault", what, "use the snapshot itself")
