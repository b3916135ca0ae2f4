"""A finding as people read it in a terminal, in the form of rustc's diagnostics.

The error line says what happened, `note` gives facts, and only `help` says what to change. Lines are never wrapped, so that
`file:line` stays one word that editors and terminals link, and a line of code stays one line.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from bisect_nan.finding import Culprit, Finding, Innocent, Link, Phase, Symptom, Verdict
from bisect_nan.finite import TensorSummary

_SHOWN = 6
"""So many names of a long list are printed: the first ones, and the last."""

_NEXT = {
    Verdict.CLEAN: "if training does fail, arm it with bisect_nan.Guard and look at the step that it saves",
    Verdict.NOT_REPRODUCED: "run where the step was recorded (same torch, device, thread count), or capture it anew here",
    Verdict.FLAKY: "run again a few times, or capture the step with torch.use_deterministic_algorithms(True)",
    Verdict.INCONCLUSIVE: "run with --search scan -v, which checks after every node, and read what was seen on the way",
}

_PLACES = {Phase.BACKWARD: " in the backward pass", Phase.OPTIMIZER: " in the optimizer's step"}


def to_text(finding: Finding, *, verbose: bool = False, colour: str | None = None) -> str:
    """Render a finding as text.

    Args:
        finding: What to report.
        verbose: Whether to add the chain with its lines, the probed cuts, the seconds by stage and the environment.
        colour: Colour system of the terminal (`standard`, `256`, `truecolor`); None for plain text.

    Returns:
        Lines that end with a newline each, with escape sequences only when there is a colour system.
    """
    file = io.StringIO()
    console = Console(file=file, force_terminal=colour is not None, color_system=colour, highlight=False)  # type: ignore[arg-type]
    console.print(to_renderable(finding, verbose=verbose), soft_wrap=True)
    return file.getvalue()


def to_renderable(finding: Finding, *, verbose: bool = False) -> Text:
    """Return a finding as a rich renderable, to be printed with `soft_wrap=True`; see `to_text`."""
    if finding.culprits:
        blocks = [list(_culprit(finding, place)) for place in range(len(finding.culprits))]
        lines = [line for block in blocks for line in [*block, Text()]][:-1]
    else:
        lines = list(_verdict(finding))
    if finding.innocents:
        lines += [Text(), _line(("also seen, harmless:", "dim")), *map(_innocent, finding.innocents)]
    if verbose:
        lines += list(_details(finding))
    if finding.search.nodes:
        lines.append(_cost(finding))
    return Text("\n").join(lines)


def _culprit(finding: Finding, place: int) -> Iterator[Text]:
    """Yield one culprit's block."""
    culprit, count = finding.culprits[place], len(finding.culprits)
    label = f"error {place + 1} of {count} [{culprit.cause}]" if count > 1 else f"error[{culprit.cause}]"
    yield _line((label, "bold red"), (f": {_headline(culprit, first=place == 0)}", "bold"))
    yield _location(culprit, finding.search.nodes)
    if culprit.source and culprit.source.text:
        yield _line((f"{culprit.source.line} | ", "bold blue"), (f"    {culprit.source.text}", ""))
    yield from _values(culprit)
    if finding.symptom and culprit.node >= 0:
        yield _fact(f"{_way(culprit)} {_noun(finding.symptom)}{_through(culprit)}")
    elif finding.symptom:
        yield _fact(f"reaches {_noun(finding.symptom)}{_through(culprit)}")
    if place == 0 and finding.symptom and finding.symptom.kind != "loss":
        yield _labelled("note", _symptom(finding))
    for note in culprit.notes:
        yield _labelled("note", note)
    yield from _advice(culprit)


def _headline(culprit: Culprit, *, first: bool) -> str:
    """Say what happened in one clause: who made which value, and in how many places."""
    bad = _first_bad(culprit)
    kind = "NaN" if bad and bad.nan else "infinity" if bad and bad.nonfinite else "non-finite value"
    many = f": {bad.nonfinite} of {bad.numel} values" if bad and 1 < bad.numel >= bad.nonfinite > 0 else ""
    if culprit.node < 0:
        return f"{culprit.name} held {kind} before the step{many}"
    op = f"`{_short(culprit.op)}`"
    derived = culprit.phase is Phase.BACKWARD and culprit.op != culprit.kernel
    subject = f"the derivative of {op}" if derived else op
    made = f"made the first {kind}" if first else f"made {kind}, too"
    return f"{subject} {made}{'' if derived else _PLACES.get(culprit.phase, '')}{many}"


