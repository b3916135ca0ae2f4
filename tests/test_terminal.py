"""The terminal report: golden texts of hand-made findings, and what holds for every one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bisect_nan.errors import FindingError
from bisect_nan.finding import (
    Culprit,
    Finding,
    Innocent,
    Link,
    Phase,
    Remedy,
    SearchCost,
    SourceLine,
    Symptom,
    Verdict,
)
from bisect_nan.finite import TensorSummary
from bisect_nan.reports import to_text

SOFTMAX = SourceLine("model.py", 19, "Attention.forward", "weights = scores.softmax(-1)")
MASK = SourceLine("model.py", 18, "Attention.forward", 'scores = scores.masked_fill(mask, float("-inf"))')
HEAD = SourceLine("model.py", 40, "step", "return head(hidden).pow(2).mean()")

FORWARD = Culprit(
    phase=Phase.FORWARD,
    cause="softmax_all_masked",
    summary="A softmax row holds only -inf.",
    confidence=0.98,
    op="aten._softmax.default",
    kernel="aten._softmax.default",
    autograd=None,
    node=27,
    name="",
    source=SOFTMAX,
    module="layers.9.attention",
    inputs=(TensorSummary("scores", "f32", (2, 5, 5), neg_inf=25, low=-1.9, high=2.3, first=(1, 0, 0)),),
    outputs=(TensorSummary("weights", "f32", (2, 5, 5), nan=25, low=0.01, high=0.9, first=(1, 0, 0)),),
    element=(1, 0, 0),
    samples=(1,),
    samples_confirmed=True,
    chain=(
        Link(27, "aten._softmax.default", SOFTMAX),
        Link(28, "aten.bmm.default", SourceLine("model.py", 20, "Attention.forward", "return weights @ values")),
        Link(31, "aten.add.Tensor", SourceLine("model.py", 25, "Block.forward", "return x + self.attention(x)")),
        Link(140, "aten.pow.Tensor_Scalar", HEAD),
        Link(141, "aten.mean.default", HEAD),
    ),
    notes=("rows [1, 0..4] hold only -inf; the -inf were written by `masked_fill` at model.py:18 and are intended",),
    help="leave one finite score per row, or zero the output of fully masked rows",
    remedy=Remedy(
        "leave_one_score",
        "give rows whose scores are all -inf finite ones",
        verified=True,
        loss=2.31412,
        code="weights = scores.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0).softmax(-1)",
        outcome="loss 2.31412, all 24 gradients finite",
    ),
)
COST = SearchCost(
    nodes=147,
    executed=131,
    probes=8,
    replays=3,
    replayed=402,
    seconds={"replay": 0.011, "search": 0.012, "confirm": 0.01, "total": 0.04},
    cuts=((73, "dirty"), (36, "dirty"), (18, "clean"), (27, "clean"), (28, "dirty")),
)
LOCATED = Finding(
    Verdict.LOCATED,
    symptom=Symptom("loss", "loss", ("nan",)),
    culprits=(FORWARD,),
    innocents=(
        Innocent(26, "aten.masked_fill.Scalar", "", MASK, "an intended infinity: -inf is written as a literal"),
    ),
    search=COST,
    loss=float("nan"),
)
BACKWARD = Culprit(
    phase=Phase.BACKWARD,
    cause="sqrt_grad_at_zero",
    summary="The derivative of sqrt at zero is infinite.",
    confidence=0.9,
    op="aten.sqrt.default",
    kernel="aten.div.Tensor",
    autograd="SqrtBackward0",
    node=61,
    name="",
    source=SourceLine("loss.py", 7, "distance", "return (a - b).square().sum(-1).sqrt()"),
    module="",
    inputs=(
        TensorSummary("grad", "f32", (4,), low=0.25, high=0.25),
        TensorSummary("twice the root", "f32", (4,), low=0.0, high=2.8),
    ),
    outputs=(TensorSummary("", "f32", (4,), pos_inf=1, low=0.089, high=0.4, first=(2,)),),
    element=(2,),
    samples=(2,),
    chain=(
        Link(61, "aten.div.Tensor", None),
        Link(63, "aten.mul.Tensor", SourceLine("loss.py", 7, "distance", ""), turns_nan=True),
        Link(70, "aten.mm.default", None),
    ),
    help="add an epsilon under the root",
    remedy=Remedy(
        "clamp", "add an epsilon under the root", verified=True, loss=2.31, outcome="loss 2.31, all gradients finite"
    ),
)
GRADIENT = Finding(
    Verdict.LOCATED,
    symptom=Symptom("gradient", "layers.0.weight", ("nan",), others=3),
    culprits=(BACKWARD,),
    search=SearchCost(nodes=88, executed=70, probes=7, seconds={"total": 0.021}),
    loss=2.3104,
)
DEPTH = Culprit(
    phase=Phase.INPUT,
    cause="input_nonfinite",
    summary="The batch holds non-finite values.",
    confidence=1.0,
    op="",
    kernel="",
    autograd=None,
    node=-1,
    name="batch['depth']",
    source=None,
    module="",
    inputs=(),
    outputs=(TensorSummary("batch['depth']", "f32", (8, 1, 4, 4), nan=3, low=0.2, high=9.5, first=(1, 0, 2, 2)),),
    element=(1, 0, 2, 2),
    samples=(1, 4),
    chain=(Link(3, "aten.sub.Tensor", HEAD), Link(4, "aten.mean.default", HEAD)),
    help="mask the holes of the target before it enters the loss",
)
INPUT = Finding(
    Verdict.LOCATED,
    symptom=Symptom("loss", "loss", ("nan",)),
    culprits=(DEPTH,),
    search=SearchCost(nodes=5, executed=0, probes=1, seconds={"total": 0.002}),
)
SEVERAL = replace(
    LOCATED, culprits=(FORWARD, replace(BACKWARD, phase=Phase.FORWARD, autograd=None, kernel=BACKWARD.op)), innocents=()
)
CLEAN = Finding(Verdict.CLEAN, search=SearchCost(nodes=20, probes=1, seconds={"total": 0.01}), loss=0.75)
LOST = Finding(
    Verdict.NOT_REPRODUCED,
    symptom=Symptom("loss", "loss", ("nan",)),
    environment=("Recorded with torch 2.12.0, this is torch 2.13.0.", "Recorded with 8 threads, this process has 2."),
    search=SearchCost(nodes=20, probes=2, seconds={"total": 0.01}),
)
FLAKY = Finding(Verdict.FLAKY, symptom=Symptom("parameter", "head.bias", ("nan", "+inf")), loss=1.5)
LAYERS = replace(
    LOCATED,
    culprits=tuple(replace(FORWARD, node=27 + 40 * i, module=f"layers.{9 + i}.attention") for i in range(3)),
    innocents=LOCATED.innocents * 3,
)
UPDATE = replace(
    FORWARD,
    phase=Phase.OPTIMIZER,
    cause="optimizer_eps_underflow",
    op="aten.addcdiv_.default",
    kernel="aten.addcdiv_.default",
    source=None,
    module="",
    chain=(),
    notes=(),
    outputs=(TensorSummary("out", "f16", (6,), nan=1, pos_inf=2, low=0.1, high=0.3, first=(4,)),),
    samples=(),
    help="give the optimizer an eps that the type can hold",
    remedy=Remedy("float32", "keep float32 master weights", outcome="head.bias is still non-finite after the update"),
)
OPTIMIZER = replace(GRADIENT, symptom=Symptom("parameter", "head.bias", ("nan", "+inf")), culprits=(UPDATE,))
REPORTS = {
    "layers": LAYERS,
    "optimizer": OPTIMIZER,
    "forward": LOCATED,
    "backward": GRADIENT,
    "input": INPUT,
    "several": SEVERAL,
    "clean": CLEAN,
    "not_reproduced": LOST,
    "flaky": FLAKY,
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name: str, golden: Callable[[str, str], None]) -> None:
    """A finding of each kind is reported word for word as in tests/golden."""
    golden(f"{name}.txt", to_text(REPORTS[name]))


def test_verbose_report(golden: Callable[[str, str], None]) -> None:
    """The verbose report adds the chain with its lines, the cuts, the times and the environment."""
    golden("forward_verbose.txt", to_text(LOCATED, verbose=True))


def test_report_survives_its_json_form() -> None:
    """A finding that went through JSON is reported in the same words."""
    for finding in REPORTS.values():
        assert to_text(Finding.from_dict(finding.to_dict()), verbose=True) == to_text(finding, verbose=True)


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1.0])
def test_a_finding_equals_its_json_form(loss: float) -> None:
    """Also where a number in it is NaN, which does not equal itself."""
    for finding in REPORTS.values():
        before = replace(finding, loss=loss)
        assert Finding.from_dict(before.to_dict()) == before
        assert Finding.from_dict(before.to_dict()) != replace(before, loss=2.0)
        assert before != before.to_dict()


@pytest.mark.parametrize(
    "given", [[], "finding.json", {}, {"version": 2}, {"version": 1}, {"version": 1, "symptom": 3}]
)
def test_what_is_no_finding_is_refused(given: Any) -> None:
    """With what was given, what was expected, and what to do."""
    with pytest.raises(FindingError, match=r"expected: the dictionary that Finding\.to_dict\(\) gives.*\ndo this: "):
        Finding.from_dict(given)


def test_general_advice_makes_room_for_a_line_that_helps() -> None:
    """What was executed and written down is not said once more in general; what could not be shown to help does not replace it."""
    assert LOCATED.culprit is not None
    remedy = Remedy("clamp", "keep it away", verified=True, code="x = y.clamp(min=1)", source=LOCATED.culprit.source)
    for shown, found in ((remedy, False), (replace(remedy, verified=False), True), (None, True)):
        culprit = replace(LOCATED.culprit, help="think of something", remedy=shown)
        report = to_text(replace(LOCATED, culprits=(culprit,)))
        assert ("help: think of something" in report) is found


def test_one_bad_hyper_parameter_is_one_error() -> None:
    """An update takes the rate in at several operations of one line."""
    assert LOCATED.culprit is not None
    culprits = [
        replace(LOCATED.culprit, phase=Phase.OPTIMIZER, op=op, kernel=op, node=node)
        for node, op in enumerate(("aten.mul.Tensor", "aten.addcdiv.default"))
    ]
    report = to_text(replace(LOCATED, culprits=tuple(culprits)))
    assert report.count("error") == 1
    assert "and so at 1 more node" in report


def test_long_lines_stay_whole() -> None:
    """No line is broken, however long its path or its code is."""
    line = SourceLine(f"{'deep/' * 60}model.py", 19, "f", f"x = {'very_' * 80}long()")
    report = to_text(replace(LOCATED, culprits=(replace(FORWARD, source=line),)), colour="standard")
    assert str(line) in report
    assert line.text in report


def test_plain_text_has_no_escapes() -> None:
    """Without a colour system there is no escape sequence; with one there is."""
    assert "\x1b" not in to_text(LOCATED)
    assert "\x1b[1;31merror" in to_text(LOCATED, colour="standard")


def test_control_characters_do_not_get_through() -> None:
    """A stranger's file cannot steer the terminal through names or lines of code."""
    evil = replace(
        FORWARD, source=replace(SOFTMAX, text="x\x1b]0;owned\x07\x9b2J\u202e"), notes=("a\rb\nc",), module="\x1b[2J"
    )
    report = to_text(replace(LOCATED, culprits=(evil,)))
    assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(report)
    assert "note: a b c" in report


