"""The dashboard in a real browser: each page does its job by clicks, without an error."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.integration.browser import PAGE_TIMEOUT_MS, chromium
from tests.integration.dashboard import XSS, HtmlTarget, Scheme, html_target, open_dashboard
from tests.integration.service import Service, service

pytestmark = pytest.mark.timeout(300)

expect.set_options(timeout=PAGE_TIMEOUT_MS)

ONE_SECOND_MS = 1000
OVERVIEW_CHARTS = {
    "Finished tasks per second": re.compile(r"Highest [\d.]+.s at"),
    "Scheduling lag": re.compile(r"Highest [\d.]+ m?s .*latest [\d.]+ m?s"),
    "Backlog": re.compile("Highest [01]|No data in this time"),
    "Age of the oldest due task": re.compile("Highest .*latest|No data in this time"),
}
"""The charts of the overview without a test of their own. The last two have samples of 10 s."""
FAST_POLICY = {"initialDelayMs": 20, "maxDelayMs": 20, "maxAttempts": 2}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run Chromium."""
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def target() -> Iterator[HtmlTarget]:
    """Run a target whose responses contain HTML."""
    with html_target() as target:
        yield target


@pytest.fixture(scope="module")
def tarry_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Run a service without API keys, and with a secret for headers of tasks."""
    folder = tmp_path_factory.mktemp("service")
    settings = folder / "tarry.toml"
    (folder / "token").write_text("token-of-the-dashboard")
    settings.write_text(
        '[[secrets]]\nname = "orders-api"\ntargets = ["*"]\nheader = "X-Token"\nfile = "token"\n'
    )
    with service(folder, "--config", str(settings)) as running_service:
        yield running_service


def post_dead_letter(tarry_service: Service, target: HtmlTarget, path: str, key: str) -> str:
    """Create a task with HTML in all its fields that fails with 500; return its id when dead."""
    target.statuses[path] = [500]
    task = tarry_service.post(
        targetUrl=f"{target.url}{path}",
        headers={"X-Note": XSS},
        body=XSS,
        callbackUrl=f"{target.url}/callback?{XSS}",
        idempotencyKey=f"{key} {XSS}",
        policy=FAST_POLICY,
    )
    assert "EXHAUSTED" == tarry_service.wait_until_finished(task["taskId"])["status"]
    task_id: str = task["taskId"]
    return task_id


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_overview_follows_attempts(
    browser: Browser, tmp_path: Path, target: HtmlTarget, width: int, scheme: Scheme
) -> None:
    """The first page follows `/events` without a reload; its figures and time range are kept."""
    target.statuses |= {"/retried-once": [503, 200], "/overview-dead": [500]}
    with (
        service(tmp_path) as tarry_service,
        open_dashboard(browser, tarry_service, width=width, scheme=scheme) as dashboard,
    ):
        page = dashboard.page
        page.clock.install()
        page.goto(dashboard.url)
        attempts = page.get_by_role("region", name="Attempts per second")
        expect(page.get_by_role("heading", name="Overview")).to_be_visible()
        expect(attempts.get_by_text("None in this time.")).to_be_visible()
        expect(page.get_by_role("status").get_by_text("Live")).to_be_visible()
        with dashboard.read_after_event("**/overview*"):
            first = tarry_service.post(targetUrl=f"{target.url}/once")
        for path in ("/retried-once", "/overview-dead"):
            task = tarry_service.post(targetUrl=target.url + path, policy=FAST_POLICY)
            tarry_service.wait_until_finished(task["taskId"])
        tarry_service.wait_until_finished(first["taskId"])
        tarry_service.wait_for(lambda: 5 == count_attempts(tarry_service))
        page.clock.run_for(ONE_SECOND_MS)
        expect_tile(page, "Attempts", "5", "60 % failed")
        page.clock.resume()
        expect_tile(page, "Success at the first attempt", "33.3 %", "1 at once, 1 after retries")
        expect_tile(page, "New dead letters", "1", "1 stored now")
        expect_tile(page, "Scheduling lag, p99", re.compile(r"[\d.]+ m?sp50 [\d.]+ m?s"))
        expect_tile(page, "Pending now", "0", "0 in flight")
        expect_tile(page, "Oldest due task", "on time", "no due task waits")
        for title, values in OVERVIEW_CHARTS.items():
            chart = page.get_by_role("region", name=title, exact=True)
            expect(chart.get_by_role("img", name=values)).to_be_visible()
        delays = page.get_by_role("region", name="Delays before retries")
        expect(delays.get_by_text(re.compile("^2 in "))).to_be_visible()

        attempts.get_by_role("group", name="arrow keys").focus()
        page.keyboard.press("Home")
        expect(attempts.get_by_text(re.compile(r"^[\d:]+: none$"))).to_be_visible()
        attempts.get_by_text("As a table").click()
        expect(attempts.get_by_role("columnheader", name="transient")).to_have_count(1)
        expect(attempts.get_by_role("row").nth(1)).to_contain_text("/s")

        page.get_by_role("link", name="3 hours").click()
        page.wait_for_url(re.compile("#/overview\\?range=3h$"))
        expect_tile(page, "Attempts", "5", "60 % failed")
        assert 0 == tarry_service.stop()
        tarry_service.start()
        page.reload()
        expect_tile(page, "Attempts", "5", "60 % failed")
        expect(page.locator(".segments [aria-current]")).to_have_text("3 hours")
        # While the service was stopped, Chromium has logged failed requests.
        dashboard.messages[:] = [message for message in dashboard.messages if "ERR_" not in message]


def count_attempts(tarry_service: Service) -> int:
    """Return the number of attempts of the overview."""
    points = tarry_service.request("GET", "/overview")[1]["points"]
    return sum(sum(point["attempts"].values()) for point in points)


def expect_tile(page: Page, label: str, value: str | re.Pattern[str], note: str = "") -> None:
    """Wait until a tile of the overview has this value and note."""
    tile = page.locator(".tile").filter(has=page.get_by_text(label, exact=True))
    if isinstance(value, str):
        expect(tile).to_have_text(f"{label}{value}{note}")
    else:
        expect(tile).to_have_text(re.compile(f"^{re.escape(label)}{value.pattern}$"))


def test_tasks_are_searched_and_paged(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The filters of the form find tasks, the link of the list shows the next page of 50."""
    prefix = f"{target.url}/search/"
    urls = [f"{prefix}{number}?{XSS}" for number in range(51)]
    tasks = [{"targetUrl": url, "delayMs": 3_600_000} for url in urls]
    assert 200 == tarry_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
    with open_dashboard(browser, tarry_service, width=390, scheme="dark") as dashboard:
        page = dashboard.show("tasks")
        page.get_by_label("Target URL starts with").fill(prefix)
        page.get_by_role("combobox", name="Status").select_option("PENDING")
        page.get_by_role("button", name="Search").click()
        page.wait_for_url(re.compile("urlPrefix="))
        expect(page.get_by_role("row")).to_have_count(51)  # with the header
        expect(page.get_by_role("cell", name=f"POST {prefix}50")).to_be_visible()
        page.get_by_role("link", name="Next page").click()
        expect(page.get_by_role("row")).to_have_count(2)
        page.reload()
        expect(page.get_by_role("cell", name=f"POST {prefix}0")).to_be_visible()
        expect(page.get_by_label("Target URL starts with")).to_have_value(prefix)


