"""Live evidence: a call of the program executed once more, what it was given and made, and what stands behind its operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from bisect_nan.causes.evidence import Call, base_name
from bisect_nan.errors import ReplayError
from bisect_nan.finding import Phase
from bisect_nan.recording.program import Arguments, Node, Program, Ref, named, substitute
from bisect_nan.replaying.dependence import Dependence
from bisect_nan.replaying.replay import Edit, Executed, Run
from bisect_nan.replaying.stretch import Checkpoint, Stretch

_TRANSPARENT = {
    *(
        "view",
        "_unsafe_view",
        "expand",
        "unsqueeze",
        "squeeze",
        "permute",
        "t",
        "transpose",
        "select",
        "slice",
        "index",
        "clone",
    ),
    *(
        "_to_copy",
        "detach",
        "as_strided",
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "sqrt",
        "pow",
        "clamp",
        "clamp_min",
        "clamp_max",
    ),
    *(
        "maximum",
        "minimum",
        "sum",
        "mean",
        "cat",
        "stack",
        "where",
        "masked_fill",
        "reciprocal",
        "real",
        "view_as_real",
        "eq",
    ),
}
"""Calls that an operand is followed back through."""

_ANCESTORS = 24


class Witness:
    """Shows calls with the values that they have in a run."""

    def __init__(
        self,
        program: Program,
        stretch: Stretch,
        dependence: Dependence,
        checkpoints: Sequence[Checkpoint],
        edits: Mapping[int, Edit] | None = None,
    ) -> None:
        """Prepare.

        Args:
            program: The step.
            stretch: The calls that the symptom needs.
            dependence: Of the whole program.
            checkpoints: Where runs can start, ascending, the first at cut 0.
            edits: What neutralises births: a call is shown with the values that it has without those before it.
        """
        self._program, self._stretch, self._dependence = program, stretch, dependence
        self._checkpoints, self._edits = checkpoints, edits or {}
        self._reached: Checkpoint | None = None  # of the latest run: most calls are asked for in their order

    def execute(self, node: Node) -> Executed:
        """Run one call again."""
        run, seen = self.before(node), list[Executed]()
        run.advance(run.cut + 1, seen.append)
        return seen[0]

    def between(self, first: Node, last: Node) -> list[Executed]:
        """Run the calls from one to another one again."""
        if not (self._stretch.has(first.index) and self._stretch.has(last.index)):
            return []
        run, seen = self.before(first), list[Executed]()
        run.advance(self._stretch.cut_after(last.index), seen.append)
        return seen

    def altered(self, node: Node) -> bool:
        """Whether births before a call are neutralised, so that what it is given need not be what it was given in the step."""
        return any(index < node.index for index in self._edits)

    def before(self, node: Node) -> Run:
        """Run up to a call, from the latest checkpoint before it and before all births that have to be neutralised."""
        place = self._stretch.cut_after(node.index) - 1
        edits = {index: edit for index, edit in self._edits.items() if index < node.index}
        first = min([place, *(self._stretch.cut_after(index) - 1 for index in edits)])
        start = [c for c in self._checkpoints if c.cut <= first][-1]
        if self._reached is not None and start.cut < self._reached.cut <= place:
            start = self._reached
        run = Run(self._stretch, start, edits)
        try:
            run.advance(place)
            self._reached = run.checkpoint()
        except ReplayError:  # the recorded calls cannot follow the changed values
            run = Run(self._stretch, [c for c in self._checkpoints if c.cut <= place][-1])
            run.advance(place)
        return run

    def call(self, executed: Executed) -> Call:
        """Return an executed call as the catalog looks at it."""
        node = executed.node
        return Call(
            target=node.target,
            arguments=_by_name(node, executed.inputs),
            outputs=tuple(None if number is None else executed.content.get(number) for number in results(executed)),
            phase=Phase.BACKWARD if node.autograd is not None else node.phase,
            autograd=node.autograd,
            source=self._program.source(node),
            module=node.module,
        )

    def forward(self, node: Node) -> Call | None:
        """Return the live forward call whose derivative a node computes; None for any other node."""
        if node.source is not None or node.forward is None or not self._stretch.has(node.forward):
            return None
        return self.call(self.execute(self._program.nodes[node.forward]))

    def ancestors(self, node: Node, name: str) -> Iterator[str]:
        """Yield the base names of the calls behind an argument, the nearest first."""
        name, _, place = name.partition("[")
        argument = _by_name(node, {}).get(name)
        if place and isinstance(argument, list | tuple):  # a member of a list: `tensors[2]`
            argument = argument[int(place.rstrip("]"))]
        queue = [(argument.value, node.index)] if isinstance(argument, Ref) else []
        seen: set[int] = set()
        while queue and len(seen) < _ANCESTORS:
            value, before = queue.pop(0)
            for call in sorted(self._dependence.needed(value, before), reverse=True):
                if call in seen:
                    continue
                seen.add(call)
                maker = self._program.nodes[call]
                op = base_name(str(maker.target))
                yield op
                if op in _TRANSPARENT:
                    queue += [
                        (number, call)
                        for number in maker.inputs()
                        if self._program.values[number].dtype.is_floating_point
                    ]

    def selected_by(self, node: Node, value: int) -> tuple[str, ...]:
        """Return the names of the calls behind the condition of the first `where` that takes a value up."""
        takers = (n for n in self._stretch.nodes if n.index > node.index and value in n.inputs())
        chooser = next((n for n in takers if base_name(str(n.target)) == "where"), None)
        return () if chooser is None else tuple(self.ancestors(chooser, "condition"))


def results(executed: Executed) -> list[int | None]:
    """Return the values that a call returned, by position, and behind them those that it only wrote to."""
    node = executed.node
    return [*node.outputs, *(number for number in node.written if number not in node.outputs)]


def _by_name(node: Node, tensors: Mapping[int, torch.Tensor]) -> Arguments:
    """Return a call's arguments by schema name; tensors live where given, else as `Ref`."""
    arguments = named(node.target, node.args, node.kwargs)
    return {name: substitute(item, tensors.__getitem__) if tensors else item for name, item in arguments.items()}


def recompute(executed: Executed, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...] | None:
    """Run a call again with every floating or complex input in `dtype`, or None where there is no such kernel."""
    wide = {True: dtype.to_complex(), False: dtype}
    cast = {
        n: t.to(wide[t.is_complex()]) if t.is_floating_point() or t.is_complex() else t
        for n, t in executed.inputs.items()
    }
    try:
        made = executed.again(cast)
    except RuntimeError:
        return None
    return tuple(None if number is None else made.get(number) for number in results(executed))
