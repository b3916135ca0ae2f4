"""Imports and calls what a user named on the command line, and turns its failures into messages.

Nothing here is reached for a snapshot, which runs no code of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
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
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = (
                ", ".join(key for key in vars(found) if not key.startswith("_"))
                if isinstance(found, ModuleType)
                else ""
            )
            expected = f"one of {known}" if known else "a name that exists"
            raise TargetError(f"got {option} {name}, and {place} has no {attribute}", expected, "check the spelling")
        found = getattr(found, part)
    if not callable(found):
        raise TargetError(f"got {option} {name}, which is {type(found).__name__}", CALLABLE, "name something to call")
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
