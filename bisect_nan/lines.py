"""Which line of Python made a call: the innermost frame outside torch."""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import CodeType

import torch

from bisect_nan.finding import SourceLine

_LIBRARIES = tuple(str(Path(path).parent) + os.sep for path in (torch.__file__, __file__))
_ENGINE = str(Path("autograd") / "graph.py"), "_engine_run_backward"
"""Where Python enters the autograd engine (torch 2.6 to 2.13: torch/autograd/graph.py); deeper frames run inside backward."""


class Lines:
    """The innermost Python line outside torch, found by walking the frames; every line is read once."""

    def __init__(self) -> None:
        self._kinds: dict[CodeType, str] = {}
        self._root = str(Path.cwd()) + os.sep
        self._known: dict[tuple[CodeType, int], SourceLine] = {}

    def caller(self) -> SourceLine | None:
        """Return the user's line, or None when the call was made by the autograd engine itself."""
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            kind = self._kinds.get(code) or self._classify(code)
            if kind == "user":
                key = (code, frame.f_lineno)
                return self._known.get(key) or self._read(*key)
            if kind == "engine":
                return None
            frame = frame.f_back  # type: ignore[assignment]
        return None

    def _classify(self, code: CodeType) -> str:
        path = code.co_filename
        if path.endswith(_ENGINE[0]) and code.co_name == _ENGINE[1]:
            kind = "engine"
        elif path.startswith((*_LIBRARIES, "<")):
            kind = "library"
        else:
            kind = "user"
        self._kinds[code] = kind
        return kind

    def _read(self, code: CodeType, line: int) -> SourceLine:
        path = code.co_filename
        source = SourceLine(
            file=path.removeprefix(self._root),
            line=line,
            function=code.co_qualname.replace("<locals>.", ""),
            text=linecache.getline(path, line).strip(),
        )
        self._known[code, line] = source
        return source
