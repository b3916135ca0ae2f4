"""What is told of each family of operations, recorded and located as a user would do it."""

from __future__ import annotations

import pytest
from families import CASES, Case, functions, layers, losses, matrices, norms, recipes, reductions, softmax
from located import finding_of

from bisect_nan.causes import CAUSES, find

PARTS = (functions, layers, losses, matrices, norms, recipes, reductions, softmax)
"""The modules that fill `CASES`."""


@pytest.mark.filterwarnings("ignore")  # torch warns of the very faults
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_cause_is_told(case: Case) -> None:
    """Every culprit of a step has its cause, with facts to show for it, and a step that is fine has none."""
    finding = finding_of(case.function, *case.leaves)
    assert tuple(culprit.cause for culprit in finding.culprits) == case.causes
    assert all(culprit.notes for culprit in finding.culprits)


def test_every_case_has_its_name() -> None:
    """No two cases share a name, and each cause that is expected has an entry."""
    names = [case.name for case in CASES]
    assert sorted({name for name in names if names.count(name) > 1}) == []
    assert all(find(cause) in CAUSES for case in CASES for cause in case.causes)
