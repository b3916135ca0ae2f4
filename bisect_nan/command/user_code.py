"""Imports and calls what a user named on the command line, and turns its failures into messages.

Nothing here is reached for a snapshot, which runs no code of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bisect_nan.errors import BisectNanError, CodeError, TargetError

CALLABLE = "module:callable, such as my_package.models:build or models.py:build"

_TORCH, _OURS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
"""Folders whose frames are not the user's."""

_KERNELS = (RuntimeError, IndexError, ValueError)
"""What torch's kernels raise about wrong operands; under the recorder they are called from a frame of this package."""


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn any error of the code inside into one message that names the user's line.

    Args:
        what: What runs inside, for the message (`build() of case.py`).

    Raises:
        CodeError: The code raised; this package's own errors and faults and a lack of memory pass through as they are.
    """
    try:
        yield
    except (BisectNanError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if len(frames) > 1 and frames[-1].filename.startswith(_OURS) and not isinstance(error, _KERNELS):
            raise
        text = " ".join(str(error).split())
        got = f"got {type(error).__name__} from {what}{_place(error, frames)}" + (f": {text}" if text else "")
        do = "run it in Python and mend it (-v shows the traceback)"
        raise CodeError(got, "code that runs through", do) from error


def _place(error: BaseException, frames: traceback.StackSummary) -> str:
    """Return ` at file:line in function` for the innermost frame of an error that is the user's own."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {_shown(error.filename)}:{error.lineno}"
    for frame in reversed(frames):
        if not frame.filename.startswith((_TORCH, _OURS, "<")):
            return f" at {_shown(frame.filename)}:{frame.lineno} in {frame.name}"
    return ""


def _shown(filename: str) -> str:
    """Return a path relative to the working directory where it lies below it."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def import_file(path: Path) -> ModuleType:
    """Execute a Python file as a module named after it, with its folder on the import path, as `python FILE` would.

    Raises:
        TargetError: Python cannot load files of this kind.
    """
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"got {path}", "a Python file (*.py)", "name the file that defines it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def named(name: str, option: str) -> Any:
    """Import what `module:callable` names; modules are looked up from the working directory, too.

    Args:
        name: `package.module:attribute`, or `path/to/file.py:attribute`.
        option: The option that it was given to, for messages.

    Raises:
        TargetError: The name has no such form, or there is no such thing.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise TargetError(f"got {option} {name}", CALLABLE, "write the module, a colon and the name in it")
    if place.endswith(".py") and not Path(place).is_file():
        raise TargetError(f"got {option} {name}, and there is no file {place}", CALLABLE, "check the path")
    with user_code(f"importing {place} for {option}"):
        if place.endswith(".py"):
            found: Any = import_file(Path(place))
        else:
            sys.path.insert(0, str(Path.cwd()))
            found = _module(place, option)
    return _callable(found, attribute, place, f"{option} {name}")


def named_in_file(name: str, root: Path, folders: Sequence[Path]) -> Any:
    """Import what a snapshot names as its code, if that lies in one of the folders that the user has allowed.

    Args:
        name: `path/to/file.py:attribute`, the path from the root or from one of the folders, or `package.module:attribute`.
        root: Where paths start.
        folders: What may be imported from.

    Raises:
        TargetError: There is no such file in the folders; nothing has been imported.
        CodeError: Importing it failed.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise TargetError(f"got the entry {name}", CALLABLE, "save the snapshot with the name of a function")
    module = place.replace(".", "/")
    names = [place] if place.endswith(".py") else [f"{module}.py", f"{module}/__init__.py"]
    allowed = [folder.resolve() for folder in folders]
    for base in (root, *folders):
        for file in ((base / path).resolve() for path in names):
            if file.is_file() and any(file.is_relative_to(folder) for folder in allowed):
                with user_code(f"importing {place}"):
                    found: Any = import_file(file) if place.endswith(".py") else _module_of(place, base, file)
                return _callable(found, attribute, place, f"the entry {name}")
    shown = ", ".join(map(str, folders)) or "no folder at all"
    raise TargetError(f"got the entry {name}", f"a file in {shown}", "allow its folder if you trust it")


def _module_of(name: str, base: Path, file: Path) -> ModuleType:
    """Import a module, which has to be the one of this file."""
    sys.path.insert(0, str(base))
    module = importlib.import_module(name)
    if module.__file__ is None or Path(module.__file__).resolve() != file:
        raise TargetError(f"got {name} from {module.__file__}", f"the module in {file}", "rename one of them")
    return module


def _callable(found: Any, attribute: str, place: str, given: str) -> Any:
    """Return the attribute of a module that is to be called."""
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = (
                ", ".join(key for key in vars(found) if not key.startswith("_"))
                if isinstance(found, ModuleType)
                else ""
            )
            expected = f"one of {known}" if known else "a name that exists"
            raise TargetError(f"got {given}, and {place} has no {attribute}", expected, "check the spelling")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"got {given}, which is {type(found).__name__}", CALLABLE, "name something to call")
    return found


def _module(place: str, option: str) -> ModuleType:
    """Import a module; that there is none of this name is the command line's fault, not the module's."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        got = f"got ModuleNotFoundError from importing {place} for {option}: {error}"
        raise TargetError(got, CALLABLE, "check the spelling, or run where the module lies") from error
