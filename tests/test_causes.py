"""The catalog of causes: names, lookup, order, and examples that do what their entries say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from located import finding_of_code
from observed import GRADIENT, LOSS, PARAMETER, Observed, births, defined, evidence_of, observe, run_one

from bisect_nan import Verdict, causes
from bisect_nan.causes import CAUSES, Cause, Evidence, diagnose, explain, find
from bisect_nan.errors import BisectNanError
from bisect_nan.finding import Phase, SourceLine

aten = torch.ops.aten
INF, NAN = float("inf"), float("nan")
STATE = ("input_nonfinite", "parameter_nonfinite", "buffer_nonfinite", "gradient_nonfinite_applied")
"""Entries that the search picks by name."""

IN_A_LOOP = {
    *("parameter_nonfinite", "buffer_nonfinite"),  # their examples make a model of their own
    *("gradient_nonfinite_applied", "learning_rate_nonfinite", "optimizer_eps_underflow", "learning_rate_explosion"),
}
"""Entries whose faults are those of a training, and of no single function."""

POINTWISE = sorted(
    (
        overload
        for packet in (getattr(aten, name) for name in dir(aten))
        if isinstance(packet, torch._ops.OpOverloadPacket)
        for overload in (getattr(packet, name) for name in packet.overloads())  # type: ignore[no-untyped-call]
        if torch.Tag.pointwise in overload.tags
        and "out" not in {argument.name for argument in overload._schema.arguments}
    ),
    key=str,
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64)
SHAPES = ((), (0,), (3,), (2, 3), (1, 3))
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 1e-30, 1e30, 7e4, INF, -INF, NAN)

ids = [cause.name for cause in CAUSES]
warns = pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of the very fault: std of one value


def examples(cause: Cause) -> tuple[torch.Tensor, list[torch.Tensor], list[Any]]:
    """Run an entry's example."""
    return observe(defined(cause.example, "fails"))