def _location(culprit: Culprit, nodes: int) -> Text:
    """Say where: a line and function, or the path of a piece of state."""
    arrow = ("  --> ", "bold blue")
    if culprit.node < 0:
        return _line(arrow, (culprit.name, ""), (f"   ({culprit.phase.value})", "dim"))
    module = f", module {culprit.module}" if culprit.module else ""
    where = f"   ({culprit.phase.value}{module}, node {culprit.node} of {nodes})"
    if culprit.source is None:
        return _line(arrow, (f"{culprit.kernel}, called by no line outside torch", ""), (where, "dim"))
    return _line(arrow, (str(culprit.source), ""), (f" in {culprit.source.function}", ""), (where, "dim"))


def _values(culprit: Culprit) -> Iterator[Text]:
    """Yield what went in and what came out, names in one column."""
    width = max((len(summary.name) for summary in (*culprit.inputs, *culprit.outputs)), default=0)
    bad = _first_bad(culprit)
    for label, summaries in (("in ", culprit.inputs), ("out", culprit.outputs)):
        for summary in summaries:
            tail = ""
            if summary is bad:
                first = culprit.element or summary.first
                tail = f"   first at {list(first)}" if first else ""
                tail += f"   {_samples(culprit.samples)}" if culprit.samples else ""
            name = f"{summary.name:{width}}  " if width else ""
            title = f"{label}  {name}" if culprit.node >= 0 else ""
            yield _line(
                ("   = ", "bold blue"),
                (title, ""),
                (summary.describe(), "red" if summary.nonfinite else ""),
                (tail, ""),
            )


def _first_bad(culprit: Culprit) -> TensorSummary | None:
    """Return the first non-finite output; for state, which has no outputs of its own, the value itself."""
    return next((summary for summary in (*culprit.outputs, *culprit.inputs) if summary.nonfinite), None)


def _advice(culprit: Culprit) -> Iterator[Text]:
    """Yield what to change, and whether that was tried."""
    remedy = culprit.remedy
    text = culprit.help or (remedy.text if remedy else "")
    if text:
        yield _labelled("help", text)
    if remedy and remedy.verified:
        loss = "the loss and all gradients are finite"
        if remedy.loss is not None:
            loss = f"the loss is {remedy.loss:.5g} and all gradients are finite"
        change = "that change" if remedy.text in ("", text) else f"this change: {remedy.text}"
        yield _labelled("verified", f"with that change {loss}" if change == "that change" else f"{loss} with {change}")
    elif remedy and remedy.text not in ("", text):
        yield _labelled("not verified", remedy.text)


def _verdict(finding: Finding) -> Iterator[Text]:
    """Yield the report of a finding that blames nothing: the verdict, what was recorded, what to do next."""
    name = finding.verdict.name.lower().replace("_", " ")
    style = "bold green" if finding.verdict is Verdict.CLEAN else "bold yellow"
    yield _line((f"{name}: ", style), (finding.verdict.value, "bold"))
    if finding.symptom:
        yield _fact(f"recorded: {_symptom(finding)}")
    elif finding.loss is not None:
        yield _fact(f"the loss is {finding.loss:.5g}")
    if finding.verdict is not Verdict.CLEAN:
        for difference in finding.environment:
            yield _labelled("note", difference)
    if finding.verdict in _NEXT:
        yield _labelled("help", _NEXT[finding.verdict])


def _innocent(innocent: Innocent) -> Text:
    """Return one line on a non-finite value that harms nothing."""
    what = f"`{_short(innocent.op)}`" if innocent.op else innocent.name
    where = f" at {innocent.source}" if innocent.source else ""
    return _line((f"  {what}{where}: {innocent.why}", "dim"))


