"""Pages for readers are executed: their fenced blocks, and the parts that are made from the code."""

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

ROOT = Path(__file__).resolve().parents[1]
DONE = "--- done ---"

Shell = Callable[[list[str]], list[tuple[str, int]]]
"""Runs commands in one shell; returns output and exit status of each."""


def shell_in(folder: Path) -> Shell:
    """Return a shell that knows `bisect-nan`, in a folder where it sees fixtures/ and may write."""
    (folder / "fixtures").symlink_to(ROOT / "fixtures")
    program = folder / "bin" / "bisect-nan"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "from bisect_nan.cli import main; main()" "$@"\n')
    program.chmod(0o755)
    before = {"PATH": str(program.parent), "PYTHONPATH": str(ROOT)}
    environment = {**os.environ, **{key: f"{new}{os.pathsep}{os.environ.get(key, '')}" for key, new in before.items()}}

    def run(commands: list[str]) -> list[tuple[str, int]]:
        lines = [f'{command}\nstatus=$?; echo "{DONE}$status"; (exit $status)' for command in commands]
        done = subprocess.run(  # noqa: S603  (the pages' own commands)
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


def blocks_of(page: Path, language: str) -> list[tuple[int, str]]:
    """Return the fenced blocks of a language: the number of the line before each, and its text."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text[: match.start(1)].count("\n"), match[1]) for match in found]


def commands(transcript: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a console block with the lines of output that it shows."""
    for part in re.split(r"^\$ ", transcript, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


def check_console(page: Path, line: int, transcript: str, shell: Shell) -> None:
    """Run commands: they end with status 0 (clean) or 1 (located), and print what the page shows; three dots stand for the rest."""
    expected = dict(commands(transcript))
    for (command, shown), (text, status) in zip(expected.items(), shell(list(expected)), strict=True):
        assert status in (0, 1), f"{command} in line {line} of {page.name}"
        pattern = "".join(".*" if part == "..." else re.escape(f"{part}\n") for part in shown)
        assert re.fullmatch(pattern or ".*", text, re.DOTALL), (
            f"{command} in line {line} of {page.name} printed\n{text}"
        )


def run_python(page: Path, blocks: list[tuple[int, str]], names: dict[str, Any]) -> None:
    """Run blocks in order; an expression with a value behind it has that value, and the tests that they define pass."""
    name = str(page)  # under which a report finds the lines
    linecache.checkcache(name)
    for line, code in blocks:
        exec(compile("\n" * line + code, name, "exec"), names)  # noqa: S102  (it is our own text)
        for expression, value in re.findall(r"^(\S.*)  # (.+)$", code, re.MULTILINE):
            assert eval(expression, names) == ast.literal_eval(value)  # noqa: S307  (as above)
    for key, value in list(names.items()):
        if key.startswith("test_"):
            value()


def check_part(page: Path, part: str, made: str, *, write: bool, same: Callable[[str], str] = str) -> None:
    """Compare what stands between `<!-- part -->` and `<!-- end -->` with what the code gives, or write it there.

    Args:
        page: The page.
        part: Its name.
        made: What the code gives.
        write: Whether to write it.
        same: Takes out of a text what may differ.
    """
    text = page.read_text(encoding="utf-8")
    marker = re.search(rf"(<!-- {part}\b.*? -->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    assert marker is not None, f"{page.name} has no part {part}"
    if write:
        page.write_text(text[: marker.start(2)] + f"{made}\n" + text[marker.end(2) :], encoding="utf-8")
        return
    assert same(marker[2]) == same(f"{made}\n"), "pytest --refresh-golden writes it anew"