def is_finite(*tensors: torch.Tensor) -> bool:
    """Tell whether nothing in the tensors is NaN or infinite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def is_masked_by_torch(observed: Observed) -> bool:
    """Tell whether a derivative of torch itself makes a bad value, which is harmless where the gradient is finite."""
    made = [value for value in observed.call.outputs if value is not None]
    return observed.forward is not None and not is_finite(*made)


def test_names_are_unique_and_end_with_unclassified() -> None:
    """A name stands for one entry, and the one that always matches is asked last."""
    assert len(set(ids)) == len(ids)
    assert ids[-1] == "unclassified"


@pytest.mark.parametrize("cause", CAUSES, ids=ids)
def test_entry_is_complete(cause: Cause) -> None:
    """Every entry has a one-sentence summary, an explanation, and says what to change."""
    assert cause.summary[0] in "`abcdefghijklmnopqrstuvwxyz"
    assert not cause.summary.endswith(".")
    assert len(cause.explanation) > 80
    assert len(cause.practice) > 40
    assert cause.practice.endswith(".")
    assert cause.help
    assert "{" not in cause.summary.replace("{op}", "")


@warns
@pytest.mark.parametrize("cause", CAUSES, ids=ids)
def test_example_fails(cause: Cause) -> None:
    """The example gives a non-finite loss, or a finite one with a non-finite gradient."""
    loss, gradients, _ = examples(cause)
    assert loss.ndim == 0
    if "grad" in cause.name and cause.name not in STATE:
        assert is_finite(loss)
        assert not is_finite(*gradients)
    else:
        assert not is_finite(loss)


@warns
@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause.name not in STATE], ids=lambda cause: cause.name)
def test_example_is_diagnosed_as_its_own_entry(cause: Cause) -> None:
    """The first bad value of the example is explained by the entry that shows it."""
    loss, _, seen = examples(cause)
    symptom = GRADIENT if is_finite(loss) else LOSS
    fresh = cause.name == "uninitialized_memory"
    observed, output, mask = next(birth for birth in births(seen) if fresh or "empty" not in birth[0].call.op)
    if observed.call.phase is Phase.OPTIMIZER:
        symptom = PARAMETER
    before = seen[: next(place for place, item in enumerate(seen) if item is observed)]
    found, match = diagnose(evidence_of(observed, mask, output=output, symptom=symptom, seen=before))
    assert (found.name, bool(match.notes)) == (cause.name, True)


@warns
@pytest.mark.parametrize("cause", CAUSES, ids=ids)
def test_near_miss_is_finite_and_silent(cause: Cause) -> None:
    """The near miss is finite, and its entry does not fire on any of its calls, blamed as a whole."""
    loss, gradients, seen = observe(defined(cause.near_miss, "near_miss"))
    assert is_finite(loss, *gradients)
    if cause.name == "unclassified":
        return
    for observed in seen:
        if "empty" in observed.call.op or is_masked_by_torch(observed):
            continue  # fresh memory differs from run to run
        for index, value in enumerate(observed.call.outputs):
            if value is not None and value.is_floating_point():
                whole = torch.ones(value.shape, dtype=torch.bool)
                for symptom in (LOSS, GRADIENT):
                    evidence = evidence_of(observed, whole, output=index, symptom=symptom, seen=seen)
                    assert cause.matches(evidence) is None, observed.call.target


@warns
@pytest.mark.parametrize("cause", CAUSES, ids=ids)
def test_repaired_example_is_finite(cause: Cause) -> None:
    """With the advice applied the example has a finite loss and finite gradients, and as many leaves as before take one."""
    loss, gradients, _ = observe(defined(cause.repaired, "repaired"))
    assert loss.ndim == 0
    assert is_finite(loss, *gradients)
    assert bool(gradients) == bool(examples(cause)[1])


@warns
@pytest.mark.parametrize(
    "cause", [cause for cause in CAUSES if cause.name not in IN_A_LOOP], ids=lambda cause: cause.name
)
def test_entry_is_located(cause: Cause) -> None:
    """Recorded and located, the example has its own cause, and neither the repaired example nor the near miss has any."""
    (culprit,) = finding_of_code(defined(cause.example, "fails")).culprits
    assert culprit.cause == cause.name
    for code, name in ((cause.repaired, "repaired"), (cause.near_miss, "near_miss")):
        assert finding_of_code(defined(code, name)).verdict is Verdict.CLEAN


def test_find_lists_near_names() -> None:
    """A wrong name is answered with the nearest right ones, as a KeyError of this package."""
    with pytest.raises(causes.UnknownCause, match="softmax_all_masked") as caught:
        find("softmax_masked")
    assert isinstance(caught.value, KeyError)
    assert isinstance(caught.value, BisectNanError)
    with pytest.raises(causes.UnknownCause, match="bisect-nan causes"):
        find("qqq")


@pytest.mark.parametrize("cause", CAUSES, ids=ids)
def test_explain_prints_the_entry(cause: Cause) -> None:
    """The explanation holds the entry's parts and no placeholder."""
    text = explain(cause.name)
    assert text.startswith(f"# {cause.name}\n")
    assert all(code.strip() in text for code in (cause.example, cause.repaired, cause.near_miss))
    assert cause.practice in text
    assert cause.help in text
    assert "{op}" not in text
    assert all(reference in text for reference in cause.references)