def _details(finding: Finding) -> Iterator[Text]:
    """Yield what --verbose adds."""
    for place, culprit in enumerate(finding.culprits, 1):
        if culprit.chain:
            yield from (Text(), _line((f"chain of error {place}:" if len(finding.culprits) > 1 else "chain:", "bold")))
            width = max(len(_short(link.op)) for link in culprit.chain)
            for link in culprit.chain:
                code = f"  {link.source}  {link.source.text}" if link.source else ""
                turns = "  (Inf turns into NaN)" if link.turns_nan else ""
                yield _line((f"  node {link.node:5}  {_short(link.op):{width}}{code}{turns}", ""))
    yield Text()
    search = finding.search
    if search.cuts:
        yield _labelled("cuts", ", ".join(f"{cut} {answer}" for cut, answer in search.cuts))
    if search.seconds:
        yield _labelled("seconds", ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in search.seconds.items()))
    if search.replays:
        yield _labelled("replays", f"{search.replays}, {search.replayed} nodes executed in them")
    for culprit in finding.culprits:
        yield _labelled("confidence", f"{culprit.confidence:.2f} that {culprit.cause} is the cause")
    yield _labelled("environment", "; ".join(finding.environment) or "nothing differs from the recording")


def _cost(finding: Finding) -> Text:
    """Return the line on what the answer cost."""
    search = finding.search
    probes = f"{search.probes} probe{'' if search.probes == 1 else 's'}"
    seconds = f", {search.seconds['total']:.2f} s" if "total" in search.seconds else ""
    return _line((f"{probes}, {search.executed} of {search.nodes} nodes executed{seconds}", "dim"))


def _way(culprit: Culprit) -> str:
    """Return how a culprit's result relates to the symptom."""
    return "reaches" if _links(culprit) else "its result is"


def _through(culprit: Culprit) -> str:
    """Return ` through bmm, add, mean` for the links of a chain; runs of one op count once, a long list is cut."""
    names: list[str] = []
    for link in _links(culprit):
        name = _short(link.op) + (" (Inf turns into NaN)" if link.turns_nan else "")
        if not names or names[-1] != name:
            names.append(name)
    if len(names) > _SHOWN + 1:
        names = [*names[: _SHOWN - 1], f"{len(names) - _SHOWN} more", names[-1]]
    return f" through {', '.join(names)}" if names else ""


def _links(culprit: Culprit) -> Sequence[Link]:
    """Return the chain without the culprit itself."""
    return [link for link in culprit.chain if link.node != culprit.node]


def _symptom(finding: Finding) -> str:
    """Describe the symptom, after the loss where that is something else."""
    assert finding.symptom is not None  # noqa: S101  (callers ask first)
    described = finding.symptom.describe()
    if finding.symptom.kind == "loss" or finding.loss is None:
        return described
    return f"the loss is {finding.loss:.5g}, {described}"


def _noun(symptom: Symptom) -> str:
    """Name the symptom's tensor: `the gradient of layers.0.weight`."""
    if symptom.kind == "loss":
        return "the loss"
    return f"the gradient of {symptom.name}" if symptom.kind == "gradient" else f"the {symptom.kind} {symptom.name}"


def _samples(samples: Sequence[int]) -> str:
    """Return `sample 1` or `samples 1, 4, 6`, a long list cut."""
    shown = [str(sample) for sample in samples[:_SHOWN]]
    more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
    return f"sample{'s' if len(samples) > 1 else ''} {', '.join(shown)}{more}"


def _short(op: str) -> str:
    """Return the name of an ATen overload that a user knows: `softmax` for `aten._softmax.default`."""
    return op.removeprefix("aten.").split(".")[0].strip("_") or op


def _fact(text: str) -> Text:
    return _line(("   = ", "bold blue"), (text, ""))


def _labelled(label: str, text: str) -> Text:
    style = {"help": "bold cyan", "verified": "bold green", "not verified": "bold yellow"}.get(label, "bold")
    return _line((f"{label}: ", style), (text, ""))


def _line(*parts: tuple[str, str]) -> Text:
    """Join styled parts into one line. A crash file may come from a stranger: no control character of it gets through."""
    safe = [("".join(char if char.isprintable() else " " for char in text), style) for text, style in parts]
    return Text.assemble(*safe, no_wrap=True)