@pytest.fixture(scope="module")
def searched_tasks(tarry_service: Service, target: HtmlTarget) -> list[dict[str, Any]]:
    """Create two pending tasks that differ in key, policy, lane and creation time, the older first.

    The seconds of their creation differ, because the fields of the form have no milliseconds.
    """

    def post(number: int, policy_id: str) -> dict[str, Any]:
        return tarry_service.post(
            targetUrl=f"{target.url}/searched/{number}",
            laneKey=f"searched-{number}",
            idempotencyKey=f"searched-{number}",
            policyId=policy_id,
            delayMs=3_600_000,
        )

    first = post(0, "webhook")
    tarry_service.wait_for(lambda: time.time() >= first["createdAt"] // 1000 + 2)
    return [first, post(1, "patient")]


@pytest.mark.parametrize(
    ("label", "field"),
    [
        ("Idempotency key", "idempotencyKey"),
        ("Target URL starts with", "targetUrl"),
        ("Downstream", "lane"),
        ("Policy", "policyId"),
    ],
)
def test_tasks_are_searched_by_a_field(
    browser: Browser,
    tarry_service: Service,
    searched_tasks: list[dict[str, Any]],
    label: str,
    field: str,
) -> None:
    """A search by key, target, downstream or policy finds the task, and not the other task."""
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("tasks")
        page.get_by_label(label, exact=True).fill(searched_tasks[1][field])
        expect_only_second(page, searched_tasks)
        page.get_by_role("link", name="Clear").click()
        expect(page.get_by_role("link", name=searched_tasks[0]["taskId"])).to_be_visible()


def test_tasks_are_searched_by_time(
    browser: Browser, tarry_service: Service, searched_tasks: list[dict[str, Any]]
) -> None:
    """The fields for the time of creation exclude older and newer tasks, and keep their values."""
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("tasks")
        start, end = (
            local_second(page, searched_tasks[1], 0),
            local_second(page, searched_tasks[1], 1),
        )
        page.get_by_label("Created after").fill(start)
        expect_only_second(page, searched_tasks)
        expect(page.get_by_label("Created after")).to_have_value(start)
        page.get_by_label("Created before").fill(end)
        expect_only_second(page, searched_tasks)
        page.get_by_label("Created after").fill("")
        page.get_by_label("Created before").fill(start)
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("link", name=searched_tasks[0]["taskId"])).to_be_visible()
        expect(page.get_by_role("link", name=searched_tasks[1]["taskId"])).to_have_count(0)


def test_tasks_are_searched_by_status(
    browser: Browser, tarry_service: Service, searched_tasks: list[dict[str, Any]]
) -> None:
    """A search for a status finds the tasks with this status, and no others."""
    first, second = (task["taskId"] for task in searched_tasks)
    cancelled = tarry_service.post(targetUrl=searched_tasks[0]["targetUrl"], delayMs=3_600_000)
    tarry_service.request("DELETE", f"/retry-tasks/{cancelled['taskId']}")
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("tasks")
        status = page.get_by_role("combobox", name="Status")
        status.select_option("CANCELLED")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("link", name=cancelled["taskId"])).to_be_visible()
        expect(page.get_by_role("link", name=second)).to_have_count(0)
        status.select_option("PENDING")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("link", name=first)).to_be_visible()
        expect(page.get_by_role("link", name=cancelled["taskId"])).to_have_count(0)


def test_task_is_opened_by_its_id(
    browser: Browser, tarry_service: Service, searched_tasks: list[dict[str, Any]]
) -> None:
    """A search by id opens the page of the task."""
    task = searched_tasks[0]
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("tasks")
        page.get_by_label("Task id").fill(task["taskId"].upper())
        page.get_by_role("button", name="Search").click()
        page.wait_for_url(re.compile(f"#/tasks/{task['taskId']}$"))
        details = page.get_by_role("region", name="Details")
        expect(details.get_by_text(task["idempotencyKey"], exact=True)).to_be_visible()


def expect_only_second(page: Page, tasks: list[dict[str, Any]]) -> None:
    """Click on Search, and wait until the results have the second task and not the first."""
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("link", name=tasks[0]["taskId"])).to_have_count(0)
    expect(page.get_by_role("link", name=tasks[1]["taskId"])).to_be_visible()


def local_second(page: Page, task: dict[str, Any], offset: int) -> str:
    """Return the second in which a task was created, plus `offset`, as local time.

    Like the value of a field, it has no seconds at the start of a minute.
    """
    script = """(ms) => {
      const time = new Date(ms);
      const local = new Date(ms - time.getTimezoneOffset() * 60000).toISOString();
      return local.slice(0, 19).replace(/:00$/, "");
    }"""
    local: str = page.evaluate(script, (task["createdAt"] // 1000 + offset) * 1000)
    return local


def test_task_id_is_checked_before_the_search(browser: Browser, tarry_service: Service) -> None:
    """An id that is not a UUID is reported next to its field; an unknown id is an error."""
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("tasks")
        page.get_by_label("Task id").fill("7")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_text("A task id has 36 characters")).to_be_visible()
        page.get_by_label("Task id").fill("01A1DEE8-4da6-777c-bd58-a99cd6e4fecb")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("alert").get_by_text("no such task")).to_be_visible()
        dashboard.expected_statuses.add(404)
        page.get_by_role("button", name="Dismiss").click()
        expect(page.get_by_text("no such task")).to_have_count(0)


