"""The Markdown report: golden texts, and that no text of a finding turns into markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from test_terminal import FORWARD, LOCATED, REPORTS

from bisect_nan.finding import Link
from bisect_nan.reports.markdown import code, fence, prose

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TEXTS = st.text(st.sampled_from("ab1 `\\*_[]()<>#|~&!.-+=:/@\"'\n\r\x1b\u202e"), max_size=30) | st.text(max_size=30)


def tokens(text: str) -> Iterator[Token]:
    """Yield what a text is made of, blocks and what stands in them."""
    for token in PARSER.parse(text):
        yield token
        yield from token.children or []


def shown(text: str) -> str:
    """Return a text as a report shows it: on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str, golden: Callable[[str, str], None]) -> None:
    """A finding of each kind is reported word for word as in tests/golden."""
    golden(f"{name}.md", REPORTS[name].to_markdown())


@given(TEXTS)
def test_a_sentence_is_no_markup(text: str) -> None:
    """Whatever stands in it is read as it is written, and only backticks make code of it."""
    found = list(tokens(prose(text)))
    assert {token.type for token in found} <= {"paragraph_open", "inline", "paragraph_close", "text", "code_inline"}
    read = "".join(token.content for token in found if token.type in ("text", "code_inline"))
    assert read.replace("`", "").split() == shown(text).replace("`", "").split()


@given(TEXTS)
def test_a_code_span_holds_its_text(text: str) -> None:
    """Backticks in it do not end it."""
    wanted = shown(text).strip()
    assert [token.content for token in tokens(f"at {code(text)}.") if token.type == "code_inline"] == [wanted] * bool(
        wanted
    )


@given(st.lists(TEXTS, max_size=3))
def test_a_block_holds_its_lines(lines: list[str]) -> None:
    """No line ends the block."""
    (token,) = PARSER.parse(fence("python", lines))
    assert token.content == "".join(f"{shown(line)}\n" for line in lines)


@given(TEXTS, TEXTS)
def test_texts_of_a_stranger(text: str, name: str) -> None:
    """A finding whose texts hold markup keeps its form, and holds no link, no image and no HTML but its own."""
    assert FORWARD.source is not None
    evil = replace(FORWARD, source=replace(FORWARD.source, file=name, text=text), module=name, notes=(text,), help=text)
    found = list(tokens(replace(LOCATED, culprits=(evil,)).to_markdown()))
    assert not {"link_open", "image", "html_inline", "s_open", "em_open"} & {token.type for token in found}
    assert [token.content.split("\n")[0] for token in found if token.type == "html_block"] == [
        "<details><summary>Full report</summary>",
        "</details>",
    ]
    assert sum(token.type == "heading_open" for token in found) == 1


def test_a_long_chain_fits_into_a_comment() -> None:
    """The chain is left out where it alone would be longer than a comment may be."""
    chain = tuple(Link(i, "aten.add.Tensor", FORWARD.source) for i in range(5000))
    text = replace(LOCATED, culprits=(replace(FORWARD, chain=chain),)).to_markdown()
    assert len(text) < 65_536
    assert "first at [1, 0, 0]" in text
