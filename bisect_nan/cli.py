"""The command line: what `bisect-nan` and its commands take and print.

This process imports no torch for `run` and `inspect`, so that `--help` and a mistyped option answer at once; the work is done
in a child process (see `bisect_nan.command.child`).
"""

from __future__ import annotations

import enum
import importlib.metadata
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from bisect_nan.command import child, mcp, watching
from bisect_nan.command.checkpoints import checkpoints
from bisect_nan.command.inspection import read_snapshot, to_renderable
from bisect_nan.command.meter import meter
from bisect_nan.command.printing import conclude, letters_escaped, refuse, say, show, tell
from bisect_nan.command.repro import repro
from bisect_nan.command.schema import schema
from bisect_nan.errors import BisectNanError, TargetError

app = typer.Typer(
    name="bisect-nan",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_STATUS = (
    "Exit status: 0 clean · 1 located · 2 usage or unreadable file"
    " · 125 cannot tell (not reproduced, flaky, the case's own code raised, killed)"
)

_LOOKED_UP = "Exit status: 0 told · 2 usage or unreadable file"
"""The same for commands that look something up."""


class Search(enum.StrEnum):
    """How the culprit is searched."""

    BISECT = "bisect"
    SCAN = "scan"


def main() -> None:
    """Run the command line; the entry point of `bisect-nan`."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    hook = sys.excepthook
    try:
        with letters_escaped():
            app()
    except watching.Start as start:
        script = start.script
    except OSError as problem:
        say(f"error: {TargetError.refused(problem)}")
        sys.exit(child.USAGE)
    else:
        return
    sys.excepthook = hook  # typer has set its own
    watching.run(script)


def _show_version(wanted: bool) -> None:
    if wanted:
        tell(f"bisect-nan {importlib.metadata.version('bisect_nan')}\n")
        raise typer.Exit


@app.callback(epilog=_STATUS)
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Find the one operation that made a training step NaN or Inf, and say what to change.

    - `bisect-nan watch train.py` runs a training script, and tells its first fault.

    - `bisect-nan run crashes/step_812.safetensors` tells the fault of a crash snapshot, which `watch` and a `Guard` write.
    """


@app.command(epilog=_STATUS)
def run(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET",
            show_default=False,
            help="A crash snapshot (`*.safetensors`), a case file (`*.py`), saved tensors, or a checkpoint (file or folder).",
        ),
    ],
    *,
    model: Annotated[
        str, typer.Option(metavar="MODULE:CALLABLE", help="Builds the model, for a target that holds only tensors.")
    ] = "",
    weights: Annotated[
        str, typer.Option(metavar="FILE", help="Weights for that model: a state dict, a checkpoint, or its folder.")
    ] = "",
    batch: Annotated[
        str, typer.Option(metavar="FILE", help="The saved batch, for a target that holds only weights.")
    ] = "",
    loss: Annotated[
        str, typer.Option(metavar="MODULE:CALLABLE", help="Called as `loss(output, target)`, if the model does not.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the finding as JSON on stdout, and nothing else there.")
    ] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the report as Markdown, for a pull request or an issue.")
    ] = False,
    github: Annotated[
        bool,
        typer.Option("--github", help="Add annotations of GitHub Actions, which mark the lines of a pull request."),
    ] = False,
    sarif: Annotated[
        str, typer.Option(metavar="FILE", help="Write the finding as SARIF 2.1.0, too, for code scanning.")
    ] = "",
    search: Annotated[
        Search, typer.Option(help="How to search; `scan` checks after every node: simpler and slower.")
    ] = Search.BISECT,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to run, such as `cpu` or `cuda:0`; else where it was recorded.")
    ] = "",
    save: Annotated[
        str, typer.Option(metavar="FILE", help="Keep the snapshot that was captured from a case or from tensors.")
    ] = "",
    html: Annotated[
        str, typer.Option(metavar="FILE", help="Write the report as one page of HTML as well, with pictures.")
    ] = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Add the chain, the probed cuts, the times and the environment.")
    ] = False,
) -> None:
    """Locate the operation that made a step non-finite, and say why.

    - `bisect-nan run crash.safetensors` looks at a snapshot that `watch` or a `Guard` saved; no code of the model is needed.

    - `bisect-nan run case.py --save crash.safetensors` captures the step of a file that has a function
      `build()` which returns `{"model": ..., "batch": ..., "step": step(model, batch) -> loss}`.

    - `bisect-nan run crash_step_812.pt --model net.py:build --weights last.pt --loss torch.nn.functional:mse_loss`
      puts a step together from saved tensors, a model and a loss.

    - `bisect-nan run checkpoint-500 --model net.py:build --batch batch.pt` does so from a checkpoint.

    - `git bisect run bisect-nan run case.py` finds the commit that brought a fault.
    """
    if not target.exists():
        refuse(
            BisectNanError(
                f"got {target}, which is no file", "a snapshot, a case file or saved tensors", "check the path"
            )
        )
    if save and target.suffix == ".safetensors" and not (model or loss):
        refuse(
            BisectNanError(
                "got --save together with a snapshot", "a case file or saved tensors", "copy the file instead"
            )
        )
    if as_json + as_markdown + github > 1:
        got = "got more than one of --json, --markdown and --github"
        refuse(BisectNanError(got, "one form for standard output", "run once for each, or write others to files"))
    out = Console()
    with tempfile.TemporaryDirectory(prefix="bisect_nan_", ignore_cleanup_errors=True) as scratch:
        request = child.Request(
            target=str(target),
            model=model,
            weights=weights,
            batch=batch,
            loss=loss,
            device=device,
            search=search.value,
            save=save,
            html=html,
            json=as_json,
            markdown=as_markdown,
            github=github,
            sarif=sarif,
            verbose=verbose,
            colour=out.color_system if out.is_terminal else None,
            scratch=scratch,
        )
        try:
            status = _attend(request)
        except KeyboardInterrupt:
            status = child.INTERRUPTED
    raise typer.Exit(status)


