"""Layer by layer: what each module of a model gave, and which gradient came back to it.

Of a module's outputs every tensor is looked at, whatever holds it: tuples, dictionaries, dataclasses. Values are read the moment that
the module returns, before a later call can write over them. Gradients are read by hooks on the outputs themselves, which may be
written to in place afterwards, unlike the outputs of modules with full backward hooks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from torch import nn

from bisect_nan import finite
from bisect_nan.finite import TensorSummary
from bisect_nan.prevention import nested
from bisect_nan.prevention.check import parts
from bisect_nan.prevention.printed import Printed, line, share, table
from bisect_nan.recording.setting import eager
from bisect_nan.replaying.intent import is_mask

FORWARD, AGAIN, GRADIENT = "forward", "forward again", "gradient"
"""What a row shows: an output, an output that a checkpoint computed anew in the backward pass, or the gradient of an output."""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """One tensor that a layer gave, or its gradient.

    Attributes:
        name: Path of the module; `(model)` for the model itself.
        kind: Its class.
        step: How often the model had been called, this time included; 0 where a part of it was called alone.
        call: How often the module had been called in this step, this time included.
        phase: `forward`, `forward again` or `gradient`.
        values: Counts and range; its `name` is the place in the output (`[0]`, `.logits`).
        given: Whether an input of the module was not finite either, as it was after the call.
        masks: Whether its infinities look like those of a mask.
    """

    name: str
    kind: str
    step: int
    call: int
    phase: str
    values: TensorSummary
    given: bool = False
    masks: bool = False

    @property
    def bad(self) -> bool:
        """Whether it holds NaN, or infinities that do not look like those of a mask."""
        return self.values.nonfinite > 0 and not self.masks


class LayerTable(Printed):
    """The rows of all calls, in the order in which they happened; `print` shows them."""

    def __init__(self) -> None:
        """Start empty."""
        self._rows: list[LayerRow] = []
        self._unseen = 0

    @property
    def rows(self) -> tuple[LayerRow, ...]:
        """The rows so far."""
        return tuple(self._rows)

    @property
    def first_bad(self) -> LayerRow | None:
        """The first row that is bad, or None. Of modules in each other it is the innermost."""
        return next((row for row in self._rows if row.bad), None)

    def add(self, row: LayerRow | None) -> None:
        """Add a row; None for values that could not be read, as within `vmap`."""
        if row is None:
            self._unseen += 1
        else:
            self._rows.append(row)

    def describe(self) -> str:
        """Say which layer is bad first, in a sentence."""
        row = self.first_bad
        if row is None:
            return f"all of {len(self._rows)} outputs and gradients are finite"
        place = f"{row.name}{row.values.name} ({row.kind}) in step {row.step}"
        if row.phase == GRADIENT:
            return f"first bad: the gradient of {place}: made by the derivative of what comes after it"
        given = "; its inputs are bad, too: made before it, outside of any layer, or in the batch" if row.given else ""
        return f"first bad: the output of {place}{given}"

    def __rich__(self) -> RenderableType:
        """Return one row for each tensor, then which one is bad first."""
        made = table("layer", "class", "phase", "step", "values", "min", "max", "NaN", "Inf", "share", left=3)
        for row in self._rows:
            values, style = row.values, "red" if row.bad else ""
            low, high = ("-", "-") if values.low is None else (f"{values.low:.4g}", f"{values.high:.4g}")
            made.add_row(
                line(f"{row.name}{values.name}" + (f"  call {row.call}" if row.call > 1 else ""), style),
                line(row.kind),
                row.phase,
                str(row.step),
                line(f"{values.dtype}{list(values.shape)}"),
                low,
                high,
                line(str(values.nan), style),
                line(str(values.pos_inf + values.neg_inf), style),
                share(values.nonfinite, parts(values)),
            )
        end = [line(self.describe(), "bold red" if self.first_bad else "bold green")]
        if self._unseen:
            end.append(line(f"not readable, within a function transform: {self._unseen}"))
        return Group(made, *end)


@contextlib.contextmanager
def layers(model: nn.Module) -> Iterator[LayerTable]:
    """Watch every layer of a model, forward and backward, while the block runs.

        with layers(model) as seen:
            step(model, batch).backward()
        print(seen)
        seen.first_bad

    All hooks are taken away at the end, also when the block raises. Nothing of what the layers compute is changed or kept. Compiled
    modules run eagerly meanwhile. It is made to look at a few steps: every output is read as it comes.

    Args:
        model: The module. A module that it holds twice has the first of its names.

    Yields:
        The table, which grows as the block runs.
    """
    watch = _Watch(model)
    try:
        with eager():
            yield watch.seen
    finally:
        watch.remove()


class _Watch:
    """The hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.seen = LayerTable()
        self._step = 0
        self._calls: dict[str, int] = {}
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin)]
        for name, module in model.named_modules():
            hook = functools.partial(self._returned, name or "(model)")
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        """Take all hooks away, those on outputs as well."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, _: nn.Module, __: Any) -> None:
        if not _in_backward():
            self._step += 1
            self._calls.clear()

    def _returned(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        phase = AGAIN if _in_backward() else FORWARD
        if phase == FORWARD:
            self._calls[name] = self._calls.get(name, 0) + 1
        about = name, type(module).__name__, self._step, self._calls.get(name, 1)
        for place, tensor in list(nested.tensors(output)):
            row = _row(about, phase, place, tensor)
            if row is not None and row.bad:
                given = [t.detach() for _, t in nested.tensors((args, kwargs))]
                row = _row(about, phase, place, tensor, given=bool(finite.probe(given)))
            self.seen.add(row)
            if tensor.requires_grad:
                hook = functools.partial(self._came_back, about, place)
                self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def _came_back(self, about: tuple[str, str, int, int], place: str, gradient: torch.Tensor) -> None:
        self.seen.add(_row(about, GRADIENT, place, gradient))


def _row(
    about: tuple[str, str, int, int], phase: str, place: str, tensor: torch.Tensor, *, given: bool = False
) -> LayerRow | None:
    name, kind, step, call = about
    try:
        values = finite.summarise(tensor.detach(), place)
        masks = values.nan == 0 < values.nonfinite and tensor.numel() > 1 and is_mask(tensor.detach())
    except RuntimeError:  # within torch.func.vmap a tensor has no values of its own
        return None
    return LayerRow(name, kind, step, call, phase, values, given, masks)


def _in_backward() -> bool:
    """Whether the backward pass runs: a module that is called there is computed anew for a checkpoint."""
    return torch._C._current_autograd_node() is not None  # torch 2.6 to 2.13
