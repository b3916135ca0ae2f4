"""One of two processes that train together: `python ranks.py SCENARIO RANK FOLDER` prints what its guard says as JSON."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from faults import Batch, Net, batches, loss_of
from torch import nn

from bisect_nan import NonFiniteStep
from bisect_nan.integrations import distributed

WORLD = 2
FAULTY = 2
"""The batch with the fault."""
FAULTS = {
    "healthy": "",
    "loss": "loss",
    "gradient": "gradient",
    "accumulated": "gradient",
    "talks": "gradient",
    "left": "gradient",
}
"""Scenario: what rank 1's batch makes bad."""


class Normed(Net):
    """Running statistics are buffers, which DDP broadcasts before each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


def train(scenario: str, rank: int, folder: Path, *, guarded: bool = True) -> nn.Module:
    """Train as one of the ranks, and return the model."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Normed())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = batches(6, FAULTS[scenario] if rank == 1 else "", at=FAULTY)
    torch.manual_seed(rank)

    def step(network: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        if scenario == "talks":
            dist.all_reduce(torch.ones(1))
        scores = (model if scenario == "accumulated" else network)(batch["x"])
        # The bad loss is a constant here: no gradient would tell the other rank of it.
        return {"loss": loss_of(scores, batch)}

    if guarded:
        guard = distributed.guard_for(model, optimizer, directory=folder)
        step = guard.watch(step)
        if scenario == "left" and rank == 0:
            guard.close()
    for number, batch in enumerate(data):
        waits = scenario == "accumulated" and number % 2 == 0
        with model.no_sync() if waits else contextlib.nullcontext():
            step(model, batch)["loss"].backward()
        if not waits:
            optimizer.step()
            optimizer.zero_grad()
        if scenario == "left" and number == FAULTY:
            break
    return model


def outcome(scenario: str, rank: int, folder: Path) -> dict[str, object]:
    """Return what comes of a scenario on this rank."""
    if scenario == "healthy":
        states = [train(scenario, rank, folder, guarded=guarded).state_dict() for guarded in (True, False)]
        return {"same": all(torch.equal(states[0][name], states[1][name]) for name in states[0])}
    try:
        train(scenario, rank, folder)
    except NonFiniteStep as fault:
        return {"message": str(fault), "path": str(fault.path)}
    return {"message": ""}


def main() -> None:
    """Join the other rank, and run the scenarios one after the other."""
    rank, folder, scenarios = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    patience = dt.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD, timeout=patience
    )
    for scenario in scenarios:
        distributed._PATIENCE = dt.timedelta(seconds=1 if scenario == "left" else 60)
        said = {"scenario": scenario, **outcome(scenario, rank, folder / scenario)}
        sys.stdout.write(json.dumps(said) + "\n")
        dist.barrier()  # the training's own group still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
