"""The progress bar of the command line, on stderr, for anything that takes longer than a second."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bisect_nan.command.child import Progress as Callback

DELAY = 1.0
"""Seconds before the bar is drawn."""

STAGES = {
    "load": "loading",
    "record": "recording the step",
    "replay": "replaying the step",
    "search": "searching",
    "confirm": "confirming",
    "explain": "explaining",
    "draw": "drawing",
    "remedy": "trying the remedy",
    "reduce": "reducing",
}
"""What the child does, in words, by the names of its stages."""


@contextlib.contextmanager
def meter(console: Console) -> Iterator[Callback]:
    """Draw a bar while the block runs, and take it away at the end.

    Args:
        console: Where to draw; nothing is drawn unless it is a terminal.

    Yields:
        The function to call with the stage, the nodes done and the nodes that it has.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(STAGES["load"], total=None)

    def advance(stage: str, done: int, total: int) -> None:
        bar.update(task, description=STAGES.get(stage, stage), completed=done, total=total or None)

    timer = threading.Timer(DELAY, bar.start)
    timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()  # It may be starting the bar this very moment, which would then never be stopped.
        bar.stop()
