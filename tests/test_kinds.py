"""Every kind of fault is located as it stands, and once more among innocent faults that come before and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kinds import KINDS, Batch, Kind, Model, decoy, fields, gradients, infinities, prepared, structure

from bisect_nan import Culprit, Snapshot, Verdict, locate

PARTS = (fields, gradients, infinities, structure)
"""The modules that fill `KINDS`."""


def names(culprit: Culprit) -> set[str]:
    """Return the names under which a culprit's operation may be known."""
    known = {name.removeprefix("aten.").split(".")[0].removesuffix("_") for name in (culprit.op, culprit.kernel)}
    return known | {(culprit.autograd or "").split("Backward")[0].lower()}


@pytest.mark.filterwarnings("ignore:std", "ignore:Sparse invariant")
@pytest.mark.parametrize("among_innocents", [False, True], ids=["alone", "among innocents"])
@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.step.__name__)
def test_the_marked_line_is_named(case: Kind, among_innocents: bool) -> None:
    """The culprit of every kind is its marked line, by its right name, with the rows that carry it, and nothing else is named."""
    model, data = prepared()

    def step(model: Model, data: Batch) -> Any:
        result = case.step(model, data)
        if not among_innocents:
            return result
        return {**result, "more": decoy(data)} if isinstance(result, dict) else result + decoy(data)

    torch.manual_seed(5)
    finding = locate(Snapshot.capture(model, data, step))
    assert finding.verdict is Verdict.LOCATED
    culprit = finding.culprits[0]
    assert culprit.source is not None
    if culprit.node >= 0:
        assert {c.source.line for c in finding.culprits if c.source} <= case.lines() or culprit.source.text.endswith(
            "# BACKWARD"
        )
    if case.ops:
        assert names(culprit) & set(case.ops)
    if case.rows is not None:
        assert culprit.samples == case.rows
    if case.phase is not None:
        assert culprit.phase is case.phase
    if case.module is not None:
        assert culprit.module == case.module
