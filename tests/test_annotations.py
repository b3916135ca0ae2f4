"""Annotations of GitHub Actions: the runner reads back what was said, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_terminal import CLEAN, DEPTH, FORWARD, LOCATED, LOST, SEVERAL

from bisect_nan.finding import SourceLine
from bisect_nan.reports import to_annotations


def read(line: str) -> tuple[str, dict[str, str], str]:
    """Read a workflow command as the runner does: https://github.com/actions/runner, ActionCommand.TryParseV2."""
    match = re.fullmatch(r"::(\w+) (.*?)::(.*)", line)
    assert match is not None
    pairs = dict(pair.split("=", 1) for pair in match[2].split(",") if pair)

    def back(text: str) -> str:
        for code, char in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
            text = text.replace(code, char)
        return text

    return match[1], {key: back(value) for key, value in pairs.items()}, back(match[3])


def test_the_line_is_marked() -> None:
    """File, line and cause are given, and the message holds the notes and the change."""
    name, properties, text = read(to_annotations(LOCATED).rstrip("\n"))
    assert name == "error"
    assert properties == {"file": "model.py", "line": "19", "title": "softmax_all_masked"}
    assert text.splitlines()[0] == "`softmax` made the first NaN: 25 of 50 values"
    assert text.splitlines()[-1] == "verified: loss 2.31412, all 24 gradients finite"


def test_each_group_has_its_line() -> None:
    """Several faults are several annotations; one without a line of code has no file."""
    lines = to_annotations(replace(SEVERAL, culprits=(*SEVERAL.culprits, DEPTH))).splitlines()
    assert [read(line)[1].get("file") for line in lines] == ["model.py", "loss.py", None]


def test_where_nothing_is_blamed() -> None:
    """A clean step has none, and one that cannot be told has a warning."""
    assert to_annotations(CLEAN) == ""
    name, properties, text = read(to_annotations(LOST).rstrip("\n"))
    assert (name, properties) == ("warning", {"title": "not reproduced"})
    assert LOST.environment[1] in text.splitlines()


@given(st.text(max_size=30), st.text(max_size=30))
def test_texts_of_a_stranger(file: str, note: str) -> None:
    """No path and no note ends its command, starts another one, or adds a property."""
    culprit = replace(FORWARD, source=SourceLine(file, 3, "f", ""), notes=(note,), remedy=None, help="")
    (line,) = to_annotations(replace(LOCATED, culprits=(culprit,))).split("\n")[:-1]
    _, properties, text = read(line)
    plain = "".join(char if char.isprintable() or char in "\r\n" else " " for char in f"{file}\0{note}")
    assert properties.keys() == {"file", "line", "title"}
    assert properties["file"] == plain[: len(file)]
    assert text == f"`softmax` made the first NaN: 25 of 50 values\n{plain[len(file) + 1 :]}"


@pytest.mark.parametrize("text", ["a%0Ab", "50%", "%25", "a:b,c", "x\r\n::error::y"])
def test_escapes_are_read_back(text: str) -> None:
    """What looks like an escape already stays what it is."""
    culprit = replace(FORWARD, source=SourceLine(text, 3, "f", ""), notes=(text,))
    _, properties, message = read(to_annotations(replace(LOCATED, culprits=(culprit,))).rstrip("\n"))
    assert properties["file"] == text
    assert text in message
