"""What is told of each family of operations, recorded and located as a user would do it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from families import CASES, Case, functions, layers, losses, matrices, norms, recipes, reductions, softmax
from hypothesis import given, settings
from hypothesis import strategies as st
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


ELEMENTWISE: dict[str, tuple[Callable[..., torch.Tensor], tuple[float, ...], str]] = {
    "log 0": (torch.log, (0.0,), "log_of_zero"),
    "log -1": (torch.log, (-1.0,), "log_of_negative"),
    "sqrt -1": (torch.sqrt, (-1.0,), "sqrt_of_negative"),
    "0 / 0": (torch.div, (0.0, 0.0), "zero_over_zero"),
    "2 / 0": (torch.div, (2.0, 0.0), "division_by_zero"),
    "1e10 / 1e-30": (torch.div, (1e10, 1e-30), "overflow"),
    "1e30 * 1e30": (torch.mul, (1e30, 1e30), "overflow"),
    "-1 ** 0.5": (torch.pow, (-1.0, 0.5), "pow_domain"),
    "0 ** -1": (torch.pow, (0.0, -1.0), "pow_domain"),
    "exp 100": (torch.exp, (100.0,), "exp_overflow"),
    "acos 1.5": (torch.acos, (1.5,), "trig_domain"),
    "lgamma 0": (torch.lgamma, (0.0,), "function_pole"),
    "derivative of sqrt 0": (torch.sqrt, (0.0,), "sqrt_grad_at_zero"),
    "derivative of 0 ** 0.5": (torch.pow, (0.0, 0.5), "pow_grad_at_zero"),
    "derivative of acos 1": (torch.acos, (1.0,), "trig_grad_at_boundary"),
    "derivative of 1e-15 / 1e-30": (torch.div, (1e-15, 1e-30), "division_grad"),
}
"""A function, operands that it cannot take, and the cause; it takes all numbers between 1/8 and 7/8."""


@pytest.mark.parametrize("name", ELEMENTWISE)
@settings(max_examples=15)
@given(data=st.data())
def test_one_element_among_others_decides(name: str, data: st.DataObject) -> None:
    """A bad element has its own cause wherever it stands, whatever the healthy ones around it are."""
    function, operands, cause = ELEMENTWISE[name]
    size = data.draw(st.integers(1, 12))
    place = data.draw(st.integers(0, size - 1))
    leaves = []
    for operand in operands:
        leaf = torch.tensor(data.draw(st.lists(st.floats(0.125, 0.875, width=32), min_size=size, max_size=size)))
        leaf[place] = operand
        leaves.append(leaf)
    (culprit,) = finding_of(function, *leaves).culprits
    assert (culprit.cause, culprit.element) == (cause, (place,))
