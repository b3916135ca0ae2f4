"""Runs the lines of a script, alone or as a recorded step, and locates the fault in it.

The lines are those that this folder generates: names of torch's operators, numbers and variables, and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import torch
from torch import nn

from bisect_nan import finite
from bisect_nan.answer.driver import locate
from bisect_nan.causes.evidence import base_name
from bisect_nan.finding import Culprit, Finding, Verdict
from bisect_nan.reproduction.draft import Mode
from bisect_nan.snapshots.snapshot import Snapshot

_GROWN = frozenset({"overflow", "exp_overflow", "fp16_overflow", "grad_overflow", "grad_overflow_fp16"})
"""What an explosion of the weights over many steps looks like in one of them."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What a script runs.

    Attributes:
        literals: Lines that make its tensors; empty where `tensors` are given.
        calls: Lines of calls.
        mode: Where the fault shows.
        result: What comes out (FORWARD) or is written to (UPDATE), as Python.
        element: Index of the blamed element in a FORWARD result.
    """

    literals: tuple[str, ...]
    calls: tuple[str, ...]
    mode: Mode
    result: str = ""
    element: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What has to be located in a script.

    Attributes:
        causes: The causes that are taken for the same; empty for any.
        op: The operation, as `op_of` names it.
        others: Causes and operations that may be located beside it, as they were in the step.
    """

    causes: frozenset[str]
    op: str
    others: frozenset[tuple[str, str]] = frozenset()

    @classmethod
    def of(cls, finding: Finding, culprit: Culprit) -> Wanted:
        """Return what has to be located for one of the culprits of a finding."""
        causes = _GROWN if culprit.cause == "learning_rate_explosion" else frozenset({culprit.cause})
        return cls(causes, op_of(culprit), frozenset((other.cause, op_of(other)) for other in finding.culprits))

    @classmethod
    def by_itself(cls, culprit: Culprit) -> Wanted:
        """Return what has to be located for a call that is run outside of the pass that it stands in: any cause.

        A division in the hand-written backward code of an autograd Function is part of a derivative in the step; run by itself it is a
        division.
        """
        return cls(frozenset(), op_of(culprit))

    def located(self, finding: Finding) -> Culprit | None:
        """Return the culprit that is meant; None when a finding does not name it, or names something new."""
        fitting = [culprit for culprit in finding.culprits if not self.causes or culprit.cause in self.causes]
        named = [culprit for culprit in fitting if op_of(culprit) == self.op]
        new = [culprit for culprit in finding.culprits if (culprit.cause, op_of(culprit)) not in self.others]
        fits = finding.verdict is Verdict.LOCATED and all(culprit in named for culprit in new)
        return named[0] if named and fits else None


def op_of(culprit: Culprit) -> str:
    """Return the name of a culprit's operation without the marks of its variants (`_foreach_`, in place)."""
    return base_name(culprit.op).removeprefix("_foreach_")


def fails(lines: Lines, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Run the lines and tell whether something non-finite comes out where it shall."""
    names = _namespace(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        execute([*lines.literals, *lines.calls], names)
        if lines.mode is Mode.BACKWARD:
            names["loss"].backward()
            leaves = [item for item in names.values() if isinstance(item, torch.Tensor) and item.is_leaf]
            return bool(finite.probe([leaf.grad for leaf in leaves if leaf.grad is not None]))
    return bool(finite.probe([_value(lines.result, names)]))


def bad_leaf(lines: Lines) -> str:
    """Return the name of the first tensor whose gradient comes out non-finite in a BACKWARD script."""
    names = _namespace({})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        execute([*lines.literals, *lines.calls], names)
        names["loss"].backward()
    leaves = {name: item for name, item in names.items() if isinstance(item, torch.Tensor) and item.is_leaf}
    return next(name for name, leaf in leaves.items() if leaf.grad is not None and finite.probe([leaf.grad]))


def located(lines: Lines, tensors: Mapping[str, torch.Tensor]) -> Finding:
    """Record the lines as a step, and locate its fault.

    Args:
        lines: What to run.
        tensors: Its tensors by name, where no lines make them; they are not changed.

    Raises:
        RecordingError: The lines cannot be recorded.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return locate(_captured(lines, tensors), remedies=False)


def _captured(lines: Lines, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
    names = _namespace(tensors)
    execute(lines.literals, names)
    if lines.mode is Mode.UPDATE:
        return Snapshot.capture_update(nn.Module(), _Calls(lines, names), 0.0)

    def step(*_: Any) -> torch.Tensor:
        execute(lines.calls, names)
        loss: torch.Tensor = (
            names["loss"] if lines.mode is Mode.BACKWARD else _element(_value(lines.result, names), lines)
        )
        return loss

    return Snapshot.capture(None, {}, step)


class _Calls(torch.optim.Optimizer):
    """An optimizer whose update is some lines."""

    def __init__(self, lines: Lines, names: dict[str, Any]) -> None:
        super().__init__([_value(lines.result, names)], {})
        self._lines, self._names = lines, names

    def step(self, _: Any = None) -> None:  # type: ignore[override]
        """Run the lines."""
        execute(self._lines.calls, self._names)


def _element(result: torch.Tensor, lines: Lines) -> torch.Tensor:
    """Return a blamed element as a view: no arithmetic of ours shall be recorded."""
    bad = finite.mask(result.detach())
    at = lines.element
    if len(at) != bad.dim() or any(i >= n for i, n in zip(at, bad.shape, strict=True)) or not bad[at]:
        at = tuple(int(i) for i in bad.nonzero()[0]) if bad.any() else (0,) * bad.dim()
    one = result[at]
    if not one.is_complex():
        return one
    parts = torch.view_as_real(one)
    return parts[0] if finite.probe([parts[0].detach()]) else parts[1]


def _namespace(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    own = {name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
    return {"torch": torch, "inf": inf, "nan": nan, **own}


def execute(lines: Sequence[str], names: dict[str, Any]) -> None:
    """Run lines of a generated script.

    Args:
        lines: The lines.
        names: Variables, to which those of the lines are added.
    """
    exec(compile("\n".join(lines), "<script>", "exec"), names)  # noqa: S102  (our own text, see the module's docstring)


def _value(text: str, names: dict[str, Any]) -> torch.Tensor:
    """Return a variable, or a member of one that holds a tuple (`y[1]`)."""
    name, _, place = text.partition("[")
    found: torch.Tensor = names[name][int(place.rstrip("]"))] if place else names[name]
    return found
