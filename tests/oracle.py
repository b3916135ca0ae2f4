"""Says which planted faults of a random program make its symptom, by trying every combination of repairs.

Shares no code with the package: the program is executed eagerly, with the faults outside of the combination in place.
"""

from __future__ import annotations

import dataclasses
from itertools import combinations

import torch
from random_programs import RandomProgram

REPAIRS = (1.0, 0.7)
"""Tried in turn: a repair may by chance saturate a clamp, and so stop another fault."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a program does.

    Attributes:
        symptom: `loss`, `gradient`, or "" when all comes out finite.
        answers: Every smallest set of faults whose repair makes the symptom go, by number.
    """

    symptom: str
    answers: tuple[frozenset[int], ...]


def run(
    program: RandomProgram,
    repaired: frozenset[int] = frozenset(),
    spared: dict[int, tuple[int, ...]] | None = None,
    repair: float = 1.0,
) -> tuple[bool, bool]:
    """Execute a program once and return whether the loss, and whether all gradients, are finite."""
    model, batch = program.build(repaired, spared, repair)
    torch.manual_seed(program.seed)
    loss = program.step()(model, batch)
    if not bool(torch.isfinite(loss)):
        return False, False
    if loss.requires_grad:
        loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return True, all(bool(torch.isfinite(g).all()) for g in gradients)


def judge(program: RandomProgram, repairs: tuple[float, ...] = REPAIRS) -> Verdict | None:
    """Return the right answer; None when the program is not sound even with every fault repaired."""
    numbers = [fault.number for fault in program.faults]
    if any(run(program, frozenset(numbers), repair=repair) != (True, True) for repair in repairs):
        return None
    loss, gradients = run(program)
    if loss and gradients:
        return Verdict("", ())
    symptom = "gradient" if loss else "loss"
    answers = [answer for repair in repairs for answer in _answers(program, symptom, repair)]
    return Verdict(symptom, tuple(dict.fromkeys(answers)))


def _answers(program: RandomProgram, symptom: str, repair: float) -> list[frozenset[int]]:
    numbers = [fault.number for fault in program.faults]
    answers: list[frozenset[int]] = []
    for size in range(1, len(numbers) + 1):
        for repaired in map(frozenset, combinations(numbers, size)):
            if any(answer <= repaired for answer in answers):
                continue
            if run(program, repaired, repair=repair)[0 if symptom == "loss" else 1]:
                answers.append(repaired)
    return answers


def rows(program: RandomProgram, fault: int, verdict: Verdict) -> tuple[int, ...]:
    """Return the rows of a fault that make the symptom on their own, all other guilty faults repaired."""
    others = verdict.answers[0] - {fault}
    planted = sorted({row for f in program.faults if f.number == fault for row, _ in f.where})
    return tuple(
        row for row in planted if not run(program, others, {fault: (row,)})[0 if verdict.symptom == "loss" else 1]
    )