def test_markup_is_text() -> None:
    """Square brackets in code and indices are printed, not taken for rich's markup."""
    report = to_text(replace(LOCATED, culprits=(replace(FORWARD, source=replace(SOFTMAX, text="x = y[bold][/]")),)))
    assert "x = y[bold][/]" in report


def test_many_samples_and_a_long_chain_are_cut() -> None:
    """Long lists show their beginning and how much is left out."""
    chain = tuple(Link(28 + i, f"aten.op{i}.default", None) for i in range(20))
    report = to_text(replace(LOCATED, culprits=(replace(FORWARD, samples=tuple(range(9)), chain=chain),)))
    assert "samples 0, 1, 2, 3, 4, 5 and 3 more" in report
    assert "through op0, op1, op2, op3, op4, 14 more, op19" in report


def test_infinities_that_went_in_are_not_called_made() -> None:
    """Where NaN is made beside infinities of the operands, only NaN is counted; infinities of the other sign are new."""
    scores = TensorSummary("scores", "f32", (4, 5), neg_inf=9, first=(0, 0))
    made = replace(scores, nan=2, neg_inf=7)
    found = Finding(Verdict.LOCATED, culprits=(replace(FORWARD, inputs=(scores,), outputs=(made,)),))
    assert "made the first NaN: 2 of 20 values" in to_text(found)
    turned = replace(made, neg_inf=0, pos_inf=7)
    found = Finding(Verdict.LOCATED, culprits=(replace(FORWARD, inputs=(scores,), outputs=(turned,)),))
    assert "made the first NaN and infinity: 9 of 20 values" in to_text(found)


def test_a_tensor_that_other_code_made_was_not_there_before_the_step() -> None:
    """What NumPy computes within the step comes into it bad."""
    state = replace(
        FORWARD, node=-1, phase=Phase.INPUT, name="constant at loss.py:29", op="", kernel="", inputs=(), chain=()
    )
    told = to_text(Finding(Verdict.LOCATED, culprits=(state,)))
    assert "constant at loss.py:29 held NaN when the step took it in: 25 of 50 values" in told
