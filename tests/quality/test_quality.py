"""How often the package is right: floors under every score of the accuracy benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = {
    "phase": 0.97,
    "line": 0.95,
    "op": 0.92,
    "cause": 0.85,
    "all": 1.0,
    "samples": 0.9,
    "clean": 1.0,
    "budget": 1.0,
}
"""The least share of cases in which each score may be right; scripts/quality.py says what it means."""


@pytest.fixture(scope="module")
def quality(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Run the benchmark, in a process that has nothing but torch loaded: it forks one more for each case."""
    path = tmp_path_factory.mktemp("quality") / "scores.json"
    command = [sys.executable, str(ROOT / "scripts" / "quality.py"), "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603  (our own script)
    scores: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return scores


@pytest.mark.parametrize("score", FLOORS)
def test_floor(score: str, quality: Mapping[str, Any]) -> None:
    """The share of cases that come out right does not fall below its floor."""
    good, of = quality["totals"][score]
    missed = [entry["case"] for entry in quality["results"] if not (entry["row"] or {score: False}).get(score, True)]
    assert good / of >= FLOORS[score], f"{score} missed in {', '.join(missed)}"


def test_every_case_comes_to_an_end(quality: Mapping[str, Any]) -> None:
    """No case runs into its time limit or raises."""
    assert {entry["case"]: entry["error"] for entry in quality["results"] if entry["row"] is None} == {}
