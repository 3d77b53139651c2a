"""Accessibility of the pages of the service, checked by axe-core in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.integration.browser import PAGE_TIMEOUT_MS, chromium
from tests.integration.dashboard import HtmlTarget, OpenedDashboard, Scheme, html_target
from tests.integration.service import Service, service

pytestmark = pytest.mark.timeout(300)

expect.set_options(timeout=PAGE_TIMEOUT_MS)

AXE_SCRIPT = (files("axe_playwright_python") / "axe.min.js").read_text("utf-8")
RUN_AXE = """(excluded) => axe.run({exclude: excluded}, {
    resultTypes: ["violations"],
    runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"],
  }).then((results) => results.violations)"""
SCREENS: tuple[tuple[int, Scheme], ...] = ((390, "dark"), (1440, "light"))
SWAGGER_UI = "#reference"
"""The element of `/docs` that Swagger UI fills."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def target() -> Iterator[HtmlTarget]:
    """Run a target."""
    with html_target() as target:
        yield target


@pytest.fixture(scope="module")
def tarry_service(
    tmp_path_factory: pytest.TempPathFactory, target: HtmlTarget
) -> Iterator[Service]:
    """Run a service with a retried task, dead letters, a replay and a paused downstream."""
    target.statuses |= {"/retried": [503, 200], "/dead": [410], "/replayed": [410]}
    with service(tmp_path_factory.mktemp("service")) as tarry_service:
        tasks = [post_task(tarry_service, target, path) for path in target.statuses]
        for task in tasks:
            tarry_service.wait_until_finished(task["taskId"])
        replay = {"filter": {"lane": tasks[-1]["lane"]}, "rate": 0.001}
        assert 201 == tarry_service.request("POST", "/dead-letters/replays", replay)[0]
        waiting = post_task(tarry_service, target, "/waiting", delayMs=3_600_000)
        pause = f"/downstreams/{waiting['lane']}/pause"
        assert 200 == tarry_service.request("POST", pause)[0]
        yield tarry_service


def post_task(service: Service, target: HtmlTarget, path: str, **fields: Any) -> dict[str, Any]:
    """Create a task with a downstream of its own."""
    policy = {"initialDelayMs": 20, "maxDelayMs": 20}
    return service.post(targetUrl=target.url + path, laneKey=path[1:], policy=policy, **fields)


@pytest.fixture(scope="module")
def dashboard(browser: Browser, tarry_service: Service) -> Iterator[OpenedDashboard]:
    """Open a tab for the tests, each of which loads a page: a new tab takes Chromium 0.5 s."""
    dashboard = OpenedDashboard(browser, tarry_service, 1440, "light")
    yield dashboard
    dashboard.page.close()


def find_violations(page: Page, *excluded: str) -> list[str]:
    """Return the violations of an open page in a narrow dark and a wide light window."""
    # Sent over the DevTools protocol, because the content security policy allows no inline script.
    page.evaluate(AXE_SCRIPT)
    found: list[str] = []
    for width, scheme in SCREENS:
        page.set_viewport_size({"width": width, "height": 900})
        # A color in transition would have a contrast of its own.
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        violations: list[dict[str, Any]] = page.evaluate(RUN_AXE, list(excluded))
        found += [
            f"{violation['id']} ({width} px, {scheme}): {node['html']}: {node['failureSummary']}"
            for violation in violations
            for node in violation["nodes"]
        ]
    return found


@pytest.mark.parametrize(
    "fragment",
    ["overview", "tasks", "downstreams", "dead-letters", "policies", "policies/webhook"],
)
def test_pages_have_no_violation(dashboard: OpenedDashboard, fragment: str) -> None:
    """The pages of the dashboard meet WCAG 2.1 AA, as far as axe-core can check it."""
    assert [] == find_violations(dashboard.show(fragment))


@pytest.mark.parametrize("path", ["/retried", "/dead"])
def test_page_of_a_task_has_no_violation(
    dashboard: OpenedDashboard, tarry_service: Service, path: str
) -> None:
    """The timelines of a retried task and of a dead letter have no violation."""
    [task_id] = [
        task["taskId"] for task in tarry_service.all_tasks() if task["targetUrl"].endswith(path)
    ]
    page = dashboard.show(f"tasks/{task_id}")
    assert [] == find_violations(page)


def test_page_of_a_downstream_has_no_violation(
    dashboard: OpenedDashboard, tarry_service: Service, target: HtmlTarget
) -> None:
    """The latency and the breaker history of a downstream have no violation."""
    lane = f"http:127.0.0.1:{target.port}@opened"
    limits = {"breaker": {"consecutiveFailures": 1, "openForMs": 1, "maxOpenMs": 1}}
    assert 200 == tarry_service.request("PUT", f"/downstreams/{lane}?create=true", limits)[0]
    target.statuses["/opened"] = [503, 200]
    task = post_task(tarry_service, target, "/opened")
    tarry_service.wait_until_finished(task["taskId"])
    page = dashboard.show(f"downstreams/{lane}")
    expect(page.get_by_role("img", name="opened 1 time")).to_be_visible()
    assert [] == find_violations(page)


def test_dialog_has_no_violation(dashboard: OpenedDashboard) -> None:
    """The form for the limits of a downstream has no violation."""
    page = dashboard.show("downstreams")
    page.get_by_role("button", name="Limits…").first.click()
    assert [] == find_violations(page)


def test_simulation_has_no_violation(dashboard: OpenedDashboard) -> None:
    """The chart and the figures of a simulated policy have no violation."""
    page = dashboard.show("policies/webhook")
    page.get_by_role("button", name="Simulate this policy").click()
    expect(page.get_by_role("table", name="Figures of the simulation")).to_be_visible()
    assert [] == find_violations(page)


def test_sign_in_has_no_violation(browser: Browser, tmp_path: Path) -> None:
    """The form for the API key has no violation, also when the key is wrong."""
    with service(tmp_path, "--set", "require_keys=true") as tarry_service:
        page = OpenedDashboard(browser, tarry_service, 1440, "light").show("")
        page.get_by_label("API key").fill("tarry_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("unknown or was revoked")).to_be_visible()
        assert [] == find_violations(page)
        page.close()


def test_reference_has_no_violation(dashboard: OpenedDashboard) -> None:
    """The page `/docs` has no violation outside of Swagger UI."""
    page = dashboard.page
    page.goto(f"{dashboard.url}docs")
    expect(page.locator("#operations-Monitoring-getMetrics")).to_be_visible()
    assert [] == find_violations(page, SWAGGER_UI)
