"""A finding as Markdown, for a pull request or an issue: what a reader has to know, and the whole report folded away.

A crash file may come from a stranger: texts of it are shown as texts, whatever markup they hold.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bisect_nan.finding import Culprit, Finding, Phase, Remedy
from bisect_nan.reports import words
from bisect_nan.reports.terminal import to_text

_SPAN = re.compile(r"(`[^`]+`)")
_MARKUP = re.compile(r"([\\`*_\[\]<>#|~&!])")
_LIST = re.compile(r"^(\d*)([-+.)=])")
"""How a list item, a numbered one, or the line under a heading begins."""

_LONGEST = 50_000
"""Characters of a report with its chain; GitHub takes 65,536 in one comment."""


def to_markdown(finding: Finding) -> str:
    """Render a finding as Markdown as GitHub and GitLab show it.

    Args:
        finding: What to report.

    Returns:
        For each culprit its headline, place, line, notes, advice and the change as a diff; else the verdict and what to do. The
        full report comes last, folded. Ends with a newline.
    """
    if finding.culprits:
        groups = words.groups(finding.culprits)
        blocks = [block for place in range(len(groups)) for block in _culprit(finding, groups, place)]
    else:
        blocks = list(_verdict(finding))
    report = to_text(finding, verbose=True)
    if len(report) > _LONGEST:
        report = to_text(finding)
    report = fence("text", report.splitlines())
    blocks.append(f"<details><summary>Full report</summary>\n\n{report}\n\n</details>")
    return "\n\n".join(blocks) + "\n"


def prose(text: str) -> str:
    """Return a sentence that reads the same as Markdown; what stands between backticks stays code."""
    parts = _SPAN.split(_printable(text).strip())
    escaped = [part if place % 2 else _MARKUP.sub(r"\\\1", part) for place, part in enumerate(parts)]
    return _LIST.sub(r"\1\\\2", "".join(escaped))


def code(text: str) -> str:
    """Return a text as a code span."""
    text = _printable(text).strip()
    ticks = "`" * (_longest_run(text) + 1)
    space = " " if len(ticks) > 1 else ""
    return f"{ticks}{space}{text}{space}{ticks}" if text else ""


def fence(language: str, lines: Sequence[str]) -> str:
    """Return lines as a code block."""
    shown = [_printable(line) for line in lines]
    ticks = "`" * max(3, _longest_run("\n".join(shown)) + 1)
    return "\n".join([f"{ticks}{language}", *shown, ticks])


def _culprit(finding: Finding, groups: Sequence[Sequence[Culprit]], place: int) -> Iterator[str]:
    """Yield the blocks about one group of culprits, told of its first."""
    culprit, *others = groups[place]
    number = f"{place + 1} of {len(groups)} " if len(groups) > 1 else ""
    yield f"### {number}{code(culprit.cause)}: {prose(words.headline(culprit, first=place == 0))}"
    yield _place(culprit, finding.search.nodes)
    if culprit.source and culprit.source.text:
        yield fence("python", [culprit.source.text])
    facts = []
    if culprit.samples:
        facts.append(words.samples(culprit))
    if finding.symptom:
        way = words.through(culprit)
        facts.append(f"reaches {words.noun(finding.symptom)}{f' {way}' if way else ''}")
        if place == 0 and finding.symptom.kind != "loss":
            facts.append(words.symptom(finding))
    if others:
        facts.append(f"and so at {len(others)} more: {words.cut(list(map(words.place_of, others)))}")
    yield from _items([*facts, *culprit.notes])
    for label, text in words.advice(culprit):
        yield f"**{label.capitalize()}:** {prose(text)}"
    if culprit.remedy:
        yield from _remedy(culprit.remedy)


def _place(culprit: Culprit, nodes: int) -> str:
    """Say where: a line and function, or the path of a piece of state."""
    source = culprit.source
    at = f"{code(str(source))} in {code(source.function)}" if source else ""
    if culprit.node < 0:
        return f"{code(culprit.name)} ({culprit.phase.value}{f', first used at {at}' if at else ''})"
    module = f", module {code(culprit.module)}" if culprit.module else ""
    inside = "the optimizer's step" if culprit.phase is Phase.OPTIMIZER else f"{code(culprit.kernel)} inside torch"
    return f"{at or inside} ({culprit.phase.value}{module}, node {culprit.node} of {nodes})"


def _remedy(remedy: Remedy) -> Iterator[str]:
    """Yield the change as a diff, and what was seen when it was executed."""
    if remedy.code and remedy.source:
        line = remedy.source
        before = [f"-{line.text}"] if line.text else []
        hunk = f"@@ -{line.line} +{line.line} @@ {line.function}"
        yield fence("diff", [f"--- {line.file}", f"+++ {line.file}", hunk, *before, f"+{remedy.code}"])
    yield f"**{'Verified' if remedy.verified else 'Not verified'}:** {prose(remedy.outcome)}"


def _verdict(finding: Finding) -> Iterator[str]:
    """Yield the blocks of a finding that blames nothing."""
    yield f"**{words.verdict(finding).capitalize()}:** {finding.verdict.value}"
    facts = [f"recorded: {words.symptom(finding)}"] if finding.symptom else []
    facts += [*finding.notes, *finding.environment]
    yield from _items(facts)
    if finding.verdict in words.NEXT:
        yield f"**Help:** {prose(words.NEXT[finding.verdict])}"


def _items(facts: Sequence[str]) -> Iterator[str]:
    """Yield facts as a list, unless there is none."""
    if facts:
        yield "\n".join(f"- {prose(fact)}" for fact in facts)


def _longest_run(text: str) -> int:
    """Return how many backticks follow each other at most."""
    return max(map(len, re.findall("`+", text)), default=0)


def _printable(text: str) -> str:
    """Return a text on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in text)
