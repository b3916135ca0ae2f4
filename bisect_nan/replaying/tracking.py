"""What autograd tracked in a recorded step: where gradients are left, and which calls it did not see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from bisect_nan.finding import Phase
from bisect_nan.recording.applications import RECOMPUTING
from bisect_nan.recording.program import Application, Node, Program, Tracking
from bisect_nan.replaying.stretch import Stretch


def saved(program: Program) -> list[int]:
    """Return the values of the forward pass that the recorded backward code of Functions reads."""
    made = {number for node in program.nodes if node.phase is Phase.FORWARD for number in node.outputs}
    nodes = [node for use in program.applications for node in program.nodes[use.first : use.last]]
    read = {number for node in nodes for number in node.inputs()}
    inputs = {number for use in program.applications for number in use.inputs if number is not None}
    return sorted((read | inputs) & {number for number in made if number is not None})


def recorded_uses(stretch: Stretch) -> dict[int, list[Application]]:
    """Return the uses of Functions whose backward code is known, by the call behind which all that they returned is there."""
    makers = {number: node.index for node in reversed(stretch.nodes) for number in node.outputs if number is not None}
    found: dict[int, list[Application]] = {}
    for use in stretch.program.applications:
        outputs = [number for number in use.outputs if number is not None]
        if outputs and all(number in makers for number in outputs):
            found.setdefault(max(makers[number] for number in outputs), []).append(use)
    return found


def without_graph(
    stretch: Stretch, applications: Mapping[int, Sequence[Application]]
) -> tuple[set[int], set[int], tuple[str, ...]]:
    """Find calls that autograd did not see though it tracked what they made: inside of Functions and of scripted code, and views.

    Returns:
        The calls; the placeholders that gradients are left in; the names of the custom Functions among them.
    """
    program = stretch.program
    makers: dict[int, Node] = {}
    for node in stretch.nodes:
        for number in node.outputs:
            if number is not None:
                makers.setdefault(number, node)
    within: set[int] = set()
    wanted = {number for number in stretch.targets if program.values[number].function}
    leaves: set[int] = set()
    for node in reversed(stretch.nodes):
        for use in applications.get(node.index, ()):
            if wanted.intersection(use.outputs):
                wanted.difference_update(use.outputs)
                inputs = {given for given in use.inputs if given is not None}
                wanted |= inputs
                leaves |= inputs
        if any(node.tracked):
            uses = list(zip(node.inputs(), node.tracked, strict=False))
            wanted |= {number for number, tracking in uses if tracking is Tracking.GRAPH}
            leaves |= {number for number, tracking in uses if tracking is Tracking.LEAF}
            continue
        made = [n for n in [*node.outputs, *node.written] if n in wanted and n in makers and not any(makers[n].tracked)]
        if made:
            within.add(node.index)
            wanted.update(node.inputs())
    leaves |= {p.value for p in program.placeholders if p.phase is Phase.PARAMETER and p.value in wanted}
    names = {program.values[n].function for n in wanted if n in makers and makers[n].index in within} - {""}
    custom = sorted(name.removesuffix("Backward") for name in names if name not in RECOMPUTING)
    return within, leaves, tuple(custom)


def materialised(node: Node, stretch: Stretch) -> Iterator[int]:
    """Yield the values that torch made of lazily conjugated or negated views below autograd, which knows only the views."""
    values = stretch.program.values
    if node.target is torch.ops.aten.clone.default and any(values[n].conj or values[n].neg for n in node.inputs()):
        yield from (number for number in node.outputs if number is not None)
