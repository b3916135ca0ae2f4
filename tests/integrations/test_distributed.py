"""Two processes that train together name the one that failed first, do the same about it, and neither waits for ever."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Net, batches, loss_of, raised
from rank import SCENARIOS, WORLD

from bisect_nan import Snapshot, Verdict, locate
from bisect_nan.integrations.distributed import RankGuard

HERE = Path(__file__).parent
Outcomes = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Return what came of every scenario, rank by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join(map(str, (HERE, HERE.parents[1])))
    ranks = [
        subprocess.Popen(  # noqa: S603  (our own script)
            [sys.executable, str(HERE / "rank.py"), str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        printed = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    said = [{line["scenario"]: line for line in map(json.loads, text.splitlines())} for text in printed]
    return {name: [rank[name] for rank in said] for name in SCENARIOS}


@pytest.mark.parametrize("scenario", ["loss", "gradient", "accumulated", "scaled", "late"])
def test_the_rank_is_named(scenario: str, outcomes: Outcomes) -> None:
    """Both ranks stop in the same step and name rank 1 and its snapshot, which tells line and sample; rank 0 writes none."""
    assert all("rank 1 failed first" in rank["message"] for rank in outcomes[scenario])
    (path,) = {Path(rank["path"]) for rank in outcomes[scenario]}
    assert path.name.startswith("rank1_")
    assert list(path.parent.iterdir()) == [path]
    finding = locate(Snapshot.load(path))
    assert finding.verdict is Verdict.LOCATED
    assert finding.culprit is not None
    assert finding.culprit.source is not None
    assert finding.culprit.source.text.endswith(f"# {SCENARIOS[scenario].fault}")
    assert finding.culprit.samples == (2,)


@pytest.mark.parametrize("scenario", ["loss left out", "gradient left out"])
def test_all_leave_the_step_out(scenario: str, outcomes: Outcomes) -> None:
    """Both ranks go on to the end with the same parameters, all finite."""
    states = [rank["state"] for rank in outcomes[scenario]]
    assert states[0] == states[1]
    assert all(math.isfinite(value) for parameter in states[0] for value in parameter)


def test_a_step_that_talks(outcomes: Outcomes) -> None:
    """It is not run again, as the other rank might not answer, and that is said."""
    for rank in outcomes["talks"]:
        assert "talks to other processes (c10d.allreduce_" in rank["message"]
        assert "ranks 0 and 1 cannot tell" in rank["message"]


def test_a_rank_that_does_not_answer(outcomes: Outcomes) -> None:
    """The other one gives up, tells what it knows, and the training's own process group goes on."""
    assert outcomes["left"][0]["message"] == ""
    assert "rank 1 failed first; rank 0 cannot tell" in outcomes["left"][1]["message"]


def test_a_healthy_training_is_the_same(outcomes: Outcomes) -> None:
    """With guards it gives the same numbers as without, bit by bit."""
    assert all(rank["same"] for rank in outcomes["healthy"])


def test_what_one_rank_alone_sees_is_not_left_out(tmp_path: Path) -> None:
    """A buffer that goes bad is known to its own rank only, so that one raises and does not part from the others."""

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x.detach().square().sum() * 1e38
            return super().forward(x)

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = Counting()
        optimizer = torch.optim.Adam(model.parameters())
        step = RankGuard(model, optimizer, directory=tmp_path, on_fault="skip").watch(
            lambda model, batch: loss_of(model(batch["x"]), batch)
        )
        step(model, batches(1)[0]).backward()
        assert "on rank 0" in str(raised(optimizer.step))
    finally:
        dist.destroy_process_group()
