"""What a search found: frozen results without tensors, and their JSON form.

`Finding.to_dict` is the versioned form that programs read; `Finding.from_dict` reads it back. Nothing here imports torch's
operators or looks at live values, so a report can be made on a machine that never saw the step.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bisect_nan.errors import FindingError
from bisect_nan.finite import TensorSummary
from bisect_nan.shows import AsPage, InNotebooks
from bisect_nan.strict_json import plain

VERSION = 1
"""Version of the JSON form; grows when a key changes its meaning."""


class Phase(enum.Enum):
    """In which part of a training step something runs, or what kind of state it is."""

    INPUT = "input"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Verdict(enum.Enum):
    """The answer in one sentence; `name` in lower case is its machine-readable form."""

    LOCATED = "The operation that made the fault was found and confirmed."
    CLEAN = "Nothing non-finite reaches the loss, a gradient or the model's state."
    NOT_REPRODUCED = "The replay of the recorded step does not show the recorded fault, so nothing is blamed."
    FLAKY = "The replay shows the recorded fault only now and then, so nothing is blamed."
    INCONCLUSIVE = "The fault was reproduced, but no single operation could be shown to make it."


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
        kind: `loss`, `gradient`, `parameter`, `buffer`, `input` or `optimizer` (a tensor of the optimizer's own).
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
    """One node on the way from a culprit to the symptom: its op, line and whether Inf turned into NaN there."""

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
    """A non-finite value that was made in this step and does not reach the symptom, with why it is harmless."""

    node: int
    op: str
    name: str
    source: SourceLine | None
    why: str


@dataclass(frozen=True, slots=True)
class SearchCost:
    """What the answer cost.

    Attributes:
        nodes: Calls in the program (forward, and backward when it was needed).
        executed: Nodes that the search executed, after the replay that reproduced the symptom and without interventions.
        probes: Frontier checks, the reproducing replay's included.
        replays: Runs besides the search: reproducing the symptom, and each intervention.
        replayed: Nodes executed in those runs.
        seconds: Wall time by stage (`replay`, `search`, `confirm`, `explain`), and `total`.
        cuts: The probed cuts, by the node behind each, and what was found there (`clean`, `dirty`, `unknown`), in order.
    """

    nodes: int = 0
    executed: int = 0
    probes: int = 0
    replays: int = 0
    replayed: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    cuts: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Finding(AsPage):  # noqa: PLW1641  (there is no hash of a dictionary)
    """The whole answer to "what made this step non-finite?".

    Attributes:
        verdict: The answer in a sentence.
        symptom: Where the failure shows; None for a clean step.
        culprits: Everything that makes the fault, the earliest first.
        innocents: Non-finite values that were looked at and acquitted.
        search: What the answer cost.
        environment: What differs between the recording and this machine; empty when nothing does.
        notes: What was seen where nothing is blamed, each a sentence without a full stop.
        loss: The loss of the step as recorded.
    """

    verdict: Verdict
    symptom: Symptom | None = None
    culprits: tuple[Culprit, ...] = ()
    innocents: tuple[Innocent, ...] = ()
    search: SearchCost = field(default_factory=SearchCost)
    environment: tuple[str, ...] = ()
    loss: float | None = None
    notes: tuple[str, ...] = ()

    def __eq__(self, other: object) -> bool:
        """Whether two findings have the same JSON form: numbers that are NaN are then equal, which they are not to Python."""
        return self.to_dict() == other.to_dict() if isinstance(other, Finding) else NotImplemented

    @property
    def culprit(self) -> Culprit | None:
        """The earliest culprit, or None."""
        return self.culprits[0] if self.culprits else None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: plain dicts, lists, strings and numbers (non-finite floats as strings)."""
        return {
            "version": VERSION,
            "verdict": self.verdict.name.lower(),
            "message": self.verdict.value,
            "symptom": plain(asdict(self.symptom)) if self.symptom else None,
            "culprit": _culprit_dict(self.culprit) if self.culprit else None,
            "culprits": [_culprit_dict(culprit) for culprit in self.culprits],
            "innocents": [plain(asdict(innocent)) for innocent in self.innocents],
            "search": plain(asdict(self.search)),
            "environment": list(self.environment),
            "loss": plain(self.loss),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Read the JSON form back.

        Raises:
            FindingError: It is no such dictionary, or one of another version; use the release that wrote it.
        """
        given: Any = data
        form = f"the dictionary that Finding.to_dict() gives, version {VERSION}"
        if not isinstance(given, Mapping) or given.get("version") != VERSION:
            got = f"version {given.get('version')!r}" if isinstance(given, Mapping) else f"{given!r:.80}"
            raise FindingError(f"got {got}", form, "read it with the release that wrote it")
        try:
            return cls._read(data)
        except (LookupError, TypeError, ValueError, AttributeError) as problem:
            raise FindingError(f"lacks or garbles {problem}", form, "write it anew with --json") from problem

    @classmethod
    def _read(cls, data: Mapping[str, Any]) -> Finding:
        symptom = data["symptom"]
        search = {**data["search"], "cuts": tuple((cut, answer) for cut, answer in data["search"]["cuts"])}
        return cls(
            verdict=Verdict[data["verdict"].upper()],
            symptom=Symptom(**{**symptom, "nonfinite": tuple(symptom["nonfinite"])}) if symptom else None,
            culprits=tuple(_read_culprit(item) for item in data["culprits"]),
            innocents=tuple(Innocent(**{**item, "source": _read_source(item["source"])}) for item in data["innocents"]),
            search=SearchCost(**search),
            environment=tuple(data["environment"]),
            loss=_number(data["loss"]),
            notes=tuple(data["notes"]),
        )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _culprit_dict(culprit: Culprit) -> dict[str, Any]:
    data: dict[str, Any] = plain(asdict(culprit))
    source = data.pop("source") or {"file": None, "line": None, "function": None, "text": None}
    return {**data, **source}


def _read_source(data: Mapping[str, Any] | None) -> SourceLine | None:
    return SourceLine(**data) if data and data.get("file") is not None else None


def _read_culprit(data: Mapping[str, Any]) -> Culprit:
    fields = {key: value for key, value in data.items() if key not in ("file", "line", "function", "text")}
    fields["source"] = _read_source({key: data[key] for key in ("file", "line", "function", "text")})
    fields["phase"] = Phase(data["phase"])
    for key in ("inputs", "outputs"):
        fields[key] = tuple(TensorSummary.from_dict(item) for item in data[key])
    for key in ("element", "samples", "notes"):
        fields[key] = tuple(data[key])
    fields["chain"] = tuple(Link(**{**item, "source": _read_source(item["source"])}) for item in data["chain"])
    if data["remedy"]:
        remedy = {**data["remedy"], "source": _read_source(data["remedy"]["source"])}
        fields["remedy"] = Remedy(**{**remedy, "loss": _number(remedy["loss"])})
    return Culprit(**fields)
