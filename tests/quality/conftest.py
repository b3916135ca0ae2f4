"""The accuracy benchmark, run once for all tests here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def quality(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """Run the benchmark, in a process that has nothing but torch loaded: it forks one more for each case."""
    path = tmp_path_factory.mktemp("quality") / "scores.json"
    command = [sys.executable, str(ROOT / "scripts" / "quality.py"), "--json", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)  # noqa: S603  (our own script)
    scores: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return scores
