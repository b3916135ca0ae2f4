"""One of two processes that train together: `python rank.py RANK FOLDER` prints what came of each scenario, as JSON."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faults import Batch, Net, batches, loss_of
from torch import nn

from bisect_nan import NonFiniteStep
from bisect_nan.integrations import distributed, ranks

WORLD = 2
FAULTY = 2
"""The batch with the fault, on rank 1."""


@dataclass(frozen=True)
class Scenario:
    """A training of both ranks.

    Attributes:
        fault: What is bad.
        talks: Whether the step has a collective of its own.
        accumulates: Whether gradients are exchanged at every other batch only, and the step refers to DDP by itself.
        leaves: Whether rank 0 stops watching, and ends after the faulty batch.
        scaled: Whether there is a `GradScaler`.
        options: Of the guard.
    """

    fault: str = ""
    talks: bool = False
    accumulates: bool = False
    leaves: bool = False
    scaled: bool = False
    options: dict[str, Any] = field(default_factory=dict)


SCENARIOS = {
    "healthy": Scenario(),
    "loss": Scenario("loss"),
    "gradient": Scenario("gradient"),
    "accumulated": Scenario("gradient", accumulates=True),
    "scaled": Scenario("loss", scaled=True),
    "late": Scenario("loss", options={"deferred": True, "healthy_every": 2}),
    "loss left out": Scenario("loss", options={"on_fault": "skip"}),
    "gradient left out": Scenario("gradient", options={"on_fault": "rollback", "healthy_every": 2}),
    "talks": Scenario("gradient", talks=True),
    "left": Scenario("gradient", leaves=True),
}


class Normed(Net):
    """Running statistics are buffers, which DDP broadcasts before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def train(scenario: Scenario, rank: int, folder: Path, *, guarded: bool = True) -> nn.Module:
    """Train as one of the ranks, and return the model."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Normed())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=scenario.scaled, init_scale=1024.0)
    torch.manual_seed(rank)

    def step(network: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        if scenario.talks:
            dist.all_reduce(torch.ones(1))
        # The bad term of the loss is a constant: no gradient tells the other rank of it by itself.
        return {"loss": loss_of((model if scenario.accumulates else network)(batch["x"]), batch)}

    if guarded:
        options = {"directory": folder, "scaler": scaler if scenario.scaled else None, **scenario.options}
        guard = distributed.guard_for(model, optimizer, **options)
        step = guard.watch(step)
        if scenario.leaves and rank == 0:
            guard.close()
    for number, batch in enumerate(batches(6, scenario.fault if rank == 1 else "", at=FAULTY)):
        waits = scenario.accumulates and number % 2 == 0
        with model.no_sync() if waits else contextlib.nullcontext():
            scaler.scale(step(model, batch)["loss"]).backward()
        if not waits:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if scenario.leaves and number == FAULTY:
            break
    return model.module


def outcome(scenario: Scenario, rank: int, folder: Path) -> dict[str, object]:
    """Return what comes of a scenario on this rank: the parameters in the end, or the message of a fault."""
    try:
        model = train(scenario, rank, folder)
    except NonFiniteStep as fault:
        return {"message": str(fault), "path": str(fault.path)}
    said: dict[str, object] = {"message": "", "state": [value.flatten().tolist() for value in model.parameters()]}
    if not scenario.fault:
        states = model.state_dict(), train(scenario, rank, folder, guarded=False).state_dict()
        said["same"] = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    return said


def main() -> None:
    """Join the other rank, and run the scenarios one after the other."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    patience, store = dt.timedelta(seconds=60), f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=patience)
    for name, scenario in SCENARIOS.items():
        ranks._PATIENCE = dt.timedelta(seconds=1) if scenario.leaves else patience
        said = {"scenario": name, **outcome(scenario, rank, folder / name)}
        sys.stdout.write(json.dumps(said) + "\n")
        dist.barrier()  # the training's own group still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
