"""`bisect-nan watch`: runs a training script as Python would, in this very process, and tells its first non-finite step.

Standard output is the script's. All that is said here, the report included, goes to standard error; `bisect-nan run FILE` gives the
report again on standard output.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import itertools
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from bisect_nan.command.child import LOCATED, QUIET, USAGE
from bisect_nan.command.printing import refuse, say
from bisect_nan.errors import BisectNanError

if TYPE_CHECKING:
    from bisect_nan.watching.watch import Fault, Watch


class OnFault(enum.StrEnum):
    """What happens to the script after its first fault."""

    STOP = "stop"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class Script:
    """What to run, and how to watch it.

    Attributes:
        target: A file, or the name of a module.
        arguments: What the script is given.
        is_module: Whether the target is the name of a module.
        from_step: The first step to be recorded.
        on_fault: What happens after the first fault.
        directory: Where the snapshot goes.
    """

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    from_step: int
    on_fault: OnFault
    directory: Path


class Start(BaseException):  # (no error, and nothing between the command line and its caller may catch it)
    """The command line is read, and says to run this script: outside of typer, which would handle the script's own exceptions."""

    def __init__(self, script: Script) -> None:
        """Carry the script."""
        super().__init__()
        self.script = script


EPILOG = "Exit status: that of the script · 1 when a fault has ended it · 2 usage"

CONTEXT = {"allow_interspersed_args": False}
"""Settings of the command: what follows the script belongs to the script, options as well."""


def watch(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", show_default=False, help="The script to run.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", show_default=False, help="What the script is given.")
    ] = None,
    *,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as after `python -m`.")] = False,
    from_step: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Record from step N on; a step ends with `optimizer.step()`, the first is 0."
        ),
    ] = 0,
    on_fault: Annotated[
        OnFault, typer.Option(help="End the script at the first fault, or let it go on unwatched.")
    ] = OnFault.STOP,
    directory: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the snapshot of the faulty step goes.")
    ] = Path("crashes"),
) -> None:
    """Run a training script, unchanged, and locate the operation that makes its first non-finite step.

    The script runs in this process as `python SCRIPT ARGS` would run it. Loss, gradients, parameters, optimizer state and buffers
    are looked at whenever an optimizer steps. Every step is recorded while it runs, which makes it slower: give --from-step where
    a long training fails late.

    - `bisect-nan watch train.py --lr 3e-4` watches `python train.py --lr 3e-4`.

    - `bisect-nan watch --from-step 800 train.py` runs the first 800 steps at full speed.

    - `bisect-nan watch -m package.train --lr 3e-4` watches `python -m package.train --lr 3e-4`.

    - `torchrun --nproc-per-node 2 -m bisect_nan watch train.py` watches every rank; each writes a file of its own.

    Options of this command stand before the script; all that follows it is the script's.

    The report goes to standard error, since standard output is the script's. `bisect-nan run FILE` shows it again.
    """
    path = Path(script)
    if not module and not (path.is_file() or (path / "__main__.py").is_file()):
        refuse(
            BisectNanError(
                f"got {script}, which is no file", "a Python script", "check the path, or give -m for a module"
            )
        )
    raise Start(Script(script, tuple(arguments or ()), module, from_step, on_fault, directory))


