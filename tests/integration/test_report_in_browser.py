"""The simulation report in a real browser without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from playwright.sync_api import Browser, Page

from tarry.simulator.report import write_html
from tarry.simulator.scenarios import STUDIES
from tarry.simulator.study import Plot, StudyResults, run_study
from tarry.simulator.vega import DARK, LIGHT
from tests.integration.browser import PAGE_TIMEOUT_MS, chromium
from tests.simulator.sample_results import (
    BARS,
    LINES,
    VARIANTS,
    sample_results,
    swept_results,
)

pytestmark = pytest.mark.timeout(300)

Scheme = Literal["light", "dark"]

MIN_FONT_SIZE_PX = 12
EMPTY_PAGE_BYTES = 30_000
"""The screenshot of an empty page is smaller, at all tested widths."""


def build_results() -> dict[str, StudyResults]:
    """Return study results of each kind of report."""
    sweep = (LINES, Plot("lines", "recovered_after", "Recovery", is_log=True), BARS)
    return {
        "storm": run_study(STUDIES["storm"], parameters={"clients": 100}),
        "sample": sample_results(),
        "sweep": swept_results({"clients": (10, 100, 1000)}, plots=sweep),
        "grid": swept_results({"clients": (10, 100), "rate": (1, 5)}, plots=(LINES,)),
    }


class OpenedReport(NamedTuple):
    page: Page
    messages: list[str]
    """Console messages, errors and network requests of the page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of each study to a folder."""
    folder = tmp_path_factory.mktemp("reports")
    for name, results in build_results().items():
        write_html(results, folder / f"{name}.html")
    return folder


def open_report(browser: Browser, path: Path, width: int, scheme: Scheme = "light") -> OpenedReport:
    """Open a report and wait until it is rendered."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(PAGE_TIMEOUT_MS)
    messages: list[str] = []
    page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("requestfailed", lambda request: messages.append(f"failed: {request.url}"))
    page.on("request", lambda request: messages.append(f"requested: {request.url}"))
    page.goto(path.as_uri())
    wait_until_drawn(page, scheme)
    messages.remove(f"requested: {path.as_uri()}")
    return OpenedReport(page, messages)


def wait_until_drawn(page: Page, scheme: Scheme) -> None:
    """Wait until the charts have the colours of a scheme."""
    page.wait_for_selector(f"html[data-drawn={scheme}]")


@pytest.mark.parametrize(
    ("name", "width", "scheme", "views"),
    [
        ("storm", 1280, "light", 12),
        ("storm", 390, "dark", 12),
        ("sample", 390, "light", 7),
        ("sweep", 1280, "light", 5),
        ("sweep", 390, "dark", 5),
        ("grid", 390, "light", 5),
    ],
)
def test_report_is_rendered(
    browser: Browser,
    reports: Path,
    tmp_path: Path,
    name: str,
    width: int,
    scheme: Scheme,
    views: int,
) -> None:
    """All charts are rendered, the page has no horizontal scrollbar, small text or error."""
    page, messages = open_report(browser, reports / f"{name}.html", width, scheme)
    boxes = page.evaluate(CHART_SIZES)
    assert views == sum(1 for box_width, height in boxes if box_width > 250 and height > 70)
    assert width == page.evaluate("document.documentElement.scrollWidth")
    assert page.evaluate(SMALLEST_FONT_SIZE) >= MIN_FONT_SIZE_PX
    assert [] == page.evaluate(CLIPPED_TEXTS)
    screenshot = page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png", full_page=True)
    assert len(screenshot) > EMPTY_PAGE_BYTES
    assert [] == messages
    page.close()


def test_variant_can_be_highlighted(browser: Browser, reports: Path) -> None:
    """A click on a variant fades the others; a second click or Escape ends the highlight."""
    page, messages = open_report(browser, reports / "sample.html", 1280)
    button = page.get_by_role("button", name=VARIANTS[1], exact=True)
    faded = page.locator("tr.faded, .panel.faded")
    button.click()
    assert ("true", 4 + 4) == (button.get_attribute("aria-pressed"), faded.count())
    page.wait_for_function(f"({DIMMED_BAR_COUNT})() === 8")
    button.click()
    assert ("false", 0) == (button.get_attribute("aria-pressed"), faded.count())
    page.wait_for_function(f"({DIMMED_BAR_COUNT})() === 0")
    button.click()
    page.keyboard.press("Escape")
    assert ("false", 0) == (button.get_attribute("aria-pressed"), faded.count())
    assert [] == messages
    page.close()


