"""The HTML report: everything that the finding tells, nothing that runs, readable without eyes, and small."""

from __future__ import annotations

import importlib.resources
import itertools
import re
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Element, read
from test_terminal import COST, FORWARD, LOCATED, REPORTS, SOFTMAX

from bisect_nan.errors import BisectNanError
from bisect_nan.finding import Finding, Link, Phase, SourceLine
from bisect_nan.pictures import BadElements, Magnitude, Picture
from bisect_nan.reports import words
from bisect_nan.reports.html import rendering, to_html
from bisect_nan.reports.html.context import around
from bisect_nan.reports.html.scale import Scale
from bisect_nan.reports.html.strip import strip
from bisect_nan.reports.html.trends import trends
from bisect_nan.reports.html.way import way

F32 = 3.4028234663852886e38
LINE = SourceLine("model.py", 12, "Attention.forward", "scores = query @ key")
PICTURE = Picture(
    magnitudes=(
        Magnitude(3, "aten.mm.default", Phase.FORWARD, LINE, "f32", 2.5, F32),
        Magnitude(26, "aten.masked_fill.Scalar", Phase.FORWARD, None, "f32", 7.25, F32, nonfinite=25),
        Magnitude(27, "aten._softmax.default", Phase.FORWARD, SOFTMAX, "f32", 0.875, F32, nonfinite=25),
        Magnitude(90, "aten.mul.Tensor", Phase.BACKWARD, SOFTMAX, "f16", 60000.0, 65504.0, nonfinite=1),
    ),
    growth=(3, 27),
    bad=(
        BadElements(
            0,
            (2, 5, 5),
            2,
            tuple((row, row + 1) for row in range(10)),
            tuple((column, column + 1) for column in range(5)),
            ((0,) * 5,) * 5 + ((1,) * 5,) * 5,
            ((0,) * 5,) * 10,
        ),
    ),
    history=({"step": 6, "loss": 2.5, "gradient_norm": 1.5}, {"step": 7, "loss": 812.25, "gradient_norm": 4e6}),
)
PAYLOAD = """</code><script>alert(1)</script>" onload='x' &lt; {{ 7 * 7 }} \x1b[31m\u202e"""


def every(page: Element, tag: str) -> list[str]:
    """Return the texts of all elements of one name."""
    return [element.text for element in page.all(tag)]


@pytest.mark.parametrize("name", REPORTS)
def test_the_page_tells_what_the_finding_tells(name: str) -> None:
    """Verdict, headline, place, values, notes, advice and search of a finding of each kind are on its page, as they are."""
    finding = REPORTS[name]
    page = read(to_html(finding, PICTURE if name == "forward" else None))
    text = page.text
    assert finding.verdict.name.lower().replace("_", " ") in text
    for place, (culprit, *_) in enumerate(words.groups(finding.culprits)):
        told = [
            words.headline(culprit, first=place == 0).replace("`", " "),
            f"{culprit.node} of {finding.search.nodes}" if culprit.node >= 0 else culprit.name,
            *(note.replace("`", " ") for note in culprit.notes),
            culprit.cause,
            str(culprit.source or ""),
        ]
        told += [culprit.help] if not (culprit.remedy and culprit.remedy.verified and culprit.remedy.code) else []
        told += [culprit.remedy.text, culprit.remedy.outcome] if culprit.remedy else []
        told += [culprit.remedy.code] if culprit.remedy and culprit.remedy.source else []
        for piece in told:
            assert " ".join(piece.split()) in text
    rows = [[cell.text for cell in row.all("th", "td")] for row in page.all("tr")]
    for culprit in (group[0] for group in words.groups(finding.culprits)):
        for value in (*culprit.inputs, *culprit.outputs):
            counts = [str(value.nan), str(value.pos_inf), str(value.neg_inf)]
            told = [f"{value.dtype}{list(value.shape)}", *counts, *map(rendering.number, (value.low, value.high))]
            assert any(row[0].endswith(value.name) and row[1:7] == told for row in rows)
    for cut, answer in finding.search.cuts:
        assert any(row[1:] == [str(cut), answer] for row in rows)


def test_the_remedy_comes_before_the_evidence() -> None:
    """After the headline the first heading is what to change."""
    headings = [element.text for element in read(to_html(LOCATED, PICTURE)).all("h1", "h2", "h3")]
    assert headings[:2] == ["softmax made the first NaN: 25 of 50 values", "What to change"]


