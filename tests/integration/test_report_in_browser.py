"""The simulation report, opened from a file in a real browser without a network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tarry.simulator.report import write_html
from tarry.simulator.scenarios import STUDIES
from tarry.simulator.study import Plot, StudyResults, run_study
from tarry.simulator.vega import DARK, LIGHT
from tests.simulator.sample_results import (
    BARS,
    LINES,
    VARIANTS,
    sample_results,
    swept_results,
)

Scheme = Literal["light", "dark"]

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SMALLEST_TEXT = 12
PLAIN_PAGE = 30_000
"""More bytes than the picture of an empty page takes, at any of the widths."""


def reported() -> dict[str, StudyResults]:
    """Return results of every kind."""
    sweep = (LINES, Plot("lines", "recovered_after", "Recovery", is_log=True), BARS)
    return {
        "storm": run_study(STUDIES["storm"], parameters={"clients": 100}),
        "made up": sample_results(),
        "sweep": swept_results({"clients": (10, 100, 1000)}, plots=sweep),
        "grid": swept_results({"clients": (10, 100), "rate": (1, 5)}, plots=(LINES,)),
    }


class Opened(NamedTuple):
    page: Page
    troubles: list[str]
    """Whatever the browser complained about or asked for."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium, or fail with the install command."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("no chromium on PATH: run .ci/browser, or apt-get install chromium as root")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a report of each study to a folder."""
    folder = tmp_path_factory.mktemp("reports")
    for name, of in reported().items():
        write_html(of, folder / f"{name}.html")
    return folder


def opened(browser: Browser, path: Path, width: int, scheme: Scheme = "light") -> Opened:
    """Open a report and wait until it is rendered."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("requestfailed", lambda request: troubles.append(f"failed: {request.url}"))
    page.on("request", lambda request: troubles.append(f"asked for: {request.url}"))
    page.goto(path.as_uri())
    drawn(page, scheme)
    troubles.remove(f"asked for: {path.as_uri()}")
    return Opened(page, troubles)


def drawn(page: Page, scheme: Scheme) -> None:
    """Wait until the charts have the colours of a scheme."""
    page.wait_for_selector(f"html[data-drawn={scheme}]")


@pytest.mark.parametrize(
    ("name", "width", "scheme", "views"),
    [
        ("storm", 1280, "light", 12),
        ("storm", 390, "light", 12),
        ("storm", 1280, "dark", 12),
        ("storm", 390, "dark", 12),
        ("made up", 390, "light", 7),
        ("sweep", 1280, "light", 5),
        ("sweep", 390, "dark", 5),
        ("grid", 390, "light", 5),
    ],
)
def test_report(
    browser: Browser,
    reports: Path,
    tmp_path: Path,
    name: str,
    width: int,
    scheme: Scheme,
    views: int,
) -> None:
    """Every chart is rendered, the page fits, its text is readable, and there is no error."""
    page, troubles = opened(browser, reports / f"{name}.html", width, scheme)
    boxes = page.evaluate(BOXES)
    assert views == sum(1 for across, down in boxes if across > 250 and down > 70)
    assert width == page.evaluate("document.documentElement.scrollWidth")
    assert page.evaluate(SMALLEST) >= SMALLEST_TEXT
    assert [] == page.evaluate(CUT_OFF)
    picture = page.screenshot(path=tmp_path / f"{name}-{width}-{scheme}.png", full_page=True)
    assert len(picture) > PLAIN_PAGE
    assert [] == troubles
    page.close()


def test_highlight_a_variant(browser: Browser, reports: Path) -> None:
    """A click on a name fades all others in charts and table; a second click or Escape ends it."""
    page, troubles = opened(browser, reports / "made up.html", 1280)
    button = page.get_by_role("button", name=VARIANTS[1], exact=True)
    faded = page.locator("tr.faded, .panel.faded")
    button.click()
    assert ("true", 4 + 4) == (button.get_attribute("aria-pressed"), faded.count())
    page.wait_for_function(f"({DIMMED})() === 8")
    button.click()
    assert ("false", 0) == (button.get_attribute("aria-pressed"), faded.count())
    page.wait_for_function(f"({DIMMED})() === 0")
    button.click()
    page.keyboard.press("Escape")
    assert ("false", 0) == (button.get_attribute("aria-pressed"), faded.count())
    assert [] == troubles
    page.close()