app.command(epilog=watching.EPILOG, context_settings=watching.CONTEXT)(watching.watch)


@app.command(epilog=_LOOKED_UP)
def explain(
    name: Annotated[str, typer.Argument(metavar="CAUSE", show_default=False, help="A cause, such as `log_of_zero`.")],
) -> None:
    """Explain a cause: what happens, an example, and what to change."""
    from bisect_nan import causes  # noqa: PLC0415  (the catalog imports torch; no other command needs it here)

    try:
        text = causes.explain(name)
    except causes.UnknownCause as error:
        refuse(error)
    if Console().is_terminal:
        show(Markdown(text))
    else:
        tell(text)


@app.command("causes", epilog=_LOOKED_UP)
def list_causes() -> None:
    """List every cause that can be named, with its summary."""
    from bisect_nan.causes import CAUSES  # noqa: PLC0415  (as in explain)

    table = Table(box=None, pad_edge=False)
    table.add_column("cause", style="bold", no_wrap=True)
    table.add_column("summary")
    for cause in CAUSES:
        table.add_row(cause.name, cause.summary.replace("`{op}`", "the operation"))
    show(table)


@app.command(epilog=_LOOKED_UP)
def inspect(
    snapshot: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT", show_default=False, help="A crash snapshot (`*.safetensors`).")
    ],
    *,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every tensor and every step of the history.")
    ] = False,
) -> None:
    """Show what a snapshot holds, without executing any of it."""
    try:
        manifest = read_snapshot(snapshot)
    except BisectNanError as error:
        refuse(error)
    show(to_renderable(snapshot, manifest, everything=verbose))


app.command(
    epilog="Exit status: 0 script written and checked · 2 usage or unreadable file · 125 there is no such script"
)(repro)
app.command(epilog=_STATUS)(checkpoints)
app.command(epilog=_LOOKED_UP)(schema)
app.command(epilog=mcp.EPILOG)(mcp.mcp)


def _attend(request: child.Request) -> int:
    """Have a request done, once more with care if something killed the child; print the answer, return the exit status."""
    with meter(Console(stderr=True)) as progress:
        end = child.attend(request, progress)
        if isinstance(end, child.Crash) and not end.wanted:
            request = replace(request, careful=True)
            end = child.attend(request, progress)
    return conclude(end, request)
