"""Reducing a fault to a short script: what comes out fails in the same way, in a process of its own as well."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import CASES, functions, layers, losses, matrices, norms, recipes, reductions, softmax
from hypothesis import given
from hypothesis import strategies as st
from kinds import KINDS, fields, gradients, infinities, prepared, structure
from torch import nn

from bisect_nan import Culprit, Finding, MinimalScript, ReproductionError, Snapshot, Verdict, locate, minimal_script
from bisect_nan.finding import Phase, SourceLine
from bisect_nan.reproduction.check import check
from bisect_nan.reproduction.minimal import Unchecked, unchecked
from bisect_nan.reproduction.recapture import op_of
from bisect_nan.reproduction.script import script_text

PARTS = (
    functions,
    layers,
    losses,
    matrices,
    norms,
    recipes,
    reductions,
    softmax,
    fields,
    gradients,
    infinities,
    structure,
)
"""The modules that fill `CASES` and `KINDS`."""

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 25
"""No script of the sample has more lines."""

EVERY = 14
"""Every so many kinds are tried here; of all of them 489 of 490 come out."""

NONE = {"memory_read_before_it_was_written"}
"""A fault that no call shows: what memory holds before anything is written to it."""


def of_leaves(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Snapshot:
    """Record a function of leaves, as `finding_of` does."""

    def step(model: nn.ParameterList, _: Any) -> torch.Tensor:
        result = function(*model)
        result = result.real if result.is_complex() else result
        return result.float().sum() if result.ndim else result

    return Snapshot.capture(nn.ParameterList([nn.Parameter(leaf.clone()) for leaf in leaves]), {}, step)


def steps() -> dict[str, Callable[[], Snapshot]]:
    """Return the sample: kinds, families and crash files."""
    found: dict[str, Callable[[], Snapshot]] = {}
    for case in CASES:
        if case.causes:
            found[case.name] = lambda case=case: of_leaves(case.function, *case.leaves)
    for kind in KINDS:
        found[kind.step.__name__] = lambda kind=kind: Snapshot.capture(*prepared(), kind.step)
    some = {name: found[name] for name in [*found][::EVERY] if name not in NONE}
    files = ROOT.glob("fixtures/*.safetensors")
    return some | {path.stem: lambda path=path: Snapshot.load(path) for path in sorted(files)}


def has_operation(finding: Finding) -> bool:
    """Whether an operation makes the fault, whose values decide it."""
    culprit = finding.culprit
    return culprit is not None and culprit.node >= 0


@pytest.fixture(scope="module")
def made() -> dict[str, Unchecked]:
    """Return the scripts of the sample."""
    found = {}
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.chdir(ROOT)
        for name, capture in steps().items():
            torch.manual_seed(5)
            snapshot = capture()
            finding = locate(snapshot, remedies=False)
            if finding.verdict is Verdict.LOCATED and has_operation(finding):
                found[name] = unchecked(snapshot, finding)
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_same_is_located_in_a_fresh_process(made: dict[str, Unchecked]) -> None:
    """Every script of the sample runs, and the same cause is located at the same operation."""
    assert len(made) > 35
    findings = check([(script.code, script.lines) for script in made.values()])
    for (name, script), finding in zip(made.items(), findings, strict=True):
        assert script.wanted.located(finding) is not None, f"{name}\n{script.code}"


@pytest.mark.filterwarnings("ignore")
def test_scripts_are_short(made: dict[str, Unchecked]) -> None:
    """A script fits on a screen, holds few numbers, and needs nothing but torch."""
    for name, script in made.items():
        assert len(script.code.splitlines()) <= LONGEST, name
        tree = ast.parse(script.code)
        assert sum(isinstance(node, ast.Constant) for node in ast.walk(tree)) < 60, script.code
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert imported <= {"torch", "inf", "nan"}


def test_elements_are_cut_down_to_the_guilty_one() -> None:
    """Of thousands of numbers the one that decides is left, and it is made round."""
    values = torch.rand(64, 96) + 0.5
    values[41, 17] = 123.456
    snapshot = of_leaves(lambda x: x.exp().mean(), values)
    script = unchecked(snapshot, locate(snapshot))
    assert script.lines.literals == ("x = torch.tensor([100.0])",)
    assert script.lines.calls == ("y = torch.exp(x)",)


def test_calls_that_the_cause_needs_stay() -> None:
    """A gradient that only a selection makes bad keeps the selection."""
    snapshot = of_leaves(lambda x: torch.where(x > 0, x.log(), 0.0).sum(), torch.tensor([0.0, 2.0]))
    finding = locate(snapshot)
    script = unchecked(snapshot, finding)
    assert finding.culprit is not None
    assert (finding.culprit.cause, op_of(finding.culprit)) == ("where_masked_gradient", "log")
    assert any("torch.where" in line for line in script.lines.calls)


class Reciprocal(torch.autograd.Function):
    """One over a number, 0 over 0, with a backward pass by hand that forgets the latter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.where(x == 0, 0, 1 / x.where(x != 0, 1))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return -gradient / x.square()


