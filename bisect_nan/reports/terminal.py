"""A finding as people read it in a terminal, in the form of rustc's diagnostics.

The error line says what happened, `note` gives facts, and only `help` says what to change. Lines are never wrapped, so that
`file:line` stays one word that editors and terminals link, and a line of code stays one line.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from bisect_nan.finding import Culprit, Finding, Phase, Verdict
from bisect_nan.reports import words


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
        groups = words.groups(finding.culprits)
        blocks = [list(_block(finding, groups, place)) for place in range(len(groups))]
        lines = [line for block in blocks for line in [*block, Text()]][:-1]
    else:
        lines = list(_verdict(finding))
    if finding.innocents:
        lines += [Text(), _line(("also seen, harmless:", "dim"))]
        lines += [_line((f"  {text}", "dim")) for text in words.acquitted(finding.innocents)]
    if verbose:
        lines += list(_details(finding))
    if finding.search.nodes:
        lines.append(_line((words.cost(finding), "dim")))
    return Text("\n").join(lines)


def _block(finding: Finding, groups: Sequence[Sequence[Culprit]], place: int) -> Iterator[Text]:
    """Yield the report of one group of culprits, told of its first."""
    culprit, *others = groups[place]
    label = f"error {place + 1} of {len(groups)} [{culprit.cause}]" if len(groups) > 1 else f"error[{culprit.cause}]"
    yield _line((label, "bold red"), (f": {words.headline(culprit, first=place == 0)}", "bold"))
    yield _location(culprit, finding.search.nodes)
    if culprit.source and culprit.source.text:
        yield _line((f"{culprit.source.line} | ", "bold blue"), (f"    {culprit.source.text}", ""))
    yield from _values(culprit)
    if finding.symptom:
        way = words.through(culprit)
        yield _fact(
            f"reaches {words.noun(finding.symptom)} {way}" if way else f"shows in {words.noun(finding.symptom)} itself"
        )
    if others:
        yield _fact(
            f"and so at {len(others)} more node{'s' if len(others) > 1 else ''}: {words.cut(list(map(words.place_of, others)))}"
        )
    if place == 0 and finding.symptom and finding.symptom.kind != "loss":
        yield _labelled("note", words.symptom(finding))
    for note in culprit.notes:
        yield _labelled("note", note)
    yield from _advice(culprit)


def _location(culprit: Culprit, nodes: int) -> Text:
    """Say where: a line and function, or the path of a piece of state."""
    arrow = ("  --> ", "bold blue")
    if culprit.node < 0:
        first = f", first used at {culprit.source} in {culprit.source.function}" if culprit.source else ""
        return _line(arrow, (culprit.name, ""), (f"   ({culprit.phase.value}{first})", "dim"))
    module = f", module {culprit.module}" if culprit.module else ""
    where = f"   ({culprit.phase.value}{module}, node {culprit.node} of {nodes})"
    if culprit.source is None:
        inside = "the optimizer's step" if culprit.phase is Phase.OPTIMIZER else f"{culprit.kernel} inside torch"
        return _line(arrow, (inside, ""), (where, "dim"))
    return _line(arrow, (str(culprit.source), ""), (f" in {culprit.source.function}", ""), (where, "dim"))


def _values(culprit: Culprit) -> Iterator[Text]:
    """Yield what went in and what came out, names in one column."""
    width = max((len(summary.name) for summary in (*culprit.inputs, *culprit.outputs)), default=0)
    bad = words.first_bad(culprit)
    for label, summaries in (("in ", culprit.inputs), ("out", culprit.outputs)):
        for summary in summaries:
            tail = ""
            if summary is bad:
                first = culprit.element or summary.first
                tail = f"   first at {list(first)}" if first else ""
                tail += f"   {words.samples(culprit)}" if culprit.samples else ""
            name = f"{summary.name:{width}}  " if width else ""
            title = f"{label}  {name}" if culprit.node >= 0 else ""
            yield _line(
                ("   = ", "bold blue"),
                (title, ""),
                (summary.describe(), "red" if summary.nonfinite else ""),
                (tail, ""),
            )


def _advice(culprit: Culprit) -> Iterator[Text]:
    """Yield what to change, the line to write, and what was seen when that was executed."""
    for label, text in words.advice(culprit):
        yield _labelled(label, text)
    remedy = culprit.remedy
    if remedy is None:
        return
    if remedy.code and remedy.source:
        if remedy.source != culprit.source:
            yield _line(("  --> ", "bold blue"), (str(remedy.source), ""))
        yield _line((f"{remedy.source.line} | ", "bold blue"), (f"    {remedy.code}", "green"))
    yield _labelled("verified" if remedy.verified else "not verified", remedy.outcome)


def _verdict(finding: Finding) -> Iterator[Text]:
    """Yield the report of a finding that blames nothing: the verdict, what was recorded, what to do next."""
    style = "bold green" if finding.verdict is Verdict.CLEAN else "bold yellow"
    yield _line((f"{words.verdict(finding)}: ", style), (finding.verdict.value, "bold"))
    if finding.symptom:
        yield _fact(f"recorded: {words.symptom(finding)}")
    elif finding.loss is not None:
        yield _fact(f"the loss is {finding.loss:.5g}")
    if finding.verdict is not Verdict.CLEAN:
        for note in (*finding.notes, *finding.environment):
            yield _labelled("note", note)
    if finding.verdict in words.NEXT:
        yield _labelled("help", words.NEXT[finding.verdict])


def _details(finding: Finding) -> Iterator[Text]:
    """Yield what --verbose adds."""
    groups = words.groups(finding.culprits)
    for place, (culprit, *_) in enumerate(groups, 1):
        if culprit.chain:
            yield from (Text(), _line((f"chain of error {place}:" if len(groups) > 1 else "chain:", "bold")))
            width = max(len(words.short(link.op)) for link in culprit.chain)
            for link in culprit.chain:
                code = f"  {link.source}  {link.source.text}" if link.source else ""
                turns = "  (Inf turns into NaN)" if link.turns_nan else ""
                yield _line((f"  node {link.node:5}  {words.short(link.op):{width}}{code}{turns}", ""))
    yield Text()
    search = finding.search
    if search.cuts:
        yield _labelled("cuts", ", ".join(f"{cut} {answer}" for cut, answer in search.cuts))
    if search.seconds:
        yield _labelled("seconds", ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in search.seconds.items()))
    if search.replays:
        yield _labelled("replays", f"{search.replays}, {search.replayed} nodes executed in them")
    for culprit, *_ in groups:
        yield _labelled("confidence", f"{culprit.confidence:.2f} that {culprit.cause} is the cause")
    yield _labelled("environment", "; ".join(finding.environment) or "nothing differs from the recording")


def _fact(text: str) -> Text:
    return _line(("   = ", "bold blue"), (text, ""))


def _labelled(label: str, text: str) -> Text:
    style = {"help": "bold cyan", "remedy": "bold cyan", "verified": "bold green", "not verified": "bold yellow"}.get(
        label, "bold"
    )
    return _line((f"{label}: ", style), (text, ""))


def _line(*parts: tuple[str, str]) -> Text:
    """Join styled parts into one line. A crash file may come from a stranger: no control character of it gets through."""
    safe = [("".join(char if char.isprintable() else " " for char in text), style) for text, style in parts]
    return Text.assemble(*safe, no_wrap=True)
