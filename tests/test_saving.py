"""A checkpoint that is there is whole and finite, whatever happened while it was written."""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bisect_nan import BisectNanError, NonFiniteValues, save_checkpoint

OLD = {"step": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a checkpoint that is there already."""
    torch.save(OLD, tmp_path / "last.pt")
    return tmp_path / "last.pt"


def load(path: Path) -> Any:
    """Read a checkpoint."""
    return torch.load(path, weights_only=True)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model after one update."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_what_is_saved(path: Path) -> None:
    """Objects with a state dict are saved as that, all else as it is, as torch.save would."""
    model, optimizer = trained()
    state = {"model": model, "optimizer": optimizer, "step": 3, "best": math.inf, "more": [{"x": torch.ones(2)}]}
    assert save_checkpoint(state, path) == path
    saved = load(path)
    assert list(saved) == list(state)
    assert (saved["step"], saved["best"]) == (3, math.inf)
    fresh, other = trained()
    fresh.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    for whole in (model, model.state_dict()):
        assert list(load(save_checkpoint(whole, path))) == list(model.state_dict())


@pytest.mark.parametrize("place", ["model", "state dict", "optimizer", "buffer", "nested"])
def test_bad_numbers_are_refused(path: Path, place: str) -> None:
    """Wherever they are, the message names the tensor, and the good file stays."""
    model, optimizer = trained()
    state: Any = {"model": model, "optimizer": optimizer, "more": [{"x": torch.ones(2)}]}
    name = {
        "model": r"model\['0.bias'\]",
        "state dict": "0.bias",
        "optimizer": "exp_avg",
        "buffer": r"model\['1.running_var'\]",
        "nested": r"more\[0\]\['x'\]",
    }[place]
    if place == "optimizer":
        next(iter(optimizer.state.values()))["exp_avg"][0, 0] = math.inf
    elif place == "nested":
        state["more"][0]["x"][0] = math.nan
    else:
        dict(model.state_dict())["1.running_var" if place == "buffer" else "0.bias"][1] = math.inf
        state = model.state_dict() if place == "state dict" else state
    with pytest.raises(NonFiniteValues, match=name):
        save_checkpoint(state, path)
    assert load(path) == OLD
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


def test_marked(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bad checkpoint can be kept under a name that says so, with a warning, beside the good one."""
    with caplog.at_level(logging.WARNING):
        marked = save_checkpoint({"w": torch.tensor([math.nan])}, path, on_bad="mark")
    assert marked.name == "last.nonfinite.pt"
    assert load(path) == OLD
    assert load(marked)["w"].isnan().all()
    assert "w" in caplog.text


def test_masks_are_let_through(path: Path) -> None:
    """Neither an intended infinity among the buffers nor a buffer that is not saved keeps anybody from saving."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2, 2).masked_fill(torch.eye(2).bool(), -math.inf))
    model.register_buffer("scratch", torch.tensor([math.nan, 1.0]), persistent=False)
    for state in (model, model.state_dict(), {"model": model}):
        save_checkpoint(state, path)


def test_what_cannot_be_written(path: Path) -> None:
    """A failure leaves the old file and nothing else, and says what to do."""
    with pytest.raises((AttributeError, TypeError), match="local"):
        save_checkpoint({"f": lambda: None}, path)
    with pytest.raises(BisectNanError, match="expected: a file"):
        save_checkpoint({"w": torch.ones(1)}, path / "below.pt")
    with pytest.raises(BisectNanError, match="another format"):
        save_checkpoint({"w": torch.ones(1)}, path.with_suffix(".safetensors"))
    with pytest.raises(ValueError, match="'refuse' or 'mark'"):
        save_checkpoint({}, path, on_bad="raise")  # type: ignore[arg-type]
    assert load(path) == OLD
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


WRITER = """
import sys, itertools, torch
from bisect_nan import save_checkpoint
for step in itertools.count(2):
    save_checkpoint({"step": step, "w": torch.full((300_000,), float(step))}, sys.argv[1])
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01])
def test_killed_while_it_writes(path: Path, delay: float) -> None:
    """After kill -9 in the middle of writing there is a whole file of one step, the last that was finished or the next."""
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:  # noqa: S603
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        told = [2, *(int(line) for line in child.stdout.read().split())]
    saved = load(path)
    assert saved["step"] in (told[-1], told[-1] + 1)
    assert (saved["w"] == saved["step"]).all()


FULL = """
import resource, signal, sys, torch
from bisect_nan import BisectNanError, save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    save_checkpoint({"w": torch.ones(100_000)}, sys.argv[1])
except BisectNanError as error:
    print(error)
"""


def test_a_full_disk(path: Path) -> None:
    """Where the file does not fit, that is one clear error, and the old file stays alone."""
    command = [sys.executable, "-c", FULL, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr
    assert "which cannot be written: " in done.stdout
    assert "do this: make room" in done.stdout
    assert load(path) == OLD
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]
