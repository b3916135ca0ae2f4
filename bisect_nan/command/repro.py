"""`bisect-nan repro`: a located fault as a short script of torch calls."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bisect_nan.command import child
from bisect_nan.command.meter import meter
from bisect_nan.command.printing import conclude


def repro(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET", show_default=False, help="A crash snapshot (`*.safetensors`) or a case file (`*.py`)."
        ),
    ],
    *,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write the script; else it is printed.")
    ] = "",
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to run, such as `cpu` or `cuda:0`; else where it was recorded.")
    ] = "",
) -> None:
    """Reduce a fault to the shortest script of torch calls that fails in the same way.

    The script holds a few literal tensors and calls, needs nothing but torch, and can be pasted into a bug report. Calls,
    elements and numbers are taken away as long as the same cause is located at the same operation; at the end the script is
    run in a fresh process, where the same has to be located once more.
    """
    with tempfile.TemporaryDirectory(prefix="bisect_nan_", ignore_cleanup_errors=True) as scratch:
        request = child.Request(target=str(target), device=device, scratch=scratch, repro=output or "-")
        try:
            status = _attend(request)
        except KeyboardInterrupt:
            status = child.INTERRUPTED
    raise typer.Exit(status)


def _attend(request: child.Request) -> int:
    """Have the script made, without those attempts that ended the process; print the answer, return the exit status."""
    with meter(Console(stderr=True)) as progress:
        end = child.attend(request, progress)
        for count in child.LEFT_OUT:
            if not isinstance(end, child.Crash) or end.wanted or end.stage != child.REDUCE:
                break
            request = child.without(request, end, count)
            end = child.attend(request, progress)
    return conclude(end, request)
