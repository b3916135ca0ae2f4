"""The server for coding agents: what its tools answer, what they refuse, and that no work outlives the call that asked for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bisect_nan.finding import Finding
from bisect_nan.strict_json import parse

mcp, anyio = pytest.importorskip("mcp"), pytest.importorskip("anyio")

from bisect_nan.command.mcp_server import Tools  # noqa: E402  (imports the extra)

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"
ATTENTION = str(FIXTURES / "all_masked_attention.safetensors")
MAIN = "from bisect_nan.cli import main; main()"

CASE = """
import os, pathlib, time
import torch

def step(model, batch):
    pathlib.Path("pid").write_text(str(os.getpid()))
    BODY
    return model(batch).log().mean() * 0 / 0

def build():
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return {"model": model, "batch": torch.ones(3, 2), "step": step}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def case(body: str) -> str:
    """Write a case file whose step does this first, and return its name."""
    Path("case.py").write_text(CASE.replace("BODY", body))
    return "case.py"


Talk = Callable[[Any], Awaitable[Any]]


def talk(server: Any, what: Talk, **options: Any) -> Any:
    """Connect a client to a server and return what it got."""

    async def connected() -> Any:
        async with mcp.Client(server, **options) as client:
            return await what(client)

    return anyio.run(connected)


def ask(tool: str, *allowed: str, **arguments: Any) -> Any:
    """Call a tool of a server in this process."""

    async def call(client: Any) -> Any:
        return await client.call_tool(tool, arguments)

    return talk(Tools([Path(path) for path in allowed]).server(), call)


def stdio(*arguments: str) -> Any:
    """Return how the server is started as a process of its own, as an editor does."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return mcp.StdioServerParameters(
        command=sys.executable, args=["-c", MAIN, "mcp", *arguments], env={**os.environ, "PYTHONPATH": path}
    )


def text_of(result: Any) -> str:
    """Return the texts of a result."""
    return "\n".join(part.text for part in result.content)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; not forever."""
    with anyio.fail_after(60):
        while not holds():
            await anyio.sleep(0.02)


def started(pid: Path) -> bool:
    """Whether a step has said which process it runs in."""
    return pid.is_file() and bool(pid.read_text())


def test_an_editor_asks_for_the_culprit() -> None:
    """Over standard input and output: the tools are listed, and `run` answers with the report and the finding, and tells its progress."""
    heard: list[tuple[float, str | None]] = []

    async def progress(done: float, _: float | None, message: str | None) -> None:
        heard.append((done, message))

    async def call(client: Any) -> Any:
        tools = await client.list_tools()
        return tools.tools, await client.call_tool("run", {"path": ATTENTION}, progress_callback=progress)

    tools, result = talk(stdio(), call)
    assert [tool.name for tool in tools] == ["run", "repro", "explain", "inspect"]
    assert all(tool.description for tool in tools)
    assert not result.is_error
    assert text_of(result).startswith("error[softmax_all_masked]: `softmax` made the first NaN")
    finding = Finding.from_dict(result.structured_content)
    assert finding.culprit is not None
    assert finding.culprit.source.line == 36
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert "loading" in {message for _, message in heard}


def test_a_clean_step_is_an_answer() -> None:
    """That nothing is wrong is told as a result, not as an error."""
    result = ask("run", path=str(FIXTURES / "harmless_masks.safetensors"))
    assert not result.is_error
    assert result.structured_content["verdict"] == "clean"


def test_repro() -> None:
    """A fault is reduced to a script of torch calls."""
    result = ask("repro", path=str(FIXTURES / "backward_sqrt_at_zero.safetensors"))
    assert "import torch" in text_of(result)
    assert result.structured_content["culprit"]["cause"] == "sqrt_grad_at_zero"


def test_explain() -> None:
    """A cause is explained; of an unknown one the nearest names are told, also where it looks like an option."""
    assert text_of(ask("explain", cause="log_of_zero")).startswith("# log_of_zero\n")
    wrong = ask("explain", cause="log_of_zer")
    assert wrong.is_error
    assert "did you mean log_of_zero" in text_of(wrong)
    assert "got the cause '--help'" in text_of(ask("explain", cause="--help"))


def test_inspect() -> None:
    """What a snapshot holds comes as text and as numbers."""
    result = ask("inspect", path=ATTENTION)
    assert "loss is nan" in text_of(result)
    assert result.structured_content["symptom"]["kind"] == "loss"
    assert {item["phase"] for item in result.structured_content["placeholders"]} >= {"input", "parameter"}


@pytest.mark.parametrize(
    ("tool", "path", "words"),
    [
        ("run", "gone.safetensors", "got gone.safetensors, which is no file"),
        ("inspect", "gone.safetensors", "got gone.safetensors, which cannot be read"),
        ("run", "text.safetensors", "without a whole header"),
        ("inspect", "text.safetensors", "without a whole header"),
        ("run", "crash.pt", "expected: a crash snapshot"),
        ("inspect", "crash.pt", "got crash.pt, which is no snapshot"),
        ("run", f"{'x' * 300}.safetensors", "which cannot be used: File name too long"),
        ("inspect", f"{'x' * 300}.safetensors", "which cannot be used: File name too long"),
    ],
)
def test_unusable_files(tool: str, path: str, words: str) -> None:
    """What cannot be used is an error of the tool, which says what to do."""
    for name in ("text.safetensors", "crash.pt"):
        Path(name).write_text("none")
    result = ask(tool, path=path)
    assert result.is_error
    assert words in text_of(result)
    assert "\ndo this: " in text_of(result)


