"""What a finding is made of: where the failure shows, what makes it, and what to change. Frozen, and without tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from bisect_nan.finite import TensorSummary
from bisect_nan.shows import InNotebooks


class Phase(enum.Enum):
    """In which part of a training step something runs, or what kind of state it is."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of Python.

    Attributes:
        file: Path, relative to the working directory of the recording where it lies below it.
        line: 1-based line number.
        function: Qualified name of the function (`Attention.forward`).
        text: The line itself, stripped; empty when the file could not be read.
    """

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        """Return `file:line`, the form that editors and terminals link."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Symptom:
    """Where the failure shows.

    Attributes:
        kind: `loss`, `gradient`, `parameter`, `buffer`, `input`, `optimizer` (a tensor of the optimizer's own) or `value` (what was
            looked at before the step raised).
        name: Path of the tensor (`layers.0.weight`); `loss` for the loss.
        nonfinite: The kinds of value found there: `nan`, `+inf`, `-inf`.
        others: How many further tensors of the same kind are non-finite.
    """

    kind: str
    name: str
    nonfinite: tuple[str, ...]
    others: int = 0

    def describe(self) -> str:
        """Return the symptom as a clause: `the gradient of layers.0.weight is nan (and 3 more)`."""
        nouns = {
            "loss": "the loss",
            "gradient": f"the gradient of {self.name}",
            "optimizer": f"the optimizer's {self.name}",
        }
        noun = nouns.get(self.kind, f"the {self.kind} {self.name}")
        more = f" (and {self.others} more)" if self.others else ""
        return f"{noun} is {' and '.join(self.nonfinite)}{more}"


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that makes the step finite.

    Attributes:
        name: Identifier of the change.
        text: What to do, in one sentence.
        verified: Whether it was executed on this step, and the loss and every gradient came out finite.
        loss: The loss after the change, when it was executed.
        code: The line to write, or "" where the change is not one to a line.
        outcome: What was seen when it was executed, or why that says nothing.
        source: The line that `code` is written for; None without code.
    """

    name: str
    text: str
    verified: bool = False
    loss: float | None = None
    code: str = ""
    outcome: str = ""
    source: SourceLine | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """One node on the way from a culprit to the symptom.

    Attributes:
        node: Index of the call in the program.
        op: Its ATen overload.
        source: Its line, or None where torch made the call by itself.
        turns_nan: Whether an infinity turned into NaN there.
    """

    node: int
    op: str
    source: SourceLine | None
    turns_nan: bool = False


@dataclass(frozen=True, slots=True)
class Culprit(InNotebooks):
    """An operation or a piece of state that makes the fault, shown by intervention.

    Attributes:
        phase: Where it runs, or which kind of state it is.
        cause: Name of the catalog entry.
        summary: The cause in one sentence.
        confidence: 0 to 1; below 0.5 the catalog has no entry that fits.
        op: ATen overload (`aten._softmax.default`); for a backward culprit the forward op whose derivative failed.
        kernel: The ATen call that made the bad value.
        autograd: Name of the autograd node that ran it (`SqrtBackward0`), or None outside of backward.
        node: Index of the call in the program; -1 for state.
        name: Path of the placeholder for state and inputs, else "".
        source: The line to look at: the innermost frame outside torch; for a backward culprit the forward line whose derivative
            failed, unless the bad value was made by Python code that runs in the backward pass.
        module: Path of the module that made the call.
        inputs: Summaries of what went into the kernel.
        outputs: Summaries of what came out.
        element: Index of the blamed element in the first bad output.
        samples: The rows of the batch that carry the fault, where they can be told.
        samples_confirmed: Whether the fault went when a healthy row stood in their place; else they are derived from what was
            computed of what.
        chain: The nodes from the culprit to the symptom.
        notes: Facts, each a sentence.
        help: What to change, or "".
        remedy: The change that was tried, or None.
    """

    phase: Phase
    cause: str
    summary: str
    confidence: float
    op: str
    kernel: str
    autograd: str | None
    node: int
    name: str
    source: SourceLine | None
    module: str
    inputs: tuple[TensorSummary, ...]
    outputs: tuple[TensorSummary, ...]
    element: tuple[int, ...]
    samples: tuple[int, ...]
    samples_confirmed: bool = False
    chain: tuple[Link, ...] = ()
    notes: tuple[str, ...] = ()
    help: str = ""
    remedy: Remedy | None = None


@dataclass(frozen=True, slots=True)
class Innocent:
    """A non-finite value that was made in this step and does not reach the symptom.

    Attributes:
        node: Index of the call that made it; -1 for state.
        op: ATen overload of that call, else "".
        name: Path of the placeholder for state and inputs, else "".
        source: The line of the call, or None.
        why: Why it is harmless.
    """

    node: int
    op: str
    name: str
    source: SourceLine | None
    why: str
