"""`bisect-nan checkpoints`: the first checkpoint of a folder whose numbers are spoilt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bisect_nan.command.child import CANNOT_TELL, CLEAN, LOCATED
from bisect_nan.command.meter import meter
from bisect_nan.command.printing import refuse, show, tell
from bisect_nan.errors import TargetError


def checkpoints(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False, help="A folder of checkpoints.")],
    *,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as JSON on stdout, and nothing else there.")
    ] = False,
) -> None:
    """Find the first checkpoint of a folder with NaN or Inf in its weights or its optimizer's state.

    Reads `*.pt`, `*.pth`, `*.bin`, `*.ckpt` and `*.safetensors` files, and folders of one checkpoint each, such as
    `checkpoint-500/`, in the order of their numbers; nothing in them is executed. Of K checkpoints at most ceil(log2 K) + 1 are
    read, one tensor at a time.
    """
    from bisect_nan.checkpoints.first import first_bad_checkpoint  # noqa: PLC0415  (torch, which --help does without)

    try:
        with meter(Console(stderr=True)) as progress:
            found = first_bad_checkpoint(folder, progress=progress)
    except TargetError as error:
        refuse(error)
    if as_json:
        tell(json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n")
    elif Console().is_terminal:
        show(found, soft_wrap=True)
    else:
        tell(f"{found}\n")
    if found.first is not None:
        raise typer.Exit(LOCATED)
    raise typer.Exit(CLEAN if found.certain else CANNOT_TELL)
