"""Calls that give other results on the same inputs: what makes a fault come and go although every state is as it was recorded."""

from __future__ import annotations

import torch

from bisect_nan import finite
from bisect_nan.recording.program import Node
from bisect_nan.recording.traits import Traits
from bisect_nan.replaying.replay import Executed, Run
from bisect_nan.replaying.stretch import Checkpoint, Stretch


def doubts(stretch: Stretch, start: Checkpoint, shown: int, of: int, *, compiled: bool) -> list[str]:
    """Return what speaks for a fault outside of the program, each a sentence without a full stop.

    Args:
        stretch: The calls that the symptom needs.
        start: The checkpoint at cut 0.
        shown: Replays from the same state that showed the symptom.
        of: Replays that were made.
        compiled: Whether the step ran under `torch.compile`.
    """
    found = [f"the recorded symptom showed in {shown} of {of} replays from the same state"]
    node = unstable(stretch, start)
    if node is not None:
        source = stretch.program.source(node)
        found.append(
            f"node {node.index} ({node.target}{f' at {source}' if source else ''}) gives other results when it is run twice on the"
            " same inputs: a race in its kernel or a faulty device is to be suspected"
        )
    if compiled:
        found.append(
            "the step ran under torch.compile and is clean when it runs eagerly: the compiled code is at fault; compile with"
            ' backend="aot_eager" to see whether it is Inductor\'s'
        )
    return found


def unstable(stretch: Stretch, start: Checkpoint) -> Node | None:
    """Run every call twice on the same inputs, from the same state of its generator, and return the first that differs.

    Memory that nobody has written to differs by itself and is no result; a view computes nothing.

    Args:
        stretch: The calls.
        start: The checkpoint at cut 0.
    """
    found: list[Node] = []

    def compare(executed: Executed) -> None:
        traits = Traits.of(executed.node.target)
        if found or traits.uninitialized or traits.view:
            return
        again = executed.again(executed.inputs)
        if not all(_same(made, again.get(number)) for number, made in executed.content.items()):
            found.append(executed.node)

    Run(stretch, start).advance(len(stretch), compare)
    return found[0] if found else None


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is None or finite.same(one, other)
