"""`bisect-nan watch` as a user meets it: a script runs as Python would run it, and its first fault is told."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bisect_nan import Snapshot

TRAIN = """
import argparse, sys
import torch
from torch import nn

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bad", type=int, default=-1)
    bad = parser.parse_args().bad
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(5):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 3)).square() * (step != bad)).log().mean()
        loss.backward()
        optimizer.step()
        print("step", step, flush=True)
    print(__name__, sys.argv[1:], sys.path[0], __file__)
    return torch.sum(torch.stack([p.double().sum() for p in model.parameters()])).item()

if __name__ == "__main__":
    print(main())
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)  # noqa: S603


def watch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command."""
    return python("-m", "bisect_nan", "watch", *arguments)


def test_a_healthy_script_runs_as_without(folder: Path) -> None:
    """It prints the same, computes the same numbers, and leaves no file; the last word on stderr tells what was looked at."""
    plain, seen = python("train.py", "--bad", "9"), watch("train.py", "--bad", "9")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert (seen.returncode, seen.stdout) == (0, plain.stdout)
    assert seen.stderr == "bisect-nan: 5 steps, recorded from step 0 on: all finite.\n"
    assert sorted(path.name for path in folder.iterdir() if path.suffix) == ["train.py"]


def test_the_first_fault_ends_the_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report goes to stderr, the file bears step and rank, and stdout holds nothing but the script's lines."""
    monkeypatch.setenv("RANK", "1")
    seen = watch("--from-step", "2", "--directory", "here", "train.py", "--bad", "3")
    assert (seen.returncode, seen.stdout) == (1, "step 0\nstep 1\nstep 2\n")
    assert "error[log_of_zero]" in seen.stderr
    assert "--> train.py:15 in main   (forward" in seen.stderr
    assert "verified: loss" in seen.stderr
    assert "bisect-nan run here/step_3_rank_1.safetensors" in seen.stderr
    snapshot = Snapshot.load(folder / "here" / "step_3_rank_1.safetensors")
    assert snapshot.step_number == 3
    assert [entry["step"] for entry in snapshot.history] == [0, 1, 2, 3]


@pytest.mark.parametrize("directory", ["train.py", "long" * 100])
def test_a_folder_that_cannot_be_written(directory: str) -> None:
    """Where no snapshot can be kept the fault is told all the same, and a script that shall go on goes on."""
    seen = watch("--on-fault", "continue", "--directory", directory, "train.py", "--bad", "1")
    assert seen.returncode == 0
    assert seen.stdout.startswith("step 0\nstep 1\nstep 2\n")
    assert "error: no snapshot was written: " in seen.stderr
    assert "error[log_of_zero]" in seen.stderr
    assert "The report again" not in seen.stderr


def test_a_module_that_goes_on_after_the_fault(folder: Path) -> None:
    """Under `--on-fault continue` the script runs to its end, with a status of its own; `-m` finds a module of a package."""
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(TRAIN.replace("print(main())", "main()\n    sys.exit(7)"))
    seen = watch("--on-fault", "continue", "-m", "package.train", "--bad", "0")
    assert seen.returncode == 7
    assert seen.stdout.splitlines()[-1] == f"__main__ ['--bad', '0'] {folder} {folder / 'package' / 'train.py'}"
    assert seen.stderr.count("error[") == 1
    assert [path.name for path in (folder / "crashes").iterdir()] == ["step_0.safetensors"]


def test_a_script_that_fails_by_itself() -> None:
    """An exception ends it as always, with its traceback and Python's exit status."""
    Path("wrong.py").write_text(
        "import sys\nprint(sys.excepthook is sys.__excepthook__)\nraise OSError(32, 'broken')\n"
    )
    seen = watch("wrong.py")
    assert (seen.returncode, seen.stdout) == (1, "True\n")
    assert seen.stderr.endswith("BrokenPipeError: [Errno 32] broken\n")
    assert 'wrong.py", line 3' in seen.stderr


def test_a_script_that_stops_at_a_bad_loss(folder: Path) -> None:
    """It keeps its exit status and its last words; what it saw is located before, and saved."""
    text = TRAIN.replace(
        "        loss.backward()", "        if loss.isinf(): raise ValueError('bad loss')\n        loss.backward()"
    )
    (folder / "stops.py").write_text(text)
    seen = watch("stops.py", "--bad", "1")
    assert (seen.returncode, seen.stdout) == (1, "step 0\n")
    assert (
        "bisect-nan: Step 1: the value behind the ValueError at stops.py:16 is -inf.\nerror[log_of_zero]" in seen.stderr
    )
    assert seen.stderr.endswith("ValueError: bad loss\n")
    assert [path.name for path in (folder / "crashes").iterdir()] == ["step_1.safetensors"]


def test_a_script_that_calls_exit(folder: Path) -> None:
    """`sys.exit(main())` is an end like any other: what was looked at is told, and the status is the script's."""
    (folder / "exits.py").write_text(TRAIN.replace("print(main())", "sys.exit(int(main() * 0))"))
    seen = watch("exits.py")
    assert (seen.returncode, seen.stderr) == (0, "bisect-nan: 5 steps, recorded from step 0 on: all finite.\n")


def test_an_interrupted_script() -> None:
    """Ctrl-C raises KeyboardInterrupt in the script, which may handle it; the process ends as Python's does."""
    text = "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(60)\n"
    text += "except KeyboardInterrupt:\n    print('mine', flush=True)\n    raise\n"
    Path("wait.py").write_text(text)
    command = [sys.executable, "-m", "bisect_nan", "watch", "wait.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, problem = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGINT, "mine\n")
    assert problem.endswith("KeyboardInterrupt\n")


def test_a_script_that_catches_everything(folder: Path) -> None:
    """A bare `except` that swallows the end does not change the exit status."""
    (folder / "train.py").write_text(
        TRAIN.replace("print(main())", "\n    try:\n        main()\n    except:\n        print('caught')")
    )
    seen = watch("train.py", "--bad", "1")
    assert (seen.returncode, seen.stdout.splitlines()[-1]) == (1, "caught")


def test_children_of_the_script() -> None:
    """Spawned processes import the script as usual, and are not watched; a script without an optimizer is told so."""
    text = "import multiprocessing, torch\n\ndef double(x):\n    return (2 * torch.tensor(x)).item()\n\nif __name__ == '__main__':\n"
    text += "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(double, [1, 2]))\n"
    Path("spawn.py").write_text(text)
    seen = watch("spawn.py")
    assert (seen.returncode, seen.stdout) == (0, "[2, 4]\n")
    assert seen.stderr == "bisect-nan: No optimizer made a step in this process, so nothing was looked at.\n"


def test_usage() -> None:
    """A missing file is told in three parts, without importing torch; help shows how options and arguments are told apart."""
    code = "import sys\nfrom bisect_nan.cli import app\ntry:\n    app()\nfinally:\n    print('torch' in sys.modules)"
    for arguments, status in ((["gone.py"], 2), (["--help"], 0), ([], 2)):
        done = python("-c", code, "watch", *arguments)
        assert done.returncode == status
        assert done.stdout.endswith("False\n")
        assert "gone.py, which is no file" in done.stderr or arguments != ["gone.py"]
        assert "--from-step 800 train.py" in done.stdout or arguments != ["--help"]
