"""The pytest plugin: steps that have to be finite, and crash snapshots as regression tests.

Every pytest run loads it where this package is installed, so it imports torch only when a test needs it.

- The fixture `finite_step` runs a step and fails with the report unless it is finite.
- Files that the ini option `bisect_nan_snapshots` names are tests: each runs its step on today's code.
- The marker `bisect_nan(cause=...)` says that `finite_step` has to find this cause.
"""

from __future__ import annotations

import contextlib
import glob
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bisect_nan.errors import BisectNanError, TargetError
from bisect_nan.snapshots.manifest import Manifest

if TYPE_CHECKING:
    from bisect_nan.finding import Finding

_SNAPSHOTS = pytest.StashKey[frozenset[Path]]()
_LOOKED = pytest.StashKey[bool]()

FiniteStep = Callable[[Any, Any, Callable[[Any, Any], Any]], "Finding"]
"""`finite_step(model, batch, step)`, where `step(model, batch)` returns the loss."""

_RECORDED = "this snapshot names no code, so what it recorded was run again; save it with an entry to test today's code"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini options."""
    text = "crash snapshots that are tests: paths and globs, from the folder of the ini file"
    parser.addini("bisect_nan_snapshots", text, type="args", default=[])
    text = "folders from which the code that a snapshot names may be imported, from the folder of the ini file"
    parser.addini("bisect_nan_entry_paths", text, type="paths", default=[])


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and let a run without arguments find the snapshots beside its `testpaths`."""
    text = "bisect_nan(cause): the step that finite_step is given has to fail with this cause, such as log_of_zero."
    config.addinivalue_line("markers", text)
    config.stash[_SNAPSHOTS] = frozenset(_snapshots(config))
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        folders = [(config.invocation_params.dir / arg).resolve() for arg in config.args]
        beside = (path for path in config.stash[_SNAPSHOTS] if not any(map(path.is_relative_to, folders)))
        config.args += sorted(map(str, beside))


def _snapshots(config: pytest.Config) -> Iterator[Path]:
    """Yield the files that the ini option names.

    Raises:
        UsageError: A name without wildcards is no file.
    """
    base = config.inipath.parent if config.inipath else config.rootpath
    for pattern in config.getini("bisect_nan_snapshots"):
        found = glob.glob(pattern, root_dir=base, recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)
        if not found and not glob.has_magic(pattern):
            raise pytest.UsageError(f"bisect_nan_snapshots names {pattern}, and there is no such file in {base}")
        yield from ((base / path).resolve() for path in found)


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> SnapshotFile | None:
    """Make a test of a snapshot that the ini option names."""
    if file_path.resolve() in parent.config.stash[_SNAPSHOTS]:
        return SnapshotFile.from_parent(parent, path=file_path)
    return None


class SnapshotFile(pytest.File):
    """A crash snapshot."""

    def collect(self) -> Iterable[SnapshotTest]:
        """Return its one test."""
        return [SnapshotTest.from_parent(self, name="finite_step")]


class SnapshotTest(pytest.Item):
    """The step of a snapshot is finite on today's code."""

    def runtest(self) -> None:
        """Run the step again, by the code that the snapshot names; without one, run what was recorded."""
        folders = self.config.getini("bisect_nan_entry_paths")
        with _imports():
            from bisect_nan.command.again import run_again  # noqa: PLC0415  (imports torch)
            from bisect_nan.snapshots.snapshot import Snapshot  # noqa: PLC0415  (likewise)
        named = bool(Manifest.read(self.path).entry)
        # Of a step that runs on today's code only the tensors are needed, which need no accelerator.
        snapshot = Snapshot.load(self.path, device="cpu" if named else None)
        if not named:
            _require_clean(self, _located(snapshot), _RECORDED)
            return
        if not folders:
            do = "name its folder in the ini option bisect_nan_entry_paths if you trust it"
            raise TargetError(f"got the entry {snapshot.entry}", "folders that code may be imported from", do)
        with _own_modules(folders):
            finding = run_again(snapshot, self.config.rootpath, folders)
        _require_clean(self, finding)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the report alone: the traceback leads through this package only."""
        if isinstance(excinfo.value, AssertionError | BisectNanError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return what heads the report of a failure."""
        return self.path, None, f"the step of {self.path.name} is finite"


