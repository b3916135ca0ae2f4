"""Two processes that train together name the one that failed first, and neither waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import FAULTS, WORLD

from bisect_nan import Snapshot, Verdict, locate

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Any]]:
    """Return what came of every scenario on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    places = os.pathsep.join(map(str, (HERE, HERE.parents[1])))
    ranks = [
        subprocess.Popen(  # noqa: S603  (our own script)
            [sys.executable, str(HERE / "ranks.py"), str(rank), str(folder), *FAULTS],
            env={**os.environ, "PYTHONPATH": places},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        printed = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    lines = [(number, json.loads(line)) for number, text in enumerate(printed) for line in text.splitlines()]
    return {(said["scenario"], number): said for number, said in lines}


Outcomes = dict[tuple[str, int], dict[str, Any]]


@pytest.mark.parametrize("scenario", ["loss", "gradient", "accumulated"])
def test_the_rank_is_named(scenario: str, outcomes: Outcomes) -> None:
    """Both ranks stop in the same step and name rank 1 and its snapshot, which tells line and sample; rank 0 writes none."""
    messages = {outcomes[scenario, rank]["message"] for rank in range(WORLD)}
    assert len(messages) == 1
    assert "rank 1 failed first" in messages.pop()
    (path,) = {Path(outcomes[scenario, rank]["path"]) for rank in range(WORLD)}
    assert path.parent.name == "rank1"
    assert list(path.parents[1].rglob("*.safetensors")) == [path]
    finding = locate(Snapshot.load(path))
    assert finding.verdict is Verdict.LOCATED
    assert finding.culprit is not None
    assert finding.culprit.source is not None
    assert finding.culprit.source.text.endswith(f"# {FAULTS[scenario]}")
    assert finding.culprit.samples == (2,)


def test_a_step_that_talks(outcomes: Outcomes) -> None:
    """It is not run again, as the other rank might not answer, and that is said."""
    for rank in range(WORLD):
        assert "talks to other processes (c10d.allreduce_" in outcomes["talks", rank]["message"]
        assert "ranks 0 and 1 cannot tell" in outcomes["talks", rank]["message"]


def test_a_rank_that_does_not_answer(outcomes: Outcomes) -> None:
    """The other one gives up, tells what it knows, and the training's own process group goes on."""
    assert outcomes["left", 0]["message"] == ""
    assert "rank 1 failed first; rank 0 cannot tell" in outcomes["left", 1]["message"]


def test_a_healthy_training_is_the_same(outcomes: Outcomes) -> None:
    """With guards it gives the same numbers as without, bit by bit."""
    assert all(outcomes["healthy", rank]["same"] for rank in range(WORLD))
