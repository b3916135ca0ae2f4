"""Looks for the smallest input that makes a loss or one of its gradients non-finite, and says why it does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
from hypothesis.errors import HypothesisDeprecationWarning, NoSuchExample, Unsatisfiable
from torch import nn

from bisect_nan.answer.driver import locate
from bisect_nan.errors import BisectNanError, SnapshotError, StressFailure
from bisect_nan.finding import Finding
from bisect_nan.reports import to_text
from bisect_nan.snapshots.snapshot import Snapshot
from bisect_nan.stressing.casefile import NoText, case_text, literal
from bisect_nan.stressing.deriving import derive
from bisect_nan.stressing.trial import SEED, Trial
from bisect_nan.whole_file import whole_file

_QUIET = hypothesis.settings(
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    verbosity=hypothesis.Verbosity.quiet,
)
"""Nothing is kept between runs: the seed alone says what is tried."""

_GUESSED = (
    "Gradients were taken of all floating-point inputs that are not called a target, label, mask or weight; where training takes"
    " fewer, mark those that it takes with requires_grad=True.\n"
)


def stress(
    function: Callable[..., Any],
    *arguments: Any,
    max_examples: int = 300,
    seed: int = 0,
    directory: str | Path | None = "crashes",
) -> int:
    """Look for inputs that make a loss, or one of its gradients, non-finite.

        from bisect_nan import stress
        from bisect_nan.strategies import labels, tensors

        def test_loss():
            stress(my_loss, tensors(("rows", 10)), labels(("rows",), classes=10))

    A healthy example costs one forward and backward pass in eager mode and one check of all results. The failing one is made
    as small as hypothesis can make it, recorded, located and explained. torch's generator starts every example at the same
    state. An input that is legal but meant to give an infinity is left out with `hypothesis.assume(...)` inside the function,
    or with `.filter(...)` on its strategy.

    Args:
        function: The loss, `loss(output, target)`, or a step, `step(model, batch)`: anything that is called with `arguments`
            and returns what `Snapshot.capture` takes for a loss.
        arguments: For each argument a strategy (see `bisect_nan.strategies`), an example tensor of whose kind all inputs are,
            lists, tuples or dictionaries of these, or a value that stays as it is, such as the model.
            Gradients are taken of the parameters of modules, and of the tensors that require them (`requires_grad=True`).
            Where there are neither, they are taken of all floating-point tensors but those whose argument is called a target,
            label, mask or weight.
        max_examples: How many inputs to try.
        seed: Another number tries other inputs.
        directory: Where the failing input is kept, as `stress_NAME.py`, or as a snapshot where the function can neither be
            imported nor copied from its source, or where there is a model; None to keep nothing.

    Returns:
        How many inputs were tried; all of them gave finite numbers.

    Raises:
        StressFailure: An input failed; the message is the report.
        BisectNanError: The strategies or `assume` allow no input at all, or hypothesis is not installed.
    """
    __tracebackhide__ = True
    trial = Trial(function, arguments)
    try:
        example = _smallest(trial, arguments, max_examples, seed)
        if example is None:
            return trial.count
        failure = _explained(trial, function, example, directory)
    finally:
        trial.end()
    raise failure


def _smallest(trial: Trial, arguments: tuple[Any, ...], max_examples: int, seed: int) -> tuple[Any, ...] | None:
    """Return the smallest failing example, or None."""
    strategy = derive(arguments, trial.accepts)
    trial.count = 0
    settings = hypothesis.settings(_QUIET, max_examples=max_examples)
    try:
        return hypothesis.find(strategy, trial.fails, settings=settings, random=Random(seed))  # noqa: S311  (not for secrets)
    except NoSuchExample:
        return None
    except Unsatisfiable as error:
        raise BisectNanError(
            f"got no input that the strategies and `assume` allow, in {trial.count} tries",
            "some that they allow",
            "leave out less",
        ) from error


def _explained(
    trial: Trial, function: Callable[..., Any], example: tuple[Any, ...], directory: str | Path | None
) -> StressFailure:
    """Record, locate and keep a failing example."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", HypothesisDeprecationWarning
        )  # `assume` in the function is outside of a test here
        snapshot = trial.capture(example)
        finding = locate(snapshot)
    shown = dict(zip(trial.names(example), trial.leaves(example), strict=True))
    name = re.sub(r"\W+", "_", getattr(function, "__name__", type(function).__name__)).strip("_")
    case, problem = None, ""
    if directory is not None:
        try:
            case = _keep(snapshot, finding, function, shown, Path(directory) / f"stress_{name}")
        except (OSError, SnapshotError) as error:  # What was found is told all the same.
            problem = f"note: no file of it was written: {error}"
    values = [f"  {key} = {_shown(value)}" for key, value in shown.items() if not isinstance(value, nn.Module)]
    got = [
        f"got a legal input that {name} fails on, the smallest of {trial.count} tried:",
        *values,
        "",
        to_text(finding),
    ]
    if finding.symptom is not None and finding.symptom.kind == "gradient" and trial.guesses(example):
        got.append(_GUESSED)
    if problem:
        got.append(problem)
    return StressFailure("\n".join(got), finding, shown, case)


def _shown(value: Any) -> str:
    """Return a value as Python where it has a short form."""
    try:
        return literal(value)
    except NoText:
        return repr(value)


def _keep(
    snapshot: Snapshot, finding: Finding, function: Callable[..., Any], example: dict[str, Any], path: Path
) -> Path:
    """Write the example as a case file, or as a snapshot where it cannot be told in Python."""
    title = finding.culprit.cause if finding.culprit else finding.verdict.name.lower()
    try:
        text = case_text(function, example, title, SEED, path.parent)
    except NoText:
        snapshot.save(path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    with whole_file(path.with_suffix(".py")) as file:
        file.write(text.encode())
    return path.with_suffix(".py")
