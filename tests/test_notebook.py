"""Findings and culprits in notebooks."""

from __future__ import annotations

import pytest
from pages import read
from test_terminal import FORWARD, LOCATED, REPORTS

from bisect_nan.reports import words
from bisect_nan.reports.html.notebook import to_fragment


@pytest.mark.parametrize("name", REPORTS)
def test_a_finding_in_short(name: str) -> None:
    """A notebook shows the headline, the line, notes, values and remedy of each culprit; or the verdict and what to do next."""
    finding = REPORTS[name]
    text = read(to_fragment(finding)).text
    for place, (culprit, *_) in enumerate(words.groups(finding.culprits)):
        told = [words.headline(culprit, first=place == 0).replace("`", " "), f"[{culprit.cause}]"]
        told += [culprit.remedy.outcome] if culprit.remedy else [culprit.help]
        told += [note.replace("`", " ") for note in culprit.notes]
        told += [value.describe() for value in (*culprit.inputs, *culprit.outputs)]
        for piece in told:
            assert " ".join(piece.split()) in text
    if not finding.culprits:
        assert finding.verdict.value in text
        assert words.NEXT[finding.verdict] in text


def test_styles_are_in_place() -> None:
    """A fragment brings no sheet, no class and no script, and leaves the text in the notebook's colour."""
    page = read(LOCATED._repr_html_() or "")
    assert not page.all("style", "link", "script")
    assert not [element for element in page.all() if "class" in element.attributes]
    assert page.all()[0].attributes["style"].count("color:") == 0


def test_a_culprit_alone() -> None:
    """A culprit shows itself as the finding shows it, without the symptom."""
    text = read(FORWARD._repr_html_() or "").text
    assert (
        text.startswith("error [softmax_all_masked] : softmax made the first NaN")
        or "error[softmax_all_masked]" in text
    )
    assert "the loss is nan" not in text
