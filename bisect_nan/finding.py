"""What a search found: frozen results without tensors, and their JSON form.

`Finding.to_dict` is the versioned form that programs read; `Finding.from_dict` reads it back. Nothing here imports torch's
operators or looks at live values, so a report can be made on a machine that never saw the step.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bisect_nan.culprit import Culprit, Innocent, Link, Phase, Remedy, SourceLine, Symptom
from bisect_nan.errors import FindingError
from bisect_nan.finite import TensorSummary
from bisect_nan.shows import AsPage
from bisect_nan.strict_json import plain

__all__ = [
    "VERSION",
    "Culprit",
    "Finding",
    "Innocent",
    "Link",
    "Phase",
    "Remedy",
    "SearchCost",
    "SourceLine",
    "Symptom",
    "Verdict",
]

VERSION = 1
"""Version of the JSON form; grows when a key changes its meaning."""


class Verdict(enum.Enum):
    """The answer in one sentence; `name` in lower case is its machine-readable form."""

    LOCATED = "The operation that made the fault was found and confirmed."
    CLEAN = "Nothing non-finite reaches the loss, a gradient or the model's state."
    NOT_REPRODUCED = "The replay of the recorded step does not show the recorded fault, so nothing is blamed."
    FLAKY = "The replay shows the recorded fault only now and then, so nothing is blamed."
    INCONCLUSIVE = "The fault was reproduced, but no single operation could be shown to make it."


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
        loss: The loss of the step as recorded; None where the step came to none.
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
