"""From confirmed births to culprits: live evidence, cause, element, samples, chain."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bisect_nan import causes, finite
from bisect_nan.causes.evidence import Call, Evidence, base_name
from bisect_nan.dependence import Dependence
from bisect_nan.finding import Culprit, Link, Phase, SourceLine
from bisect_nan.program import Node, Ref, substitute
from bisect_nan.replay import Executed, Run
from bisect_nan.reproduce import Pass
from bisect_nan.samples import Samples
from bisect_nan.scaling import loss_scale
from bisect_nan.snapshot import Snapshot
from bisect_nan.stretch import Stretch
from bisect_nan.trace import Birth, Origin
from bisect_nan.trend import within

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


class Examination:
    """Explains births, each with the values of one more execution of its call."""

    def __init__(
        self, snapshot: Snapshot, stretch: Stretch, dependence: Dependence, done: Pass, targets: Sequence[int]
    ) -> None:
        """Prepare.

        Args:
            snapshot: The step.
            stretch: The calls that the symptom needs.
            dependence: Of the whole program.
            done: A pass with checkpoints that reach up to the births.
            targets: The symptom's values.
        """
        assert snapshot.observed is not None
        self._past = snapshot.history
        self._program, self._symptom = snapshot.program, snapshot.observed.symptom
        self._stretch, self._dependence, self._done, self._targets = stretch, dependence, done, targets
        self._turned: set[int] = set()
        self._samples = Samples(snapshot.program, stretch, done.checkpoints)

    def culprits(self, births: Sequence[Birth], innocents: Sequence[Birth]) -> tuple[Culprit, ...]:
        """Return one culprit for each place where births lie, the earliest first."""
        self._turned = {birth.node for birth in innocents if birth.origin is Origin.TURNED}
        places: dict[tuple[int, int], list[Birth]] = {}
        for birth in sorted(births, key=lambda b: b.node):
            places.setdefault((birth.node, -1 if birth.placeholder is None else birth.value), []).append(birth)
        return tuple(
            self._state(group[0]) if group[0].placeholder else self._call(group, innocents) for group in places.values()
        )

    def _state(self, birth: Birth) -> Culprit:
        placeholder = birth.placeholder
        assert placeholder is not None
        tensor = self._done.checkpoints[0].env[birth.value]
        phase = placeholder.phase
        entry, match = causes.of_state(phase, placeholder.name, self._symptom, birth.mask)
        users = [node for node in self._stretch.nodes if birth.value in node.inputs()]
        source = self._program.source(users[0]) if users else None
        return Culprit(
            phase=phase,
            cause=entry.name,
            summary=entry.summary.format(op=placeholder.name, name=placeholder.name),
            confidence=1.0,
            op="",
            kernel="",
            autograd=None,
            node=-1,
            name=placeholder.name,
            source=source,
            module=placeholder.name.rpartition(".")[0] if phase in (Phase.PARAMETER, Phase.BUFFER) else "",
            inputs=(),
            outputs=(finite.summarise(tensor, placeholder.name),),
            element=_first(birth.mask),
            samples=self._samples.of_input(birth.mask) if phase is Phase.INPUT and not placeholder.constant else (),
            chain=self._chain(users[0].index) if users else (),
            notes=match.notes,
            help=match.help or entry.help,
        )

    def _call(self, births: Sequence[Birth], innocents: Sequence[Birth]) -> Culprit:
        node = self._program.nodes[births[0].node]
        executed = self._execute(node)
        value, mask = _blamed(executed, births)
        origin = self._program.origin(node)
        evidence = Evidence(
            call=self._live(executed),
            output=_results(executed).index(value),
            mask=mask,
            symptom=self._symptom,
            forward=self._forward(node),
            intended=self._written(innocents),
            recompute=lambda dtype: _recompute(executed, dtype),
            ancestors=lambda name: tuple(self._ancestors(node, name)),
            loss_scale=loss_scale(self._program, self._done.checkpoints[0].env),
            selected_by=lambda: self._selected_by(node, value),
            history=self._history(node),
        )
        entry, match = causes.diagnose(evidence)
        op = str(origin.target) if node.source is None and node.forward is not None else str(node.target)
        return Culprit(
            phase=node.phase,
            cause=entry.name,
            summary=entry.summary.format(op=base_name(op).lstrip("_")),
            confidence=match.confidence,
            op=op,
            kernel=str(node.target),
            autograd=node.autograd,
            node=node.index,
            name="",
            source=origin.source,
            module=node.module,
            inputs=tuple(finite.summarise(t, n) for n, t in evidence.call.tensors().items()),
            outputs=tuple(finite.summarise(t, "out") for t in executed.content.values()),
            element=_first(mask),
            samples=self._samples.of_result(node.index, value, mask) if node.phase is not Phase.OPTIMIZER else (),
            chain=self._chain(node.index),
            notes=match.notes,
            help=match.help or entry.help,
        )

    def _written(self, innocents: Sequence[Birth]) -> tuple[SourceLine, ...]:
        """The lines that wrote infinities on purpose, each once."""
        nodes = [
            self._program.nodes[birth.node] for birth in innocents if birth.origin is Origin.WRITTEN and birth.node >= 0
        ]
        return tuple(dict.fromkeys(source for node in nodes if (source := self._program.source(node))))

    def _execute(self, node: Node) -> Executed:
        """Run one call again, from the latest checkpoint before it."""
        place = self._stretch.cut_after(node.index) - 1
        run = Run(self._stretch, [c for c in self._done.checkpoints if c.cut <= place][-1])
        run.advance(place)
        seen: list[Executed] = []
        run.advance(place + 1, seen.append)
        return seen[0]

    def _history(self, node: Node) -> tuple[Mapping[str, float], ...]:
        """Return the numbers of the training up to a call; an update may have changed the parameters before it."""
        if node.phase is not Phase.OPTIMIZER:
            return self._past
        place = self._stretch.cut_after(node.index) - 1
        run = Run(self._stretch, [c for c in self._done.checkpoints if c.cut <= place][-1])
        run.advance(place)
        return within(self._past, self._program, self._done.checkpoints[0].env, run.env)

    def _live(self, executed: Executed) -> Call:
        node = executed.node
        return Call(
            target=node.target,
            arguments=_by_name(node, executed.inputs),
            outputs=tuple(None if number is None else executed.content.get(number) for number in _results(executed)),
            phase=Phase.BACKWARD if node.autograd is not None else node.phase,
            autograd=node.autograd,
            source=self._program.source(node),
            module=node.module,
        )

    def _forward(self, node: Node) -> Call | None:
        """The live forward call whose derivative a node computes; None for any other node."""
        if node.source is not None or node.forward is None or not self._stretch.has(node.forward):
            return None
        return self._live(self._execute(self._program.nodes[node.forward]))

    def _ancestors(self, node: Node, name: str) -> Iterator[str]:
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

    def _selected_by(self, node: Node, value: int) -> tuple[str, ...]:
        """The names of the calls behind the condition of the first `where` that takes a value up."""
        takers = (n for n in self._stretch.nodes if n.index > node.index and value in n.inputs())
        chooser = next((n for n in takers if base_name(str(n.target)) == "where"), None)
        return () if chooser is None else tuple(self._ancestors(chooser, "condition"))

    def _chain(self, start: int) -> tuple[Link, ...]:
        path = self._dependence.chain(start, self._targets, [node.index for node in self._stretch.nodes])
        nodes = [self._program.nodes[index] for index in path]
        return tuple(
            Link(node.index, base_name(str(node.target)), self._program.source(node), node.index in self._turned)
            for node in nodes
        )


def _blamed(executed: Executed, births: Sequence[Birth]) -> tuple[int, torch.Tensor]:
    """Return the first value that holds blamed elements, and all of its blamed elements."""
    value = min((birth.value for birth in births), key=_results(executed).index)
    mask = torch.zeros(executed.content[value].shape, dtype=torch.bool)
    for birth in births:
        if birth.value == value:
            mask |= birth.mask.cpu()
    return value, mask.to(executed.content[value].device)


def _results(executed: Executed) -> list[int | None]:
    """The values that a call returned, by position, and behind them those that it only wrote to."""
    node = executed.node
    return [*node.outputs, *(number for number in node.written if number not in node.outputs)]


def _by_name(node: Node, tensors: Mapping[int, torch.Tensor]) -> dict[str, Any]:
    """Return a call's arguments by schema name, defaults included; tensors live where given, else as `Ref`."""
    arguments: dict[str, Any] = {}
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            arguments[argument.name] = node.args[place]
        elif argument.name in node.kwargs:
            arguments[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            arguments[argument.name] = argument.default_value
    return {name: substitute(item, tensors.__getitem__) if tensors else item for name, item in arguments.items()}


def _recompute(executed: Executed, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...] | None:
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
    return tuple(None if number is None else made.get(number) for number in _results(executed))


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    where = mask.nonzero()
    return tuple(where[0].tolist()) if len(where) else ()