def test_chart_has_a_tooltip(browser: Browser, reports: Path) -> None:
    """A pointer on a chart shows the variant, the time and the value."""
    page, messages = open_report(browser, reports / "sample.html", 1280)
    page.locator("#view-0-0 svg").hover()
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for()
    assert ["variant", "time", "requests a second"] == tooltip.locator(".key").all_inner_texts()
    assert "none" == tooltip.locator(".value").first.inner_text()
    assert [] == messages
    page.close()


@pytest.mark.parametrize(("scheme", "fill"), [("light", LIGHT.span), ("dark", DARK.span)])
def test_disruptions_are_shaded(browser: Browser, reports: Path, scheme: Scheme, fill: str) -> None:
    """Disruptions are shaded and labelled, and a pointer on the shade shows the tooltip."""
    page, messages = open_report(browser, reports / "sample.html", 390, scheme)
    row = page.locator("#view-0-0 svg")
    shade = row.locator(f'path[fill="{fill}"]')
    assert 2 == shade.count()
    for label in ("frozen", "maintenance"):
        assert 1 == row.get_by_text(label, exact=True).count()
    shade.first.hover(force=True)
    page.locator("#vg-tooltip-element.visible").wait_for()
    seconds = page.locator("#vg-tooltip-element .value").nth(1).inner_text()
    assert 28 <= float(seconds.removesuffix(" s")) <= 32
    assert [] == messages
    page.close()


def test_charts_follow_the_colour_scheme(browser: Browser, reports: Path) -> None:
    """Charts are redrawn when the system turns dark, and the highlight is kept."""
    page, messages = open_report(browser, reports / "sample.html", 1280)
    page.get_by_role("button", name=VARIANTS[1], exact=True).click()
    page.emulate_media(color_scheme="dark")
    wait_until_drawn(page, "dark")
    page.wait_for_function(f"({DIMMED_BAR_COUNT})() === 8")
    assert 7 == page.locator(".view svg").count()
    assert [] == messages
    page.close()


def test_charts_follow_the_window_width(browser: Browser, reports: Path) -> None:
    """Charts are resized when the window becomes narrow."""
    page, messages = open_report(browser, reports / "sample.html", 1280)
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("document.documentElement.scrollWidth === 390")
    page.wait_for_function(f"({CHART_SIZES})().every(([width]) => width > 250 && width <= 390)")
    assert [] == messages
    page.close()


def test_report_is_readable_without_javascript(browser: Browser, reports: Path) -> None:
    """Without JavaScript the numbers are shown, with a hint about the charts."""
    page = browser.new_page(java_script_enabled=False)
    page.set_default_timeout(PAGE_TIMEOUT_MS)
    page.goto((reports / "sample.html").as_uri())
    assert "The charts need JavaScript" in page.locator("noscript").inner_text()
    assert 5 == page.locator("tbody tr").count()
    page.close()


CHART_SIZES = """() => [...document.querySelectorAll(".view svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height];
})"""

DIMMED_BAR_COUNT = (
    """() => document.querySelectorAll('.bars .mark-rect path[opacity="0.12"]').length"""
)

SMALLEST_FONT_SIZE = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const sizes = [];
  while (texts.nextNode()) {
    const parent = texts.currentNode.parentElement;
    if (texts.currentNode.data.trim() && parent.getClientRects().length)
      sizes.push(parseFloat(getComputedStyle(parent).fontSize));
  }
  return Math.min(...sizes);
}"""

CLIPPED_TEXTS = """() => [...document.querySelectorAll(".view svg")].flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter((text) => {
    const box = text.getBoundingClientRect();
    const seen = getComputedStyle(text).opacity !== "0" && box.width > 0;
    return seen && (box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
  }).map((text) => text.textContent);
})"""
