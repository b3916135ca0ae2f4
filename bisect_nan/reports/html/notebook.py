"""A finding or a culprit in a notebook: the report in short, with its styles in place, for light and dark pages."""

from __future__ import annotations

from bisect_nan.finding import Culprit, Finding
from bisect_nan.reports import words
from bisect_nan.reports.html.rendering import render


def to_fragment(shown: Finding | Culprit) -> str:
    """Render a finding, or one of its culprits, as a piece of HTML.

    Raises:
        BisectNanError: jinja2 is not installed; `pip install "bisect_nan[report]"` brings it.
    """
    finding = shown if isinstance(shown, Finding) else None
    culprits = [shown] if isinstance(shown, Culprit) else [group[0] for group in words.groups(shown.culprits)]
    headlines = [words.headline(culprit, first=place == 0) for place, culprit in enumerate(culprits)]
    return render("notebook.html", finding=finding, culprits=list(zip(culprits, headlines, strict=True)))
