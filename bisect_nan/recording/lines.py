"""Which line of Python made a call: the innermost frame outside torch."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from pathlib import Path

import torch

from bisect_nan.finding import SourceLine

_USER, _LIBRARY, _UNNAMED, _ENGINE, _RECORDING = range(5)
"""Kinds of file: user code, torch or this package, code without a file, where autograd is entered, and what runs the step."""

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_ENTRIES = {
    str(Path(torch.__file__).parent / "autograd" / "graph.py"): (_ENGINE, "_engine_run_backward"),
    str(Path(__file__).with_name("capture.py")): (_RECORDING, "_run"),
    str(Path(__file__).parents[1] / "watching" / "tape.py"): (_RECORDING, "run_backward"),
}
"""Files with a function behind which no line of the step is found: deeper frames run in backward, or are the recording's own.

torch 2.6 to 2.13: torch/autograd/graph.py.
"""


class Lines:
    """Finds the innermost Python line outside torch by walking the frames; every line is read once."""

    def __init__(self) -> None:
        """Name files relative to the present working directory."""
        self._root = str(Path.cwd()) + os.sep
        self._kinds: dict[str, int] = {}
        self._known: dict[tuple[str, int, str], SourceLine] = {}

    def caller(self) -> SourceLine | None:
        """Return the user's line, or None when the autograd engine made the call, or the recording itself."""
        frame, unnamed, kinds = sys._getframe(2), None, self._kinds
        while frame is not None:
            code = frame.f_code
            path = code.co_filename
            kind = kinds.get(path)
            if kind is None:
                kind = kinds[path] = _kind(path)
            if kind == _USER:
                return self._line(path, frame.f_lineno, code.co_qualname)
            if kind == _UNNAMED:
                unnamed = unnamed or frame
            elif kind > _UNNAMED and code.co_name == _ENTRIES[path][1]:
                break
            frame = frame.f_back  # type: ignore[assignment]
        return None if unnamed is None else self._line("<string>", unnamed.f_lineno, unnamed.f_code.co_qualname)

    def raised(self, error: BaseException) -> SourceLine | None:
        """Return the innermost of the user's lines that an exception came through."""
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        found = [(code, line) for code, line in frames if _kind(code.co_filename) == _USER]
        return self._line(found[-1][0].co_filename, found[-1][1], found[-1][0].co_qualname) if found else None

    def _line(self, path: str, line: int, function: str) -> SourceLine:
        source = self._known.get((path, line, function))
        if source is None:
            source = self._known[path, line, function] = SourceLine(
                file=path.removeprefix(self._root),
                line=line,
                function=function.replace("<locals>.", ""),
                text=linecache.getline(path, line).strip(),
            )
        return source


def _kind(path: str) -> int:
    """Return what kind of code comes from a file."""
    if path in _ENTRIES:
        return _ENTRIES[path][0]
    if path.startswith((_TORCH, _PACKAGE, "<frozen", "<eval_with_key>", "<__array_function__")):
        return _LIBRARY
    return _UNNAMED if path == "<string>" else _USER