def test_a_call_of_a_backward_pass_by_hand() -> None:
    """It is run by itself, on the numbers that it had, and the script says where it stands."""
    snapshot = of_leaves(Reciprocal.apply, torch.tensor([2.0, 0.0]))
    finding = locate(snapshot)
    assert finding.culprit is not None
    assert (finding.culprit.phase, finding.culprit.cause) == (Phase.BACKWARD, "division_grad")
    script = minimal_script(snapshot, finding)
    assert (script.cause, script.op) == ("division_by_zero", "div")
    assert "# The call stands in a backward pass, and is run here by itself.\n" in script.code
    assert "backward()" not in script.code


def test_a_derivative_of_a_derivative() -> None:
    """A penalty on gradients is shown as one: the script differentiates twice."""

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad((x.abs() ** 1.5).sum(), x, create_graph=True)
        return slope.square().sum()

    snapshot = of_leaves(penalty, torch.tensor([2.0, 0.0]))
    script = minimal_script(snapshot, locate(snapshot))
    assert (script.cause, script.op) == ("pow_grad_at_zero", "pow")
    assert "slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]\nloss = slope.sum()\n" in script.code
    assert "# It shows in the derivative of a derivative.\n" in script.code


def test_large_tensors_are_drawn() -> None:
    """A sum that overflows only with all of its elements is shown with a tensor that one expression makes."""
    snapshot = of_leaves(lambda x: x.sum(), torch.full((300,), 1000.0, dtype=torch.float16))
    script = unchecked(snapshot, locate(snapshot))
    assert len(script.code) < 600


def test_the_public_function() -> None:
    """`minimal_script` returns the script with what a fresh process found in it."""
    snapshot = of_leaves(torch.sqrt, torch.tensor([0.0, 2.0]))
    script = minimal_script(snapshot, locate(snapshot))
    assert isinstance(script, MinimalScript)
    assert (script.cause, script.op) == ("sqrt_grad_at_zero", "sqrt")
    assert script.checked == "ran in a fresh process, sqrt_grad_at_zero at `sqrt`"
    assert "torch.sqrt(x)" in script.code


@pytest.mark.parametrize(
    ("step", "batch", "message"),
    [
        (lambda _, b: b.sum(), torch.tensor([torch.nan]), "bad before anything runs"),
        (lambda _, b: b.sum(), torch.tensor([1.0]), "verdict clean"),
    ],
)
def test_what_has_no_script_is_told(step: Any, batch: torch.Tensor, message: str) -> None:
    """Bad data, and a step without a fault, have no operation to show."""
    snapshot = Snapshot.capture(nn.Identity(), batch, step)
    with pytest.raises(ReproductionError, match=message):
        minimal_script(snapshot, locate(snapshot))


def test_scripts_that_end_the_process_are_left_out() -> None:
    """A number among `skip` is not run, and without any run nothing is claimed."""
    snapshot = of_leaves(torch.log, torch.tensor([0.0, 2.0]))
    finding, ran = locate(snapshot), list[int]()
    unchecked(snapshot, finding, progress=lambda _, asked, __: ran.append(asked), skip=(2, 3))
    assert 1 in ran
    assert not {2, 3} & {*ran}
    with pytest.raises(ReproductionError, match="does not show"):
        unchecked(snapshot, finding, skip=range(10_000))


@pytest.fixture(scope="module")
def logarithm() -> tuple[Unchecked, Culprit]:
    """Return a script and the culprit that it shows."""
    snapshot = of_leaves(torch.log, torch.tensor([0.0]))
    finding = locate(snapshot)
    assert finding.culprit is not None
    return unchecked(snapshot, finding), finding.culprit


@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_text_of_a_file_stays_in_the_comment(logarithm: tuple[Unchecked, Culprit], text: str) -> None:
    """Whatever the recorded line of code says, the script runs the same calls, in the same encoding."""
    script, culprit = logarithm
    line = SourceLine(text, 1, text, f"{text}\nimport os # -*- coding: utf-7 -*-\r\x0c{text}")
    hostile = script_text(script.lines, replace(culprit, source=line), "log_of_zero")
    assert ast.dump(ast.parse(hostile.encode())) == ast.dump(ast.parse(script.code))
