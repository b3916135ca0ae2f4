"""What the command line can be pointed at: snapshots, case files, saved tensors with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from bisect_nan import Verdict, locate
from bisect_nan.command.child import Request
from bisect_nan.command.targets import Target
from bisect_nan.command.targets import load_target as load
from bisect_nan.errors import BisectNanError, SnapshotError, TargetError

CASE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    def step(model, batch):
        return (model(batch) * 0.0).log().mean()  # the logarithm of zero
    return {"model": nn.Linear(3, 2), "batch": torch.ones(4, 3), "step": step}
"""
TRAINED = """
import torch
from torch import nn

def build():
    def step(model, batch):
        return (model(batch) * batch.new_tensor(RATE)).square().mean()
    return {"model": nn.Linear(3, 1), "batch": torch.ones(4, 3), "step": step, "steps": 6,
            "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=RATE)}
"""
NET = """
import torch
from torch import nn

ready = nn.Linear(3, 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x).log()

def build():
    return Net()

def number():
    return 3

def broken():
    raise RuntimeError("no such checkpoint")

def loss(output, target):
    return (output - target).square().mean()

def vector(output, target):
    return output - target
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder with `net.py` in it, and forget afterwards what was imported from there."""
    modules, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def load_target(path: Path, **options: str) -> Target:
    """Load a target as the command line would with these options."""
    return load(Request(str(path), **options))  # type: ignore[arg-type]


def write(name: str, text: str) -> Path:
    """Write a file into the working folder."""
    path = Path(name)
    path.write_text(text)
    return path


def tensors(**saved: object) -> Path:
    """Save a dictionary such as crash handlers write."""
    path = Path("crash_step_812.pt")
    torch.save(saved, path)
    return path


def test_case_is_captured() -> None:
    """A case with one step is captured as it is, and its fault is located at its own line."""
    target = load_target(write("case.py", CASE))
    assert target.captured
    assert target.snapshot is not None
    finding = locate(target.snapshot)
    assert finding.culprit is not None
    assert finding.culprit.source is not None
    assert str(finding.culprit.source) == "case.py:8"


