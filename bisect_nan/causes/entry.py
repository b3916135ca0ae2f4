"""The form of a catalog entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bisect_nan.causes.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Match:
    """What a matcher says of a culprit that fits its entry.

    Attributes:
        confidence: 0 to 1.
        notes: Facts in numbers, each a sentence without a full stop.
        help: What to change on this very line, in one sentence; the entry's own advice when empty.
    """

    confidence: float
    notes: tuple[str, ...] = ()
    help: str = ""


@dataclass(frozen=True, slots=True)
class Cause:
    """One entry of the catalog.

    Attributes:
        name: States the fault, never the fix (`log_of_zero`).
        summary: One sentence; may use `{op}`.
        matches: Looks at the evidence and returns a Match, or None when this is not the cause.
        explanation: What happens, with the arithmetic.
        example: A short program that fails in this way: code that defines `fails() -> torch.Tensor`, a scalar that is non-finite,
            or whose `backward()` gives a leaf a non-finite gradient (for the optimizer: the sum of the updated parameter).
        repaired: Code that defines `repaired() -> torch.Tensor`: the example after the change, as a user would write it. Its
            value and its gradients are finite.
        near_miss: Code that defines `near_miss() -> torch.Tensor`: the same look, and neither value nor gradient is wrong.
        practice: Where people meet it, in one or two sentences.
        help: What to change, in general.
        references: Public reports and documentation.
    """

    name: str
    summary: str
    matches: Callable[[Evidence], Match | None]
    explanation: str
    example: str
    repaired: str
    near_miss: str
    practice: str
    help: str
    references: tuple[str, ...] = ()