def test_pictures_are_drawn_where_there_are_numbers() -> None:
    """Magnitudes, bad elements and history are on the page with a picture, and left out without one."""
    with_them, without = (set(every(read(to_html(LOCATED, drawn)), "h2")) for drawn in (PICTURE, None))
    assert with_them - without == {"How large the values are", "The bad elements", "The training before"}
    page = read(to_html(LOCATED, PICTURE))
    assert "The growth began at node 3 ( mm at model.py:12) with 2.5." in page.text
    assert "limit of f16: 65504" in page.text
    assert "812.25 at step 7" in page.text
    assert "25 NaN of the 50 elements of [2, 5, 5]; sample 1 carries the fault" in page.text
    names = next(svg for svg in page.all("svg") if svg.attributes.get("class") == "names loose")
    assert every(names, "text") == ["sample 1", "0"]


def test_one_element_has_no_map() -> None:
    """A loss is one element: where it is bad needs no picture."""
    (bad,) = PICTURE.bad
    one = replace(bad, shape=(), split=0, rows=((0, 1),), columns=((0, 1),), nan=((1,),), inf=((0,),))
    assert "The bad elements" not in every(read(to_html(LOCATED, replace(PICTURE, bad=(one,)))), "h2")


def test_further_errors_are_one_click_away() -> None:
    """Where there are several, the first screen names the others, each a link to its part of the page."""
    page = read(to_html(REPORTS["several"]))
    links = [element for element in page.all("a") if (element.attributes["href"] or "").startswith("#error-")]
    parts = {element.attributes["id"] for element in page.all("article")}
    assert links
    assert {(element.attributes["href"] or "").removeprefix("#") for element in links} == parts - {"error-1"}