def run(script: Script) -> None:
    """Run a script under watch, in this process and as its main module; its exceptions pass through.

    Raises:
        SystemExit: With status 1: a fault has ended the script. Else the script's own.
    """
    path = _prepared(script)
    if script.is_module and not _is_there(script.target):
        say(
            f"error: {BisectNanError(f'got no module {script.target}', 'one that Python finds from here', 'check the name')}"
        )
        raise SystemExit(USAGE)
    from bisect_nan.watching import watch as machinery  # noqa: PLC0415  (imports torch, which the command line does without)

    watcher = _Watcher(script)
    watched = machinery.Watch(from_step=script.from_step, caught=watcher.caught)
    watched.start()
    try:
        if script.is_module:
            runpy.run_module(script.target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    except BaseException as error:
        watcher.ended(watched, error)
        raise
    else:
        watcher.ended(watched, None)
    finally:
        watched.close()


def _prepared(script: Script) -> str:
    """Set `sys.argv` and `sys.path` up as Python does for a script, and return the script's absolute path."""
    path = Path(script.target)
    sys.argv = [script.target, *script.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path.cwd() if script.is_module else path.resolve().parent)
    return os.path.abspath(path)  # noqa: PTH100  (Path.absolute keeps `..`)


def _is_there(module: str) -> bool:
    """Whether Python finds a module; the packages around it are imported, and whatever they raise passes through."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return False


class _Watcher:
    """Says on standard error what became of a watched script."""

    def __init__(self, script: Script) -> None:
        self._script, self._directory = script, script.directory.absolute()
        self._stopped = self._silent = False

    def caught(self, fault: Fault) -> None:
        """Tell the first fault; end the script if that was asked for."""
        self._told(fault)
        if self._script.on_fault is OnFault.STOP:
            self._stopped = True
            self._end()

    def _told(self, fault: Fault) -> None:
        """Save, locate and tell a fault."""
        self._silent = True
        if fault.snapshot is None:
            _say(f"error: got a parameter that is not finite after step {fault.step}, which was not recorded")
            if fault.problem is None:
                _say(f"do this: start again with --from-step {fault.step}")
            else:
                _say(*str(fault.problem).splitlines())
        else:
            self._tell(fault)

    def ended(self, watched: Watch, error: BaseException | None) -> None:
        """Tell what the script has ended at by itself, or that nothing was found; what it raised goes on its way.

        Raises:
            SystemExit: A fault has ended the script, or should have.
        """
        if self._stopped and error is None:  # it has caught the SystemExit
            self._end()
        if self._silent:
            return
        quiet = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        try:
            fault = watched.ended(None if quiet else error)
        except Exception as problem:  # noqa: BLE001  (the script's own may be on its way, and is not to be replaced)
            _say(f"What ran since the last step cannot be looked into: {problem}")
            fault = None
        if fault is not None:
            self._told(fault)
            if quiet and self._script.on_fault is OnFault.STOP:
                self._end()
        elif quiet:
            self._sum_up(watched)

    def _sum_up(self, watched: Watch) -> None:
        steps, first = watched.steps, self._script.from_step
        if steps == 0:
            _say("No optimizer made a step in this process, so nothing was looked at.")
        elif steps <= first:
            _say(f"{steps} steps, all parameters finite. Nothing was recorded before step {first}.")
        else:
            _say(f"{steps} steps, recorded from step {first} on: all finite.")
        if watched.problem is not None:
            _say(f"{watched.unrecorded} steps could not be recorded, the latest since {watched.problem.got}.")

    def _tell(self, fault: Fault) -> None:
        assert fault.snapshot is not None
        assert fault.snapshot.observed is not None
        _say(f"Step {fault.step}: {fault.snapshot.observed.symptom.describe()}.")
        try:
            path = fault.snapshot.save(_free_path(self._directory, fault.step))
        except (BisectNanError, OSError) as problem:
            _say(f"error: no snapshot was written: {problem}")
            with (
                contextlib.suppress(BisectNanError, OSError),
                tempfile.TemporaryDirectory(prefix="bisect_nan_") as folder,
            ):
                _report(fault.snapshot.save(_free_path(Path(folder), fault.step)))
            return
        shown = Path(os.path.relpath(path)) if path.is_relative_to(Path.cwd()) else path
        _report(shown)
        _say(f"The report again: bisect-nan run {shlex.quote(str(shown))}")

    def _end(self) -> NoReturn:
        raise SystemExit(LOCATED)


def _report(path: Path) -> None:
    """Locate the fault of a snapshot in a process of its own, which tells it on standard error."""
    locate = [sys.executable, "-P", "-W", QUIET, "-m", "bisect_nan", "run", str(path)]
    done = subprocess.run(locate, stdout=sys.__stderr__, check=False)  # noqa: S603  (a command of this package)
    if done.returncode != LOCATED and "RANK" in os.environ:
        _say("If gradients are averaged over ranks, the fault has come from another one: look at its report.")


def _free_path(directory: Path, step: int) -> Path:
    """Return a path that no file has yet, with the rank of the process where it is one of several."""
    name = f"step_{step}" + (f"_rank_{rank}" if (rank := os.environ.get("RANK")) else "")
    endings = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    return next(path for ending in endings if not (path := directory / f"{name}{ending}.safetensors").exists())


def _say(*lines: str) -> None:
    rank = os.environ.get("RANK")
    for line in lines:
        print(f"bisect-nan{f' (rank {rank})' if rank else ''}: {line}", file=sys.__stderr__, flush=True)
