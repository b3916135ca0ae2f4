"""The line that made a call."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bisect_nan.finding import SourceLine
from bisect_nan.recording.lines import Lines

LINES = Lines()


def here() -> SourceLine | None:
    """Ask for the caller as the recorder does: from a method that torch's dispatcher calls."""
    return LINES.caller()


def test_the_caller_is_the_user_line_with_its_text() -> None:
    """File relative to the working directory, line, qualified function and text."""
    source = here()
    assert source is not None
    line = inspect.getsourcelines(test_the_caller_is_the_user_line_with_its_text)[1] + 2
    relative = str(Path(__file__).relative_to(Path.cwd())) if Path(__file__).is_relative_to(Path.cwd()) else __file__
    assert (source.file, source.line, source.text) == (relative, line, "source = here()")
    assert source.function == "test_the_caller_is_the_user_line_with_its_text"


def test_frames_of_torch_are_skipped() -> None:
    """A call that goes through torch's modules and back into a hook is at the hook's line; else at the call of the module."""
    found: list[SourceLine | None] = []

    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(here())
            return x

    nn.Sequential(Asking())(torch.ones(1))
    (source,) = found
    assert source is not None
    assert source.function.endswith("Asking.forward")


def test_functions_inside_functions_are_named_without_locals() -> None:
    """The qualified name reads as it was written."""

    def inner() -> SourceLine | None:
        return here()

    source = inner()
    assert source is not None
    assert source.function == "test_functions_inside_functions_are_named_without_locals.inner"


def test_code_without_a_file_has_a_line_when_nothing_better_is_there() -> None:
    """`python -c` and the like are reported as <string>; code that a library generated is reported at its caller."""
    script = (
        "import sys; sys.path[:0] = %r\n"
        "from bisect_nan.recording.lines import Lines\n"
        "lines = Lines()\n"
        "def ask():\n"
        "    return lines.caller()\n"
        "print(ask())\n"
    )
    done = subprocess.run(  # noqa: S603  (runs this interpreter)
        [sys.executable, "-c", script % (sys.path,)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "<string>:6"
    space = {"here": here}
    exec("def generated():\n    return here()", space)  # noqa: S102
    source = space["generated"]()  # type: ignore[operator]
    assert source is not None
    assert source.text == 'source = space["generated"]()  # type: ignore[operator]'


def test_the_engine_ends_the_search() -> None:
    """Frames outside of a backward pass did not make the calls that run in it (torch/autograd/graph.py)."""
    engine = torch.autograd.graph._engine_run_backward
    assert engine.__code__.co_filename.endswith("torch/autograd/graph.py")
    found: list[SourceLine | None] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(LINES.caller())
            return func(*args, **(kwargs or {}))

    loss = torch.ones(3, requires_grad=True).exp().sum()
    with Mode():
        torch.autograd.backward(loss, torch.tensor(1.0))
    assert found
    assert found[-1] is None