def test_tooltip(browser: Browser, reports: Path) -> None:
    """A pointer on a chart shows the variant, the time and the value."""
    page, troubles = opened(browser, reports / "made up.html", 1280)
    page.locator("#view-0-0 svg").hover()
    tip = page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    assert ["variant", "time", "requests a second"] == tip.locator(".key").all_inner_texts()
    assert "none" == tip.locator(".value").first.inner_text()
    assert [] == troubles
    page.close()


@pytest.mark.parametrize(("scheme", "ground"), [("light", LIGHT.span), ("dark", DARK.span)])
def test_disruptions_are_shaded(
    browser: Browser, reports: Path, scheme: Scheme, ground: str
) -> None:
    """Disruptions are shaded and labelled, and a pointer there still shows the value."""
    page, troubles = opened(browser, reports / "made up.html", 390, scheme)
    row = page.locator("#view-0-0 svg")
    shade = row.locator(f'path[fill="{ground}"]')
    assert 2 == shade.count()
    for label in ("frozen", "maintenance"):
        assert 1 == row.get_by_text(label, exact=True).count()
    shade.first.hover(force=True)
    page.locator("#vg-tooltip-element.visible").wait_for()
    seconds = page.locator("#vg-tooltip-element .value").nth(1).inner_text()
    assert 28 <= float(seconds.removesuffix(" s")) <= 32
    assert [] == troubles
    page.close()


def test_dark_scheme(browser: Browser, reports: Path) -> None:
    """Charts follow when the system turns dark, and the highlighted variant stays."""
    page, troubles = opened(browser, reports / "made up.html", 1280)
    page.get_by_role("button", name=VARIANTS[1], exact=True).click()
    page.emulate_media(color_scheme="dark")
    drawn(page, "dark")
    page.wait_for_function(f"({DIMMED})() === 8")
    assert 7 == page.locator(".view svg").count()
    assert [] == troubles
    page.close()


def test_narrow_window(browser: Browser, reports: Path) -> None:
    """Charts fit again when the window becomes narrow."""
    page, troubles = opened(browser, reports / "made up.html", 1280)
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("document.documentElement.scrollWidth === 390")
    page.wait_for_function(f"({BOXES})().every(([width]) => width > 250 && width <= 390)")
    assert [] == troubles
    page.close()


def test_without_javascript(browser: Browser, reports: Path) -> None:
    """Without JavaScript the numbers are shown, with a hint about the charts."""
    page = browser.new_page(java_script_enabled=False)
    page.goto((reports / "made up.html").as_uri())
    assert "The charts need JavaScript" in page.locator("noscript").inner_text()
    assert 5 == page.locator("tbody tr").count()
    page.close()


BOXES = """() => [...document.querySelectorAll(".view svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  return [box.width, box.height];
})"""

DIMMED = """() => document.querySelectorAll('.bars .mark-rect path[opacity="0.12"]').length"""

SMALLEST = """() => {
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const sizes = [];
  while (texts.nextNode()) {
    const parent = texts.currentNode.parentElement;
    if (texts.currentNode.data.trim() && parent.getClientRects().length)
      sizes.push(parseFloat(getComputedStyle(parent).fontSize));
  }
  return Math.min(...sizes);
}"""

CUT_OFF = """() => [...document.querySelectorAll(".view svg")].flatMap((svg) => {
  const frame = svg.getBoundingClientRect();
  return [...svg.querySelectorAll("text")].filter((text) => {
    const box = text.getBoundingClientRect();
    const seen = getComputedStyle(text).opacity !== "0" && box.width > 0;
    return seen && (box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1);
  }).map((text) => text.textContent);
})"""
