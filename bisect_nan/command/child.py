"""Runs the work of the command line in a process of its own, and says how that process ended.

Kernels exist that crash the process on hostile values, and a snapshot can ask for more memory than there is. So the command
line itself imports no torch: it starts `bisect_nan.command.worker`, reads one JSON object a line from it (progress, then the
answer), and learns from the exit code and the last progress line what a child was doing when something killed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

Progress = Callable[[str, int, int], None]
"""Called with the stage, the nodes done in it and the nodes that it has."""

CLEAN, LOCATED, USAGE, CANNOT_TELL, INTERRUPTED = 0, 1, 2, 125, 130
"""Exit statuses of the command line; 125 makes `git bisect run` skip a commit, 130 is Ctrl-C, as shells count it."""

REDUCE = "reduce"
"""The stage in which scripts are tried, each announced by its number."""

LEFT_OUT = (1, 4, 16, 64, 256)
"""Scripts that are left out after one ended the process, as some kernels do on hostile values: those like it come in a row."""

CAPTURED = "captured.safetensors"
"""Name, in the scratch folder, of the snapshot that a careful run keeps, so that a crash can be tied to its source line."""

_ENDED_ON_PURPOSE = frozenset({signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)})

QUIET = "ignore:Failed to initialize NumPy:UserWarning"
"""torch warns so when it is imported where NumPy is not installed, which nothing here needs."""


@dataclass(frozen=True, slots=True)
class Request:
    """What the child is asked to do: the options of `bisect-nan run`.

    Attributes:
        target: The file or folder to look at.
        model: `module:callable` that builds the model, for a file that holds only tensors.
        weights: File or checkpoint folder with the model's weights.
        batch: File with the batch, where the target holds only weights.
        loss: `module:callable` that is called with output and target.
        device: Where to run; empty for the device of the recording.
        search: `bisect` or `scan`.
        save: Where to keep a snapshot that was captured from the target; empty for nowhere.
        html: Where to write the report as a page of HTML; empty for nowhere.
        json: Whether the answer is JSON instead of the report for people.
        markdown: Whether it is Markdown.
        github: Whether annotations of GitHub Actions follow the report.
        sarif: Where to write the answer as SARIF, too; empty for nowhere.
        verbose: Whether the report shows the chain, the cuts, the times and the environment.
        colour: Colour system of the terminal that the report is for; None for plain text.
        scratch: Folder for files that are needed only while the command runs.
        careful: Whether to announce every node before it runs, and to keep a captured snapshot in `scratch`.
        repro: Where to write the shortest script that fails in the same way, `-` for standard output; empty for a report instead.
        skip: Numbers of scripts on the way to that one that ended an earlier child.
    """

    target: str
    model: str = ""
    weights: str = ""
    batch: str = ""
    loss: str = ""
    device: str = ""
    search: str = "bisect"
    save: str = ""
    html: str = ""
    json: bool = False
    markdown: bool = False
    github: bool = False
    sarif: str = ""
    verbose: bool = False
    colour: str | None = None
    scratch: str = ""
    careful: bool = False
    repro: str = ""
    skip: tuple[int, ...] = ()

    def to_json(self) -> str:
        """Return the form in which the request travels to the child."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child that came to an end of its own says.

    Attributes:
        text: For stdout.
        messages: Lines for stderr.
        status: The exit status.
        finding: The JSON form of the finding; None when there is none, since something went wrong.
    """

    text: str
    messages: tuple[str, ...]
    status: int
    finding: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Crash:
    """A child that ended without an answer.

    Attributes:
        code: Its exit code; the negative signal number when a signal killed it.
        stage: What it was doing last; empty when it never said.
        node: The last index that it announced in that stage; -1 when it announced none.
    """

    code: int
    stage: str = ""
    node: int = -1

    @property
    def signal(self) -> str:
        """Name of the signal that killed the child (`SIGSEGV`), or an empty string."""
        with contextlib.suppress(ValueError):
            return signal.Signals(-self.code).name
        return ""

    @property
    def wanted(self) -> bool:
        """Whether someone ended the child on purpose, so that a second attempt would be unwelcome."""
        return -self.code in _ENDED_ON_PURPOSE


class Hearing:
    """What a child has said so far."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._stage, self._node = "", -1
        self._answer: Answer | None = None

    def hear(self, line: str | bytes) -> tuple[str, int, int] | None:
        """Take one line of the child; return the stage, the nodes done in it and the nodes that it has where it tells of progress."""
        message = _read(line)
        if "progress" in message:
            stage, node, total = message["progress"]
            self._stage, self._node = stage, node if total else -1  # a stage that counts something else
            return stage, node, total
        if "answer" in message:
            self._answer = Answer(message["answer"], tuple(message["messages"]), message["status"], message["finding"])
        return None

    def end(self, code: int) -> Answer | Crash:
        """Return the child's answer, or how it ended without one, once it has ended with this exit code."""
        return self._answer or Crash(code, self._stage, self._node)


def command(request: Request) -> list[str]:
    """Return the command that starts a child; its standard output is for `Hearing`."""
    # -P: a stranger's crash file may lie in a folder with a `json.py` beside it, which must not be imported.
    return [sys.executable, "-P", "-W", QUIET, "-m", "bisect_nan.command.worker", request.to_json()]


def environment() -> dict[str, str]:
    """Return the environment of a child: each execution of a call that torch warns of would print its warning once more."""
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ}


def without(request: Request, crash: Crash, count: int) -> Request:
    """Return a request for a script that leaves out so many, from the one on that ended the child."""
    return replace(request, skip=(*request.skip, *range(crash.node, crash.node + count)))


def attend(request: Request, progress: Progress) -> Answer | Crash:
    """Run a request in a child process and wait for its end.

    Args:
        request: What to do.
        progress: Called for every progress line of the child.

    Returns:
        The child's answer, or how it ended without one.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed, or this process was told to terminate; the child has been killed.
    """
    with _interrupt_ignored():  # The child inherits this: Ctrl-C reaches only this process, which then kills the child.
        child = subprocess.Popen(  # noqa: S603
            command(request), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment()
        )
    hearing = Hearing()
    with child, _ended_together(child):
        assert child.stdout is not None
        for line in child.stdout:
            told = hearing.hear(line)
            if told is not None:
                progress(*told)
    return hearing.end(child.returncode)


def _read(line: str | bytes) -> dict[str, Any]:
    """Parse one line of the child; a line that its death cut short counts as nothing."""
    with contextlib.suppress(ValueError):
        message = json.loads(line)
        if isinstance(message, dict):
            return message
    return {}


@contextlib.contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """Ignore Ctrl-C for a moment, so that a process started meanwhile ignores it for good."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _ended_together(child: subprocess.Popen[str]) -> Iterator[None]:
    """Kill the child when this process is interrupted or told to terminate: there is nothing that it has to save."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except BaseException:
        child.kill()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
