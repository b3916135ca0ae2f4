"""Which operations of a healthy step come close to the ends of a half-precision type: the overflow of next week.

The step is recorded and its program run once more; of everything that a call makes or writes, forward and backward, the largest
magnitude is compared with the largest number of the type, and the median magnitude with its smallest normal one. Only finite values
count, so masks with -Inf are left out, and so are masks with the lowest number of the tensor's own type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Group, RenderableType

from bisect_nan import finite
from bisect_nan.causes.evidence import base_name
from bisect_nan.errors import BisectNanError
from bisect_nan.finding import Phase, SourceLine
from bisect_nan.prevention.printed import Printed, line, table
from bisect_nan.recording.capture import Step, record
from bisect_nan.recording.program import Node, Program
from bisect_nan.replaying.replay import Executed, Run, own_generator
from bisect_nan.replaying.stretch import Stretch

_MASK = 4
"""A value beyond a quarter of the range of its own type was put there by the program: `masked_fill(mask, torch.finfo(dtype).min)`."""

_ENDS: tuple[Literal["overflow", "underflow"], ...] = ("overflow", "underflow")

_SHOWN = 15
"""So many lines are printed for each end."""


@dataclass(frozen=True, slots=True)
class HeadroomRow:
    """One call that comes close to an end of the type.

    Attributes:
        node: Index of the call in the recorded program.
        op: What it calls: `exp`, `mm`.
        phase: FORWARD or BACKWARD.
        module: Path of the module that made it.
        source: Its line; of a derivative the line of the forward pass.
        dtype: Type that it computed in.
        shape: Sizes of the tensor that it made.
        end: `overflow` or `underflow`.
        factor: How many times its values can grow (shrink) before the end: the largest number of the type by the largest magnitude (the
            median magnitude by the smallest normal number). Below 1 the end is passed.
        largest: The largest finite magnitude.
        median: The median of the magnitudes that are not 0.
        lost: Share of the values that are not 0 and would become 0, from 0 to 1.
    """

    node: int
    op: str
    phase: Phase
    module: str
    source: SourceLine | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    end: Literal["overflow", "underflow"]
    factor: float
    largest: float
    median: float
    lost: float


@dataclass(frozen=True, slots=True)
class Headroom(Printed):
    """How close a step comes to the ends of a type.

    Attributes:
        dtype: The type.
        within: The factor within which a call is listed.
        rows: The calls, those near an overflow first, each end by closeness.
        nodes: How many calls of floating point were looked at.
        mixed: Whether the step computes in this type itself; then only what is of this type was looked at. Else all was, as if it were.
        loss: The loss of the step.
    """

    dtype: torch.dtype
    within: float
    rows: tuple[HeadroomRow, ...]
    nodes: int
    mixed: bool
    loss: float

    def near(self, end: Literal["overflow", "underflow"]) -> tuple[HeadroomRow, ...]:
        """Return the rows of one end."""
        return tuple(row for row in self.rows if row.end == end)

    def describe(self) -> str:
        """Return how many calls are close, in a sentence."""
        name = str(self.dtype).removeprefix("torch.")
        looked = f"{self.nodes} calls in {name}" if self.mixed else f"{self.nodes} calls, taken as if in {name}"
        ends = {end: len(self.near(end)) for end in _ENDS}
        return f"{looked}: within a factor of {self.within:g} of overflow {ends['overflow']}, of underflow {ends['underflow']}"

    def __rich__(self) -> RenderableType:
        """Return the closest call of each line, with how many calls of it are close; `rows` has all."""
        if not self.rows:
            return line(self.describe(), "bold green")
        made = table(
            "end", "operation", "where", "module", "phase", "calls", "factor", "largest", "median", "lost", left=5
        )
        parts: list[RenderableType] = [line(self.describe(), "bold"), made]
        for end in _ENDS:
            groups: dict[object, list[HeadroomRow]] = {}
            for row in self.near(end):
                groups.setdefault((row.op, row.phase, row.source), []).append(row)
            for row, *others in list(groups.values())[:_SHOWN]:
                made.add_row(
                    row.end,
                    line(row.op),
                    line("" if row.source is None else f"{row.source}  {row.source.text}"),
                    line(row.module),
                    row.phase.value,
                    str(1 + len(others)),
                    line(f"{row.factor:.3g}", "red" if row.factor < 1 else ""),
                    f"{row.largest:.3g}",
                    f"{row.median:.3g}",
                    f"{100 * row.lost:.3g}%",
                )
            if len(groups) > _SHOWN:
                parts.append(line(f"and {len(groups) - _SHOWN} more lines close to {end}", "dim"))
        return Group(*parts)


def headroom(
    model: Any, batch: Any, step: Step, dtype: torch.dtype = torch.float16, *, within: float = 16.0
) -> Headroom:
    """Show which calls of a healthy step come within a factor of the ends of a type, forward and backward.

        print(headroom(model, batch, step))
        print(headroom(model, batch, step, torch.bfloat16))

    A step that computes in the type (autocast, `model.half()`) is looked at where it does; any other as if it computed in the type
    throughout, also where its code asks for float32. Gradients are those of the loss as `step` returns it: scale the loss there to
    see what a scaler does. The model is left as it was.

    Args:
        model: The module (or any object that `step` takes).
        batch: Any pytree of tensors and plain values.
        step: `step(model, batch) -> loss`.
        dtype: A type of floating point, such as `torch.float16` or `torch.bfloat16`.
        within: The factor.

    Raises:
        BisectNanError: The step is not healthy, or `dtype` is no type of floating point.
        RecordingError: The step cannot be recorded.
        ReplayError: A call cannot be executed again.
    """
    if not dtype.is_floating_point:
        raise BisectNanError(f"got {dtype}", "a type of floating point", "give torch.float16 or torch.bfloat16")
    recording = record(model, batch, step)
    if recording.observed is not None:
        got = f"got a step that is not healthy: {recording.observed.symptom.describe()}"
        do = "locate(Snapshot.capture(model, batch, step)) says why"
        raise BisectNanError(got, "a step whose loss and gradients are finite", do)
    program = recording.program
    mixed = any(program.values[n].dtype == dtype for node in program.nodes for n in node.outputs if n is not None)
    stretch = Stretch(program, range(len(program.nodes)), [])
    looked: list[int] = []
    rows: list[HeadroomRow] = []

    def visit(executed: Executed) -> None:
        found = list(_measured(stretch, executed, dtype if mixed else None, functools.partial(_rows, dtype, within)))
        looked.extend([executed.node.index] * bool(found))
        rows.extend(row for made in found for row in made)

    with own_generator():
        run = Run(stretch, stretch.start(recording.tensors))
        for cut in range(1, len(stretch) + 1):  # one call at a time: nothing has to be kept for a later look at it
            run.advance(cut, visit)
    ordered = sorted(rows, key=lambda row: (row.end != "overflow", row.factor, row.node))
    return Headroom(dtype, within, tuple(ordered), len(looked), mixed, recording.loss)


_Rows = Callable[[Program, Node, torch.Tensor], list[HeadroomRow]]


def _measured(
    stretch: Stretch, executed: Executed, only: torch.dtype | None, close: _Rows
) -> Iterator[list[HeadroomRow]]:
    """Yield the rows of each tensor of floating point that a call made or wrote; a view of what others wrote is none."""
    program, node = stretch.program, executed.node
    for number, tensor in executed.content.items():
        if not tensor.is_floating_point() or (only is not None and tensor.dtype != only):
            continue
        if number in node.written or stretch.fills(node, number):
            yield close(program, node, tensor)


def _rows(dtype: torch.dtype, within: float, program: Program, node: Node, tensor: torch.Tensor) -> list[HeadroomRow]:
    """Return a row for each end of the type that a tensor comes close to."""
    sizes = magnitudes(tensor)
    if sizes.numel() == 0:
        return []
    info = torch.finfo(dtype)
    largest, median = float(sizes.max()), float(sizes.median())
    lost = float((sizes.to(dtype) == 0).sum()) / sizes.numel()
    factors: list[tuple[Literal["overflow", "underflow"], float]] = [
        ("overflow", info.max / largest),
        ("underflow", median / info.smallest_normal),
    ]
    make = functools.partial(
        HeadroomRow,
        node.index,
        base_name(str(node.target)).strip("_"),
        node.phase,
        node.module or program.origin(node).module,
        program.source(node),
        tensor.dtype,
        tuple(tensor.shape),
    )
    return [make(end, factor, largest, median, lost) for end, factor in factors if factor <= within]


def magnitudes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of a tensor's values that are finite, not 0, and not the fill of a mask, in one dimension.

    Args:
        tensor: Floating point of any layout.
    """
    bad = finite.mask(tensor)
    dense = tensor if tensor.layout is torch.strided and not tensor.is_nested else tensor.values()
    sizes = dense.detach().to(torch.float64 if dense.dtype is torch.float64 else torch.float32).abs()
    keep = sizes > 0
    if bad.shape == keep.shape:
        keep &= ~bad
    return sizes[keep & (sizes < torch.finfo(tensor.dtype).max / _MASK)]
