"""`bisect-nan run --html FILE`: a page beside the normal report, and no answer lost when it cannot be made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pages import read
from test_cli import CLEAN, LOG_OF_ZERO, bisect_nan, case

from bisect_nan import Finding, Snapshot, Verdict, locate
from bisect_nan.command import page
from bisect_nan.command.page import write_page
from bisect_nan.errors import ReplayError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_page_beside_the_report(folder: Path) -> None:
    """The report is on stdout as ever, stderr says where the page is, and nothing else is left in its folder."""
    done = bisect_nan("run", case(LOG_OF_ZERO), "--html", "reports/out.html")
    assert done.returncode == 1
    assert done.stdout.startswith("error[log_of_zero]: ")
    assert "Wrote the report as reports/out.html." in done.stderr
    assert [path.name for path in (folder / "reports").iterdir()] == ["out.html"]
    headings = [element.text for element in read((folder / "reports/out.html").read_text()).all("h1", "h2")]
    assert headings[0] == "log made the first infinity: 8 of 8 values"
    assert {"How large the values are", "The bad elements"} <= set(headings)


def test_json_stays_alone_on_stdout(folder: Path) -> None:
    """Together with --json the finding is all there is on stdout; a clean step has a page, too."""
    done = bisect_nan("run", case(CLEAN), "--json", "--html", "out.html")
    assert done.returncode == 0
    assert Finding.from_dict(json.loads(done.stdout)).verdict is Verdict.CLEAN
    assert Verdict.CLEAN.value in read((folder / "out.html").read_text()).text


def test_a_page_that_cannot_be_written(folder: Path) -> None:
    """A bad place for the page costs the page: the report and its status are the same, and stderr says what to do."""
    (folder / "taken").mkdir()
    done = bisect_nan("run", case(LOG_OF_ZERO), "--html", "taken")
    assert done.returncode == 1
    assert done.stdout.startswith("error[log_of_zero]: ")
    assert "error: got taken, which cannot be written: " in done.stderr
    assert "do this: name another one after --html" in done.stderr
    assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []


def test_a_step_that_cannot_be_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the step cannot be run once more the page comes without pictures, and the message says so."""

    def fails(*_: object) -> None:
        raise ReplayError("node 3 cannot be executed here", "a kernel", "use another machine")

    snapshot = Snapshot.capture(
        torch.nn.Linear(2, 1), torch.zeros(3, 2), lambda model, batch: (model(batch) * 0).log().mean()
    )
    finding = locate(snapshot, remedies=False)
    monkeypatch.setattr(page, "picture", fails)
    said = write_page(folder / "out.html", finding, snapshot)
    assert said.startswith(
        f"Wrote the report as {folder / 'out.html'}, without pictures: node 3 cannot be executed here"
    )
    assert "The bad elements" not in (folder / "out.html").read_text()
