"""A finding as SARIF 2.1.0, the form in which code scanning takes results and marks lines.

The standard: https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import quote

from bisect_nan.finding import Culprit, Finding, Link, Remedy, SourceLine, Verdict
from bisect_nan.reports import words

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_ROOT = "%SRCROOT%"


def to_sarif(
    finding: Finding, explained: Mapping[str, str] | None = None, here: Mapping[SourceLine, str] | None = None
) -> dict[str, Any]:
    """Return a SARIF log with one run.

    Args:
        finding: What to report.
        explained: Explanations of causes in Markdown, by name, for the help of the rules.
        here: Lines of the finding that the files of this machine still have, as they stand there with their indentation. Only
            for these is a change given as a fix, since a fix names columns.
    """
    groups = words.groups(finding.culprits)
    causes = list(dict.fromkeys(culprit.cause for culprit, *_ in groups))
    summaries = {culprit.cause: culprit.summary for culprit in reversed(finding.culprits)}
    results = [_result(finding, groups, place, here or {}) for place in range(len(groups))]
    run = {
        "tool": {
            "driver": {
                "name": "bisect-nan",
                "rules": [_rule(c, summaries[c], (explained or {}).get(c)) for c in causes],
            }
        },
        "invocations": [_invocation(finding)],
        "columnKind": "unicodeCodePoints",
        "results": [{**result, "ruleIndex": causes.index(result["ruleId"])} for result in results],
        "properties": {"verdict": finding.verdict.name.lower()},
    }
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(cause: str, summary: str, explained: str | None) -> dict[str, Any]:
    rule = {
        "id": cause,
        "shortDescription": {"text": summary},
        "defaultConfiguration": {"level": "error"},
        "properties": {"tags": ["correctness"]},
    }
    return {**rule, "help": {"text": explained, "markdown": explained}} if explained else rule


def _invocation(finding: Finding) -> dict[str, Any]:
    """Say whether there is an answer; an unsuccessful run tells code scanning that a lack of results means nothing."""
    if finding.verdict in (Verdict.LOCATED, Verdict.CLEAN):
        return {"executionSuccessful": True}
    texts = (finding.verdict.value, *finding.notes, *finding.environment)
    notifications = [{"level": "warning", "message": {"text": text}} for text in texts]
    return {"executionSuccessful": False, "toolExecutionNotifications": notifications}


def _result(
    finding: Finding, groups: Sequence[Sequence[Culprit]], place: int, here: Mapping[SourceLine, str]
) -> dict[str, Any]:
    """Return the result for one group of culprits, told of its first."""
    culprit, *others = groups[place]
    lines = [words.headline(culprit, first=place == 0)]
    if finding.symptom:
        way = words.through(culprit)
        lines.append(f"reaches {words.noun(finding.symptom)}{f' {way}' if way else ''}")
    if others:
        lines.append(f"and so at {len(others)} more: {words.cut(list(map(words.place_of, others)))}")
    lines += [*culprit.notes, *(f"{label}: {text}" for label, text in words.advice(culprit))]
    result: dict[str, Any] = {
        "ruleId": culprit.cause,
        "level": "error",
        "rank": round(100 * culprit.confidence, 1),
        "message": {"text": "\n".join(lines)},
        "locations": [_location(culprit)],
        "partialFingerprints": {"bisectNan/v1": _fingerprint(culprit)},
    }
    if related := _related(culprit):
        result["relatedLocations"] = related
    if flow := _flow(culprit.chain):
        result["codeFlows"] = [{"threadFlows": [{"locations": flow}]}]
    if culprit.remedy and (fix := _fix(culprit.remedy, here)):
        result["fixes"] = [fix]
    return result


def _location(culprit: Culprit) -> dict[str, Any]:
    """Return the line of a culprit, and what it is part of: a function, or a tensor of the model or the batch."""
    if culprit.node < 0:
        logical = {"fullyQualifiedName": culprit.name, "kind": culprit.phase.value}
        first = next((link.source for link in culprit.chain if link.source), None)
        source = culprit.source or first
    else:
        source = culprit.source
        logical = {"fullyQualifiedName": source.function, "kind": "function"} if source else {"name": culprit.op}
    return {**(_line(source) if source else {}), "logicalLocations": [logical]}


def _line(source: SourceLine) -> dict[str, Any]:
    region: dict[str, Any] = {"startLine": max(1, source.line)}
    if source.text:
        region["snippet"] = {"text": source.text}
    return {"physicalLocation": {"artifactLocation": _artifact(source.file), "region": region}}


def _artifact(file: str) -> dict[str, str]:
    """Return a file: relative to the root of the sources where it is, else as a `file:` address."""
    windows = PureWindowsPath(file)
    path = PurePosixPath(windows.as_posix() if windows.drive or "\\" in file else file)
    if windows.drive or path.is_absolute():
        return {"uri": f"file:///{quote(str(path).lstrip('/'), safe='/:')}"}
    return {"uri": quote(str(path)), "uriBaseId": _ROOT}


def _related(culprit: Culprit) -> list[dict[str, Any]]:
    """Return where the change goes and where the fault ends up, if these are other lines."""
    sources = [link.source for link in culprit.chain if link.source]
    places = {sources[-1]: "the fault shows here"} if sources else {}
    if culprit.remedy and culprit.remedy.code and culprit.remedy.source:
        places[culprit.remedy.source] = "the change is made here"
    return [
        {"id": number, "message": {"text": text}, **_line(source)}
        for number, (source, text) in enumerate(places.items(), 1)
        if source != culprit.source
    ]


def _flow(chain: Sequence[Link]) -> list[dict[str, Any]]:
    """Return the way of the fault, one step for each line in a row."""
    steps = []
    for source, links in groupby((link for link in chain if link.source), key=lambda link: link.source):
        assert source is not None
        names = words.cut(list(dict.fromkeys(words.short(link.op) for link in links)))
        steps.append({"location": {"message": {"text": names}, **_line(source)}})
    return steps


def _fix(remedy: Remedy, here: Mapping[SourceLine, str]) -> dict[str, Any] | None:
    """Return the change of a line that still stands where it stood, its indentation kept."""
    source = remedy.source
    if not remedy.code or source is None or source not in here:
        return None
    line = here[source]
    start, end = len(line) - len(line.lstrip()), len(line.rstrip())
    region = {"startLine": source.line, "startColumn": start + 1, "endLine": source.line, "endColumn": end + 1}
    replacement = {"deletedRegion": region, "insertedContent": {"text": remedy.code}}
    outcome = f"{'verified' if remedy.verified else 'not verified'}: {remedy.outcome}"
    return {
        "description": {"text": f"{remedy.text} ({outcome})"},
        "artifactChanges": [{"artifactLocation": _artifact(source.file), "replacements": [replacement]}],
    }


def _fingerprint(culprit: Culprit) -> str:
    """Return what stays the same while lines above it come and go."""
    source = culprit.source
    where = (source.file, source.function, source.text) if source else ()
    parts = "\0".join((culprit.phase.value, culprit.cause, culprit.op, culprit.name, *where))
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:32]
