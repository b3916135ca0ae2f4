"""A finding as annotations of GitHub Actions: workflow commands that mark lines of a pull request.

The form is that of https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bisect_nan.finding import Culprit, Finding, Verdict
from bisect_nan.reports import words

_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}


def to_annotations(finding: Finding) -> str:
    """Return one line for each group of culprits; where nothing is blamed, a warning; for a clean step nothing.

    Args:
        finding: What to report.
    """
    groups = words.groups(finding.culprits)
    lines = [_error(culprit, first=place == 0) for place, (culprit, *_) in enumerate(groups)]
    if not lines and finding.verdict is not Verdict.CLEAN:
        text = "\n".join((finding.verdict.value, *finding.notes, *finding.environment))
        lines = [_command("warning", {"title": words.verdict(finding)}, text)]
    return "".join(f"{line}\n" for line in lines)


def _error(culprit: Culprit, *, first: bool) -> str:
    source = culprit.source
    place = {"file": source.file, "line": str(source.line)} if source else {}
    headline = words.headline(culprit, first=first)
    return _command("error", {**place, "title": culprit.cause}, "\n".join((headline, *_facts(culprit))))


def _facts(culprit: Culprit) -> Iterator[str]:
    """Yield the notes and what to change, a line each."""
    yield from culprit.notes
    for label, text in words.advice(culprit):
        yield f"{label}: {text}"
    if culprit.remedy:
        if culprit.remedy.code:
            yield culprit.remedy.code
        yield f"{'verified' if culprit.remedy.verified else 'not verified'}: {culprit.remedy.outcome}"


def _command(name: str, properties: Mapping[str, str], text: str) -> str:
    """Return a workflow command."""
    pairs = ",".join(f"{key}={_escaped(value, _PROPERTY)}" for key, value in properties.items())
    return f"::{name} {pairs}::{_escaped(text, _DATA)}"


def _escaped(text: str, table: Mapping[str, str]) -> str:
    """Return a text as the runner reads it back. Control characters are spaces, line ends of the text itself excepted."""
    printable = "".join(char if char.isprintable() or char in "\r\n" else " " for char in text)
    return "".join(table.get(char, char) for char in printable)