def test_case_may_import_its_neighbours(tmp_path: Path) -> None:
    """A case file finds modules that lie beside it, as a script does, from any working directory."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "neighbour_of_case.py").write_text("SCALE = 0.0")
    case = CASE.replace("import torch\n", "import torch\nfrom neighbour_of_case import SCALE\n", 1)
    assert load_target(write("deep/case.py", case)).snapshot is not None


def test_trained_case_is_the_step_that_the_guard_saved(tmp_path: Path) -> None:
    """A case with an optimizer trains under a guard until it fails; the failing step is what is looked at."""
    target = load_target(write("case.py", TRAINED.replace("RATE", "1e18")), scratch=f"{tmp_path / 'crashes'}")
    assert target.captured
    assert target.snapshot is not None
    assert target.notes[0].startswith("Trained under a guard until ")


def test_case_that_trains_through_has_no_snapshot(tmp_path: Path) -> None:
    """A case without a fault leaves nothing to look at."""
    target = load_target(write("case.py", TRAINED.replace("RATE", "1e-3")), scratch=f"{tmp_path / 'crashes'}")
    assert target.snapshot is None
    assert target.notes == ("Trained 6 steps under a guard, and every one was finite.",)


def test_case_runs_under_its_autocast() -> None:
    """`autocast` names the dtype that the step computes in."""
    case = CASE.replace("(model(batch) * 0.0).log().mean()", "check(model(batch)).mean()").replace(
        "    def step",
        "    def check(x):\n        assert x.dtype == torch.bfloat16\n        return x.float()\n    def step",
    )
    case = case.replace('"step": step}', '"step": step, "autocast": torch.bfloat16}')
    target = load_target(write("case.py", case))
    assert target.snapshot is not None
    assert locate(target.snapshot).verdict is Verdict.CLEAN


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import torch\nprint('training')", "has no function build"),
        ("# build me\nx = 1", "build is None"),
        ("build = lambda: 3", "got int from build()"),
        ("build = lambda: {'model': 1}", "without batch and step"),
        ("build = lambda: {'model': 1, 'batch': 2, 'step': 3}", "got int as the model"),
        ("def build():\n    return {}['weights']", "KeyError from build() of case.py at case.py:2 in build: 'weights'"),
        ("import no_such_module\ndef build(): ...", "ModuleNotFoundError from case.py at case.py:1"),
        ("def build(:", "SyntaxError from case.py"),
        ("def build():\n    raise SystemExit(3)", "SystemExit from build() of case.py at case.py:2 in build: 3"),
    ],
)
def test_unusable_case(text: str, words: str) -> None:
    """A case file that cannot be used is refused with its own line and what a case has to be."""
    with pytest.raises(TargetError) as caught:
        load_target(write("case.py", text))
    assert words in str(caught.value)
    assert "do this: " in str(caught.value)


def test_step_that_fails_names_its_line() -> None:
    """An error inside the step is reported at the user's line, not at torch's."""
    case = CASE.replace("model(batch) * 0.0", "model(batch) @ batch")
    with pytest.raises(TargetError, match=r"RuntimeError from the step of case.py at case.py:8 in step"):
        load_target(write("case.py", case))


def test_tensors_with_model_weights_and_loss() -> None:
    """A dictionary of tensors, a model, its weights and a loss make a step; other keys are ignored and named."""
    path = tensors(
        step=812, input=torch.ones(4, 3), output=torch.zeros(4, 2), target=torch.zeros(4, 2), loss=float("nan")
    )
    torch.save({"head.weight": torch.zeros(2, 3), "head.bias": torch.zeros(2)}, "last.pt")
    target = load_target(path, model="net:build", weights="last.pt", loss="torch.nn.functional:mse_loss")
    assert target.notes == (
        "Used input, target of crash_step_812.pt; ignored step, output, loss.",
        "Weights from last.pt.",
    )
    assert target.snapshot is not None
    finding = locate(target.snapshot)
    assert finding.culprit is not None
    assert str(finding.culprit.source) == "net.py:13"


def test_weights_may_come_with_the_tensors() -> None:
    """A state dict in the same file is used, DistributedDataParallel's prefix or not; a file path may name the model."""
    state = {"module.head.weight": torch.ones(2, 3), "module.head.bias": torch.zeros(2)}
    path = tensors(x=torch.ones(4, 3), y=torch.zeros(4, 2), model_state_dict=state)
    target = load_target(path, model="net.py:build", loss="net:loss")
    assert target.notes == (
        "Used x, y, model_state_dict of crash_step_812.pt.",
        "Weights from the key model_state_dict of crash_step_812.pt (`module.` taken off every name).",
    )
    assert target.snapshot is not None
    assert locate(target.snapshot).verdict is Verdict.CLEAN


def test_weights_may_be_safetensors_or_missing() -> None:
    """Weights load from safetensors; without any the model runs as it was built, and a note says so."""
    from safetensors.torch import save_file  # noqa: PLC0415  (this test alone needs it)

    path = tensors(input=torch.ones(4, 3), target=torch.zeros(4, 2))
    save_file({"weight": torch.ones(2, 3), "bias": torch.zeros(2)}, "last.safetensors")
    with_weights = load_target(path, model="net:ready", weights="last.safetensors", loss="net:loss")
    assert with_weights.notes[1] == "Weights from last.safetensors."
    without = load_target(path, model="net:ready", loss="net:loss")
    assert without.notes[1] == "No --weights: the model ran with those it was built with."


