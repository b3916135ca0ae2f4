"""README.md: its commands and code are run, and the parts that are made from the code are those that the code gives."""

from __future__ import annotations

import ast
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import LAYERS
from torch import nn

from bisect_nan.causes import CAUSES

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
REPORTED = "bisect-nan run fixtures/all_masked_attention.safetensors"
COST = re.compile(r"\d+ probes, \d+ of (\d+) nodes executed, \d+\.\d+ s")
"""The last line of a report; how long a search takes, and hence where it cuts, differs from run to run."""
DONE = "--- done ---"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read and write paths as README does."""
    monkeypatch.chdir(ROOT)


Shell = Callable[[list[str]], list[tuple[str, int]]]
"""Runs commands in one shell; returns output and exit status of each."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Return a shell that knows `bisect-nan`, in a folder where it sees fixtures/ and may write."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    program = folder / "bin" / "bisect-nan"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from bisect_nan.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    before = {"PATH": str(program.parent), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **{key: f"{new}{os.pathsep}{os.environ.get(key, '')}" for key, new in before.items()}}

    def run(commands: list[str]) -> list[tuple[str, int]]:
        lines = [f'{command}\nstatus=$?; echo "{DONE}$status"; (exit $status)' for command in commands]
        done = subprocess.run(  # noqa: S603  (README's own commands)
            ["/bin/sh", "-c", "\n".join(lines)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        parts = re.split(f"{DONE}(\\d+)\n", done.stdout)
        return [(text, int(status)) for text, status in zip(parts[::2], parts[1::2], strict=False)]

    return run


def blocks(language: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of a language: the number of the line before each, and its text."""
    text = README.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def commands(transcript: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a console block with the lines of output that it shows."""
    for part in re.split(r"^\$ ", transcript, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


@pytest.mark.parametrize(("line", "transcript"), blocks("console"))
def test_console(line: int, transcript: str, shell: Shell) -> None:
    """Commands end with status 0 (clean) or 1 (located), and print what README shows; three dots stand for the rest."""
    expected = dict(commands(transcript))
    for (command, shown), (text, status) in zip(expected.items(), shell(list(expected)), strict=True):
        assert status in (0, 1), f"{command} in line {line}"
        pattern = "".join(".*" if part == "..." else re.escape(f"{part}\n") for part in shown)
        assert re.fullmatch(pattern or ".*", text, re.DOTALL), f"{command} in line {line} printed\n{text}"


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
    linecache.checkcache("README.md")
    for line, code in blocks("python"):
        exec(compile("\n" * line + code, "README.md", "exec"), names)  # noqa: S102  (it is our own text)
        for expression, value in re.findall(r"^(\S.*)  # (.+)$", code, re.MULTILINE):
            assert eval(expression, names) == ast.literal_eval(value)  # noqa: S307  (as above)
    for name, value in names.items():
        if name.startswith("test_"):
            value()


def report(shell: Shell) -> str:
    """Return the report on the first screen."""
    ((text, status),) = shell([REPORTED])
    assert status == 1
    return f"```\n$ {REPORTED}\n{text}```"


def causes() -> str:
    """Return the table of causes."""
    rows = [f"| `{cause.name}` | {cause.summary.replace('`{op}`', 'the operation')} |" for cause in CAUSES]
    return "\n".join(["| cause | what happens |", "|---|---|", *rows])


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


@pytest.mark.parametrize("part", ["report", "causes", "tree"])
def test_made_parts(part: str, request: pytest.FixtureRequest) -> None:
    """The report, the table of causes and the list of files are what the code gives today."""
    made = {"causes": causes, "tree": tree, "report": lambda: report(request.getfixturevalue("shell"))}[part]()
    text = README.read_text(encoding="utf-8")
    marker = re.search(rf"(<!-- {part}\b.*? -->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    assert marker is not None
    if request.config.getoption("--refresh-golden"):
        README.write_text(text[: marker.start(2)] + f"{made}\n" + text[marker.end(2) :], encoding="utf-8")
        return
    refresh = "pytest tests/test_readme.py --refresh-golden writes it anew"
    assert COST.sub(r"of \1", marker[2]) == COST.sub(r"of \1", f"{made}\n"), refresh
