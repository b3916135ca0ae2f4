"""Where snapshots go: few, each whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_guard import BAD, Loop, adam, batch_of, raised
from test_recovery import Training
from torch import nn

from bisect_nan import Guard, NonFiniteStep, Snapshot, SnapshotError
from bisect_nan.loop import shelf
from bisect_nan.snapshots import storages


def names(folder: Path) -> list[str]:
    """Return the files in a folder."""
    return sorted(path.name for path in folder.iterdir())


def test_the_first_faults_of_a_run_are_kept(tmp_path: Path) -> None:
    """Further ones are told and not written."""
    training = Training(adam, tmp_path, on_fault="skip", keep=2)
    training.run([batch_of(0), BAD["loss"][1], batch_of(1), BAD["loss"][1], batch_of(2), BAD["loss"][1]])
    assert names(tmp_path) == ["step_1.safetensors", "step_3.safetensors"]


def test_files_of_earlier_runs_make_room(tmp_path: Path) -> None:
    """Of earlier snapshots the oldest go; other files are nobody's business."""
    for age, name in enumerate(
        ["step_7.safetensors", "step_9.safetensors", "rank1_step_3_2.safetensors", "weights.safetensors"]
    ):
        (tmp_path / name).write_bytes(b"earlier")
        os.utime(tmp_path / name, (1000.0 + age, 1000.0 + age))
    (tmp_path / ".0123456789abcdef.tmp").write_bytes(b"killed")
    os.utime(tmp_path / ".0123456789abcdef.tmp", (1000.0, 1000.0))
    (tmp_path / ".fedcba9876543210.tmp").write_bytes(b"another process writes this")
    raised(lambda: Training(adam, tmp_path, keep=2).run([BAD["loss"][1]]))
    assert names(tmp_path) == [
        ".fedcba9876543210.tmp",
        "rank1_step_3_2.safetensors",
        "step_0.safetensors",
        "weights.safetensors",
    ]


def test_a_snapshot_that_would_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written, the fault is told all the same, and why there is no file."""
    usage = shelf.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shelf.shutil, "disk_usage", lambda _: usage._replace(free=100))
    fault = raised(lambda: Training(adam, tmp_path).run([BAD["loss"][1]]), match="free in")
    assert fault.path is None
    assert names(tmp_path) == []


def test_an_unwritable_folder(tmp_path: Path) -> None:
    """The training is as before the step, and can go on."""
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    loop = Loop(adam, tmp_path / "file" / "crashes")
    loop.run([batch_of(0), BAD["loss"][1], batch_of(1)])
    assert [fault.path for fault in loop.faults] == [None]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("place", ["record", "write"])
def test_an_interrupt_while_a_fault_is_saved(
    error: type[BaseException], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes through; nothing is left behind, and the training is as before the step."""

    def interrupt(*_: object, **__: object) -> None:
        raise error

    loop = Loop(adam, tmp_path)
    loop.run([batch_of(0)])
    state = loop.state(BAD["loss"][1])
    with monkeypatch.context() as patch:
        patch.setattr(*((Snapshot, "capture") if place == "record" else (storages, "_write_storage")), interrupt)
        with pytest.raises(error):
            loop.step(loop.model, BAD["loss"][1])
    assert loop.state(BAD["loss"][1]) == state
    assert names(tmp_path) == []
    with pytest.raises(NonFiniteStep) as caught:
        loop.step(loop.model, BAD["loss"][1])
    assert caught.value.path is not None


KILLED = """
import sys, time
from pathlib import Path
import torch
from torch import nn
from bisect_nan import Guard
from bisect_nan.snapshots import storages

write = storages._write_storage
def slowly(file, storage):
    write(file, storage)
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
storages._write_storage = slowly

model = nn.Linear(64, 64)
guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=sys.argv[1])
guard.watch(lambda m, b: m(b).log().mean())(model, -torch.ones(4, 64))
"""


def test_kill_9_in_the_middle_of_writing(tmp_path: Path) -> None:
    """No half file is ever offered as a snapshot."""
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:  # noqa: S603  (our own text)
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        child.send_signal(signal.SIGKILL)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(SnapshotError):
        Snapshot.load(left)


def test_the_rank_is_in_the_name(tmp_path: Path) -> None:
    """In a distributed run every process has files of its own."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fault = raised(lambda: Training(adam, tmp_path / "crashes").run([BAD["loss"][1]]))
    finally:
        torch.distributed.destroy_process_group()
    assert fault.path == tmp_path / "crashes" / "rank0_step_0.safetensors"


def test_an_exception_in_the_step_is_the_users(tmp_path: Path) -> None:
    """It passes through unchanged, and the step after it is watched as ever."""
    model = nn.Linear(2, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), directory=tmp_path, on_fault="skip")

    def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if len(batch) > 3:
            raise ValueError("too long")
        return model(batch).log().mean()

    watched = guard.watch(step)
    with pytest.raises(ValueError, match="too long"):
        watched(model, torch.ones(4, 2))
    watched(model, -torch.full((1, 2), torch.inf))
    assert names(tmp_path) == ["step_0.safetensors"]
    assert time.time() - (tmp_path / "step_0.safetensors").stat().st_mtime < 3600
