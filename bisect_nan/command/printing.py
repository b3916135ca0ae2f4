"""What every command prints in the same way: its tables, its messages, and an error that ends it."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from bisect_nan.command.child import USAGE
from bisect_nan.errors import BisectNanError


def show(renderable: RenderableType) -> None:
    """Print tables on standard output: for a terminal in its width and colours, else as `plain` text."""
    out = Console()
    if out.is_terminal:
        out.print(renderable)
    else:
        typer.echo(plain(renderable))


def plain(renderable: RenderableType) -> str:
    """Return tables as text that is not wrapped to any width, without the spaces that fill it."""
    out = Console(width=10_000, color_system=None)
    with out.capture() as captured:
        out.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def say(message: str) -> None:
    """Print a message on standard error, its first words in colour."""
    text = Text(message)
    text.highlight_regex(r"^error:", "bold red")
    text.highlight_regex(r"(?m)^(expected|do this):", "bold")
    Console(stderr=True).print(text, soft_wrap=True)


def refuse(error: BisectNanError) -> NoReturn:
    """Print an error and end with the status for wrong usage."""
    say(f"error: {error}")
    raise typer.Exit(USAGE)
