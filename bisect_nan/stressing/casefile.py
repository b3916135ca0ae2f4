"""Writes the smallest failing input as a file that `bisect-nan run` takes and that needs nothing but the loss's own code."""

from __future__ import annotations

import builtins
import inspect
import os
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from bisect_nan import finite

_LARGEST = 1000
"""Elements of a tensor that is still written down; a constant one may have any number."""

_CASE = '''\
"""The smallest input that bisect_nan.stress found to fail: {title}."""

{header}

{code}
def step(model, batch):
    return {name}({arguments})


def build():
    torch.manual_seed({seed})
    batch = {{
{items}
    }}
    return {{"model": torch.nn.Identity(), "batch": batch, "step": step}}
'''


class NoText(Exception):  # noqa: N818  (an outcome, and it never leaves this folder)
    """Something cannot be written down as Python, so a snapshot has to do."""


def case_text(function: Callable[..., Any], example: Mapping[str, Any], title: str, seed: int, folder: Path) -> str:
    """Return the text of a case file.

    Args:
        function: The loss.
        example: Its arguments by name, in order.
        title: What is wrong, in a few words.
        seed: Seed of torch's generator.
        folder: Where the file will lie; the loss's own file is named relative to it.

    Raises:
        NoText: The loss can neither be imported nor copied, or an argument has no short text.
    """
    items = "\n".join(f'        "{name}": {literal(value)},' for name, value in example.items())
    writer = _Writer(folder)
    name = writer.name(function)
    header = ["import torch", *sorted(writer.imports - {"import torch"})]
    if writer.roots:
        paths = [
            f"sys.path.insert(0, str(Path(__file__).resolve().parent / {root!r}))" for root in sorted(writer.roots)
        ]
        header = ["import sys", "from pathlib import Path", "", *paths, "", *header]
    if "inf" in items or "nan" in items:
        header.append("from math import inf, nan")
    return _CASE.format(
        title=title,
        header="\n".join(header),
        code="".join(f"\n{block}\n\n" for block in writer.blocks),
        name=name,
        arguments=", ".join(f'batch["{key}"]' for key in example),
        seed=seed,
        items=items,
    )


def literal(value: Any) -> str:
    """Return a value as Python that makes it again: numbers, strings, dtypes, tensors, and containers of these.

    Raises:
        NoText: It is something else, or a tensor too large to read.
    """
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype):
        return repr(value)
    if type(value) is dict:
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    if type(value) is list:
        return "[" + ", ".join(map(literal, value)) + "]"
    if type(value) is tuple:
        return "(" + "".join(f"{literal(item)}, " for item in value).rstrip() + ")"
    raise NoText


def _tensor(tensor: torch.Tensor) -> str:
    options = f"dtype={tensor.dtype}" + (", requires_grad=True" if tensor.requires_grad else "")
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise NoText
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return f"torch.zeros({tuple(tensor.shape)}, {options})"
    first = tensor.flatten()[0].item()
    if tensor.numel() > 1 and finite.same(tensor, torch.full_like(tensor, first)):
        return f"torch.full({tuple(tensor.shape)}, {first!r}, {options})"
    if tensor.numel() > _LARGEST:
        raise NoText
    return f"torch.tensor({tensor.tolist()!r}, {options})"


class _Writer:
    """Collects the imports and the copied code that a function needs.

    Attributes:
        imports: Import statements.
        roots: Folders to look in for them, relative to the file.
        blocks: Copied functions and constants, each after what it needs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._copied: set[str] = set()
        self.imports: set[str] = set()
        self.roots: set[str] = set()
        self.blocks: list[str] = []

    def name(self, function: Any, called: str = "") -> str:
        """Make a function known to the file, and return what it is called there."""
        called = called or getattr(function, "__name__", "")
        if not called.isidentifier():
            raise NoText
        module = sys.modules.get(getattr(function, "__module__", "") or "")
        own = getattr(function, "__name__", "")
        if module is not None and module.__name__ != "__main__" and getattr(module, own, None) is function:
            self._import(module)
            self.imports.add(f"from {module.__name__} import {own}" + (f" as {called}" if called != own else ""))
        elif isinstance(function, FunctionType) and called == own:
            self._copy(function)
        else:
            raise NoText
        return called

    def _import(self, module: ModuleType) -> None:
        """See to it that a module of the user's own is found."""
        file = getattr(module, "__file__", None)
        if file is None:
            return
        up = module.__name__.count(".") + (Path(file).name == "__init__.py")
        root = Path(file).resolve().parents[up]
        installed = {
            Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib", "platstdlib")
        }
        if root not in installed:
            self.roots.add(os.path.relpath(root, self._folder))

    def _copy(self, function: FunctionType) -> None:
        """Copy a function's text, and whatever it names outside of itself."""
        if function.__name__ in self._copied:
            return
        self._copied.add(function.__name__)
        try:
            text = textwrap.dedent(inspect.getsource(function)).rstrip()
        except (OSError, TypeError) as error:
            raise NoText from error
        if not text.startswith(f"def {function.__name__}("):  # A lambda in a line, a decorator, or what one returned.
            raise NoText
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        known = {**vars(builtins), **function.__globals__, **{name: cell.cell_contents for name, cell in cells}}
        for name in sorted(_outside(symtable.symtable(text, "<case>", "exec")) - {function.__name__}):
            if name not in known:
                raise NoText
            if known[name] is not vars(builtins).get(name):
                self._need(name, known[name])
        self.blocks.append(text)

    def _need(self, name: str, value: Any) -> None:
        """Make something known that copied text names."""
        if isinstance(value, ModuleType):
            self._import(value)
            self.imports.add(f"import {value.__name__}" + (f" as {name}" if value.__name__ != name else ""))
        elif callable(value):
            self.name(value, name)
        elif name not in self._copied:
            self._copied.add(name)
            self.blocks.append(f"{name} = {literal(value)}")


def _outside(table: symtable.SymbolTable) -> set[str]:
    """Return the names that code takes from around itself, functions inside of it included."""
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and not symbol.is_assigned()}
    if table.get_type() == "module":
        own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    return own.union(*map(_outside, table.get_children()))
