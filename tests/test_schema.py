"""The JSON Schema of findings: it fits every finding, and nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from located import finding_of_code
from observed import defined
from test_terminal import LOCATED, REPORTS
from typer.testing import CliRunner

from bisect_nan import Finding, cli
from bisect_nan.causes import CAUSES, Cause
from bisect_nan.reports import to_schema

SCHEMA = to_schema()
VALIDATOR = Draft202012Validator(SCHEMA)


def json_of(finding: Finding) -> Any:
    """Return what `--json` prints, as another program reads it."""
    return json.loads(json.dumps(finding.to_dict(), allow_nan=False))


def test_it_is_a_schema() -> None:
    """It is valid itself, and printed by the command line."""
    Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(CliRunner().invoke(cli.app, ["schema"]).output) == SCHEMA


def test_it_is_published(golden: Callable[[str, str], None]) -> None:
    """A change of the form shows in a diff, so that it is not forgotten to raise the version."""
    golden("finding.schema.json", json.dumps(SCHEMA, indent=2) + "\n")


@pytest.mark.parametrize("name", REPORTS)
def test_reported_findings_fit(name: str) -> None:
    """Each kind of finding fits."""
    VALIDATOR.validate(json_of(REPORTS[name]))


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of the very fault
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_located_findings_fit(cause: Cause) -> None:
    """What is found for the example of each cause fits."""
    VALIDATOR.validate(json_of(finding_of_code(defined(cause.example, "fails"))))


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every object and list below a value, with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def test_every_field_is_needed_and_known() -> None:
    """Without any one of its fields, with one more, or with another type in it, an object is refused."""
    whole = json_of(LOCATED)
    for number, (_, key) in enumerate(places(whole)):
        if not isinstance(key, str) or key in LOCATED.search.seconds:
            continue
        for damage in ("lack", "rename", "retype"):
            broken = copy.deepcopy(whole)
            owner, key = list(places(broken))[number]  # noqa: PLW2901  (the same place in the copy)
            value = owner.pop(key)
            if damage == "rename":
                owner[f"{key}_"] = value
            if damage == "retype":
                owner[key] = {"other": value}
            assert not VALIDATOR.is_valid(broken), f"{damage} {key}"


def test_every_field_is_described() -> None:
    """Each has a sentence of its own."""
    for part in (SCHEMA, *SCHEMA["$defs"].values()):
        for name, field in part.get("properties", {}).items():
            assert field["description"], name