def test_readme_names_every_family() -> None:
    """The page on adding entries lists each file of the catalog."""
    folder = Path(causes.__file__).parent
    text = (folder / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py", "entry.py", "evidence.py"}
    assert {name for name in files if f"`{name}`" not in text} == set()


def quotient(above: float, below: float, *ancestors: str, dtype: torch.dtype = torch.float32) -> Evidence:
    """Divide two numbers, the lower one made by the given ops."""
    tensors = torch.tensor([above], dtype=dtype), torch.tensor([below], dtype=dtype)
    return run_one(aten.div.Tensor, *tensors, ancestors={"other": ancestors})


def test_special_entries_come_before_general_ones() -> None:
    """One division is five causes, depending on what is divided by what."""
    assert diagnose(quotient(0, 0, "add", "std"))[0].name == "zero_variance"
    assert diagnose(quotient(0, 0, "sum"))[0].name == "zero_over_zero"
    assert diagnose(quotient(1, 0, "linalg_vector_norm"))[0].name == "zero_variance"
    assert diagnose(quotient(1, 0, "softplus"))[0].name == "division_by_zero"
    assert diagnose(quotient(100, 1e-4, "std", dtype=torch.float16))[0].name == "fp16_overflow"
    assert diagnose(quotient(1, 1e-42, "std"))[0].name == "overflow"
    hidden = replace(quotient(0, 0, "std"), symptom=GRADIENT)
    assert diagnose(hidden)[0].name == "where_masked_gradient"


def test_cancelled_variance_is_no_overflow() -> None:
    """A root of a negative number stays one though float64 would have kept it positive."""
    evidence = run_one(aten.sqrt.default, torch.tensor([-1e-7]))
    healed = replace(evidence, recompute=lambda dtype: (torch.zeros(1, dtype=dtype),))
    assert diagnose(healed)[0].name == "sqrt_of_negative"


def test_harmless_elements_do_not_decide() -> None:
    """Only blamed elements count: a harmless pole of the same call is left out."""
    evidence = run_one(aten.pow.Tensor_Scalar, torch.tensor([0.0, 0.0, 0.0, -1.0]), -0.5)
    blamed = replace(evidence, mask=evidence.call.outputs[0].isnan())  # type: ignore[union-attr]
    _, match = diagnose(blamed)
    assert "negative base" in match.notes[0]
    assert "at 1 of 4 elements, first at [3]" in match.notes[0]


def test_notes_name_the_line_that_meant_the_infinity() -> None:
    """A row of only -inf is explained together with the line that wrote them."""
    evidence = run_one(aten._softmax.default, torch.tensor([[0.0, 0.0], [-INF, -INF]]), -1, half_to_float=False)
    line = SourceLine("model.py", 18, "forward", "scores = scores.masked_fill(mask, -inf)")
    _, match = diagnose(replace(evidence, intended=(line,)))
    written = "`scores = scores.masked_fill(mask, -inf)` at model.py:18"
    assert match.notes[0] == "1 row of scores holds only -inf, first [1, :]"
    assert match.notes[1] == f"the infinities among the inputs were written by {written} and are intended"


def test_broken_kernel_costs_an_entry_not_the_answer() -> None:
    """An entry whose matcher cannot read the tensors is skipped."""

    def recompute(_: torch.dtype) -> None:
        raise RuntimeError("no such kernel")

    evidence = run_one(aten.mul.Tensor, torch.tensor([1e30]), torch.tensor([1e30]))
    cause, match = diagnose(replace(evidence, recompute=recompute))
    assert cause.name == "unclassified"
    assert match.confidence < 0.5


def argument(draw: st.DrawFn, kind: str) -> Any:
    """Draw a value for one argument of a schema."""
    if "Tensor" in kind:
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        count = torch.Size(shape).numel()
        tensor = torch.tensor(
            draw(st.lists(st.sampled_from(NUMBERS), min_size=count, max_size=count)), dtype=torch.float64
        )
        tensor = (tensor if dtype.is_floating_point or dtype.is_complex else tensor.nan_to_num(0, 9, -9)).to(dtype)
        return [tensor.reshape(shape)] if "[]" in kind or "List" in kind else tensor.reshape(shape)
    if "str" in kind or "mode" in kind:
        return "floor"
    if kind.startswith("bool"):
        return draw(st.booleans())
    return draw(st.sampled_from((0, 1, 2, -1))) if kind.startswith("int") else draw(st.sampled_from(NUMBERS))


@st.composite
def any_evidence(draw: st.DrawFn) -> Evidence | None:
    """Draw a pointwise call on awkward operands; None where the kernel refuses them."""
    target = draw(st.sampled_from(POINTWISE))
    arguments = [argument(draw, str(spec.type)) for spec in target._schema.arguments if not spec.kwarg_only]
    phase, symptom = draw(st.sampled_from(list(Phase))), draw(st.sampled_from((LOSS, GRADIENT, PARAMETER)))
    try:
        evidence = run_one(target, *arguments, phase=phase, symptom=symptom, blame_all=draw(st.booleans()))
    except (RuntimeError, TypeError, AssertionError, ValueError, IndexError):
        return None
    return replace(evidence, forward=evidence.call) if draw(st.booleans()) else evidence


@warns
@settings(max_examples=300)
@given(any_evidence())
def test_no_matcher_raises_on_pointwise_calls(evidence: Evidence | None) -> None:
    """Whatever the op, type and shape, each matcher answers with a Match or None, and the last always matches."""
    if evidence is None:
        return
    for cause in CAUSES:
        match = cause.matches(evidence)
        assert match is None or 0 < match.confidence <= 1
    assert diagnose(evidence)[0] in CAUSES
