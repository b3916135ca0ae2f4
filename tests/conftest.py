"""Settings and fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The tests' tensors are small: threads that wait for each other on a busy machine cost more than they bring. Read when torch is
# imported, here and in the processes that the tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The first call of a kernel can take a hundred times as long as the next; a deadline would fail at random.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the switch that rewrites the expected reports."""
    text = "write the files in tests/golden anew; then read the diff"
    parser.addoption("--refresh-golden", action="store_true", help=text)


@pytest.fixture(scope="session", autouse=True)
def _plain_output() -> Iterator[None]:
    """Have programs that tests start write plain text of a fixed width, whatever terminal or runner the tests run in."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "FORCE_COLOR",
            "CLICOLOR_FORCE",
            "NO_COLOR",
            "TTY_COMPATIBLE",
            "TTY_INTERACTIVE",
            "GITHUB_ACTIONS",
            "RANK",
        ):
            patch.delenv(name, raising=False)
        patch.setenv("COLUMNS", "120")
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return a function that compares a text with `tests/golden/NAME`; under --refresh-golden it writes that file."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--refresh-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"there is no {path}; run pytest --refresh-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8")

    return compare
