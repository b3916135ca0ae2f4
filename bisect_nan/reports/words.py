"""The words that every report shares: plain strings about culprits and symptoms, without layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bisect_nan.finding import Culprit, Finding, Innocent, Phase, Symptom, Verdict
from bisect_nan.finite import TensorSummary

_SHOWN = 6
"""So many names of a long list are printed: the first ones, and the last."""

_PLUMBING = frozenset(
    {"alias", "clone", "copy", "detach", "expand", "permute", "reshape", "select", "slice", "split", "squeeze", "t"}
    | {"to_copy", "transpose", "unbind", "unsafe_view", "unsqueeze", "view"}
)
"""Calls that move values around; they are left out where the way to the symptom is told in one line."""

NEXT = {
    Verdict.CLEAN: "if training does fail, arm it with bisect_nan.Guard and look at the step that it saves",
    Verdict.NOT_REPRODUCED: "run where the step was recorded (same torch, device, thread count), or capture it anew here",
    Verdict.FLAKY: "run again a few times, or capture the step with torch.use_deterministic_algorithms(True)",
    Verdict.INCONCLUSIVE: "run with --search scan -v, which checks after every node, and read what was seen on the way",
}
"""What to do where nothing is blamed."""

_PLACES = {Phase.BACKWARD: " in the backward pass", Phase.OPTIMIZER: " in the optimizer's step"}


def groups(culprits: Sequence[Culprit]) -> Sequence[Sequence[Culprit]]:
    """Put culprits together that are one line with one cause: a layer used ten times, an update of ten parameters.

    The line of an update is the call of `optimizer.step()`, whichever of its operations the cause meets first.
    """
    found: dict[object, list[Culprit]] = {}
    for culprit in culprits:
        ops = () if culprit.phase is Phase.OPTIMIZER else (culprit.op, culprit.kernel)
        same = (culprit.phase, culprit.cause, ops, culprit.source, culprit.name)
        found.setdefault(same, []).append(culprit)
    return list(found.values())


def place_of(culprit: Culprit) -> str:
    """Return a node's number and module."""
    return f"{culprit.node} in {culprit.module}" if culprit.module else str(culprit.node)


def headline(culprit: Culprit, *, first: bool) -> str:
    """Say what happened in one clause: who made which value, and in how many places."""
    bad = first_bad(culprit)
    kind, count = "NaN and infinity", bad.nonfinite if bad else 0
    if bad and bad.nan and _brought(bad, culprit.inputs):
        kind, count = "NaN", bad.nan
    elif bad and count in (bad.nan, bad.pos_inf + bad.neg_inf):
        kind = "NaN" if bad.nan else "infinity"
    many = f": {count} of {bad.numel} values" if bad and 1 < bad.numel >= count > 0 else ""
    if culprit.node < 0:
        when = "when the step took it in" if culprit.name.startswith("constant") else "before the step"
        return f"{culprit.name} held {kind} {when}{many}"
    op = f"`{short(culprit.op)}`"
    derived = culprit.phase is Phase.BACKWARD and culprit.op != culprit.kernel
    subject = f"the derivative of {op}" if derived else op
    made = f"made the first {kind}" if first else f"also made {kind}"
    return f"{subject} {made}{'' if derived else _PLACES.get(culprit.phase, '')}{many}"


def _brought(made: TensorSummary, inputs: Sequence[TensorSummary]) -> bool:
    """Whether as many infinities of either sign went in as came out: they are not what the call made."""
    came = sum(part.pos_inf for part in inputs), sum(part.neg_inf for part in inputs)
    return made.pos_inf <= came[0] and made.neg_inf <= came[1]


def first_bad(culprit: Culprit) -> TensorSummary | None:
    """Return the first non-finite output; for state, which has no outputs of its own, the value itself."""
    return next((summary for summary in (*culprit.outputs, *culprit.inputs) if summary.nonfinite), None)


def through(culprit: Culprit) -> str:
    """Return `through bmm, add, mean` for the chain behind a culprit; runs of one op count once, moves not at all."""
    names: list[str] = []
    links = [link for link in culprit.chain if link.node != culprit.node]
    for link in links:
        name = short(link.op) + (" (Inf turns into NaN)" if link.turns_nan else "")
        if name not in (*_PLUMBING, *names[-1:]):
            names.append(name)
    return f"through {cut(names or [short(links[-1].op)])}" if links else ""


def cut(names: Sequence[str]) -> str:
    """Return a list in words, the middle of a long one left out."""
    if len(names) > _SHOWN + 1:
        names = [*names[: _SHOWN - 1], f"{len(names) - _SHOWN} more", names[-1]]
    return ", ".join(names)


def verdict(finding: Finding) -> str:
    """Return the name of the verdict: `not reproduced`."""
    return finding.verdict.name.lower().replace("_", " ")


def advice(culprit: Culprit) -> Iterator[tuple[str, str]]:
    """Yield what to change, as `help` in general and as the `remedy` that was tried.

    Where a line was seen to help, general advice beside it would say the same once more, or something else.
    """
    remedy = culprit.remedy
    if culprit.help and not (remedy and remedy.verified and remedy.code):
        yield "help", culprit.help
    if remedy and remedy.text != culprit.help:
        yield "remedy", remedy.text


def symptom(finding: Finding) -> str:
    """Describe the symptom, after the loss where that is something else."""
    assert finding.symptom is not None
    described = finding.symptom.describe()
    if finding.symptom.kind == "loss" or finding.loss is None:
        return described
    return f"the loss is {finding.loss + 0.0:.5g}, {described}"  # 0 rather than -0


def noun(shown: Symptom) -> str:
    """Name the symptom's tensor: `the gradient of layers.0.weight`."""
    if shown.kind == "loss":
        return "the loss"
    return f"the gradient of {shown.name}" if shown.kind == "gradient" else f"the {shown.kind} {shown.name}"


def samples(culprit: Culprit) -> str:
    """Return `sample 1` or `samples 1, 4, 6`, a long list cut, and whether that was seen or derived."""
    rows = culprit.samples
    shown = [str(row) for row in rows[:_SHOWN]]
    more = f" and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    how = "" if culprit.samples_confirmed else " (derived)"
    return f"sample{'s' if len(rows) > 1 else ''} {', '.join(shown)}{more}{how}"


def short(op: str) -> str:
    """Return the name of an ATen overload that a user knows: `softmax` for `aten._softmax.default`."""
    return op.removeprefix("aten.").split(".")[0].strip("_") or op


def acquitted(innocents: Sequence[Innocent]) -> list[str]:
    """Return one line for each place and reason of non-finite values that harm nothing."""
    texts = []
    for innocent in innocents:
        what = f"`{short(innocent.op)}`" if innocent.op else innocent.name
        where = f" at {innocent.source}" if innocent.source else ""
        texts.append(f"{what}{where}: {innocent.why}")
    return [text if times == 1 else f"{text} ({times} times)" for text, times in Counter(texts).items()]


def cost(finding: Finding) -> str:
    """Return what the answer cost."""
    search = finding.search
    probes = f"{search.probes} probe{'' if search.probes == 1 else 's'}"
    seconds = f", {search.seconds['total']:.2f} s" if "total" in search.seconds else ""
    return f"{probes}, {search.executed} of {search.nodes} nodes executed{seconds}"
