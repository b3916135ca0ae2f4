"""The command line as a user meets it: commands, exit statuses, messages, and children that die."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bisect_nan import Snapshot, cli
from bisect_nan.causes import CAUSES
from bisect_nan.command.child import Crash, Request
from bisect_nan.command.crash import describe_crash
from bisect_nan.finding import Finding, Verdict

CASE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    def step(model, batch):
        print("printed by the step")
        hidden = model(batch["x"])
        return BODY
    return {"model": nn.Linear(3, 2), "batch": {"x": torch.ones(4, 3)}, "step": step}
"""
LOG_OF_ZERO = CASE.replace("BODY", "(hidden * 0.0).log().mean()")
CLEAN = CASE.replace("BODY", "hidden.square().mean()")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


MAIN = "from bisect_nan.cli import main; main()"


def python(code: str, *arguments: str, output: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run a line of Python in a process of its own; its standard output may go elsewhere."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603  (this very interpreter)


def bisect_nan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return python(MAIN, *arguments)


def case(text: str) -> str:
    """Write a case file and return its name."""
    Path("case.py").write_text(text)
    return "case.py"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["--help"], 0), (["--version"], 0), (["run", "--help"], 0), (["run", "--no-such"], 2), (["run", "gone.pt"], 2)],
)
def test_answers_without_torch(arguments: list[str], status: int) -> None:
    """Help, the version and wrong usage are answered by a process that never imports torch."""
    code = (
        "import sys\nfrom bisect_nan.cli import app\n"
        "try:\n    app()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = python(code, *arguments)
    assert done.returncode == status
    assert done.stderr.endswith("False\n")


def test_version() -> None:
    """--version prints the name and the release."""
    assert (
        CliRunner().invoke(cli.app, ["--version"]).output == f"bisect-nan {importlib.metadata.version('bisect_nan')}\n"
    )


def test_located() -> None:
    """A located fault gives the report on stdout and status 1; what the user's code prints goes to stderr."""
    done = bisect_nan("run", case(LOG_OF_ZERO))
    assert done.returncode == 1
    assert done.stdout.startswith(
        "error[log_of_zero]: `log` made the first infinity: 8 of 8 values\n  --> case.py:10 in build.step "
    )
    assert "\n10 |     return (hidden * 0.0).log().mean()\n" in done.stdout
    assert set(done.stderr.splitlines()) == {"printed by the step"}


def test_a_warning_of_torch_is_not_repeated_by_the_search() -> None:
    """Torch warns at each deviation of one number; the search runs it many times, and the user sees it at most in the step itself."""
    done = bisect_nan("run", case(CASE.replace("BODY", "hidden[:1, 0].std()")))
    assert done.stdout.startswith("error[degenerate_dof]")
    assert done.stderr.count("degrees of freedom") <= 1


def test_json_is_all_there_is_on_stdout() -> None:
    """--json prints the finding, which reads back, and the notes of --verbose stay on stderr."""
    done = bisect_nan("run", case(LOG_OF_ZERO), "--json", "--search", "scan", "-v")
    finding = Finding.from_dict(json.loads(done.stdout))
    assert done.returncode == 1
    assert finding.culprit is not None
    assert finding.culprit.cause == "log_of_zero"


def test_clean() -> None:
    """A clean step has status 0."""
    done = bisect_nan("run", case(CLEAN))
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "clean")