def test_model_may_return_the_loss() -> None:
    """Without --loss the model's own output is the loss, also under the name `loss`, and a mapping gives keyword arguments."""
    write(
        "own.py",
        "import torch\nclass Own(torch.nn.Linear):\n    def forward(self, x, labels):\n"
        "        return {'loss': (super().forward(x) - labels).log().mean()}\ndef build():\n    return Own(3, 2)\n",
    )
    path = tensors(input={"x": torch.ones(4, 3), "labels": torch.full((4, 2), 9.0)})
    target = load_target(path, model="own:build")
    assert target.snapshot is not None
    assert locate(target.snapshot).verdict is Verdict.LOCATED


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "without a model (its keys: input, target)"),
        ({"model": "net"}, "got --model net"),
        ({"model": "net:nothing"}, "net has no nothing\nexpected: one of torch, nn, ready, Net, build"),
        ({"model": "no_such_module:build"}, "ModuleNotFoundError from importing no_such_module for --model"),
        ({"model": "gone.py:build"}, "there is no file gone.py"),
        ({"model": "net:number"}, "got int from net:number()"),
        ({"model": "net:broken"}, "RuntimeError from net:broken() at net.py:22 in broken: no such checkpoint"),
        (
            {"model": "net:build"},
            "got shape [4, 2] from the model\nexpected: the loss, one number\ndo this: add --loss",
        ),
        ({"model": "net:build", "loss": "net:vector"}, "got shape [4, 2] from net:vector"),
        ({"model": "net:build", "weights": "gone.pt"}, "got gone.pt, which is no file"),
        ({"model": "net:build", "weights": "net.py"}, "got net.py, which cannot be read"),
        ({"model": "net:build", "weights": "other.pt"}, "do not fit the model: size mismatch for head.weight"),
        ({"model": "net:build", "device": "nonsense"}, "got --device nonsense"),
    ],
)
def test_what_is_missing_is_said(options: dict[str, str], words: str) -> None:
    """Every missing or unusable piece of a step is named, with what to add."""
    torch.save(nn.Linear(7, 7).state_dict(), "other.pt")
    with pytest.raises(TargetError) as caught:
        load_target(tensors(input=torch.ones(4, 3), target=torch.zeros(4, 2)), **options)
    assert words in str(caught.value)
    assert "do this: " in str(caught.value)


def test_keys_that_are_missing_are_named() -> None:
    """A dictionary without one input, or without the target that a loss needs, is refused with the keys that would do."""
    with pytest.raises(
        TargetError, match=r"got pixels, depth in .*\nexpected: the input of the model, under one of input, "
    ):
        load_target(tensors(pixels=torch.ones(2), depth=torch.ones(2)), model="net:build")
    with pytest.raises(TargetError, match=r"got input in .*\nexpected: the target of the loss, under one of target, "):
        load_target(tensors(input=torch.ones(2)), model="net:build", loss="net:loss")


class Payload:
    """An object whose unpickling would be noticed."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        """Leave a file behind when unpickled."""
        return (Path.touch, (Path("executed"),))  # type: ignore[return-value]


def test_a_pickle_of_anything_else_is_not_executed() -> None:
    """A file that would call something is refused, with what it names, and nothing of it has run."""
    with pytest.raises(TargetError, match=r"which cannot be read: it holds objects of builtins.getattr, pathlib"):
        load_target(tensors(input=Payload()), model="net:build")
    assert not Path("executed").exists()


def test_snapshots_take_no_model(tmp_path: Path) -> None:
    """Options that belong to saved tensors are refused beside a snapshot or a case."""
    target = load_target(write("case.py", CASE))
    assert target.snapshot is not None
    target.snapshot.save(tmp_path / "crash.safetensors")
    with pytest.raises(TargetError, match="got --model and --loss together with a snapshot"):
        load_target(tmp_path / "crash.safetensors", model="a:b", loss="c:d")
    loaded = load_target(tmp_path / "crash.safetensors")
    assert loaded.snapshot is not None
    assert not loaded.captured


def test_files_that_are_no_snapshots() -> None:
    """A missing file and a file that only has the name of a snapshot each get one clear error."""
    with pytest.raises(TargetError, match="which is no file"):
        load_target(Path("gone.safetensors"))
    with pytest.raises((SnapshotError, BisectNanError)):
        load_target(write("empty.safetensors", "nothing"))
