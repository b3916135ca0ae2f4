"""The lines around a line, where its file lies here and still reads as it was recorded."""

from __future__ import annotations

import linecache
import textwrap
from dataclasses import dataclass

from bisect_nan.finding import SourceLine

_AROUND = 4
"""Lines that are shown before and after."""

_WIDEST = 400
"""Characters of a line that are shown."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file.

    Attributes:
        number: 1-based.
        text: Without what all shown lines are indented by.
        here: Whether it is the line that the report speaks of.
    """

    number: int
    text: str
    here: bool


def around(source: SourceLine) -> tuple[Line, ...]:
    """Return a line with its neighbours; the line alone where they cannot be read, or nothing where its text is unknown.

    A crash file may come from a stranger, and a report may be passed on: nothing but Python source is read, and only where the very
    line stands in it that the crash file tells.
    """
    if not source.text:
        return ()
    alone = (Line(source.line, source.text[:_WIDEST], here=True),)
    if not source.file.endswith(".py"):
        return alone
    linecache.checkcache(source.file)
    lines = linecache.getlines(source.file)
    if not 0 < source.line <= len(lines) or lines[source.line - 1].strip() != source.text.strip():
        return alone
    first = max(source.line - _AROUND, 1)
    shown = [line.rstrip()[:_WIDEST] for line in lines[first - 1 : source.line + _AROUND]]
    texts = textwrap.dedent("\n".join(shown)).split("\n")
    found = [Line(number, text, number == source.line) for number, text in enumerate(texts, first)]
    written = [place for place, line in enumerate(found) if line.text]
    return tuple(found[written[0] : written[-1] + 1])
