"""SARIF: valid by the published schema, with the culprit's line, the way of the fault, and a change that can be applied."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft4Validator
from test_terminal import BACKWARD, DEPTH, FORWARD, INPUT, LOCATED, LOST, REPORTS, SEVERAL, SOFTMAX

from bisect_nan.finding import Culprit, Finding, Remedy, SourceLine
from bisect_nan.reports import to_sarif

SCHEMA = json.loads((Path(__file__).parent / "sarif" / "sarif-2.1.0-rtm.5.json").read_text(encoding="utf-8"))
REMEDY = replace(FORWARD.remedy or Remedy("", ""), source=SOFTMAX)


def run_of(finding: Finding, **known: Any) -> dict[str, Any]:
    """Return the run of a finding's log, which is valid and survives JSON."""
    log = to_sarif(finding, **known)
    Draft4Validator(SCHEMA).validate(log)
    assert json.loads(json.dumps(log, allow_nan=False)) == log
    (run,) = log["runs"]
    return dict(run)


def result_of(culprit: Culprit, **known: Any) -> dict[str, Any]:
    """Return the result for one culprit."""
    (result,) = run_of(replace(LOCATED, culprits=(culprit,)), **known)["results"]
    return dict(result)


@pytest.mark.parametrize("name", REPORTS)
def test_every_finding_is_valid(name: str) -> None:
    """The log of each kind of finding is valid, and each of its results has a rule."""
    run = run_of(REPORTS[name], explained={"softmax_all_masked": "# softmax_all_masked\n"})
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules))
    assert [rules[result["ruleIndex"]] for result in run["results"]] == [result["ruleId"] for result in run["results"]]


TEXT = st.text(max_size=20)


@given(TEXT.filter(bool), TEXT, TEXT, st.integers(0, 2**40))
def test_any_text_is_valid(file: str, function: str, text: str, line: int) -> None:
    """Paths and lines of a stranger do not make the log invalid."""
    source = SourceLine(file, line, function, text)
    culprit = replace(
        FORWARD, source=source, name=text, notes=(text,), remedy=replace(REMEDY, source=source, text=text)
    )
    for node in (27, -1):
        result_of(replace(culprit, node=node), here={source: text} if line else {})  # a file has no line 0


def test_the_line_is_marked() -> None:
    """A result lies where the culprit is, relative to the root of the sources."""
    (location,) = result_of(FORWARD)["locations"]
    assert location["physicalLocation"]["artifactLocation"] == {"uri": "model.py", "uriBaseId": "%SRCROOT%"}
    assert location["physicalLocation"]["region"] == {"startLine": 19, "snippet": {"text": SOFTMAX.text}}
    assert location["logicalLocations"] == [{"fullyQualifiedName": "Attention.forward", "kind": "function"}]


def test_state_is_marked_where_it_is_used() -> None:
    """An input has no line, so the first one that takes it in is marked, and the tensor is named."""
    (result,) = run_of(INPUT)["results"]
    (location,) = result["locations"]
    assert location["physicalLocation"]["region"]["startLine"] == 40
    assert location["logicalLocations"] == [{"fullyQualifiedName": "batch['depth']", "kind": "input"}]
    (location,) = result_of(replace(DEPTH, chain=()))["locations"]
    assert "physicalLocation" not in location


@pytest.mark.parametrize(
    ("file", "uri", "relative"),
    [
        ("src/a b.py", "src/a%20b.py", True),
        ("src\\net.py", "src/net.py", True),
        ("/home/me/net.py", "file:///home/me/net.py", False),
        ("C:\\me\\net.py", "file:///C:/me/net.py", False),
        ("100%.py", "100%25.py", True),
    ],
)
def test_addresses(file: str, uri: str, relative: bool) -> None:
    """A path becomes an address, below the root of the sources only where it was below the working directory."""
    (location,) = result_of(replace(FORWARD, source=replace(SOFTMAX, file=file)))["locations"]
    artifact = location["physicalLocation"]["artifactLocation"]
    assert artifact["uri"] == uri
    assert ("uriBaseId" in artifact) is relative


def test_further_places() -> None:
    """The line of the change and the line where the fault shows are given beside it, and the way as a flow."""
    elsewhere = replace(SOFTMAX, line=12, text="scores = q @ k")
    result = result_of(replace(FORWARD, remedy=replace(REMEDY, source=elsewhere)))
    places = {place["physicalLocation"]["region"]["startLine"] for place in result["relatedLocations"]}
    assert places == {12, 40}
    (flow,) = result["codeFlows"][0]["threadFlows"]
    lines = [step["location"]["physicalLocation"]["region"]["startLine"] for step in flow["locations"]]
    assert lines == [19, 20, 25, 40]
    assert "relatedLocations" not in result_of(replace(BACKWARD, chain=(), remedy=None))


@given(st.text(" \t", max_size=8), st.text(" ", max_size=3))
def test_a_fix_replaces_the_line_and_keeps_its_indentation(before: str, behind: str) -> None:
    """Applied to the file as the standard says, it gives the file with the changed line."""
    line = f"{before}{SOFTMAX.text}{behind}"
    (fix,) = result_of(replace(FORWARD, remedy=REMEDY), here={SOFTMAX: line})["fixes"]
    (change,) = fix["artifactChanges"]
    (replacement,) = change["replacements"]
    region = replacement["deletedRegion"]
    start, end = region["startColumn"] - 1, region["endColumn"] - 1
    assert line[:start] + replacement["insertedContent"]["text"] + line[end:] == f"{before}{REMEDY.code}{behind}"
    assert fix["description"]["text"].endswith("(verified: loss 2.31412, all 24 gradients finite)")


def test_no_fix_for_a_line_that_is_gone() -> None:
    """Where the file does not hold the line, nothing says which columns to replace."""
    assert "fixes" not in result_of(replace(FORWARD, remedy=REMEDY))


def test_a_fingerprint_survives_lines_above() -> None:
    """The same fault a few lines further down is the same result for code scanning; another line is another one."""

    def fingerprint(source: SourceLine) -> Any:
        return result_of(replace(FORWARD, source=source))["partialFingerprints"]

    assert fingerprint(SOFTMAX) == fingerprint(replace(SOFTMAX, line=99))
    assert fingerprint(SOFTMAX) != fingerprint(replace(SOFTMAX, text="weights = scores.exp()"))


def test_no_answer_is_no_success() -> None:
    """Where nothing can be told, the run is unsuccessful, so that an empty list does not close what was reported before."""
    (invocation,) = run_of(LOST)["invocations"]
    assert invocation["executionSuccessful"] is False
    assert invocation["toolExecutionNotifications"][1]["message"]["text"] == LOST.environment[0]
    assert run_of(SEVERAL)["invocations"] == [{"executionSuccessful": True}]
