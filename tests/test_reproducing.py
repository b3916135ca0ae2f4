"""`bisect-nan repro` writes its script where it was asked to, and says what was seen of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from bisect_nan import Finding, MinimalScript, Snapshot, locate
from bisect_nan.command import reproducing
from bisect_nan.command.child import REDUCE, Request


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> tuple[Snapshot, Finding]:
    """Return a step and its finding; the script of it is at hand."""

    def made(*_: object, progress: reproducing.Progress, skip: tuple[int, ...]) -> MinimalScript:
        progress("reduce", 1 + len(skip), 600)
        return MinimalScript("import torch\n", "log_of_zero", "log", 3)

    monkeypatch.setattr(reproducing, "minimal_script", made)
    snapshot = Snapshot.capture(nn.Identity(), torch.zeros(2), lambda _, batch: batch.log().mean())
    return snapshot, locate(snapshot)


def test_the_script_goes_to_the_file(fault: tuple[Snapshot, Finding], tmp_path: Path) -> None:
    """The file holds the script; how long it is and how it was checked is printed, and the work is told."""
    told: list[tuple[str, int, int]] = []
    request = Request("case.py", repro=str(tmp_path / "repro.py"), skip=(1, 2))
    text, message, status = reproducing.write_script(*fault, request, lambda *far: told.append(far))
    assert (tmp_path / "repro.py").read_text() == "import torch\n"
    assert text.splitlines()[1] == "checked: ran in a fresh process, log_of_zero at `log`"
    assert (message, status) == ("", 0)
    assert told == [(REDUCE, 3, 600)]


def test_the_script_goes_to_standard_output(fault: tuple[Snapshot, Finding]) -> None:
    """Without a file standard output is the script alone."""
    text, message, status = reproducing.write_script(*fault, Request("case.py", repro="-"), lambda *_: None)
    assert text == "import torch\n"
    assert message == "checked: ran in a fresh process, log_of_zero at `log`"
    assert status == 0


def test_a_file_that_cannot_be_written(fault: tuple[Snapshot, Finding], tmp_path: Path) -> None:
    """The error names the file and the reason, and the script is printed instead: it may have taken minutes."""
    request = Request("case.py", repro=str(tmp_path))
    text, message, status = reproducing.write_script(*fault, request, lambda *_: None)
    assert (text, status) == ("import torch\n", 2)
    assert message.startswith(f"error: got {tmp_path}, which cannot be written: Is a directory")


def test_the_file_is_replaced_as_a_whole(
    fault: tuple[Snapshot, Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails leaves the script that was there; folders on the way to a new one are made."""
    path = tmp_path / "new" / "repro.py"
    request = Request("case.py", repro=str(path))
    reproducing.write_script(*fault, request, lambda *_: None)
    path.write_text("mine")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device" in reproducing.write_script(*fault, request, lambda *_: None)[1]
    assert path.read_text() == "mine"
    assert [file.name for file in path.parent.iterdir()] == ["repro.py"]