def test_saved_snapshot_needs_no_case(folder: Path) -> None:
    """--save keeps the captured snapshot: it can be inspected and located without the case file."""
    saved = bisect_nan("run", case(LOG_OF_ZERO), "--save", "crash.safetensors", "-v")
    assert "Saved the snapshot as crash.safetensors." in saved.stderr
    assert "chain:" in saved.stdout
    (folder / "case.py").unlink()
    located = bisect_nan("run", "crash.safetensors")
    assert located.returncode == 1
    assert "case.py:10" in located.stdout
    shown = bisect_nan("inspect", "crash.safetensors")
    assert shown.returncode == 0
    assert "loss is -inf" in shown.stdout
    assert "weight  float32[2, 3]" in shown.stdout
    assert "batch['x']  float32[4, 3]" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "gone.safetensors"], "got gone.safetensors, which is no file"),
        (["run", "text.safetensors"], "text.safetensors"),
        (["run", "text.safetensors", "--save", "x"], "got --save together with a snapshot"),
        (["run", "case.py"], "got case.py, which has no function build"),
        (["run", "case.py", "--model", "a:b"], "got --model together with a case file"),
        (["inspect", "text.safetensors"], "text.safetensors"),
        (["inspect", "gone.safetensors"], "gone.safetensors"),
        (["inspect", "case.py"], "got case.py, which is no snapshot"),
        (["checkpoints", "case.py"], "got case.py, which is no folder"),
        (["watch", "gone.py"], "got gone.py, which is no file"),
        (["watch", "."], "got ., which is no file"),
        (["watch", "-m", "gone"], "got no module gone"),
        (["watch", "-m", "gone.main"], "got no module gone.main"),
        (["mcp", "--allow-code", "gone.py"], "got --allow-code gone.py, which is no file"),
    ],
)
def test_unusable_targets(arguments: list[str], words: str) -> None:
    """What cannot be used ends with status 2 and one message that says what to do, never a traceback."""
    Path("text.safetensors").write_text("not a snapshot at all")
    case("x = 1")
    done = bisect_nan(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert "\ndo this: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "more", ["", ', "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "steps": 2']
)
def test_a_step_that_raises_because_of_a_nan(more: str) -> None:
    """An assertion of the step's that met a NaN is a located fault, also in a case that trains; any other is its own error."""
    text = CASE.replace("return BODY", "assert (hidden * 0.0).log().isfinite().all()").replace(
        '"step": step', f'"step": step{more}'
    )
    done = bisect_nan("run", case(text))
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("error[log_of_zero]: ")
    assert "the value behind the AssertionError at case.py:10" in done.stdout
    other = bisect_nan("run", case(text.replace(".log()", "").replace("all()", "all().logical_not()")))
    assert other.returncode == 125
    assert "got AssertionError from the step of case.py" in other.stderr


def test_verbose_shows_the_traceback_of_the_users_code() -> None:
    """An error in the user's own code tells nothing about its numbers: status 125; -v adds the traceback to the message."""
    done = bisect_nan("run", case("def build():\n    return 1 / 0"), "-v")
    assert done.returncode == 125
    assert "got ZeroDivisionError from build() of case.py at case.py:2 in build" in done.stderr
    assert "Traceback" in done.stderr


def test_killed_child() -> None:
    """A child that a signal kills becomes one message and status 125."""
    body = "__import__('os').kill(__import__('os').getpid(), __import__('signal').SIGSEGV)"
    done = bisect_nan("run", case(CASE.replace("BODY", body)))
    assert done.returncode == 125
    assert done.stdout == ""
    assert "error: the working process was killed by SIGSEGV (segmentation fault) " in done.stderr
    assert "while it ran and recorded the step\n" in done.stderr


def test_crashing_kernel_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """When a kernel kills the child during the replay, a careful second run names the node and its line."""
    bisect_nan("run", case(LOG_OF_ZERO), "--save", "crash.safetensors")
    # Runs at the start of every Python process below: the replay of a logarithm kills it, as a broken kernel would.
    (folder / "hook").mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'bisect_nan.command.worker' in ' '.join(sys.orig_argv):\n"
        "    import torch\n"
        "    call = torch._ops.OpOverload.__call__\n"
        "    def deadly(self, /, *args, **kwargs):\n"
        "        if str(self) == 'aten.log.default':\n"
        "            os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        return call(self, *args, **kwargs)\n"
        "    torch._ops.OpOverload.__call__ = deadly\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{folder / 'hook'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    done = bisect_nan("run", "crash.safetensors")
    assert done.returncode == 125
    assert "killed by SIGSEGV (segmentation fault) in stage replay, while it executed node " in done.stderr
    assert "(aten.log.default at case.py:10)" in done.stderr


