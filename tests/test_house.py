"""The rules of the house, checked on the source itself: layers, torch's internals, code from files, sizes, docstrings."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from layers import ORDER

import bisect_nan

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bisect_nan"
LONGEST = 320
"""Lines of a module; a longer one holds a second idea."""

TRUSTED = {
    "recording.recorder",
    "replaying.replay",
    "replaying.stretch",
    "recording.calls",
    "recording.lines",
    "recording.values",
    "recording.traits",
    "recording.generators",
    "recording.uninitialized",
}
"""Modules that see every call while it happens, or make it happen again: they may use any private name of torch."""

INTERNALS = {
    # An operator's schema, which has no public accessor.
    **{
        module: {"_schema"}
        for module in (
            "recording.program",
            "snapshots.operators",
            "answer.explain",
            "replaying.influence",
            "replaying.intent",
            "blaming.trace",
            "reproduction.spelling",
        )
    },
    # The parts of a sparse tensor; the public ones refuse uncoalesced ones.
    "finite": {"_indices", "_values"},
    # The norms of many tensors in one call, which `torch.nn.utils.get_total_norm` wraps in five others.
    "norms": {"_foreach_norm"},
    "blaming.confirm": {"_values"},
    "snapshots.storages": {"_indices", "_values"},
    "recording.memory": {"_neg_view"},
    # The fields of Python's named tuples.
    "prevention.nested": {"_fields"},
    # Whether the backward pass runs.
    "prevention.layers": {"_C", "_current_autograd_node"},
    # How often a tensor was written to.
    "recording.live": {"_version", "_unsafe_preserve_version_counter"},
    # The hooks that run before an update.
    "loop.assurance": {"_optimizer_step_pre_hooks"},
    # What sees a call before it is made.
    "integrations.distributed": {"_python_dispatch"},
    # The stack of dispatch modes, at the bottom of which a script is watched; the mode's wrapper against compilation.
    "watching.stream": {"_C", "_len_torch_dispatch_stack", "_pop_mode", "_push_mode", "_python_dispatch"},
    # What the iterators of data loaders have in common.
    "watching.names": {"_BaseDataLoaderIter"},
    # What keeps `cond` from being compiled.
    "recording.setting": {"_C", "_dispatch_cache"},
}
"""Module: the private names of torch that it may use."""

EVERYWHERE = {"_ops", "_pytree"}
"""The type of an operator, and torch's pytrees, which have no public name."""


DOORS = {"shows": {"reports.html", "reports.html.notebook", "reports.markdown"}}
"""Module: what stands above it and is loaded when one of its methods is called, for people look for it there."""


def name_of(path: Path) -> str:
    """Return a module's name below the package: `causes.entry`; empty for the package itself."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


PATHS = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in PATHS.items()}


def run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes but those that only a type checker sees."""
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield child
            yield from run_time_nodes(child)


