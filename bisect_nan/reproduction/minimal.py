"""A located fault as the shortest script of torch calls that fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch

from bisect_nan.errors import ReproductionError
from bisect_nan.finding import Culprit, Finding, Phase, Verdict
from bisect_nan.reproduction.check import check
from bisect_nan.reproduction.draft import Draft, Mode
from bisect_nan.reproduction.drafting import Drafting
from bisect_nan.reproduction.oracle import Oracle
from bisect_nan.reproduction.recapture import Lines, Wanted, op_of
from bisect_nan.reproduction.reduction import ddmin
from bisect_nan.reproduction.script import script_lines, script_text
from bisect_nan.reproduction.shrink import shrink
from bisect_nan.reproduction.surroundings import Surroundings, Unit
from bisect_nan.snapshots.snapshot import Snapshot

_BUDGET = 600
"""Drafts that are run; each costs about ten milliseconds."""

_TOLD = {"optimizer_eps_underflow": ("add",)}
"""Calls that a script shows though the fault does not need them: without them nobody sees where a number comes from."""

_INSTEAD = "use the snapshot itself, which holds the whole step"

Attempt = tuple[list[Unit], Callable[[list[Unit]], Draft]]
"""Calls, and how a draft is made of some of them."""


@dataclass(frozen=True, slots=True)
class MinimalScript:
    """A script of torch calls that fails as the step did.

    Attributes:
        code: Its text: literal tensors, calls, and an assertion that what comes out is not finite.
        cause: The cause that is named in it.
        op: The operation that is named in it.
        drafts: How many scripts were run on the way.
    """

    code: str
    cause: str
    op: str
    drafts: int

    @property
    def checked(self) -> str:
        """What was seen of the script outside of this process."""
        return f"ran in a fresh process, {self.cause} at `{self.op}`"


def minimal_script(
    snapshot: Snapshot | None,
    finding: Finding,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    skip: Container[int] = (),
) -> MinimalScript:
    """Reduce a located fault to a short script that needs nothing but torch.

    The culprit's call, with as few of the calls around it as the fault needs, is run on the tensors that it had in the step; calls,
    elements and numbers are taken away as long as `locate` names the same cause at the same operation. The script is then run
    in a fresh process. For several culprits it shows the earliest.

    Args:
        snapshot: The step.
        finding: What `locate` said of it.
        progress: Told `reduce`, the number of the script that is about to run, and how many there are at most.
        skip: Numbers of scripts that end the process, as some kernels do: what a process that had this fate told last.

    Raises:
        ReproductionError: There is no operation to show, or no short script shows it.
        ReplayError: A call of the program cannot be executed here.
    """
    made = unchecked(snapshot, finding, progress=progress, skip=skip)
    seen = made.wanted.located(check([(made.code, made.lines)])[0])
    if seen is None:
        raise ReproductionError(
            "got another fault from the script in a fresh process", "the one that was found", _INSTEAD
        )
    return MinimalScript(made.code, seen.cause, made.wanted.op, made.drafts)


@dataclass(frozen=True, slots=True)
class Unchecked:
    """A script that has run in this process only.

    Attributes:
        code: Its text.
        lines: What it runs.
        wanted: What has to be located in it.
        drafts: How many scripts were run on the way.
    """

    code: str
    lines: Lines
    wanted: Wanted
    drafts: int


def unchecked(
    snapshot: Snapshot | None,
    finding: Finding,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    skip: Container[int] = (),
) -> Unchecked:
    """Do as `minimal_script` does, up to the fresh process.

    Args:
        snapshot: The step; None where a finding needed none.
        finding: What was located in it.
        progress: As for `minimal_script`.
        skip: Likewise.

    Raises:
        ReproductionError: There is no operation to show, or no short script shows it.
    """
    culprit = _culprit(finding)
    assert snapshot is not None  # an operation was located in it
    told, around = progress or (lambda *_: None), Surroundings(snapshot, culprit)
    oracle = Oracle(Wanted.of(finding, culprit), _BUDGET, lambda asked: told("reduce", asked, _BUDGET), skip)
    draft = _found(around, culprit, finding, oracle)
    if draft is None and culprit.phase is Phase.BACKWARD and not around.derivative:
        oracle.wanted = Wanted.by_itself(culprit)
        draft = _found(around, culprit, finding, oracle)
    if draft is None:
        got = (
            f"got `{op_of(culprit)}`, whose fault ({culprit.cause}) does not show in it and the calls next to it alone"
        )
        raise ReproductionError(got, "a fault of a few calls", _INSTEAD)
    lines = script_lines(shrink(draft, oracle))
    return Unchecked(script_text(lines, culprit, oracle.cause), lines, oracle.wanted, oracle.asked)


def _culprit(finding: Finding) -> Culprit:
    """Return the culprit that a script can show."""
    culprit = finding.culprit
    if culprit is None or finding.verdict is not Verdict.LOCATED:
        raise ReproductionError(
            f"got the verdict {finding.verdict.name.lower()}", "a located fault", "see what bisect-nan run says of it"
        )
    if culprit.node < 0:
        raise ReproductionError(
            f"got {culprit.name}, which is bad before anything runs: no operation makes the fault",
            "a fault that an operation makes",
            "look at where this tensor comes from",
        )
    if culprit.cause == "uninitialized_memory":
        raise ReproductionError(
            "got memory that nobody has written to: what a fresh process finds there is another matter",
            "a fault that numbers decide",
            "write to the memory before it is read",
        )
    return culprit


def _found(around: Surroundings, culprit: Culprit, finding: Finding, oracle: Oracle) -> Draft | None:
    """Return a draft of the fewest calls that shows the fault."""
    for selection, make in _attempts(around, culprit, finding):
        if _shows(selection, make, oracle):
            break
    else:
        return None
    told = _TOLD.get(culprit.cause, ())
    fixed = [unit for unit in selection if unit == around.core or around.name(unit) in told]
    others = [unit for unit in selection if unit not in fixed]
    if not others or _shows(fixed, make, oracle):
        return make(fixed)
    return make(sorted([*ddmin(others, lambda rest: _shows(sorted([*rest, *fixed]), make, oracle)), *fixed]))


def _shows(selection: list[Unit], make: Callable[[list[Unit]], Draft], oracle: Oracle) -> bool:
    try:
        return oracle.shows(make(selection))
    except ReproductionError:
        return False


def _attempts(around: Surroundings, culprit: Culprit, finding: Finding) -> Iterator[Attempt]:
    """Yield growing sets of calls, each with the ways in which they may show the fault."""
    symptom = finding.symptom
    hidden = symptom is not None and symptom.kind == "gradient" and culprit.phase is Phase.FORWARD
    mode = Mode.UPDATE if culprit.phase is Phase.OPTIMIZER else Mode.FORWARD
    if around.derivative or hidden:
        mode = Mode.BACKWARD
    if mode is not Mode.FORWARD:
        yield from _beyond_results(around, culprit, mode)
    if around.derivative:
        return
    elements = list(dict.fromkeys([culprit.element, *around.bad_elements()]))
    for later in (False, True):
        for selection in around.selections(later=later):
            for element in elements:
                yield selection, _maker(around, Mode.FORWARD, element=element)


def _beyond_results(around: Surroundings, culprit: Culprit, mode: Mode) -> Iterator[Attempt]:
    """Yield attempts that show the fault in a gradient or in what is written to."""
    gradients: list[torch.Tensor | None] = [None]
    if around.derivative and around.upstream is not None:
        gradients += [around.upstream, torch.zeros_like(around.upstream)]
    told = _TOLD.get(culprit.cause, ())
    selections = list(around.selections(later=True))
    selections.sort(key=lambda selection: not {around.name(unit) for unit in selection}.issuperset(told))
    for selection in selections:
        for upstream in gradients:
            yield selection, _maker(around, mode, upstream=upstream)
            if around.differentiates:
                yield selection, _maker(around, mode, upstream=upstream, twice=True)


def _maker(
    around: Surroundings,
    mode: Mode,
    *,
    element: tuple[int, ...] = (),
    upstream: torch.Tensor | None = None,
    twice: bool = False,
) -> Callable[[list[Unit]], Draft]:
    return lambda selection: Drafting(around, selection, mode).draft(element, upstream, twice=twice)
