"""What every command prints in the same way: its tables, its messages, its answer, and an error that ends it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import NoReturn, TextIO

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from bisect_nan.command import child
from bisect_nan.command.crash import describe_crash
from bisect_nan.errors import BisectNanError


def show(renderable: RenderableType, *, soft_wrap: bool = False) -> None:
    """Print tables on standard output: for a terminal in its width and colours, else as `plain` text.

    Args:
        renderable: What to print.
        soft_wrap: Whether a terminal breaks long lines by itself.
    """
    out = Console()
    tell(_printed(out, renderable, soft_wrap=soft_wrap) if out.is_terminal else f"{plain(renderable)}\n")


def plain(renderable: RenderableType) -> str:
    """Return tables as text that is not wrapped to any width, without the spaces that fill it."""
    text = _printed(Console(file=io.StringIO(), width=10_000, color_system=None), renderable)
    return "\n".join(line.rstrip() for line in text.splitlines())


def tell(text: str) -> None:
    """Write an answer to standard output. That nobody reads it any more (`| head`) changes nothing about the exit status.

    Raises:
        Exit: With the status for wrong usage: there is no room for it.
    """
    try:
        _write(sys.stdout, text)
    except OSError as problem:
        _silence(sys.stdout)
        got = f"got standard output, which cannot be written: {problem.strerror}"
        refuse(
            BisectNanError(got, "a terminal, a pipe, or a file on a disk with room", "make room, or write elsewhere")
        )


def say(message: str) -> None:
    """Print a message on standard error, its first words in colour."""
    text = Text(message)
    text.highlight_regex(r"^error:", "bold red")
    text.highlight_regex(r"(?m)^(expected|do this):", "bold")
    _write(sys.stderr, _printed(Console(stderr=True), text, soft_wrap=True))


def conclude(end: child.Answer | child.Crash, request: child.Request) -> int:
    """Print what the child process has answered, or how it died, and return the exit status."""
    if isinstance(end, child.Crash):
        say(f"error: {describe_crash(end, request)}")
        return child.CANNOT_TELL
    for message in end.messages:
        say(message)
    tell(end.text)
    return end.status


def refuse(error: BisectNanError) -> NoReturn:
    """Print an error and end with the status for wrong usage."""
    say(f"error: {error}")
    raise typer.Exit(child.USAGE)


@contextlib.contextmanager
def letters_escaped() -> Iterator[None]:
    r"""Have standard output write letters that its encoding lacks as escapes (`\xfc`), as standard error does: no answer is lost."""
    if not isinstance(sys.stdout, io.TextIOWrapper):
        yield
        return
    before = sys.stdout.errors
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        sys.stdout.reconfigure(errors=before)


def _printed(console: Console, renderable: RenderableType, *, soft_wrap: bool = False) -> str:
    """Return what a console would print."""
    with console.capture() as captured:
        console.print(renderable, soft_wrap=soft_wrap)
    return captured.get()


def _write(stream: TextIO | None, text: str) -> None:
    """Write to a stream, unless it is closed or nobody reads it."""
    if stream is None:  # closed by whoever started this (`>&-`)
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    """Have what a stream still holds, and whatever follows, written to nowhere: Python would try it once more at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
