"""`bisect-nan mcp`: answers a coding agent in an editor over standard input and output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from bisect_nan.command.printing import refuse, say
from bisect_nan.errors import BisectNanError

EPILOG = "Exit status: 0 when the client has closed the connection · 2 usage"

_EXTRA = ("mcp", "mcp_types", "anyio", "pydantic")
"""The SDK, and what comes with it."""


def mcp(
    *,
    allow_code: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            help="A case file, or a folder of such, that clients may have executed; give it again for more.",
        ),
    ] = None,
) -> None:
    """Serve coding agents, as a server of the Model Context Protocol on standard input and output (extra `mcp`).

    Its tools are `run`, `repro`, `explain` and `inspect`. They take crash snapshots, of which no code is executed; case files
    (`*.py`) only where --allow-code names them. An editor starts the server by itself, once its settings hold this command:

    - `{"mcpServers": {"bisect-nan": {"command": "bisect-nan", "args": ["mcp"]}}}`

    Give the full path of `bisect-nan` where it lies in a virtual environment.
    """
    for path in allow_code or ():
        if not path.exists():
            refuse(BisectNanError(f"got --allow-code {path}, which is no file", "a file or a folder", "check the path"))
    try:
        from bisect_nan.command.mcp_server import serve  # noqa: PLC0415  (an extra)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        got = f"got no package {error.name}, which the server stands on"
        refuse(BisectNanError(got, "the extra mcp", "pip install 'bisect_nan[mcp]'"))
    if sys.stdin.isatty():
        say("Waits for a client on standard input, which an editor is that has started this. Ctrl-C ends it.")
    serve(allow_code or ())