@pytest.mark.parametrize("text", ["", "a\0b", "x" * 200_000])
def test_texts_that_name_nothing(text: str) -> None:
    """What can be neither a path nor a cause is refused as an argument, and no tool stumbles over it."""
    for tool, arguments in (("run", {"path": text}), ("inspect", {"path": text}), ("explain", {"cause": text})):
        result = ask(tool, **arguments)
        assert result.is_error
        assert "validation error" in text_of(result)


def test_no_code_unless_the_user_allowed_it(folder: Path) -> None:
    """A case file is executed only where it, or its folder, was named when the server started; a link out of that folder is not."""
    path = case("pass")
    refused = ask("run", path=path)
    assert refused.is_error
    assert "bisect-nan mcp --allow-code case.py" in text_of(refused)
    (folder / "allowed").mkdir()
    (folder / "allowed" / "link.py").symlink_to(folder / path)
    assert ask("run", "allowed", path="allowed/link.py").is_error
    assert ask("run", "allowed", path="allowed/../case.py").is_error
    assert not (folder / "pid").exists()
    done = ask("run", str(folder), path=path)
    assert not done.is_error
    assert done.structured_content["culprit"]["cause"] == "log_of_zero"


def test_code_that_raises() -> None:
    """An error of the case's own code is told with its line."""
    path = case("raise ValueError('no such label')")
    result = ask("run", path, path=path)
    assert result.is_error
    assert "ValueError" in text_of(result)
    assert "case.py:7 in step: no such label" in text_of(result)


def test_a_crash_stays_outside() -> None:
    """A child that a signal kills is an error of the tool, and the next call is answered."""
    path = case("os.kill(os.getpid(), 11)")

    async def call(client: Any) -> Any:
        return [await client.call_tool("run", {"path": target}) for target in (path, ATTENTION)]

    crashed, after = talk(Tools([Path(path)]).server(), call)
    assert crashed.is_error
    assert "killed by SIGSEGV" in text_of(crashed)
    assert not after.is_error


def test_cancelling_ends_the_child(folder: Path) -> None:
    """A call that is taken back ends its child; nothing is left of it, and the server goes on."""
    path = case("time.sleep(600)")
    scratch = folder / "tmp"
    scratch.mkdir()

    async def call(client: Any) -> Any:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(client.call_tool, "run", {"path": path})
                await until(lambda: started(folder / "pid"))
                scope.cancel()
        await until(lambda: is_gone(int((folder / "pid").read_text())))
        await until(lambda: not any(scratch.iterdir()))
        return await client.call_tool("inspect", {"path": ATTENTION})

    server = stdio("--allow-code", path)
    server.env["TMPDIR"] = str(scratch)
    assert not talk(server, call).is_error


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, None])
def test_the_end_of_the_server_ends_the_child(folder: Path, end: signal.Signals | None) -> None:
    """Told to end, or left by its client, the server takes the running child with it."""
    path = case("time.sleep(600)")
    lines = (
        '{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},'
        '"clientInfo":{"name":"test","version":"1"}}}\n'
        '{"jsonrpc":"2.0","method":"notifications/initialized"}\n'
        '{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"run","arguments":{"path":"case.py"}}}\n'
    )
    assert all(parse(line, "a message") for line in lines.splitlines())
    scratch = folder / "tmp"
    scratch.mkdir()
    command = [sys.executable, "-c", MAIN, "mcp", "--allow-code", path]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(  # noqa: S603  (this very interpreter)
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdin is not None
        server.stdin.write(lines)
        server.stdin.flush()
        anyio.run(until, lambda: started(folder / "pid"))
        if end is None:
            server.stdin.close()
        else:
            server.send_signal(end)
        assert server.wait(timeout=30) == (0 if end is None else 128 + end)
    anyio.run(until, lambda: is_gone(int((folder / "pid").read_text())))
    assert not any(scratch.iterdir())


def test_one_at_a_time(folder: Path) -> None:
    """Steps are looked at one after the other, since each may need most of the memory."""
    path = case(
        "assert not pathlib.Path('busy').exists(); pathlib.Path('busy').touch(); time.sleep(0.2); os.remove('busy')"
    )

    async def call(client: Any) -> list[Any]:
        results: list[Any] = []

        async def once() -> None:
            results.append(await client.call_tool("run", {"path": path}))

        async with anyio.create_task_group() as group:
            group.start_soon(once)
            group.start_soon(once)
        return results

    assert [result.is_error for result in talk(Tools([folder]).server(), call)] == [False, False]


@pytest.mark.parametrize("missing", ["anyio", "mcp", "mcp.server.mcpserver"])
def test_without_the_extra(missing: str) -> None:
    """Where the SDK is not installed, or its first generation is, the command says what to install."""
    code = f"import sys; sys.modules[{missing!r}] = None\n{MAIN}"
    done = subprocess.run([sys.executable, "-c", code, "mcp"], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 2
    assert "do this: pip install 'bisect_nan[mcp]'" in done.stderr


def test_no_torch_in_the_server() -> None:
    """The process that stays alive imports no torch."""
    code = "import sys; import bisect_nan.command.mcp_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0  # noqa: S603
