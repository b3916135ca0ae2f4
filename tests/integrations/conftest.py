"""What the tests of the integrations share: no warnings of other packages, and a folder of their own to write to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let other packages warn, and not the guard."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default", "error::bisect_nan.loop.mistakes.LoopMistake"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder: trainers write logs next to themselves."""
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
