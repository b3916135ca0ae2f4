"""docs/: its commands and code are run, its links lead somewhere, and what is made from the code is what the code gives."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from blocks import ROOT, Shell, blocks_of, check_console, check_part, run_python, shell_in
from torch import nn

from bisect_nan import causes
from bisect_nan.snapshots import encoding, manifest

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RUN_HERE = [page for page in PAGES if page.name != "use.md"]
"""All but the page that goes with README, see test_readme.py."""

TRAIN = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for number in range(20):
    signal = torch.randn(16, 4)
    if number == 3:
        signal[5] = 1.0  # a sensor that stands still
    scaled = (signal - signal.mean(1, keepdim=True)) / signal.std(1, keepdim=True)
    loss = model(scaled).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
"""What the pages call train.py: a training loop as a reader may have one."""

CASE = """\
import torch

def step(model, batch):
    return model(batch).square().mean()

def build():
    return {"model": torch.nn.Linear(2, 1), "batch": torch.ones(3, 2), "step": step}
"""


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder that sees fixtures/."""
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """Return a shell in a folder that holds what the reader of the pages has."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "train.py").write_text(TRAIN)
    (folder / "case.py").write_text(CASE)
    (folder / "runs").mkdir()
    for number in range(1, 6):
        state = {"weight": torch.full((2, 2), torch.nan if number > 3 else 1.0)}
        torch.save(state, folder / "runs" / f"step_{number}00.pt")
    return shell_in(folder)


def names() -> dict[str, Any]:
    """Return what the reader has: a model, an optimizer, a step, data."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    batch = {"input": torch.rand(4, 3), "target": torch.tensor([0, 1, 1, 0])}

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["input"]), batch["target"])

    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optimizer": optimizer, "step": step, "batch": batch, "loader": [batch, batch]}


CONSOLE = [(page, *block) for page in RUN_HERE for block in blocks_of(page, "console")]


@pytest.mark.parametrize(("page", "line", "transcript"), CONSOLE, ids=lambda value: getattr(value, "name", ""))
def test_console(page: Path, line: int, transcript: str, shell: Shell) -> None:
    """Commands print what the page shows."""
    check_console(page, line, transcript, shell)


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_python(page: Path) -> None:
    """The Python blocks of a page run in order, as does every block of the catalog alone."""
    blocks = blocks_of(page, "python")
    if page.name == "catalog.md":
        for block in blocks:
            run_python(page, [block], {})
    else:
        run_python(page, blocks, names())


@pytest.mark.skipif(importlib.util.find_spec("bisect_nan.integrations") is None, reason="there are no integrations")
def test_ranks(tmp_path: Path) -> None:
    """The block for several processes runs, here in a group of one."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        run_python(DOCS / "quickstart.md", blocks_of(DOCS / "quickstart.md", "python ranks"), names())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", RUN_HERE, ids=lambda page: page.name)
def test_no_block_is_left_out(page: Path) -> None:
    """Every block is of a kind that is run here; JSON is JSON; the line that installs is the README's, which a fresh environment runs."""
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"^```(.+)$", text, re.MULTILINE)) <= {"console", "python", "python ranks", "json", "sh"}
    for _, block in blocks_of(page, "json"):
        json.loads(block)
    for _, block in blocks_of(page, "sh"):
        assert block.removesuffix("\n") in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Links lead to files that exist, and to headings that they have."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path) if path else page
        if not file.exists() or (heading and heading not in headings(file)):
            broken.append(target)
    assert broken == []


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_picture() -> None:
    """The picture is an image that a browser can draw, in light and dark."""
    root = ET.parse(DOCS / "search.svg").getroot()  # noqa: S314  (our own file)
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in (DOCS / "search.svg").read_text(encoding="utf-8")


def catalog() -> str:
    """Return all that is known of all causes."""
    rows = [
        f"| [`{cause.name}`](#{cause.name}) | {cause.summary.replace('`{op}`', 'the operation')} |"
        for cause in causes.CAUSES
    ]
    texts = [re.sub(r"^# ", "## ", causes.explain(cause.name)).rstrip() for cause in causes.CAUSES]
    return "\n".join(["| cause | what happens |", "|---|---|", *rows, "", "\n\n".join(texts)])


def fields(module: Any) -> str:
    """Return the tables in a module's docstring as tables of Markdown, the text around them as it stands."""
    text = inspect.getdoc(module) or ""
    _, _, text = text.partition("\n\n")  # the summary
    return re.sub(r"^(=+) +=+\n(.+?)\n=+ +=+\n(.+?)\n=+ +=+$", table, text, flags=re.DOTALL | re.MULTILINE)


def table(found: re.Match[str]) -> str:
    """Return a simple table of reStructuredText as Markdown: its first column is as wide as the first rule."""
    width = len(found[1])
    rows: list[list[str]] = []
    for line in [found[2], "", *found[3].splitlines()]:
        key, value = line[:width].strip(), line[width:].strip()
        if not line:
            rows.append(["---", "---"])
        elif key:
            rows.append([key, value])
        else:
            rows[-1][1] += f" {value}"
    return "\n".join(f"| {key} | {value} |" for key, value in rows)


MADE = {
    ("catalog.md", "causes"): catalog,
    ("file-format.md", "manifest"): lambda: fields(manifest),
    ("file-format.md", "program"): lambda: fields(encoding),
}


@pytest.mark.parametrize(("page", "part"), MADE)
def test_made_parts(page: str, part: str, request: pytest.FixtureRequest) -> None:
    """The catalog and the tables of the file format are what the code says."""
    check_part(DOCS / page, part, MADE[page, part](), write=request.config.getoption("--refresh-golden"))