@pytest.fixture
def finite_step(request: pytest.FixtureRequest) -> FiniteStep:
    """Return a function `finite_step(model, batch, step)` that fails with the report unless the step is finite.

    It runs `step(model, batch)` and its backward pass once, leaves everything as it was, and returns the finding. In a test that is
    marked with `bisect_nan(cause=...)` it fails unless that cause is found.
    """
    wanted = _wanted(request.node)

    def check(model: Any, batch: Any, step: Callable[[Any, Any], Any]) -> Finding:
        __tracebackhide__ = True
        with _imports():
            from bisect_nan.snapshots.snapshot import Snapshot  # noqa: PLC0415  (imports torch)
        finding = _located(Snapshot.capture(model, batch, step))
        request.node.stash[_LOOKED] = True
        if wanted is None:
            _require_clean(request.node, finding)
        else:
            _require_cause(request.node, finding, wanted)
        return finding

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fail a test that is marked to find a cause and has not looked for any."""
    result = yield
    if _wanted(item) is not None and not item.stash.get(_LOOKED, False):
        pytest.fail("the marker bisect_nan asks for a cause, but the test has not called finite_step", pytrace=False)
    return result


def _wanted(item: pytest.Item) -> str | None:
    """Return the cause that a test is marked with; fail where that is not one cause of the catalog."""
    marker = item.get_closest_marker("bisect_nan")
    if marker is None:
        return None
    values = (*marker.args, *marker.kwargs.values())
    if len(values) != 1 or not set(marker.kwargs) <= {"cause"}:
        pytest.fail("the marker bisect_nan takes one cause, as in bisect_nan(cause='log_of_zero')", pytrace=False)
    with _imports():
        from bisect_nan.causes import UnknownCause, find  # noqa: PLC0415  (imports torch)
    try:
        return find(values[0]).name
    except UnknownCause as error:
        problem = str(error)
    pytest.fail(f"the marker bisect_nan: {problem}", pytrace=False)


def _located(snapshot: Any) -> Finding:
    """Locate the fault; what torch warns of while calls run again was said when they ran first."""
    with _imports():
        from bisect_nan.answer.driver import locate  # noqa: PLC0415  (imports torch)

        return locate(snapshot)


def _require_clean(item: pytest.Item, finding: Finding, note: str = "") -> None:
    """Fail with the report unless the step is finite."""
    __tracebackhide__ = True
    _tell(item, finding)
    if finding.verdict.name != "CLEAN":
        raise AssertionError(_report(finding) + (f"note: {note}\n" if note else ""))


def _require_cause(item: pytest.Item, finding: Finding, cause: str) -> None:
    """Fail with the report unless a cause was found."""
    __tracebackhide__ = True
    _tell(item, finding)
    if cause not in {culprit.cause for culprit in finding.culprits}:
        raise AssertionError(f"expected {cause}, and this was found:\n{_report(finding)}")


def _report(finding: Finding) -> str:
    from bisect_nan.reports import to_text  # noqa: PLC0415  (imports torch)

    return to_text(finding)


def _tell(item: pytest.Item, finding: Finding) -> None:
    """Give the finding to reports, such as JUnit's, as properties of the test."""
    item.user_properties.append(("bisect_nan.verdict", finding.verdict.name.lower()))
    if culprit := finding.culprit:
        item.user_properties += [("bisect_nan.cause", culprit.cause), ("bisect_nan.op", culprit.op)]
        if source := culprit.source:
            item.user_properties += [("bisect_nan.file", source.file), ("bisect_nan.line", str(source.line))]


@contextlib.contextmanager
def _imports() -> Iterator[None]:
    """Silence warnings: where the tests' settings turn them into errors, those of torch's import are not the tests' fault."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _own_modules(folders: Iterable[Path]) -> Iterator[None]:
    """Take back what an entry brings into `sys.path`, and into `sys.modules` from its folders: another one may use the same names."""
    path, modules = sys.path[:], dict(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if modules.get(name) is not module and file and any(map(Path(file).is_relative_to, folders)):
                del sys.modules[name]
                if name in modules:
                    sys.modules[name] = modules[name]