def test_task_page_shows_the_timeline(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The page of a task shows its attempts, waits, reason and excerpts as text."""
    # Until the service has read its secret, it redacts the whole response.
    headers = {"X-Token": {"secret": "orders-api"}}
    task = tarry_service.post(targetUrl=f"{target.url}/secret", headers=headers)
    tarry_service.wait_until_finished(task["taskId"])
    task_id = post_dead_letter(tarry_service, target, "/timeline", "timeline")
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("tasks?status=EXHAUSTED")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.get_by_role("main")).to_be_focused()
        page.get_by_role("link", name=task_id).press("Enter")
        expect(page.get_by_role("heading", name=f"Task {task_id}")).to_be_focused()
        timeline = page.get_by_role("region", name="Timeline")
        expect(timeline.get_by_text("Attempt 2")).to_be_visible()
        expect(timeline.get_by_role("img", name="of a ceiling of 20 ms")).to_be_visible()
        expect(timeline.get_by_text("ceiling 20 ms · full jitter")).to_be_visible()
        expect(timeline.get_by_text("Stopped: attempts")).to_be_visible()
        assert [XSS, XSS] == timeline.locator("pre").all_inner_texts()
        facts = page.get_by_role("region", name="Details")
        expect(facts.get_by_text(f"X-Note: {XSS}")).to_be_visible()
        expect(facts.get_by_text(f"timeline {XSS}")).to_be_visible()
        assert [XSS] == facts.locator("pre").all_inner_texts()
        expect(facts.get_by_text(f"{target.url}/callback?")).to_be_visible()


def test_task_page_follows_changes_of_breaker_and_budget(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The timeline shows hints, budget, breaker and its changes; it follows `/events`."""
    path, key = "/changes", "changes"
    lane = f"http:127.0.0.1:{target.port}@{key}"
    limits = {"breaker": {"consecutiveFailures": 2, "openForMs": 600_000, "maxOpenMs": 600_000}}
    tarry_service.request("PUT", f"/downstreams/{lane}?create=true", limits)
    target.statuses[path], target.retry_after[path] = [503, 503, 200], "1"
    policy = FAST_POLICY | {"maxAttempts": 3}
    task = tarry_service.post(targetUrl=f"{target.url}{path}", laneKey=key, policy=policy)
    tarry_service.wait_for(lambda: 2 == len(tarry_service.attempts(task["taskId"])))
    with open_dashboard(browser, tarry_service, width=390) as dashboard:
        dashboard.page.clock.install()
        page = dashboard.show(f"tasks/{task['taskId']}")
        items = page.get_by_role("region", name="Timeline").get_by_role("listitem")
        expect(items.nth(2)).to_contain_text("retry-after: 1 s")
        expect(items.nth(2)).to_contain_text(re.compile(r"retry budget [\d.]+breaker closed"))
        expect(items.nth(4)).to_contain_text(re.compile(r"retry budget [\d.]+, before: [\d.]+"))
        expect(items.nth(4)).to_contain_text("breaker open, before: closed")
        expect(items.nth(5)).to_contain_text("Breaker closed → open")
        expect(items.nth(5)).to_contain_text("the last one: status 503.")
        with dashboard.read_after_event("**/explain"):
            tarry_service.request("POST", f"/downstreams/{lane}/resume")
        tarry_service.wait_until_finished(task["taskId"])
        page.clock.run_for(ONE_SECOND_MS)
        expect(page.get_by_role("status").get_by_text("SUCCEEDED")).to_be_visible()
        expect(items.nth(6)).to_contain_text("Breaker open → closed")
        expect(items.nth(6)).to_contain_text("An operator resumed the downstream.")
        expect(items.nth(7)).to_contain_text("Attempt 3")
        page.clock.resume()


def test_texts_of_responses_and_of_the_address_are_not_html(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """HTML in any text of a response or of the page's own address is shown as text."""
    task_id = post_dead_letter(tarry_service, target, "/poisoned", "poisoned")
    payload = quote(XSS, safe="")

    def poison_response(route: Route) -> None:
        response = route.fetch()
        poisoned = poison_texts(response.json())
        if "headers" in poisoned and "requestExcerpt" not in poisoned:
            poisoned["headers"]["X-Token"] = {"secret": XSS}
        route.fulfill(response=response, json=poisoned)

    with open_dashboard(browser, tarry_service) as dashboard:
        dashboard.expected_statuses |= {404, 422}
        main = dashboard.page.get_by_role("main")
        for fragment in (
            f"{payload}",
            f"overview?range={payload}",
            f"tasks?urlPrefix={payload}&lane={payload}&createdAfter={payload}",
            f"tasks/{payload}",
            f"downstreams/{payload}",
            f"dead-letters?reason={payload}&error={payload}",
            f"policies/{payload}?new=1",
        ):
            dashboard.show(fragment)
            dashboard.check()
        expect(main.get_by_role("heading", name=XSS)).to_be_visible()
        for path in ("retry-tasks", "downstreams", "dead-letters", "retry-policies"):
            dashboard.page.route(re.compile(f"/{path}([/?].*)?$"), poison_response)
        lane = quote(f"http:127.0.0.1:{target.port}", safe="")
        pages = ("tasks", f"tasks/{task_id}", "downstreams", f"downstreams/{lane}", "dead-letters")
        for fragment in (*pages, "policies", "policies/webhook"):
            dashboard.show(fragment)
            if fragment != "policies/webhook":  # its texts are values of fields
                expect(main.get_by_text(XSS).first).to_be_visible()
            if fragment.endswith(task_id):
                expect(main.get_by_text(f"X-Token: [secret {XSS}]")).to_be_visible()
            dashboard.check_text()
        dashboard.show("overview")  # the badges of statuses with HTML are too wide


def poison_texts(value: Any) -> Any:
    """Return decoded JSON with HTML at the end of each text."""
    if isinstance(value, dict):
        return {
            name: entry if name == "nextCursor" else poison_texts(entry)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [poison_texts(entry) for entry in value]
    return value + XSS if isinstance(value, str) else value


def test_task_is_retried(browser: Browser, tarry_service: Service, target: HtmlTarget) -> None:
    """The button retries a dead letter, and the page shows its success without a reload."""
    task_id = post_dead_letter(tarry_service, target, "/retried", "retried")
    target.statuses["/retried"] = [200]
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show(f"tasks/{task_id}")
        page.get_by_role("button", name="Retry now").click()
        expect(page.get_by_role("status").get_by_text("starts now")).to_be_visible()
        expect(page.get_by_role("status").get_by_text("SUCCEEDED")).to_be_visible()
        expect(page.get_by_role("button", name="Retry now")).to_have_count(0)


def test_task_is_cancelled_by_keyboard(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """Escape closes the confirmation and returns the focus; Enter in it cancels the task."""
    task = tarry_service.post(targetUrl=f"{target.url}/cancel", delayMs=3_600_000)
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show(f"tasks/{task['taskId']}")
        button = page.get_by_role("button", name="Cancel…")
        button.press("Enter")
        page.keyboard.press("Escape")
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(button).to_be_focused()
        button.press("Enter")
        page.get_by_role("button", name="Cancel the task").press("Enter")
        expect(page.get_by_role("status").get_by_text("CANCELLED", exact=True)).to_be_visible()
    assert "CANCELLED" == tarry_service.task(task["taskId"])["status"]


def test_task_is_copied_as_curl(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The curl command has the request of the task, quoted, and the names of its secrets."""
    url = f"{target.url}/curl?q=it's"
    task = tarry_service.post(
        targetUrl=url,
        headers={
            "X-Note": "it's $HOME",
            "Authorization": "Bearer secret",
            "X-Token": {"secret": "orders-api"},
        },
        body="x",
        idempotencyKey="curl-1",
        delayMs=3_600_000,
    )
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show(f"tasks/{task['taskId']}")
        expect(page.get_by_text("X-Token: [secret orders-api]")).to_be_visible()
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.get_by_role("button", name="Copy as curl").click()
        page.get_by_role("button", name="Copy", exact=True).click()
        expect(page.get_by_text("Copied.")).to_be_visible()
        command = page.evaluate("navigator.clipboard.readText()")
        page.get_by_role("button", name="Close").click()
    quoted_url = task["targetUrl"].replace("'", "'\\''")
    assert command.startswith(f"curl --globoff --request 'POST' '{quoted_url}' \\\n")
    assert "--header 'X-Note: it'\\''s $HOME'" in command
    assert "--header 'Authorization: [redacted]'" in command
    assert "--header 'X-Token: [secret orders-api]'" in command
    assert "--header 'Idempotency-Key: curl-1'" in command
    assert command.endswith("--data-binary @body")


def test_api_key_is_needed_to_sign_in(browser: Browser, tmp_path: Path) -> None:
    """With API keys, the page asks for one, keeps it for the tab, and removes it on sign-out."""
    with (
        service(tmp_path, "--set", "require_keys=true") as tarry_service,
        open_dashboard(browser, tarry_service, width=390) as dashboard,
    ):
        key = create_api_key(tmp_path)
        page = dashboard.page
        page.goto(dashboard.url)
        expect(page.get_by_role("navigation")).to_have_count(0)
        sign_in(page, "tarry_wrong")
        expect(page.get_by_text("unknown or was revoked")).to_be_visible()
        dashboard.expected_statuses.add(401)
        sign_in(page, key)
        expect(page.get_by_role("heading", name="Sign in")).to_have_count(0)
        expect(page.get_by_text("Figures of your tenant.")).to_be_visible()
        expect(page.locator("section.chart")).to_have_count(1)
        page.reload()
        expect(page.get_by_role("navigation", name="Pages", exact=True)).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert 0 == page.evaluate("sessionStorage.length + localStorage.length")


BUTTONS = {
    "dead-letters": ("Replay…", "Select all on this page", "Replay selected…"),
    "downstreams": ("Pause", "Reset", "Limits…"),
    "policies": ("New policy",),
}
"""Buttons of the pages, as texts. The page of a task is added by the test."""


def test_buttons_that_the_key_may_not_use_are_hidden(
    browser: Browser, tmp_path: Path, target: HtmlTarget
) -> None:
    """Buttons are shown to the roles that may use them: write, and for policies admin."""
    target.statuses["/roles"] = [410]
    roles = ("read", "write", "admin")
    with (
        service(tmp_path, "--set", "require_keys=true") as tarry_service,
        open_dashboard(browser, tarry_service) as dashboard,
    ):
        keys = {role: create_api_key(tmp_path, "--role", role) for role in roles}
        headers = {"Authorization": f"Bearer {keys['admin']}"}
        body = {"targetUrl": f"{target.url}/roles", "idempotencyKey": "roles"}
        created = tarry_service.request("POST", "/retry-tasks", body, headers)
        path = f"/retry-tasks/{created[1]['taskId']}"
        tarry_service.wait_for(
            lambda: "EXHAUSTED" == tarry_service.request("GET", path, None, headers)[1]["status"]
        )
        buttons = {f"tasks/{created[1]['taskId']}": ("Retry now",), **BUTTONS}
        page = dashboard.page
        page.goto(dashboard.url)
        for role, key in keys.items():
            sign_in(page, key)
            expect(page.locator("html")).to_have_attribute("data-key-role", role)
            for fragment, texts in buttons.items():
                dashboard.show(fragment)
                expect(page.locator("html")).to_have_attribute("data-key-role", role)
                is_shown = role == "admin" or (role == "write" and fragment != "policies")
                for text in texts:
                    button = page.get_by_text(text, exact=True).first
                    expect(button).to_be_visible() if is_shown else expect(button).to_be_hidden()
                    expect(button).to_be_attached()
            page.get_by_role("button", name="Sign out").click()


def create_api_key(folder: Path, *flags: str) -> str:
    """Create an API key in the store of a service; return it."""
    store = f"sqlite:{folder / 'tarry.db'}"
    command = [sys.executable, "-m", "tarry", "keys", "create", "--tenant", "ann", "--store", store]
    command += flags
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout
    match = re.search(r"tarry_[\w-]+", output)
    assert match is not None, output
    return match[0]


def sign_in(page: Page, key: str) -> None:
    """Enter an API key."""
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()


def test_downstream_is_paused_reset_and_resumed(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """Each action asks for a confirmation, and the row shows the new state."""
    tarry_service.post(targetUrl=f"{target.url}/lanes", laneKey="operated", delayMs=3_600_000)
    lane = f"http:127.0.0.1:{target.port}@operated"
    with open_dashboard(browser, tarry_service, width=390, scheme="dark") as dashboard:
        page = dashboard.show("downstreams")
        page.get_by_role("button", name=f"Pause {lane}").click()
        page.get_by_role("button", name="Cancel", exact=True).click()
        page.get_by_role("button", name=f"Pause {lane}").click()
        page.get_by_role("button", name="Pause this downstream").click()
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=lane, exact=True))
        expect(row.get_by_text("PAUSED")).to_be_visible()
        expect(page.get_by_role("status").get_by_text(f"Paused: {lane}")).to_be_visible()
        page.get_by_role("button", name=f"Resume {lane}").click()
        page.get_by_role("button", name="Resume this downstream").click()
        expect(row.get_by_text("ACTIVE")).to_be_visible()
        page.get_by_role("button", name=f"Reset {lane}").click()
        page.get_by_role("button", name="Reset this downstream").click()
        expect(page.get_by_role("status").get_by_text(f"Reset: {lane}")).to_be_visible()


def test_downstreams_are_searched_by_state(
    browser: Browser, tmp_path: Path, target: HtmlTarget
) -> None:
    """A search by state finds downstreams of all pages, and keeps a row that has changed."""
    with (
        service(tmp_path) as tarry_service,
        open_dashboard(browser, tarry_service, width=1440) as dashboard,
    ):
        keys = [f"customer-{number:03}" for number in range(SEARCHED_LANES)]
        tasks = [{"targetUrl": target.url, "laneKey": key, "delayMs": 3_600_000} for key in keys]
        assert 200 == tarry_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
        lane = f"http:127.0.0.1:{target.port}@{keys[-1]}"
        assert 200 == tarry_service.request("POST", f"/downstreams/{lane}/pause")[0]
        page = dashboard.show("downstreams")
        page.get_by_role("combobox", name="State").select_option("PAUSED")
        page.get_by_role("button", name="Show").click()
        page.wait_for_url(re.compile("state=PAUSED$"))
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=lane, exact=True))
        expect(row.get_by_text("PAUSED")).to_be_visible()
        expect(page.get_by_role("row")).to_have_count(2)  # with the header
        buttons = row.get_by_role("button").all()
        assert 1 == len({button.evaluate("each => each.offsetTop") for button in buttons})
        page.get_by_role("button", name=f"Resume {lane}").click()
        page.get_by_role("button", name="Resume this downstream").click()
        expect(row.get_by_text("ACTIVE")).to_be_visible()
        page.get_by_role("combobox", name="State").select_option("PARKED")
        page.get_by_role("button", name="Show").click()
        expect(page.get_by_text("No downstream is in the state PARKED.")).to_be_visible()
        page.get_by_role("link", name="Clear").click()
        expect(page.get_by_role("row")).to_have_count(51)


SEARCHED_LANES = 201
"""A search reads pages of 200 downstreams."""


def test_downstream_has_breaker_history_and_latency(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """A row has the breaker and two quantiles; the page of a lane also has the history."""
    path, key = "/history", "history"
    lane = f"http:127.0.0.1:{target.port}@{key}"
    limits = {"breaker": {"consecutiveFailures": 1, "openForMs": 600_000, "maxOpenMs": 600_000}}
    tarry_service.request("PUT", f"/downstreams/{lane}?create=true", limits)
    target.statuses[path] = [200, 503]
    first = tarry_service.post(targetUrl=f"{target.url}{path}", laneKey=key)
    tarry_service.wait_until_finished(first["taskId"])
    with open_dashboard(browser, tarry_service, width=390, scheme="dark") as dashboard:
        page = dashboard.page
        page.clock.install()
        dashboard.show("downstreams")
        page.get_by_role("link", name=lane, exact=True).click()
        history = page.get_by_role("region", name="Breaker history")
        expect(history.get_by_text("The breaker is closed. No change is recorded.")).to_be_visible()
        with dashboard.read_after_event(f"**/{quote(lane, safe='')}"):
            tarry_service.post(targetUrl=f"{target.url}{path}", laneKey=key)
        tarry_service.wait_for(lambda: 2 == count_lane_attempts(tarry_service, lane))
        page.clock.run_for(ONE_SECOND_MS)
        changes = history.get_by_role("listitem").filter(has=page.get_by_role("strong"))
        expect(changes).to_have_count(1)
        page.clock.resume()
        expect(changes).to_contain_text("closed → open")
        expect(changes).to_contain_text("Too many attempts failed, the last one: status 503.")
        tiles = page.get_by_role("region", name="Latency of attempts")
        expect(tiles.get_by_text("p90")).to_be_visible()
        expect(tiles.locator("dd").last).to_have_text("2")
        page.get_by_role("main").get_by_role("link", name="Downstreams").click()
        row = page.get_by_role("row").filter(has=page.get_by_role("link", name=lane, exact=True))
        expect(row.get_by_role("cell", name="open since")).to_be_visible()
        expect(row.get_by_role("cell", name=re.compile(r"\d m?s . \d.* m?s$"))).to_be_visible()
        for label, text in LANE_CELLS.items():
            expect(row.locator(f"[data-label='{label}']")).to_have_text(text)
        page.get_by_role("link", name=lane, exact=True).click()
        page.get_by_role("button", name=f"Resume {lane}").click()
        page.get_by_role("button", name="Resume this downstream").click()
        expect(changes).to_have_count(2)
        expect(changes.first).to_contain_text("open → closed")
        expect(changes.first).to_contain_text("An operator resumed the downstream.")
        expect(history.get_by_role("img", name="opened 1 time, now closed")).to_be_visible()


LANE_CELLS: dict[str, str | re.Pattern[str]] = {
    "State": re.compile(r"^PARKEDprobes in (9|10) min"),
    "Retry budget": re.compile(r"^[\d.]+$"),
    "Limits": re.compile(r"^breaker setnow \d+ at a time$"),
    "In flight": "0",
    "Pending": "1",
    "Dead": "0",
}
"""The cells of a parked downstream with a waiting task."""


def count_lane_attempts(tarry_service: Service, lane: str) -> int:
    """Return the number of attempts in the latency of a downstream."""
    latency = tarry_service.request("GET", f"/downstreams/{lane}")[1]["latency"]
    attempts: int = latency["attempts"]
    return attempts


def test_limits_of_a_downstream_are_set_and_removed(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The form has the current limits, shows an invalid value, and replaces the limits."""
    tarry_service.post(targetUrl=f"{target.url}/lanes", laneKey="limited", delayMs=3_600_000)
    lane = f"http:127.0.0.1:{target.port}@limited"
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("downstreams")
        page.get_by_label("Exact name of a downstream").fill(lane)
        page.get_by_role("button", name="Show").click()
        page.get_by_role("button", name=f"Limits… {lane}").click()
        page.get_by_label("Attempts per second").fill("5")
        page.get_by_label("Failure rate").fill("2")
        page.get_by_role("button", name="Set limits").click()
        expect(page.get_by_role("dialog").get_by_text("failureRate")).to_be_visible()
        dashboard.expected_statuses.add(422)
        page.get_by_label("Failure rate").fill("0.25")
        page.get_by_role("button", name="Set limits").click()
        expect(page.get_by_role("cell", name="5/s, breaker set")).to_be_visible()
        limits = tarry_service.request("GET", f"/downstreams/{lane}")[1]["limits"]
        assert {"ratePerSecond": 5.0, "breaker": {"failureRate": 0.25}} == limits
        page.get_by_role("button", name=f"Limits… {lane}").click()
        expect(page.get_by_label("Attempts per second")).to_have_value("5")
        page.get_by_label("Attempts per second").fill("")
        page.get_by_label("Failure rate").fill("")
        page.get_by_role("button", name="Set limits").click()
        expect(page.get_by_role("status").get_by_text("Limits removed")).to_be_visible()
    assert "DEFAULT" == tarry_service.request("GET", f"/downstreams/{lane}")[1]["limitsSource"]


def test_dead_letters_are_grouped_and_replayed(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """A group of dead letters is counted by a dry run, replayed, and its progress is shown."""
    target.statuses["/group"] = [410]
    task = tarry_service.post(
        targetUrl=f"{target.url}/group", laneKey="group", idempotencyKey=f"group {XSS}"
    )
    assert "EXHAUSTED" == tarry_service.wait_until_finished(task["taskId"])["status"]
    target.statuses["/group"] = [200]
    with open_dashboard(browser, tarry_service, width=390) as dashboard:
        page = dashboard.show("dead-letters")
        page.get_by_role("combobox", name="Reason").select_option("permanent")
        page.get_by_role("textbox", name="Downstream").fill(task["lane"])
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url(re.compile("reason=permanent"))
        expect(page.get_by_role("cell", name=f"group {XSS}")).to_be_visible()
        page.get_by_role("button", name=f"Replay permanent {task['lane']}").click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_text("1 dead letter matches now.")).to_be_visible()
        dialog.get_by_label("Tasks per second").fill("5")
        dialog.get_by_role("button", name="Start the replay").click()
        replays = page.get_by_role("region", name="Replays")
        expect(replays.get_by_text("1 of 1 replayed")).to_be_visible()
        expect(replays.get_by_text("1 SUCCEEDED")).to_be_visible()
        expect(page.get_by_text("There are no dead letters that match.")).to_be_visible()
        groups = page.get_by_role("button", name=f"Replay permanent {task['lane']}")
        expect(groups).to_have_count(0)
    assert "SUCCEEDED" == tarry_service.task(task["taskId"])["status"]


def test_dead_letters_that_match_the_form_are_replayed(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The button of the form counts and replays what its fields match, also without a search."""
    task_id = post_dead_letter(tarry_service, target, "/form", "form")
    other_id = post_dead_letter(tarry_service, target, "/form-other", "form-other")
    target.statuses["/form"] = [200]
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("dead-letters")
        page.get_by_label("Idempotency key").fill(f"form {XSS}")
        page.get_by_role("button", name="Replay…", exact=True).click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_text(f"idempotencyKey: form {XSS}")).to_be_visible()
        expect(dialog.get_by_text("1 dead letter matches now.")).to_be_visible()
        dialog.get_by_label("Tasks per second").fill("0")
        dialog.get_by_role("button", name="Start the replay").click()
        replays = page.get_by_role("region", name="Replays")
        replay = replays.get_by_role("row").filter(has_text=f"form {XSS}")
        expect(replay.get_by_role("cell", name="at once")).to_be_visible()
        expect(replay.get_by_text("1 of 1 replayed")).to_be_visible()
    assert "SUCCEEDED" == tarry_service.wait_until_finished(task_id)["status"]
    assert "EXHAUSTED" == tarry_service.task(other_id)["status"]


def test_selected_dead_letters_are_replayed(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The checkboxes select dead letters of the page, and only these are replayed."""
    url = f"{target.url}/select"
    ids = [post_dead_letter(tarry_service, target, f"/select{n}", f"select{n}") for n in range(3)]
    target.statuses |= {f"/select{number}": [200] for number in range(3)}
    with open_dashboard(browser, tarry_service, width=390) as dashboard:
        page = dashboard.show(f"dead-letters?urlPrefix={url}")
        replay = page.get_by_role("button", name="Replay selected…")
        expect(replay).to_be_disabled()
        page.get_by_label("Select all on this page").check()
        page.get_by_label(f"Select {ids[1]}").uncheck()
        expect(page.get_by_label("Select all on this page")).not_to_be_checked()
        replay.click()
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_text("2 selected dead letters are tried again.")).to_be_visible()
        dialog.get_by_label("Tasks per second").fill("10")
        dialog.get_by_role("button", name="Start the replay").click()
        status = page.get_by_role("status").get_by_text("2 of 2 selected dead letters replayed.")
        expect(status).to_be_visible()
        expect(page.get_by_label(f"Select {ids[0]}")).to_have_count(0)
        expect(page.get_by_label(f"Select {ids[1]}")).not_to_be_checked()
        expect(replay).to_be_disabled()
    assert "SUCCEEDED" == tarry_service.wait_until_finished(ids[0])["status"]
    assert "SUCCEEDED" == tarry_service.wait_until_finished(ids[2])["status"]
    assert "EXHAUSTED" == tarry_service.task(ids[1])["status"]


def test_replay_of_selected_dead_letters_is_cancelled(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The dialog shows the progress, and no further dead letter is replayed when it is closed."""
    url = f"{target.url}/stop"
    ids = [post_dead_letter(tarry_service, target, f"/stop{n}", f"stop{n}") for n in range(2)]
    target.statuses |= {"/stop0": [200], "/stop1": [200]}
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show(f"dead-letters?urlPrefix={url}")
        page.get_by_label("Select all on this page").check()
        page.get_by_role("button", name="Replay selected…").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Tasks per second").fill("0.5")
        dialog.get_by_role("button", name="Start the replay").click()
        expect(dialog.get_by_text("1 of 2 replayed")).to_be_visible()
        dialog.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("status").get_by_text("1 of 2 selected")).to_be_visible()
        expect(page.get_by_label(f"Select {ids[0]}")).to_be_checked()
    assert "SUCCEEDED" == tarry_service.wait_until_finished(ids[1])["status"]
    assert "EXHAUSTED" == tarry_service.task(ids[0])["status"]


def test_groups_have_the_dead_letters_of_all_pages(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """The list has 50 dead letters per page; a group has all of them on each page."""
    target.statuses["/many"] = [410]
    tasks = [{"targetUrl": f"{target.url}/many", "laneKey": "many", "body": n} for n in range(51)]
    assert 200 == tarry_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
    lane = f"http:127.0.0.1:{target.port}@many"
    path = f"/dead-letters?lane={lane}&limit=500"
    tarry_service.wait_for(lambda: len(tarry_service.request("GET", path)[1]["items"]) == 51)
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show(f"dead-letters?lane={lane}")
        groups = page.get_by_role("region", name="By reason and downstream")
        row = groups.get_by_role("row", name=f"permanent {lane} 51 410")
        expect(row).to_be_visible()
        expect(groups.get_by_text("All 51 dead letters")).to_be_visible()
        page.get_by_role("link", name="Next page").click()
        expect(page.get_by_role("region", name="Dead letters").get_by_role("row")).to_have_count(2)
        expect(row).to_be_visible()


GROUP = {
    "reason": "permanent",
    "lane": "https:a.example:443",
    "newestTaskId": "t",
    "newestFinishedAt": 1,
    "newestStatus": 410,
    "newestError": None,
}


def send_groups(route: Route) -> None:
    """Respond with one of three pages of groups, with 1, 10 and 100 dead letters."""
    number = int(dict(parse_qsl(urlsplit(route.request.url).query)).get("cursor", "0"))
    next_cursor = str(number + 1) if number < 2 else None
    route.fulfill(json={"items": [GROUP | {"count": 10**number}], "nextCursor": next_cursor})


def test_count_of_older_dead_letters_continues_after_an_error(
    browser: Browser, tarry_service: Service
) -> None:
    """The dead letters that were counted before the error are not counted twice."""
    failures = [503]

    def fail_once(route: Route) -> None:
        if failures and "cursor=2" in route.request.url:
            route.fulfill(status=failures.pop(), json={"detail": "The store is away."})
        else:
            send_groups(route)

    with open_dashboard(browser, tarry_service) as dashboard:
        dashboard.expected_statuses.add(503)
        dashboard.page.route("**/dead-letters/groups*", fail_once)
        page = dashboard.show("dead-letters")
        groups = page.get_by_role("region", name="By reason and downstream")
        expect(groups.get_by_text("The newest 1 dead letters")).to_be_visible()
        count_older = page.get_by_role("button", name="Count older dead letters")
        count_older.click()
        expect(page.get_by_text("The store is away.")).to_be_visible()
        count_older.click()
        expect(groups.get_by_text("All 111 dead letters")).to_be_visible()


def test_counts_of_dead_letters_do_not_overlap(browser: Browser, tarry_service: Service) -> None:
    """A replay that ends while older dead letters are counted does not count any twice."""
    replay = {"replayId": "r", "filter": {}, "rate": 1, "matched": 9, "replayed": 0, "finished": {}}
    replay |= {"createdAt": 1, "finishedAt": None}
    status = ["RUNNING"]
    held: list[Route] = []

    def hold_older(route: Route) -> None:
        if status == ["RUNNING"] and "cursor=1" in route.request.url:
            held.append(route)
        else:
            send_groups(route)

    def send_replays(route: Route) -> None:
        route.fulfill(json={"items": [replay | {"status": status[0]}], "nextCursor": None})

    with open_dashboard(browser, tarry_service) as dashboard:
        dashboard.page.route("**/dead-letters/groups*", hold_older)
        dashboard.page.route("**/dead-letters/replays*", send_replays)
        page = dashboard.show("dead-letters")
        with page.expect_request("**/dead-letters/groups?cursor=1"):
            page.get_by_role("button", name="Count older dead letters").click()
        status[0] = "DONE"
        expect(page.get_by_role("region", name="Replays").get_by_text("DONE")).to_be_visible()
        page.wait_for_timeout(200)
        send_groups(held[0])
        groups = page.get_by_role("region", name="By reason and downstream")
        expect(groups.get_by_text("All 111 dead letters")).to_be_visible()
        page.wait_for_timeout(200)
        expect(groups.get_by_text("All 111 dead letters")).to_be_visible()


def test_only_the_largest_groups_are_shown_at_first(
    browser: Browser, tmp_path: Path, target: HtmlTarget
) -> None:
    """Of more than 100 groups of dead letters, the largest are shown, and all after a click."""
    target.statuses["/groups"] = [410]
    url = f"{target.url}/groups"
    keys = [f"g{number}" for number in (*range(101), 100)]
    tasks = [{"targetUrl": url, "laneKey": key, "body": n} for n, key in enumerate(keys)]
    # A service of its own: with its 101 downstreams, other tests would not find theirs in lists.
    with service(tmp_path) as tarry_service:
        assert 200 == tarry_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
        path = f"/dead-letters?urlPrefix={url}&limit=500"
        tarry_service.wait_for(lambda: len(tarry_service.request("GET", path)[1]["items"]) == 102)
        with open_dashboard(browser, tarry_service) as dashboard:
            page = dashboard.show(f"dead-letters?urlPrefix={url}")
            groups = page.get_by_role("region", name="By reason and downstream")
            expect(groups.get_by_text("the 100 largest of 101 groups")).to_be_visible()
            expect(groups.get_by_role("row")).to_have_count(101)  # with the header
            expect(groups.get_by_role("row").nth(1)).to_contain_text("@g100")
            groups.get_by_role("button", name="Show all 101 groups").click()
            expect(groups.get_by_role("row")).to_have_count(102)
            expect(groups.get_by_text("All 102 dead letters", exact=True)).to_be_visible()


@pytest.mark.parametrize("width", [360, 768, 1025, 1280, 1345])
def test_tables_are_not_wider_than_the_window(
    browser: Browser, tarry_service: Service, target: HtmlTarget, width: int
) -> None:
    """Narrow windows show rows as cards; in others, the columns fit."""
    target.statuses["/a-path-of-some-length/with/parts"] = [410]
    task = tarry_service.post(
        targetUrl=f"{target.url}/a-path-of-some-length/with/parts",
        laneKey=f"customer-{width}-with-a-long-name",
        idempotencyKey=f"order-{width}-2026-11-18T20:15:00.123456",
    )
    tarry_service.wait_until_finished(task["taskId"])
    with open_dashboard(browser, tarry_service, width=width) as dashboard:
        for fragment in ("tasks", "downstreams", "dead-letters"):
            dashboard.show(fragment)
            dashboard.check()


def test_long_url_does_not_fill_the_list(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """A list shows three lines of a long URL; its tooltip and the page of the task show all."""
    url = f"{target.url}/long/{'a-part-of-a-path/' * 60}"
    task = tarry_service.post(targetUrl=url, delayMs=3_600_000)
    with open_dashboard(browser, tarry_service, width=390) as dashboard:
        page = dashboard.show(f"tasks?urlPrefix={quote(f'{target.url}/long/', safe='')}")
        text = page.get_by_title(url, exact=True)
        expect(text).to_contain_text(url)
        line_height = 1.5 * 16
        assert text.evaluate("each => each.parentElement.offsetHeight") <= 3 * line_height
        page = dashboard.show(f"tasks/{task['taskId']}")
        details = page.get_by_role("region", name="Details").get_by_text(f"POST {url}")
        assert details.evaluate("each => each.parentElement.offsetHeight") > 3 * line_height


@pytest.mark.parametrize(
    ("fragment", "error"),
    [
        ("tasks/no-such-task", "There is no such task"),
        ("downstreams/no-such-downstream", "Tenant default has no downstream no-such-downstream"),
    ],
)
def test_page_of_an_unknown_item_has_only_the_error(
    browser: Browser, tarry_service: Service, fragment: str, error: str
) -> None:
    """The page of an unknown task or downstream shows the error, and no empty boxes."""
    with open_dashboard(browser, tarry_service) as dashboard:
        dashboard.expected_statuses.add(404)
        page = dashboard.show(fragment)
        expect(page.get_by_role("alert").get_by_text(error)).to_be_visible()
        expect(page.locator("main .panel:visible, main .loading")).to_have_count(0)


def test_replay_is_cancelled(browser: Browser, tarry_service: Service, target: HtmlTarget) -> None:
    """A running replay has a button that cancels it after a confirmation."""
    target.statuses["/slow"] = [410]
    tasks = [
        tarry_service.post(targetUrl=f"{target.url}/slow", laneKey="slow", body=number)
        for number in range(3)
    ]
    for task in tasks:
        tarry_service.wait_until_finished(task["taskId"])
    body = {"filter": {"lane": tasks[0]["lane"]}, "rate": 0.001}
    assert 201 == tarry_service.request("POST", "/dead-letters/replays", body)[0]
    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("dead-letters")
        replays = page.get_by_role("region", name="Replays")
        replays.get_by_role("button", name="Cancel…").click()
        page.get_by_role("button", name="Cancel the replay").click()
        expect(replays.get_by_text("CANCELLED")).to_be_visible()


def test_policy_is_created_edited_and_deleted(browser: Browser, tarry_service: Service) -> None:
    """The form of a policy draws its delays, reports an invalid field, and saves new versions."""
    name = "orders"
    with open_dashboard(browser, tarry_service, width=390, scheme="dark") as dashboard:
        page = dashboard.show("policies")
        webhook = page.get_by_role("row", name=re.compile("webhook.* built in"))
        expect(webhook).to_be_visible()
        page.get_by_label("Name of a new policy").fill(name)
        page.get_by_role("button", name="New policy").click()
        page.get_by_label("Attempts at most").fill("4")
        page.get_by_label("First delay (ms)").fill("200")
        delays = page.get_by_role("region", name="Delays")
        expect(delays.get_by_text("At most 3 retries, longest wait 1.4 s.")).to_be_visible()
        expect(delays.get_by_role("img", name="from 200 ms to 800 ms")).to_be_visible()
        expect(delays.locator("rect.band")).to_have_count(3)
        expect(delays.locator("line.ceiling")).to_have_count(3)
        page.get_by_label("Multiplier").fill("-1")
        expect(page.get_by_role("alert").get_by_text("multiplier must be")).to_be_visible()
        expect(page.get_by_label("Multiplier")).to_have_attribute("aria-invalid", "true")
        dashboard.expected_statuses.add(422)
        page.get_by_label("Multiplier").fill("3")
        statuses = page.get_by_label("Retried statuses")
        expect(statuses).to_have_value("408, 425, 429, 500, 502-504, 507, 509, 512-599")
        statuses.fill("429, 452-454, 5xx")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text(f"Saved {name}, version 1.")).to_be_visible()
        expect(page.get_by_label("First delay (ms)")).to_have_value("200")
        expect(statuses).to_have_value("429, 452-454, 500-599")
        page.get_by_role("combobox", name="Backoff").select_option("SCHEDULE")
        page.get_by_label("Schedule (ms)").fill("1000, 60000")
        page.get_by_role("button", name="Save").click()
        expect(page.get_by_text(f"Saved {name}, version 2.")).to_be_visible()
        delays.get_by_text("As a table").click()
        expect(delays.get_by_role("row", name=re.compile("3 .*1 min"))).to_be_visible()
        page.get_by_role("button", name="Delete…").click()
        page.get_by_role("button", name="Delete this policy").click()
        expect(page.get_by_text(f"Deleted {name}.")).to_be_visible()
        expect(webhook).to_be_visible()
        expect(page.get_by_role("link", name=name)).to_have_count(0)


def test_message_is_shown_when_the_next_page_is_complete(
    browser: Browser, tarry_service: Service
) -> None:
    """Until the page of a new policy is complete, nothing says that the policy was saved."""
    name, delayed = "delayed-page", list[Route]()
    saved = f"Saved {name}, version 1."
    with open_dashboard(browser, tarry_service, width=1440, scheme="light") as dashboard:
        page = dashboard.show(f"policies/{name}?new=1")
        expect(page.get_by_role("button", name="Save")).to_be_visible()

        def delay_reads(route: Route) -> None:
            delayed.append(route) if route.request.method == "GET" else route.continue_()

        page.route(f"**/retry-policies/{name}", delay_reads)
        with page.expect_request(
            lambda request: request.url.endswith(name) and request.method == "GET"
        ):
            page.get_by_role("button", name="Save").click()
        expect(page.get_by_text(saved)).to_have_count(0)
        delayed[0].continue_()
        expect(page.get_by_text(saved)).to_be_visible()


def test_problem_of_a_policy_stays_until_a_later_request(
    browser: Browser, tarry_service: Service, target: HtmlTarget
) -> None:
    """Neither a late drawing nor the choice of a downstream removes the problem that is shown."""
    tarry_service.wait_until_finished(tarry_service.post(targetUrl=target.url)["taskId"])
    held: list[Route] = []

    def hold_first(route: Route) -> None:
        held.append(route)
        if len(held) > 1:
            route.continue_()

    with open_dashboard(browser, tarry_service) as dashboard:
        page = dashboard.show("policies/patient")
        problem = page.get_by_role("alert").get_by_text("multiplier must be")
        page.route("**/policy-schedules", hold_first)
        with page.expect_request("**/policy-schedules"):
            page.get_by_label("First delay (ms)").fill("200")
        page.get_by_label("Multiplier").fill("-1")
        expect(problem).to_be_visible()
        with page.expect_response(lambda response: response.status == 200):
            held[0].continue_()
        page.wait_for_timeout(100)  # the page handles the response
        expect(problem).to_be_visible()

        page.get_by_label("Multiplier").fill("2")
        expect(problem).to_have_count(0)
        lane = page.get_by_role("combobox", name="Downstream")
        lane.fill(f"http:127.0.0.1:{target.port}")
        page.get_by_role("button", name="Advise").click()
        too_few = page.get_by_role("alert").get_by_text("advice needs 200")
        expect(too_few).to_be_visible()
        page.wait_for_timeout(500)  # longer than the page waits before it draws
        expect(too_few).to_be_visible()
        dashboard.expected_statuses.add(422)


def test_policy_is_simulated_before_it_is_saved(browser: Browser, tarry_service: Service) -> None:
    """The button simulates the fields of the form, and shows a chart with its figures.

    A change of the form changes the result of the next simulation; an invalid field is marked.
    """
    with open_dashboard(browser, tarry_service, width=390, scheme="dark") as dashboard:
        page = dashboard.show("policies/unsaved?new=1")
        button = page.get_by_role("button", name="Simulate this policy")
        button.click()
        simulation = page.get_by_role("region", name="Simulation")
        chart = simulation.get_by_role("img", name=re.compile("Requests at the target per second"))
        expect(chart).to_be_visible()
        expect(page.get_by_role("status").get_by_text("requests per call")).to_be_visible()
        expect(button).to_be_focused()
        label = chart.get_attribute("aria-label")
        row = simulation.get_by_role("row", name=re.compile("Requests per call"))
        expect(row.get_by_role("cell").last).to_have_text("1")
        simulation.get_by_role("group", name=re.compile("arrow keys")).press("Home")
        expect(simulation.get_by_text(re.compile("^0 s: this policy .*/s"))).to_be_visible()
        simulation.get_by_text("As a table").click()
        expect(simulation.get_by_role("row", name=re.compile("1 min 59 s"))).to_be_visible()
        page.get_by_label("Attempts at most").fill("1")
        button.click()
        expect(row.get_by_role("cell").first).to_have_text("1")
        assert label != chart.get_attribute("aria-label")
        page.get_by_label("First delay (ms)").fill("-5")
        button.click()
        expect(page.get_by_role("alert").get_by_text("initialDelayMs must be")).to_be_visible()
        dashboard.expected_statuses.add(422)


def test_policy_is_advised_from_recorded_attempts(browser: Browser, tarry_service: Service) -> None:
    """The advice shows current and proposed values with reasons, and fills them into the form.

    The policy is not saved. With too few attempts, the form shows how many are needed.
    """
    with (
        html_target() as target,
        open_dashboard(browser, tarry_service, width=390, scheme="dark") as dashboard,
    ):
        lane = f"http:127.0.0.1:{target.port}"
        tarry_service.wait_until_finished(tarry_service.post(targetUrl=target.url)["taskId"])
        page = dashboard.show("policies/patient")
        page.get_by_role("combobox", name="Downstream").fill(lane)
        expect(page.locator(f"datalist option[value='{lane}']")).to_be_attached()
        page.get_by_label("Schedule (ms)").fill("soon")  # the advice is for the saved policy
        button = page.get_by_role("button", name="Advise")
        button.click()
        problem = page.get_by_role("alert").get_by_text(
            "lane has 1 recorded attempt, but advice needs 200"
        )
        expect(problem).to_be_visible()
        page.get_by_label("Schedule (ms)").fill("")
        dashboard.expected_statuses.add(422)

        tasks = [{"targetUrl": target.url}] * 210
        assert 200 == tarry_service.request("POST", "/retry-tasks/batch", {"tasks": tasks})[0]
        path = f"/retry-tasks?lane={lane}&status=SUCCEEDED&limit=500"
        tarry_service.wait_for(lambda: len(tarry_service.request("GET", path)[1]["items"]) == 211)
        button.click()
        advice = page.get_by_role("region", name="Advice")
        expect(advice.get_by_text("From 211 attempts of 211 calls")).to_be_visible()
        expect(button).to_be_focused()
        row = advice.get_by_role("row", name=re.compile("First delay"))
        expect(row).to_contain_text("twice the median")
        first_delay = page.get_by_label("First delay (ms)")
        before = first_delay.input_value()
        advice.get_by_role("button", name="Use these values").click()
        expect(first_delay).not_to_have_value(before)
        expect(page.get_by_role("status").get_by_text("not saved yet")).to_be_visible()
        assert tarry_service.request("GET", "/retry-policies/patient")[1]["version"] is None