def test_interrupt_ends_both(folder: Path) -> None:
    """Ctrl-C ends the command line with status 130, and its child with it."""
    body = "open('pid', 'w').write(str(__import__('os').getpid())) and __import__('time').sleep(60)"
    command = [sys.executable, "-c", MAIN, "run", case(CASE.replace("BODY", body))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as parent:  # noqa: S603  (as in python)
        deadline = time.monotonic() + 60
        while not ((folder / "pid").is_file() and (folder / "pid").read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        parent.send_signal(signal.SIGINT)
        assert parent.wait(timeout=10) == 130
        assert parent.stderr is not None
        assert "Traceback" not in parent.stderr.read()
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("crash", "words", "advice"),
    [
        (
            Crash(-9, "replay", 12),
            "killed by SIGKILL (most likely for lack of memory) in stage replay, while it",
            "memory",
        ),
        (Crash(-11, "replay", 12), "while it executed node 12\n", "some kernels crash"),
        (Crash(-15, "search", 3), "killed by SIGTERM", "run again"),
        (Crash(3, "record", 0), "ended with exit code 3 while it ran and recorded the step", "plain Python"),
    ],
)
def test_words_of_a_crash(crash: Crash, words: str, advice: str) -> None:
    """Each way to die has its words; without a readable file the node is named by its number."""
    text = describe_crash(crash, Request("gone.safetensors"))
    assert words in text
    assert advice in text.split("do this: ")[1]


def test_only_crashes_are_tried_again() -> None:
    """A child that was told to end is not started once more."""
    assert Crash(-signal.SIGTERM).wanted
    assert Crash(-signal.SIGINT).wanted
    assert not Crash(-signal.SIGKILL).wanted
    assert not Crash(3).wanted


def test_causes_and_explain() -> None:
    """`causes` lists every cause, and `explain` says all about one."""
    listed = bisect_nan("causes")
    assert listed.returncode == 0
    assert all(cause.name in listed.stdout for cause in CAUSES)
    explained = bisect_nan("explain", "log_of_zero")
    assert explained.returncode == 0
    assert explained.stdout.startswith("# log_of_zero\n")


@pytest.mark.parametrize("name", ["log_of_zer", "LOG_OF_ZERO", "error[log_of_zero]", "log"])
def test_explain_suggests(name: str) -> None:
    """A mistyped cause, or a part of one, is answered with the nearest names and status 2."""
    done = bisect_nan("explain", name)
    assert done.returncode == 2
    assert "did you mean " in done.stderr
    assert "log_of_zero" in done.stderr


def test_every_command_says_its_exit_status() -> None:
    """Whoever reads the help of a command learns which exit statuses it has."""
    for command in typer.main.get_command(cli.app).commands.values():
        assert command.epilog.startswith("Exit status: "), command.name


def test_every_verdict_has_a_status() -> None:
    """Only a clean step is 0 and only a located fault is 1; everything else cannot tell."""
    from bisect_nan.command import worker  # noqa: PLC0415  (meant to be the child; imported here for its table)

    statuses = {verdict: worker.STATUS.get(verdict, 125) for verdict in Verdict}
    assert statuses[Verdict.CLEAN] == 0
    assert statuses[Verdict.LOCATED] == 1
    assert {status for verdict, status in statuses.items() if verdict not in (Verdict.CLEAN, Verdict.LOCATED)} == {125}


@pytest.mark.parametrize(
    ("option", "start"), [("--markdown", "### `log_of_zero`: "), ("--github", "error[log_of_zero]: ")]
)
def test_forms_on_stdout(option: str, start: str) -> None:
    """--markdown prints the report for a pull request, and --github adds the line's annotation; the status is the same."""
    done = bisect_nan("run", case(LOG_OF_ZERO), option)
    assert done.returncode == 1
    assert done.stdout.startswith(start)
    annotated = "\n::error file=case.py,line=10,title=log_of_zero::`log` made the first infinity: 8 of 8 values%0A"
    assert (annotated in done.stdout) is (option == "--github")


def test_sarif_is_written_beside_the_report() -> None:
    """--sarif FILE holds the rule's explanation and the change of the line as it stands in the file."""
    done = bisect_nan("run", case(LOG_OF_ZERO), "--sarif", "out.sarif")
    assert done.returncode == 1
    assert done.stdout.startswith("error[log_of_zero]")
    (run,) = json.loads(Path("out.sarif").read_text())["runs"]
    assert run["tool"]["driver"]["rules"][0]["help"]["markdown"].startswith("# log_of_zero\n")
    (fix,) = run["results"][0]["fixes"]
    (replacement,) = fix["artifactChanges"][0]["replacements"]
    line = Path("case.py").read_text().splitlines()[9]
    region = replacement["deletedRegion"]
    assert (region["startLine"], region["startColumn"], region["endColumn"]) == (10, 9, len(line) + 1)


def test_sarif_that_cannot_be_written() -> None:
    """Folders on the way are made; a bad place costs the file, and neither the report nor its status."""
    assert bisect_nan("run", case(CLEAN), "--sarif", "new/out.sarif").returncode == 0
    assert Path("new/out.sarif").is_file()
    done = bisect_nan("run", case(LOG_OF_ZERO), "--sarif", "new")
    assert done.returncode == 1
    assert done.stdout.startswith("error[log_of_zero]: ")
    assert "error: got new, which cannot be written: " in done.stderr
    assert "do this: name another one after --sarif" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [("run", "NAME"), ("inspect", "NAME"), ("watch", "NAME"), ("repro", "NAME"), ("mcp", "--allow-code", "NAME")],
)
def test_a_path_that_the_system_refuses(arguments: tuple[str, ...]) -> None:
    """A path that cannot be looked at, for its length or for want of a right, is one error and no traceback."""
    done = bisect_nan(*(argument.replace("NAME", f"{'long' * 100}.py") for argument in arguments))
    assert done.returncode == 2
    assert done.stderr.startswith("error: got longlong")
    assert ".py, which cannot be used: File name too long\nexpected: " in done.stderr
    assert "\ndo this: " in done.stderr


