"""The crash files in fixtures/: each is located as fixtures/README.md says, and can be made anew."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bisect_nan import Finding, Verdict, locate
from bisect_nan.command.child import Request
from bisect_nan.command.targets import load_target

ROOT = Path(__file__).resolve().parents[1]
FIXTURES = ROOT / "fixtures"
LARGEST = 200_000
"""No file has more bytes than this."""


def table() -> list[dict[str, str]]:
    """Return the rows of the table in fixtures/README.md, code marks taken off."""
    lines = [line for line in (FIXTURES / "README.md").read_text().splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(head, row, strict=True)) for row in rows]


ROWS = {row["file"]: row for row in table()}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name files as the fixtures do: relative to the checkout."""
    monkeypatch.chdir(ROOT)


def locate_file(name: str, folder: Path = FIXTURES) -> Finding:
    """Locate a fixture as the command line does."""
    request = Request(str(folder / name))
    if name.endswith(".pt"):
        model, loss = "fixtures/models/classifier.py:build", "torch.nn.functional:cross_entropy"
        request = Request(str(folder / name), model=model, weights=str(folder / "last.pt"), loss=loss)
    snapshot = load_target(request).snapshot
    assert snapshot is not None
    return locate(snapshot)


@pytest.fixture(scope="module")
def found() -> Mapping[str, Finding]:
    """Return the findings of the files in fixtures/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return {name: locate_file(name) for name in ROWS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which the files were made anew."""
    spec = importlib.util.spec_from_file_location("make_fixtures", ROOT / "scripts" / "make_fixtures.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    folder = tmp_path_factory.mktemp("fixtures")
    script.make(folder)
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_located_as_the_readme_says(name: str, found: Mapping[str, Finding]) -> None:
    """Phase, cause, source line and samples are those of the table."""
    row, finding = ROWS[name], found[name]
    if row["phase"] == "none":
        assert finding.verdict is Verdict.CLEAN
        return
    culprit = finding.culprit
    assert culprit is not None
    assert culprit.source is not None
    model = re.search(r"models/\w+\.py", row["made by"])
    assert model is not None
    assert culprit.source.file == f"fixtures/{model[0]}"
    assert culprit.source.text == row["line"]
    assert (culprit.phase.value, culprit.cause) == (row["phase"], row["cause"])
    assert list(culprit.samples) == [int(sample) for sample in row["samples"].split()]


def test_the_table_is_complete() -> None:
    """Every file in fixtures/ has a row in its README, and none is large."""
    files = {path.name: path.stat().st_size for path in FIXTURES.iterdir() if path.suffix in (".safetensors", ".pt")}
    assert files.keys() == {*ROWS, "last.pt"}
    assert max(files.values()) < LARGEST


@pytest.mark.parametrize("name", ROWS)
def test_made_anew_gives_the_same_finding(name: str, found: Mapping[str, Finding], made: Path) -> None:
    """The script makes files with the findings of those that are there, apart from times, costs and the last digits."""
    expected = plain(found[name].to_dict())
    anew = list(plain(locate_file(name, made).to_dict()))
    assert anew == [pytest.approx(leaf, rel=1e-3) if isinstance(leaf, float) else leaf for leaf in expected]


def plain(value: Any, place: str = "") -> Iterator[Any]:
    """Flatten the JSON form of a finding into its leaves; numbers within notes are left out, another CPU may round them up."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in ("search", "environment"):
                yield key
                yield from plain(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from plain(item, place)
    else:
        yield re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", value) if place == "notes" else value
