"""Results that print as what rich makes of them: in a terminal, in a log, in a notebook."""

from __future__ import annotations

import html
import io
from abc import ABC, abstractmethod

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_WIDTH = 10_000
"""A log has no width: nothing is wrapped, so that a name stays one word."""


class Printed(ABC):
    """A result with a table: `print(result)` gives plain text, a rich console and a notebook show the same."""

    __slots__ = ()

    @abstractmethod
    def __rich__(self) -> RenderableType:
        """Return the table."""

    def __str__(self) -> str:
        """Return the table as plain text, without a newline at the end."""
        file = io.StringIO()
        Console(file=file, width=_WIDTH, color_system=None, force_terminal=False, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().rstrip().splitlines())

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def table(*columns: str, left: int = 1) -> Table:
    """Return an empty table in the style of the package.

    Args:
        columns: Titles.
        left: So many of the first columns hold words; the others hold numbers.
    """
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, title in enumerate(columns):
        made.add_column(line(title), justify="left" if place < left else "right", overflow="fold")
    return made


def line(text: str, style: str = "") -> Text:
    """Return a text that is no markup; a name may come from a stranger's file, so no control character gets through."""
    return Text("".join(char if char.isprintable() else " " for char in text), style)


def share(part: int, whole: int) -> str:
    """Return a share as percents; one that is not 0 does not look like 0, nor one below 1 like all."""
    if not whole or not part:
        return "0%"
    if part == whole:
        return "100%"
    percents = 100 * part / whole
    return "<0.1%" if percents < 0.1 else f"{min(percents, 99.9):.1f}%"  # noqa: PLR2004  (the last digit shown)
