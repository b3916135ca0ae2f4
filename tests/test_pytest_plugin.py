"""The pytest plugin, in runs of pytest of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

from bisect_nan import Snapshot

ROOT = Path(__file__).resolve().parents[1]
INI = """
[pytest]
testpaths = tests
bisect_nan_snapshots = crashes/*.safetensors
bisect_nan_entry_paths = cases
filterwarnings = error
addopts = --strict-markers --strict-config
"""
CASE = """
import torch
from torch import nn

def build():
    def step(model, batch):
        return (BODY).mean()
    return {"model": nn.Linear(2, 2), "batch": {"x": torch.ones(3, 2)}, "step": step}
"""
STEPS = """
import pytest
import torch
from torch import nn

model, batch = nn.Linear(2, 2), torch.ones(3, 2)

def good(model, batch):
    return model(batch).square().mean()

def bad(model, batch):
    return (model(batch) * 0).log().mean()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty project with its settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    Path("pytest.ini").write_text(INI)
    for name in ("tests", "cases", "crashes"):
        Path(name).mkdir()
    return tmp_path


def run(*arguments: str) -> tuple[dict[str, str], str, dict[str, dict[str, str]]]:
    """Run pytest with the plugin; return each test's outcome, all output, and the properties that JUnit's report has of each."""
    command = [sys.executable, "-m", "pytest", "-p", "bisect_nan.integrations.pytest_plugin", "-p", "no:cacheprovider"]
    # On CI pytest repeats each failure's whole text in its last lines (see running_on_ci in pytest 9).
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    done = subprocess.run(  # noqa: S603  (this very interpreter)
        [*command, "--junitxml=report.xml", "-rA", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    outcomes: dict[str, str] = {}
    properties: dict[str, dict[str, str]] = {}
    if Path("report.xml").is_file():
        for case in ET.parse("report.xml").iter("testcase"):  # noqa: S314  (written by pytest a moment ago)
            name = case.attrib["name"]
            name = case.attrib["classname"].rpartition(".")[2] if name == "finite_step" else name
            name = Path(case.attrib["classname"].replace(".", "/")).parent.name if name == "safetensors" else name
            outcomes[name] = next((kind for kind in ("failure", "error") if case.find(kind) is not None), "passed")
            properties[name] = {item.attrib["name"]: item.attrib["value"] for item in case.iter("property")}
    return outcomes, done.stdout + done.stderr, properties


def snapshot(name: str, body: str, batch: torch.Tensor, entry: str = "") -> None:
    """Save the snapshot of a step in crashes/."""

    def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        made = eval(body, {"model": model, "batch": batch, "torch": torch})  # noqa: S307  (a text of this file)
        return torch.as_tensor(made.mean())

    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    Snapshot.capture(model, {"x": batch}, step).save(f"crashes/{name}.safetensors", entry=entry)


ZERO, ONE = torch.zeros(3, 2), torch.ones(3, 2)
ENTROPY = 'batch["x"].log() * model(batch["x"]).exp()'
MENDED = 'batch["x"].clamp(min=1e-6).log() * model(batch["x"]).exp()'


def test_it_costs_nothing_when_it_is_not_used() -> None:
    """A run without any of its features imports no torch, and the plugin is known to pytest by its entry point."""
    Path("tests/test_it.py").write_text("import sys\n\ndef test_it():\n    assert 'torch' not in sys.modules\n")
    assert run()[0] == {"test_it": "passed"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert import_module(project["entry-points"]["pytest11"]["bisect_nan"]).SnapshotFile


def test_it_does_no_harm_to_a_process_that_has_imported_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest, started from Python with warnings as errors and the plugin installed, has nothing to say about the order of imports."""
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    installed = Path("site", "installed-1.dist-info")
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[pytest11]\nbisect_nan = bisect_nan.integrations.pytest_plugin\n")
    (installed / "RECORD").write_text("bisect_nan/__init__.py,,\n")
    monkeypatch.setenv("PYTHONPATH", "site", prepend=":")
    Path("tests/test_it.py").write_text(
        "def test_it(request):\n    assert request.config.pluginmanager.has_plugin('bisect_nan')\n"
    )
    code = "import bisect_nan, pytest\nraise SystemExit(pytest.main(['tests']))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_fixture_and_the_marker() -> None:
    """A finite step passes, another one fails with the report, and the marker turns a cause into what is expected."""
    Path("tests/test_it.py").write_text(
        STEPS
        + """
def test_good(finite_step):
    assert finite_step(model, batch, good).culprit is None

def test_bad(finite_step):
    finite_step(model, batch, bad)

@pytest.mark.bisect_nan(cause="log_of_zero")
def test_expected(finite_step):
    assert finite_step(model, batch, bad).culprit.op == "aten.log.default"

@pytest.mark.bisect_nan("zero_over_zero")
def test_other_cause(finite_step):
    finite_step(model, batch, bad)

@pytest.mark.bisect_nan(cause="log_of_zero")
def test_no_fault(finite_step):
    finite_step(model, batch, good)

@pytest.mark.bisect_nan(cause="log_of_zero")
def test_not_called():
    pass

@pytest.mark.bisect_nan(cause="log_of_zer")
def test_no_such_cause(finite_step):
    finite_step(model, batch, bad)

@pytest.mark.bisect_nan
def test_no_cause(finite_step):
    finite_step(model, batch, bad)
"""
    )
    outcomes, text, properties = run()
    assert {name for name, outcome in outcomes.items() if outcome == "passed"} == {"test_good", "test_expected"}
    assert len(outcomes) == 8
    assert "AssertionError: error[log_of_zero]: `log` made the first infinity: 6 of 6 values" in text
    assert "AssertionError: expected zero_over_zero, and this was found:" in text
    assert "the marker bisect_nan asks for a cause, but the test has not called finite_step" in text
    assert "do this: did you mean log_of_zero" in text
    assert "the marker bisect_nan takes one cause" in text
    assert properties["test_good"] == {"bisect_nan.verdict": "clean"}
    assert properties["test_bad"] == {
        "bisect_nan.verdict": "located",
        "bisect_nan.cause": "log_of_zero",
        "bisect_nan.op": "aten.log.default",
        "bisect_nan.file": "tests/test_it.py",
        "bisect_nan.line": "12",
    }


def test_snapshots_run_on_the_code_of_today() -> None:
    """The batch of that day fails on code that is as it was, passes on mended code, and case files do not meet each other."""
    snapshot("old", ENTROPY, ZERO, "cases/old/case.py:build")
    snapshot("mended", ENTROPY, ZERO, "cases/mended/case.py:build")
    snapshot("module", ENTROPY, ZERO, "cases.package.case:build")
    snapshot("below", ENTROPY, ZERO, "package.case:build")
    snapshot("harmless", ENTROPY, ONE)
    snapshot("recorded", ENTROPY, ZERO)
    for name, body, first in (
        ("old", ENTROPY, "from names import NAME\nassert NAME == 'old'\n"),
        ("mended", MENDED, "from names import NAME\nassert NAME == 'mended'\n"),
        ("package", MENDED, "from .names import NAME\n"),
    ):
        Path("cases", name).mkdir()
        Path("cases", name, "case.py").write_text(first + CASE.replace("BODY", body))
        Path("cases", name, "names.py").write_text(f"NAME = {name!r}\n")
    outcomes, text, properties = run("-p", "xdist", "-n1")
    kinds = {"old": "failure", "recorded": "failure"}
    assert outcomes == {
        name: kinds.get(name, "passed") for name in ("old", "mended", "module", "below", "harmless", "recorded")
    }
    assert "--> cases/old/case.py:9 in build.step" in text
    assert text.count("this snapshot names no code") == 1
    assert properties["old"]["bisect_nan.cause"] == "log_of_zero"


def test_code_is_imported_from_allowed_folders_only(folder: Path) -> None:
    """A snapshot cannot have anything imported from elsewhere, however it writes the path."""
    Path("evil.py").write_text("open('ran', 'w')\n\ndef build():\n    pass\n")
    Path("cases/link.py").symlink_to(folder / "evil.py")
    entries = [
        "evil.py:build",
        "cases/../evil.py:build",
        f"{folder}/evil.py:build",
        "cases/link.py:build",
        "evil:build",
    ]
    entries += ["os:getcwd", "cases.gone:build", "..evil:build", ".:build"]
    for number, entry in enumerate(entries):
        snapshot(f"s{number}", ENTROPY, ZERO, entry)
    outcomes, text, _ = run()
    assert set(outcomes.values()) == {"failure"}
    assert len(outcomes) == len(entries)
    assert "got the entry evil.py:build\nexpected: a file in" in text
    assert not Path("ran").exists()


def test_what_no_longer_fits_is_said() -> None:
    """A model of another shape, a batch without a part, code that raises, and a function that is gone are told in one message."""
    for name in ("wide", "renamed", "broken", "gone"):
        snapshot(name, ENTROPY, ZERO, f"cases/{name}.py:{'other' if name == 'gone' else 'build'}")
        Path("cases", f"{name}.py").write_text(CASE.replace("BODY", MENDED))
    for name, old, new in (
        ("wide", "nn.Linear(2, 2)", "nn.Linear(2, 5)"),
        ("renamed", '{"x": torch', '{"y": torch'),
        ("broken", "import torch\n", "import no_such_module\n"),
    ):
        path = Path("cases", f"{name}.py")
        path.write_text(path.read_text().replace(old, new, 1))
    outcomes, text, _ = run()
    assert set(outcomes.values()) == {"failure"}
    assert "got the parameter weight of shape [2, 2], which in today's model is of shape [5, 2]" in text
    assert "got batch['x'], which today's batch does not have" in text
    assert "got ModuleNotFoundError from importing cases/broken.py" in text
    assert "got the entry cases/gone.py:other, and cases/gone.py has no other" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("bisect_nan_entry_paths = cases", "", "name its folder in the ini option bisect_nan_entry_paths"),
        ("crashes/*.safetensors", "crashes/gone.safetensors", "there is no such file"),
        ("testpaths = tests", "", "error[log_of_zero]: `log` made the first infinity: 6 of 6 values"),
    ],
)
def test_settings(old: str, new: str, words: str) -> None:
    """Without allowed folders nothing is imported, a file that is missing is told, and testpaths are not needed."""
    Path("cases/case.py").write_text(CASE.replace("BODY", ENTROPY))
    snapshot("crash", ENTROPY, ZERO, "cases/case.py:build")
    Path("pytest.ini").write_text(INI.replace(old, new))
    assert words in run()[1]


def test_only_named_files_are_tests() -> None:
    """Weights that lie about are left alone, and a run that names its tests runs no others."""
    snapshot("crash", ENTROPY, ONE)
    Path("tests/weights.safetensors").write_bytes(Path("crashes/crash.safetensors").read_bytes())
    Path("tests/test_it.py").write_text("def test_it():\n    pass\n")
    assert run()[0] == {"test_it": "passed", "crash": "passed"}
    assert run("tests")[0] == {"test_it": "passed"}


def test_readme() -> None:
    """The settings and the tests that docs/use.md shows work as it says, with a snapshot whose code has been mended."""
    text = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    for language, file in (("toml", "pyproject.toml"), ("py", "tests/test_it.py")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        Path(file).write_text(block)
    Path("pytest.ini").unlink()
    Path("cases/tagger.py").write_text(CASE.replace("BODY", MENDED))
    snapshot("tagger", ENTROPY, ZERO)
    path = "crashes/tagger.safetensors"
    Snapshot.load(path).save(path, entry="cases/tagger.py:build")
    names = ("test_the_step_is_finite", "test_it_is_not_for_far_outputs", "tagger")
    outcomes, text, _ = run()
    assert outcomes == dict.fromkeys(names, "passed"), text
