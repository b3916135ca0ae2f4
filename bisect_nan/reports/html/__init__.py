"""A finding as one page of HTML that works offline, prints, and runs no script.

Nothing in it comes from anywhere else: styles and pictures stand in the page. Every text of a crash file is escaped, and the
page's own policy forbids scripts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bisect_nan.finding import Culprit, Finding, Verdict
from bisect_nan.pictures import Picture
from bisect_nan.reports import words
from bisect_nan.reports.html.context import Line, around
from bisect_nan.reports.html.heat import HeatMap, heat_map
from bisect_nan.reports.html.probes import search
from bisect_nan.reports.html.rendering import render
from bisect_nan.reports.html.strip import strip
from bisect_nan.reports.html.trends import trends
from bisect_nan.reports.html.way import Way, way

_FULL = 8
"""Groups of culprits that are told in full; of the others there is the headline."""

_MAPS = 4
"""Culprits whose bad elements are drawn, at most."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One group of culprits as the page shows it, told of its first.

    Attributes:
        culprit: The first.
        headline: What happened, in one clause.
        others: The others, in words.
        lines: The source around the culprit's line.
        fixed: The line that the remedy replaces; None without a line to write.
        way: From the culprit to the symptom.
        heat: Its bad elements.
    """

    culprit: Culprit
    headline: str
    others: str
    lines: tuple[Line, ...]
    fixed: Line | None
    way: Way | None
    heat: HeatMap | None


def to_html(finding: Finding, picture: Picture | None = None) -> str:
    """Render a finding as a page.

    Args:
        finding: What to report.
        picture: What is drawn of live values; without it the page has no magnitudes, no bad elements and no history.

    Raises:
        BisectNanError: jinja2 is not installed; `pip install "bisect_nan[report]"` brings it.
    """
    drawn = picture or Picture()
    groups = words.groups(finding.culprits)
    nodes = [culprit.node for culprit in finding.culprits]
    return render(
        "page.html",
        finding=finding,
        located=finding.verdict is Verdict.LOCATED,
        faults=list(_faults(finding, groups[:_FULL], drawn)),
        further=[group[0] for group in groups[_FULL:]],
        strip=strip(drawn, nodes),
        search=search(finding.search, nodes),
        trends=trends(drawn.history),
        innocents=words.acquitted(finding.innocents),
    )


def _faults(finding: Finding, groups: Sequence[Sequence[Culprit]], picture: Picture) -> Iterator[Fault]:
    maps = {bad.culprit: bad for bad in picture.bad[:_MAPS]}
    for place, group in enumerate(groups):
        culprit, *others = group
        bad = maps.get(finding.culprits.index(culprit))
        yield Fault(
            culprit=culprit,
            headline=words.headline(culprit, first=place == 0),
            others=_others(others),
            lines=around(culprit.source) if culprit.source else (),
            fixed=_fixed(culprit),
            way=way(culprit),
            heat=heat_map(bad, culprit) if bad and math.prod(bad.shape) > 1 else None,
        )


def _others(others: Sequence[Culprit]) -> str:
    return words.cut([words.place_of(culprit) for culprit in others])


def _fixed(culprit: Culprit) -> Line | None:
    remedy = culprit.remedy
    if remedy is None or not remedy.code or remedy.source is None:
        return None
    return Line(remedy.source.line, remedy.source.text, here=remedy.source == culprit.source)