def hostile(value: Any, text: str) -> Any:
    """Return a finding, or a part of one, with another text in the place of every text of a file."""
    if isinstance(value, str):
        return text if value else ""
    if isinstance(value, tuple):
        return tuple(hostile(item, text) for item in value)
    if isinstance(value, dict):
        return {key: hostile(item, text) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        names = [one.name for one in fields(value) if not (isinstance(value, Finding) and one.name == "search")]
        return replace(value, **{name: hostile(getattr(value, name), text) for name in names})
    return value


@pytest.mark.parametrize("name", REPORTS)
def test_texts_of_files_stay_texts(name: str) -> None:
    """Whatever a crash file calls its modules, lines and tensors, the page has the same elements, and no script among them."""
    pages = [
        [read(to_html(shown, drawn)), read(shown._repr_html_() or "")]
        for shown, drawn in (
            (hostile(REPORTS[name], text), hostile(PICTURE, text) if name == "forward" else None)
            for text in (PAYLOAD, "plain")
        )
    ]
    for attacked, plain in zip(*pages, strict=True):
        assert [element.tag for element in attacked.all()] == [element.tag for element in plain.all()]
        assert not attacked.all("script", "iframe", "object", "img", "base", "form")
        assert not [key for element in attacked.all() for key in element.attributes if key.startswith("on")]
        assert "\x1b" not in attacked.text + "".join(str(e.attributes) for e in attacked.all())
        assert "\u202e" not in attacked.text
        assert "{{ 7 * 7 }}" in attacked.text or "{{ 7 * 7 }}" not in str(REPORTS[name])


@given(st.text("`<&a ", max_size=12))
def test_backticks_are_code(text: str) -> None:
    """What stands between backticks is set as code, a text with an odd one stays as it is, and nothing of it is lost."""
    shown = read(str(rendering._environment().filters["code"](text)))
    assert {element.tag for element in shown.all()} <= {"code"}
    whole = "".join(child if isinstance(child, str) else "".join(map(str, child.children)) for child in shown.children)
    assert whole == (text if text.count("`") % 2 else text.replace("`", ""))


def test_nothing_comes_from_elsewhere() -> None:
    """The page forbids scripts, and names no address to load anything from."""
    page = read(to_html(LOCATED, PICTURE))
    (policy,) = [m.attributes["content"] for m in page.all("meta") if "http-equiv" in m.attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert "http:" not in to_html(LOCATED, PICTURE)
    assert "https:" not in to_html(LOCATED, PICTURE)
    assert {element.attributes["href"] for element in page.all("a", "link")} == {"#main", "data:,"}


@pytest.mark.parametrize("name", REPORTS)
def test_a_screen_reader_finds_its_way(name: str) -> None:
    """Landmarks, one h1, no level of heading left out, captions, and every picture either has a name or is passed over."""
    page = read(to_html(REPORTS[name], PICTURE if name == "forward" else None))
    assert {"header", "main", "footer"} <= {element.tag for element in page.all()}
    levels = [int(element.tag[1]) for element in page.all("h1", "h2", "h3")]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert all(table.all("caption") and table.all("th") for table in page.all("table"))
    identifiers = [element.attributes["id"] for element in page.all() if "id" in element.attributes]
    assert len(identifiers) == len(set(identifiers))
    named = [
        element.attributes["aria-labelledby"] or "" for element in page.all() if "aria-labelledby" in element.attributes
    ]
    assert {identifier for names in named for identifier in names.split()} <= set(identifiers)
    inner = {id(svg) for outer in page.all("svg") for svg in outer.all("svg")}
    for svg in page.all("svg"):
        assert (
            id(svg) in inner
            or "aria-hidden" in svg.attributes
            or (svg.attributes.get("role") == "img" and svg.all("title"))
        )
    scrolling = [e for e in page.all("div") if e.attributes.get("class") in ("code", "scroll")]
    assert all(e.attributes.get("tabindex") == "0" and e.attributes.get("aria-label") for e in scrolling)


def test_a_long_program_makes_a_small_page() -> None:
    """Ten thousand nodes, links, cuts and harmless values, fifty culprits and wide lines fit into a megabyte."""
    wide = replace(SOFTMAX, text="x = " + "very_long_name + " * 60)
    links = tuple(Link(node, "aten.mul.Tensor", replace(wide, line=node)) for node in range(10_000))
    culprits = tuple(replace(FORWARD, node=node, cause=f"cause_{node}", chain=links) for node in range(50))
    cells = tuple((i, i + 1) for i in range(96))
    bad = BadElements(
        0, (96, 96), 1, cells, cells, tuple(tuple((x + y) % 2 for x in range(96)) for y in range(96)), ((0,) * 96,) * 96
    )
    drawn = Picture(
        magnitudes=tuple(
            Magnitude(n, "aten.mul.Tensor", Phase.FORWARD, wide, "f32", 1.0 + n, F32, n % 3) for n in range(10_000)
        ),
        growth=tuple(range(10_000)),
        bad=tuple(replace(bad, culprit=place) for place in range(50)),
        history=tuple({"step": step, "loss": 1.0 + step, "gradient_norm": 2.0} for step in range(10_000)),
    )
    cuts = tuple((node, "clean") for node in range(10_000))
    innocents = tuple(replace(LOCATED.innocents[0], source=replace(wide, line=n)) for n in range(10_000))
    finding = replace(LOCATED, culprits=culprits, innocents=innocents, search=replace(COST, nodes=10_000, cuts=cuts))
    size = len(to_html(finding, drawn).encode())
    assert size < 1_000_000


def magnitudes() -> st.SearchStrategy[list[Magnitude]]:
    """Return magnitudes of up to 2000 calls, some of them left out, in two types."""
    types = {"f16": 65504.0, "f32": F32}

    def of(values: list[tuple[float, str, int]]) -> list[Magnitude]:
        return [
            Magnitude(3 * node, "aten.mul.Tensor", Phase.FORWARD, None, dtype, value, types[dtype], bad)
            for node, (value, dtype, bad) in enumerate(values)
        ]

    return st.lists(st.tuples(st.floats(0, 65000), st.sampled_from(list(types)), st.integers(0, 1)), max_size=400).map(
        of
    )


@given(magnitudes())
def test_the_strip_keeps_what_matters(calls: list[Magnitude]) -> None:
    """Bars stay inside the strip, do not overlap, and neither the largest value nor any bad call is lost when calls share one."""
    drawn = strip(Picture(tuple(calls)), [])
    largest = max((one.largest for one in calls), default=0)
    assert (drawn is None) == (largest == 0)
    if drawn is None:
        return
    assert all(0 <= bar.x <= bar.x + bar.width <= 100.01 and 0 <= bar.y <= 100 for bar in drawn.bars)
    assert all(a.x + a.width <= b.x + 0.01 for a, b in zip(drawn.bars, drawn.bars[1:], strict=False))
    assert any(bar.kind != "finite" for bar in drawn.bars) == any(one.nonfinite for one in calls)
    assert all(bar.y == 0 for bar in drawn.bars if bar.kind == "none"), "what holds no finite number is no short bar"
    if len(drawn.bars) == drawn.calls:
        alone = [one for one in calls if one.nonfinite and not one.largest]
        assert sum(bar.kind == "none" for bar in drawn.bars) == len(alone)
    nearest = max(one.largest / one.limit for one in calls)
    assert drawn.nearest[0].largest / drawn.nearest[0].limit == nearest
    assert all(limit.above or limit.y >= 0 for limit in drawn.limits)


@given(st.floats(1e-30, 1e30), st.floats(1e-30, 1e30), st.booleans())
def test_larger_numbers_stand_higher(a: float, b: float, logarithmic: bool) -> None:
    """On any axis a larger number is not lower than a smaller one, and both are on the page."""
    low, high = sorted((a, b))
    scale = Scale.logarithm(low, high) if logarithmic else Scale.linear(low, high)
    assert 100 >= scale.y(low) >= scale.y(high) >= 0
    assert len(scale.ticks) <= 8


def test_lines_around_are_read_only_where_they_are_the_recorded_ones(tmp_path: Path) -> None:
    """Neighbours are shown from a Python file that still holds the line; from a changed, missing or other file nothing is."""
    path = tmp_path / "model.py"
    path.write_text("class Net:\n    def forward(self):\n        x = 1\n        return x.log()\n\n\nsecret = 1\n")
    line = SourceLine(str(path), 4, "Net.forward", "return x.log()")
    assert [(one.number, one.text, one.here) for one in around(line)] == [
        (1, "class Net:", False),
        (2, "    def forward(self):", False),
        (3, "        x = 1", False),
        (4, "        return x.log()", True),
        (5, "", False),
        (6, "", False),
        (7, "secret = 1", False),
    ]
    for other in (
        replace(line, text="return x.sqrt()"),
        replace(line, line=99),
        replace(line, file=str(tmp_path / "gone.py")),
        replace(line, line=0),
    ):
        assert [one.text for one in around(other)] == [other.text]
    (tmp_path / "passwd").write_text("root\nreturn x.log()\n")
    assert [one.text for one in around(replace(line, file=str(tmp_path / "passwd"), line=2))] == ["return x.log()"]
    assert around(replace(line, text="")) == ()


def test_a_long_way_is_cut_in_the_middle() -> None:
    """Calls of one line are one stop, and of many stops the first and the last are drawn, with how many are left out between."""
    links = tuple(Link(node, "aten.mul.Tensor", replace(SOFTMAX, line=node // 2)) for node in range(27, 127))
    found = way(replace(FORWARD, chain=links))
    assert found is not None
    assert (found.stops[0].first, found.stops[-1].last) == (27, 126)
    shown = len(found.stops)
    assert sum(stop.left_out for stop in found.stops) + shown == 51
    assert found.left_out + len(found.links) == 100


def test_every_bad_cell_is_drawn() -> None:
    """The paths of a map that is full of single bad cells cover each of them once."""
    cells = tuple((i, i + 1) for i in range(90))
    counts = tuple(tuple((x * y) % 3 // 2 for x in range(90)) for y in range(90))
    bad = BadElements(0, (90, 90), 1, cells, cells, counts, ((0,) * 90,) * 90)
    page = to_html(LOCATED, Picture(bad=(bad,)))
    (path,) = re.findall(r'<path class="cell nan l4" d="([^"]*)"', page)
    drawn = [
        (int(x) + i, int(y))
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path)
        for i in range(int(width))
    ]
    assert sorted(drawn) == [(x, y) for x in range(90) for y in range(90) if counts[y][x]]


def test_infinity_that_turns_into_nan_changes_the_colour() -> None:
    """Behind the call where Inf turns into NaN the way is one of NaN."""
    found = way(REPORTS["backward"].culprits[0])
    assert found is not None
    assert [(stop.bad, stop.turns) for stop in found.stops] == [("inf", False), ("nan", True), ("nan", False)]


def test_trends_have_the_numbers_of_the_history() -> None:
    """Each quantity of the history is one chart, over decades where it grows by much."""
    loss, gradient = trends(PICTURE.history)
    assert (loss.name, loss.start, loss.latest, loss.scale.logarithmic) == ("Loss", 2.5, 812.25, True)
    assert (gradient.first, gradient.last, gradient.points[-1][0]) == (6, 7, 100)
    assert trends(()) == ()


def test_without_jinja2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the extra a page is refused with what to install, and a notebook shows the text."""
    rendering._environment.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(BisectNanError, match=r'pip install "bisect_nan\[report\]"'):
        LOCATED.to_html()
    assert LOCATED._repr_html_() is None
    assert FORWARD._repr_html_() is None


def test_templates_are_part_of_the_package() -> None:
    """The templates lie where an installed package finds them."""
    folder = importlib.resources.files("bisect_nan.reports.html") / "templates"
    assert {"page.html", "page.css", "parts.html", "notebook.html"} <= {file.name for file in folder.iterdir()}