def imported(tree: ast.AST) -> set[str]:
    """Return the modules of this package that a module imports, inside of functions as well."""
    names: list[str] = []
    for node in run_time_nodes(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    ours = [name.removeprefix("bisect_nan.") for name in names if name.startswith("bisect_nan.")]
    return {name if name in MODULES else name.rpartition(".")[0] for name in ours}


def test_every_module_has_its_layer() -> None:
    """The list of layers holds each module once."""
    assert sorted(ORDER) == sorted(set(MODULES) - {""})


def test_imports_point_down() -> None:
    """A module imports only modules that stand before it in the layers, so there are no cycles either."""
    below = {name: set(ORDER[: ORDER.index(name)]) for name in ORDER} | {"": set(ORDER)}
    upward = {name: imported(tree) - below.get(name, set()) - DOORS.get(name, set()) for name, tree in MODULES.items()}
    upward = {name: modules for name, modules in upward.items() if modules}
    assert upward == {}


def test_frameworks_stay_in_their_integrations() -> None:
    """A package that is only an extra is imported by the integration that has its name; the trainer of transformers runs on accelerate."""
    extras = {"lightning", "transformers", "accelerate"}
    found = {
        name: {
            (getattr(node, "module", None) or node.names[0].name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        & extras
        for name, tree in MODULES.items()
    }
    assert {name: used for name, used in found.items() if used} == {f"integrations.{name}": {name} for name in extras}


def test_reports_know_the_finding_alone() -> None:
    """A report is made from a finding, and the numbers of its pictures, and looks at nothing live."""
    reports = [tree for name, tree in MODULES.items() if name.startswith("reports")]
    others = {name for tree in reports for name in imported(tree) if not name.startswith("reports")}
    assert others <= {"culprit", "errors", "finding", "finite", "pictures"}


def internals(tree: ast.AST) -> set[str]:
    """Return the private names that a module takes from torch: parts of dotted names, and attributes that it does not define."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    own |= {ast.unparse(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)}
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {part for alias in node.names if alias.name.startswith("torch") for part in alias.name.split(".")}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()", "os", "sys"):
            found.add(node.attr)
    return {name for name in found - own if name.startswith("_") and not name.startswith("__")}


def test_torch_internals_stay_where_they_are_known() -> None:
    """A private name of torch may vanish with any release, so few modules may use one, and those that are listed."""
    used = {name: internals(tree) - EVERYWHERE - INTERNALS.get(name, set()) for name, tree in MODULES.items()}
    assert {name: names for name, names in used.items() if names and name not in TRUSTED} == {}


def test_the_public_names() -> None:
    """The package offers these names, and each can be imported."""
    assert sorted(bisect_nan.__all__) == [
        "BisectNanError",
        "Check",
        "Culprit",
        "Finding",
        "FiniteCollate",
        "FirstBad",
        "Guard",
        "Headroom",
        "LayerTable",
        "LoopMistake",
        "MinimalScript",
        "NonFiniteStep",
        "NonFiniteValues",
        "Phase",
        "RecordingError",
        "ReplayError",
        "ReproductionError",
        "SmokeTest",
        "Snapshot",
        "SnapshotError",
        "StressFailure",
        "TargetError",
        "Verdict",
        "check_batch",
        "check_model",
        "check_tensor",
        "first_bad_checkpoint",
        "headroom",
        "layers",
        "locate",
        "minimal_script",
        "picture",
        "save_checkpoint",
        "smoke_test",
        "stress",
    ]
    assert all(hasattr(bisect_nan, name) for name in bisect_nan.__all__)


GENERATED = "reproduction.recapture"
"""Runs the scripts that this package writes: `reproduction.literals` and `reproduction.spelling` let no text of a file into them."""


def forbidden(tree: ast.AST, name: str) -> Iterator[str]:
    """Yield what would execute something that comes from a file or from a text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {alias.name for alias in node.names} | {getattr(node, "module", "")}
            yield from modules & {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
        if isinstance(node, ast.Call):
            called, keywords = ast.unparse(node.func), [ast.unparse(keyword) for keyword in node.keywords]
            if (
                called in ("eval", "exec", "compile", "__import__", "torch.hub.load", "torch.jit.load")
                and name != GENERATED
            ):
                yield called
            if called == "torch.load" and "weights_only=True" not in keywords:
                yield called
            if called.endswith((".exec_module", "import_module")) and name not in (
                "",
                "command.user_code",
            ):  # the package loads its own names
                yield called


def test_nothing_runs_from_a_file() -> None:
    """No pickle is read and no text executed; what the user names on the command line is imported by one module."""
    assert {name: found for name, tree in MODULES.items() if (found := list(forbidden(tree, name)))} == {}


def test_sizes_and_names() -> None:
    """A module holds one idea, which its name tells."""
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in PATHS.items()}
    assert {name: count for name, count in lines.items() if count >= LONGEST} == {}
    words = {part for name in MODULES for part in name.split(".")}
    assert not words & {"utils", "util", "helpers", "common", "misc"}


def undocumented(node: ast.AST, place: str) -> Iterator[str]:
    """Yield the public modules, classes, functions and methods without a docstring."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not ast.get_docstring(
        node
    ):
        yield place
    for child in [] if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield from undocumented(child, f"{place}.{child.name}")


def test_docstrings() -> None:
    """Every public module, class, function and method says what it is."""
    assert [place for name, tree in MODULES.items() for place in undocumented(tree, name)] == []


def test_every_test_says_what_it_shows() -> None:
    """A test's docstring is one sentence on one line."""
    unclear = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = ast.get_docstring(node) or ""
                if not text.endswith(".") or "\n" in text:
                    unclear.append(f"{path.name}: {node.name}")
    assert unclear == []


SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if "__main__" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_start(script: Path) -> None:
    """A script that nobody runs for weeks still finds what it imports."""
    subprocess.run([sys.executable, script, "--help"], check=True, capture_output=True)  # noqa: S603  (our own scripts)