@pytest.mark.parametrize("arguments", [("run", "clean.py"), ("causes",), ("schema",), ("--version",)])
def test_an_answer_that_nobody_reads(arguments: tuple[str, ...]) -> None:
    """A reader that has gone (`| head`) and a closed standard output change nothing about the exit status: 1 would say located."""
    Path("clean.py").write_text(CLEAN)
    reads, writes = os.pipe()
    os.close(reads)
    for code in (MAIN, f"import sys; sys.stdout = None; {MAIN}"):  # which is what Python makes of `>&-`
        done = python(code, *arguments, output=writes)
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
    os.close(writes)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
@pytest.mark.parametrize("arguments", [("run", "case.py"), ("causes",)])
def test_an_answer_without_room(arguments: tuple[str, ...]) -> None:
    """A full disk is told in one error, with the status for wrong usage."""
    case(CLEAN)
    with Path("/dev/full").open("w") as full:
        done = python(MAIN, *arguments, output=full.fileno())
    assert done.returncode == 2
    assert "error: got standard output, which cannot be written: No space left on device\nexpected: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [("run", "fälle/cäse.py"), ("run", "fälle/cäse.py", "--markdown"), ("--help",)])
def test_letters_that_standard_output_lacks(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    """Where standard output takes ASCII alone, other letters are escapes, and the answer is there."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    Path("fälle").mkdir()
    Path("fälle/cäse.py").write_text(LOG_OF_ZERO)
    done = python(MAIN, *arguments)
    assert done.returncode == (1 if "run" in arguments else 0)
    assert ("f\\xe4lle/c\\xe4se.py:10" if "run" in arguments else "\\u2022") in done.stdout


def test_a_watched_script_keeps_its_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its letters are its own: what it would make of them without a watch it makes under one."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii:xmlcharrefreplace")
    Path("train.py").write_text("print('\u00e4')")
    assert python(MAIN, "watch", "train.py").stdout == "&#228;\n"


def test_one_form_on_stdout() -> None:
    """Two forms at once are refused before anything runs."""
    done = bisect_nan("run", case(CLEAN), "--json", "--github")
    assert done.returncode == 2
    assert "got more than one of --json, --markdown and --github" in done.stderr


def test_a_saved_case_names_its_code() -> None:
    """--save writes down which function built the step, and a copy of the snapshot keeps it."""
    bisect_nan("run", case(LOG_OF_ZERO), "--save", "crash.safetensors")
    snapshot = Snapshot.load("crash.safetensors")
    assert snapshot.entry == "case.py:build"
    assert Snapshot.load(snapshot.save("copy.safetensors")).entry == "case.py:build"
    assert Snapshot.load(snapshot.save("other.safetensors", entry="cases.log:build")).entry == "cases.log:build"
    assert "case.py:build" in bisect_nan("inspect", "copy.safetensors").stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_git_bisect_finds_the_commit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`git bisect run` ends on the commit that brought the fault, past one that cannot be imported."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        done = subprocess.run(["git", *identity, *arguments], capture_output=True, text=True, check=False)  # noqa: S603, S607
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    git("init", "repository")
    monkeypatch.chdir("repository")
    bodies = ["x", "x * 1", "x * 2", "MISSING", "x * 3", "x * 0", "x * 0 * 1", "x * 0 * 2"]
    for number, body in enumerate(bodies):
        text = "import no_such_module\n" if body == "MISSING" else f"def hidden(x):\n    return {body}\n"
        Path("net.py").write_text(text)
        git("add", "net.py")
        git("commit", "-m", f"change {number}")
    Path("../case.py").write_text(
        "import sys\nsys.path.insert(0, '.')\nimport torch\nfrom net import hidden\n"
        + CASE.replace("BODY", "hidden(hidden_).abs().log().mean()").replace("hidden = ", "hidden_ = ")
    )
    git("bisect", "start", "HEAD", "HEAD~7")
    found = git("bisect", "run", sys.executable, "-c", MAIN, "run", "../case.py")
    assert "change 5" in found.partition("is the first bad commit")[2]
    assert "got ModuleNotFoundError" in found
