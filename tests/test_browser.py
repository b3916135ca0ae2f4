"""The HTML report in a real browser: no errors, the finding's numbers, no sideways scrolling, light, dark, keyboard and paper."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bisect_nan import Finding, Snapshot, locate, picture
from bisect_nan.reports import words
from bisect_nan.reports.html import rendering

pytestmark = pytest.mark.browser
webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if CHROMIUM is None or DRIVER is None:
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
NAMES = [
    "all_masked_attention",
    "backward_sqrt_at_zero",
    "fp16_overflow",
    "input_nan",
    "optimizer_eps",
    "harmless_masks",
]
OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start Chromium with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for option in [*OPTIONS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Finding, Path]]:
    """Write the page of every fixture."""
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name in NAMES:
        snapshot = Snapshot.load(FIXTURES / f"{name}.safetensors")
        finding = locate(snapshot)
        path = folder / f"{name}.html"
        path.write_text(finding.to_html(picture(snapshot, finding)), encoding="utf-8")
        found[name] = finding, path
    return found


def show(browser: Any, path: Path, *, width: int = 1100, scheme: str = "light", medium: str = "screen") -> None:
    """Open a page in a window of some width."""
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": features})
    browser.get(path.as_uri())


@pytest.mark.parametrize("name", NAMES)
def test_no_errors(name: str, browser: Any, pages: dict[str, tuple[Finding, Path]]) -> None:
    """The console stays empty: nothing is missing, and the page keeps to its own policy."""
    show(browser, pages[name][1])
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("name", NAMES)
def test_numbers(name: str, browser: Any, pages: dict[str, tuple[Finding, Path]]) -> None:
    """What is seen in the table of values, the headline and the drawn cells are the numbers of the finding."""
    finding, path = pages[name]
    show(browser, path)
    heading = browser.execute_script("return document.querySelector('h1').innerText")
    culprit = finding.culprit
    if culprit is None:
        assert heading == finding.verdict.value
        return
    assert heading.replace("\n", " ") == words.headline(culprit, first=True).replace("`", "")
    rows = browser.execute_script(
        "return [...document.querySelectorAll('#values-1 ~ .scroll tbody tr')].map(r => [...r.cells].map(c => c.innerText))"
    )
    expected = [
        [
            f"{v.dtype}{list(v.shape)}",
            str(v.nan),
            str(v.pos_inf),
            str(v.neg_inf),
            *map(rendering.number, (v.low, v.high)),
        ]
        for v in (*culprit.inputs, *culprit.outputs)
    ]
    assert [row[1:7] for row in rows] == expected
    bad = words.first_bad(culprit)
    assert bad is not None
    caption = browser.execute_script("return document.querySelector('#bad-1 ~ figure figcaption').innerText")
    counts = {"NaN": bad.nan, "infinite": bad.pos_inf + bad.neg_inf}
    told = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    assert caption.startswith(f"{told} of the {bad.numel} elements")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [320, 400, 1100])
def test_no_sideways_scrolling(name: str, width: int, browser: Any, pages: dict[str, tuple[Finding, Path]]) -> None:
    """At any width the page is as wide as the window, with every detail opened; wide code and tables scroll in their boxes."""
    show(browser, pages[name][1], width=width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    wide, window = browser.execute_script(
        "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= window <= width


def luminance(browser: Any, expression: str) -> float:
    """Return how bright a colour of the page is, as WCAG 2 counts it (https://www.w3.org/TR/WCAG22/#dfn-relative-luminance)."""
    text = browser.execute_script(f"return {expression}")
    parts = [float(part) / 255 for part in text[text.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(scheme: str, browser: Any, pages: dict[str, tuple[Finding, Path]]) -> None:
    """In light and in dark every text stands out from the page by at least 4.5 to 1."""
    show(browser, pages["all_masked_attention"][1], scheme=scheme)
    ground = luminance(browser, "getComputedStyle(document.body).backgroundColor")
    assert (ground < 0.5) == (scheme == "dark")
    for place in ("h1", ".badge", "dt", "figcaption", "summary", ".seal", ".old code", ".new code", "td.bad"):
        colour = luminance(browser, f"getComputedStyle(document.querySelector('{place}')).color")
        assert (max(colour, ground) + 0.05) / (min(colour, ground) + 0.05) >= 4.5, place
    for place in ("svg text", "svg .name", "svg .strong", "svg .code-text"):
        colour = luminance(browser, f"getComputedStyle(document.querySelector('{place}')).fill")
        assert (max(colour, ground) + 0.05) / (min(colour, ground) + 0.05) >= 4.5, place


def test_the_keyboard_reaches_everything(browser: Any, pages: dict[str, tuple[Finding, Path]]) -> None:
    """Tab goes to the skip link first, then to every box that scrolls and every detail, and shows where it is."""
    show(browser, pages["all_masked_attention"][1])
    wanted = browser.execute_script("return document.querySelectorAll('a, summary, [tabindex]').length")
    inside = browser.execute_script("return document.querySelectorAll('details [tabindex]').length")  # closed
    seen = []
    for _ in range(wanted - inside):
        webdriver.ActionChains(browser).send_keys("\ue004").perform()
        seen.append(
            browser.execute_script(
                "const e = document.activeElement; return [e.tagName, e.className, getComputedStyle(e).outlineStyle]"
            )
        )
    assert seen[0][:2] == ["A", "skip"]
    assert len(seen) == wanted - inside
    assert {outline for _, _, outline in seen} == {"solid"}
    assert [tag for tag, _, _ in seen].count("SUMMARY") == browser.execute_script(
        "return document.querySelectorAll('summary').length"
    )


def test_paper(browser: Any, pages: dict[str, tuple[Finding, Path]]) -> None:
    """On paper the page is light, and what is folded on the screen is open."""
    show(browser, pages["all_masked_attention"][1], scheme="dark", medium="print")
    assert luminance(browser, "getComputedStyle(document.body).backgroundColor") == pytest.approx(1)
    heights = browser.execute_script(
        "return [...document.querySelectorAll('details table')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(heights) > 0


def test_nothing_moves_while_it_loads(browser: Any, pages: dict[str, tuple[Finding, Path]]) -> None:
    """The browser sees no shift of the layout."""
    show(browser, pages["fp16_overflow"][1], width=400)
    shifts = browser.execute_async_script(
        "const done = arguments[0]; let sum = 0;"
        "new PerformanceObserver(l => l.getEntries().forEach(e => sum += e.value)).observe({type: 'layout-shift', buffered: true});"
        "setTimeout(() => done(sum), 200)"
    )
    assert shifts == 0
