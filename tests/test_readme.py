"""README.md and docs/use.md: their commands and code are run, and what is made from the code is what the code gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import ROOT, Shell, blocks_of, check_console, check_part, run_python, shell_in
from layers import LAYERS
from torch import nn

README = ROOT / "README.md"
PAGES = (README, ROOT / "docs" / "use.md")
REPORTED = "bisect-nan run fixtures/all_masked_attention.safetensors"
COST = re.compile(r"\d+ probes, \d+ of (\d+) nodes executed, \d+\.\d+ s")
"""The last line of a report; how long a search takes, and hence where it cuts, differs from run to run."""


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and write paths as README does."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Return a shell in a folder where it sees fixtures/ and may write."""
    return shell_in(tmp_path_factory.mktemp("shell"))


def blocks(language: str) -> list[tuple[tuple[Path, int], str]]:
    """Return the fenced blocks of a language: the page and the number of the line before each, and its text."""
    return [((page, line), text) for page in PAGES for line, text in blocks_of(page, language)]


@pytest.mark.parametrize(("place", "transcript"), blocks("console"))
def test_console(place: tuple[Path, int], transcript: str, shell: Shell) -> None:
    """Commands end with status 0 (clean) or 1 (located), and print what the page shows; three dots stand for the rest."""
    check_console(*place, transcript, shell)


def test_python() -> None:
    """The Python blocks run in order, and an expression with a value behind it has that value."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch = {"input": torch.rand(4, 3), "target": torch.tensor([0, 1, 1, 0])}
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "loader": [batch, batch],
    }
    for page in PAGES:
        run_python(page, blocks_of(page, "python"), names)


def report(shell: Shell) -> str:
    """Return the report on the first screen."""
    ((text, status),) = shell([REPORTED])
    assert status == 1
    return f"```\n$ {REPORTED}\n{text}```"


def tree() -> str:
    """Return one line for each file: the first line of its docstring."""
    parts: list[str] = []
    for layer, modules in reversed(LAYERS.items()):
        names = [name.replace(".", "/") for name in reversed(modules.split())]
        files = [
            f"bisect_nan/{name}{'/__init__' if (ROOT / 'bisect_nan' / name).is_dir() else ''}.py" for name in names
        ]
        parts.append(listing(layer, files))
    for title, folder in (("Scripts", "scripts"), ("Crash files to try", "fixtures/models"), ("Tests", "tests")):
        parts.append(listing(title, sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))))
    return "\n\n".join(parts)


def listing(title: str, files: list[str]) -> str:
    """Return a table of files."""
    rows = []
    for file in files:
        text = ast.get_docstring(ast.parse(Path(file).read_text(encoding="utf-8"))) or ""
        rows.append(f"| [{file.removeprefix('bisect_nan/')}]({file}) | {text.splitlines()[0]} |")
    return "\n".join([f"| **{title}** | |", "|---|---|", *rows])


@pytest.mark.parametrize("part", ["report", "tree"])
def test_made_parts(part: str, request: pytest.FixtureRequest) -> None:
    """The report and the list of files are what the code gives today."""
    made = tree() if part == "tree" else report(request.getfixturevalue("shell"))
    write = request.config.getoption("--refresh-golden")
    check_part(README, part, made, write=write, same=lambda text: COST.sub(r"of \1", text))
