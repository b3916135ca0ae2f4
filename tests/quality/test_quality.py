"""How often the package is right: floors under every score of the accuracy benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

FLOORS = {
    "phase": 0.97,
    "line": 0.98,
    "op": 0.92,
    "cause": 0.97,
    "all": 1.0,
    "samples": 0.9,
    "clean": 1.0,
    "verified": 0.9,
    "budget": 1.0,
}
"""The least share of cases in which each score may be right; scripts/quality.py says what it means."""


@pytest.mark.parametrize("score", FLOORS)
def test_floor(score: str, quality: Mapping[str, Any]) -> None:
    """The share of cases that come out right does not fall below its floor."""
    good, of = quality["totals"][score]
    missed = [entry["case"] for entry in quality["results"] if not (entry["row"] or {score: False}).get(score, True)]
    assert good / of >= FLOORS[score], f"{score} missed in {', '.join(missed)}"


def test_every_case_comes_to_an_end(quality: Mapping[str, Any]) -> None:
    """No case runs into its time limit or raises."""
    assert {entry["case"]: entry["error"] for entry in quality["results"] if entry["row"] is None} == {}
