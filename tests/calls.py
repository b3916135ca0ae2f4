"""Single calls with live values, for tests of what looks at one call."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bisect_nan import Snapshot
from bisect_nan.recording.program import Program
from bisect_nan.replaying.replay import Executed, Run
from bisect_nan.replaying.stretch import Checkpoint, Stretch


def stretch_of(program: Program) -> Stretch:
    """Return the whole program, ready to run, its loss kept to the end."""
    return Stretch(program, range(len(program.nodes)), [program.targets.loss])


def run_all(snapshot: Snapshot) -> tuple[list[Executed], Stretch, Checkpoint]:
    """Execute a snapshot's program and return all of its calls, and what to run it again with."""
    stretch = stretch_of(snapshot.program)
    start, calls = stretch.start(snapshot.tensors()), list[Executed]()
    Run(stretch, start).advance(len(stretch), calls.append)
    return calls, stretch, start


def call(function: Callable[..., torch.Tensor], *tensors: torch.Tensor, op: str) -> tuple[Executed, int]:
    """Run a function of tensors and return its first call whose name starts with `op`, with the number of its first result."""

    def step(_: None, batch: list[torch.Tensor]) -> torch.Tensor:
        result = function(*batch)
        return (result if result.is_floating_point() or result.is_complex() else result.float()).sum().real

    calls, *_ = run_all(Snapshot.capture(None, list(tensors), step))
    found = [executed for executed in calls if executed.node.target._schema.name.startswith(f"aten::{op}")]
    return found[0], next(iter(found[0].content))


def numbers(executed: Executed) -> list[int]:
    """Return the value numbers of a call's tensor arguments, in order."""
    return list(executed.inputs)
