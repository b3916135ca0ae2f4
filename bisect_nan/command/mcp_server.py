"""A server of the Model Context Protocol, so that a coding agent in an editor can ask for the culprit of a crash file.

The work is done as for the command line: in a child process, which a crash of a kernel or a lack of memory ends alone. This process
imports no torch and keeps nothing between two calls. A call that the client takes back ends its child; so does the end of this process.
A step may need most of the machine's memory, so that one is looked at after the other.

Protocol: https://modelcontextprotocol.io/specification. SDK: https://py.sdk.modelcontextprotocol.io.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import anyio
from anyio.abc import Process
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

from bisect_nan.command import child
from bisect_nan.command.crash import describe_crash
from bisect_nan.command.inspection import read_snapshot, to_renderable
from bisect_nan.command.meter import STAGES
from bisect_nan.command.printing import plain
from bisect_nan.errors import BisectNanError, TargetError

INSTRUCTIONS = """\
bisect_nan finds the one operation that made a PyTorch training step NaN or Inf. Where a training wrote a crash snapshot
(`crashes/step_812.safetensors`), call `run` with its path before reading the code: it names the source line, the samples of the batch,
the cause and a change, and says whether that change was executed and made the step finite. `explain` tells more about a cause;
`inspect` what a snapshot holds: the loss of the steps before, shapes, the environment."""

PAUSE = 0.5
"""Seconds between two notifications of progress within a stage."""

_ARGUMENT: Any = {
    "pattern": r"^[^\x00]+$",
    "max_length": 4096,
}  # others the system takes neither as a path nor for a process
Snapshot = Annotated[str, Field(description="Path of a crash snapshot (`*.safetensors`).", **_ARGUMENT)]
Target = Annotated[
    str, Field(description="Path of a crash snapshot (`*.safetensors`), or of a case file (`*.py`).", **_ARGUMENT)
]
Cause = Annotated[str, Field(description="Name of a cause, as `run` gives it, such as `log_of_zero`.", **_ARGUMENT)]


class Tools:
    """What a client can call. Each tool is a method; its docstring is what the client's model reads."""

    def __init__(self, allowed: Sequence[Path] = ()) -> None:
        """Remember which code may be executed.

        Args:
            allowed: Case files, and folders of such, that the user has named when the server was started.
        """
        self._allowed = [path.resolve() for path in allowed]
        self._turn = anyio.Lock()
        self._work: tuple[Process, str] | None = None

    def server(self) -> MCPServer[Any]:
        """Return a server that offers these tools."""
        server: MCPServer[Any] = MCPServer(
            "bisect-nan",
            instructions=INSTRUCTIONS,
            version=importlib.metadata.version("bisect_nan"),
            log_level="WARNING",
        )
        looks = ToolAnnotations(read_only_hint=not self._allowed, open_world_hint=bool(self._allowed))
        reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
        for tool, title, hints in (
            (self.run, "Locate the culprit of a NaN or Inf", looks),
            (self.repro, "Write a short script that fails in the same way", looks),
            (self.explain, "Explain a cause", reads),
            (self.inspect, "Show what a crash snapshot holds", reads),
        ):
            server.add_tool(tool, title=title, description=inspect.getdoc(tool), annotations=hints)
        return server

    def end(self) -> None:
        """End the work at once, and leave nothing of it."""
        if self._work is not None:
            process, scratch = self._work
            process.kill()
            shutil.rmtree(scratch, ignore_errors=True)

    async def run(self, path: Target, context: Context[Any]) -> CallToolResult:
        """Locate the operation that made a training step NaN or Inf: source line, module, samples, cause, and a change that was tried.

        Takes a crash snapshot; it is executed here without the model's code. The structured content is the finding: `verdict`,
        `culprit` (`file`, `line`, `text`, `module`, `cause`, `samples`, `remedy` ...), `culprits` where there are several, `innocents`.
        """
        answer = await self._answered(child.Request(target=self._permitted(path)), context)
        return _result(answer.text, *answer.messages, structured=answer.finding)

    async def repro(self, path: Target, context: Context[Any]) -> CallToolResult:
        """Reduce the fault to the shortest script of torch calls that fails in the same way, for a test or a bug report.

        Takes a crash snapshot. The script needs nothing but torch; the structured content is the finding.
        """
        answer = await self._answered(child.Request(target=self._permitted(path), repro="-"), context)
        return _result(answer.text, *answer.messages, structured=answer.finding)

    async def explain(self, cause: Cause) -> CallToolResult:
        """Explain a cause: the arithmetic, where it is met, an example, the example repaired, the same look without the fault."""
        # The catalog lies in modules that import torch.
        command = [sys.executable, "-P", "-W", child.QUIET, "-m", "bisect_nan", "explain", "--", cause]
        done = await anyio.run_process(command, check=False)
        if done.returncode != child.CLEAN:
            raise ToolError(done.stderr.decode().strip().removeprefix("error: "))
        return _result(done.stdout.decode())

    async def inspect(self, path: Snapshot) -> CallToolResult:
        """Show what a crash snapshot holds, without executing any of it: symptom, history, environment, tensors by name and shape."""
        try:
            manifest = await anyio.to_thread.run_sync(read_snapshot, Path(path))
        except (BisectNanError, OSError) as error:
            told = TargetError.refused(error) if isinstance(error, OSError) else error
            raise ToolError(str(told)) from error
        shown = "writer", "symptom", "loss", "step_number", "history", "environment", "nodes", "placeholders"
        text = plain(to_renderable(Path(path), manifest, everything=True))
        return _result(text, structured={key: manifest.data[key] for key in shown})

    def _permitted(self, path: str) -> str:
        """Return the file to look at: a snapshot, or code that the user has allowed."""
        file = Path(path)
        if file.suffix == ".safetensors":
            return path
        real = file.resolve()  # an allowed folder may hold a link to what is not allowed
        if file.suffix != ".py":
            problem = TargetError(f"got {path}", "a crash snapshot (*.safetensors)", "run `bisect-nan run` by hand")
            raise ToolError(str(problem))
        if not any(real.is_relative_to(allowed) for allowed in self._allowed):
            do = f"ask the user to start the server as `bisect-nan mcp --allow-code {path}`"
            problem = TargetError(f"got {path}, whose code would be executed", "a crash snapshot, or allowed code", do)
            raise ToolError(str(problem))
        return str(real)

    async def _answered(self, request: child.Request, context: Context[Any]) -> child.Answer:
        """Have a request done when its turn comes, once more with care if something killed the child, as the command line does.

        Raises:
            ToolError: There is no finding; the message says why.
        """
        told = _Teller(context)
        async with self._turn:
            with tempfile.TemporaryDirectory(prefix="bisect_nan_", ignore_cleanup_errors=True) as scratch:
                request = replace(request, scratch=scratch)
                end = await self._attend(request, told)
                for count in child.LEFT_OUT if request.repro else (0,):
                    if not isinstance(end, child.Crash) or end.wanted:
                        break
                    if request.repro and end.stage != child.REDUCE:
                        break
                    request = child.without(request, end, count) if request.repro else replace(request, careful=True)
                    end = await self._attend(request, told)
                if isinstance(end, child.Crash):
                    raise ToolError(describe_crash(end, request))
        if end.finding is None:
            raise ToolError("\n".join(end.messages).removeprefix("error: "))
        return end

    async def _attend(self, request: child.Request, told: _Teller) -> child.Answer | child.Crash:
        """Run a request in a child process, as `child.attend` does."""
        hearing = child.Hearing()
        command = child.command(request)
        around = child.environment()
        async with await anyio.open_process(command, stdin=subprocess.DEVNULL, stderr=None, env=around) as process:
            self._work = process, request.scratch
            try:
                assert process.stdout is not None
                rest = b""
                async for chunk in process.stdout:
                    *lines, rest = (rest + chunk).split(b"\n")
                    for progress in filter(None, map(hearing.hear, lines)):
                        await told.tell(*progress)
                code = await process.wait()
            except BaseException:  # Nobody waits for an answer.
                process.kill()
                raise
            finally:
                self._work = None
        return hearing.end(code)


class _Teller:
    """Tells the client how far its call is."""

    def __init__(self, context: Context[Any]) -> None:
        self._context = context
        self._count, self._stage, self._next = 0, "", 0.0

    async def tell(self, stage: str, done: int, total: int) -> None:
        """Send a notification unless one was sent just now: their numbers have to grow, and a stage counts from 0, so they are counted."""
        now = time.monotonic()
        if stage == self._stage and now < self._next:
            return
        self._count, self._stage, self._next = self._count + 1, stage, now + PAUSE
        words = STAGES.get(stage, stage) + (f", {done} of {total} nodes" if total else "")
        await self._context.report_progress(self._count, message=words)


def serve(allowed: Sequence[Path]) -> None:
    """Serve a client over standard input and output until it closes them."""
    tools = Tools(allowed)

    def leave(number: int, _: FrameType | None) -> None:
        tools.end()
        os._exit(128 + number)  # a thread waits for the next line of standard input, which may never come

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    tools.server().run()


def _result(*texts: str, structured: dict[str, Any] | None = None) -> CallToolResult:
    content = [TextContent(type="text", text=text) for text in texts]
    return CallToolResult(content=list(content), structured_content=structured)
