"""The API reference at `/docs` in a real browser, with a service that requires API keys."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.integration.browser import PAGE_TIMEOUT_MS, chromium
from tests.integration.dashboard import XSS, Scheme
from tests.integration.tenants import Tenants, two_tenants

pytestmark = pytest.mark.timeout(300)

expect.set_options(timeout=PAGE_TIMEOUT_MS)


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Run a service with two tenants."""
    with two_tenants(tmp_path_factory.mktemp("service")) as tenants:
        yield tenants


@pytest.fixture(scope="module")
def browser(tenants: Tenants) -> Iterator[Browser]:
    """Run Chromium, after `asyncio.run` of the other fixture: Playwright has its own event loop."""
    with chromium() as browser:
        yield browser


class Reference:
    """The open reference, with everything that went wrong on it."""

    def __init__(self, browser: Browser, tenants: Tenants, width: int, scheme: Scheme) -> None:
        self.url = f"http://127.0.0.1:{tenants.service.port}/docs"
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page.set_default_timeout(PAGE_TIMEOUT_MS)
        self.messages: list[str] = []
        """Console messages, which include violations of the content security policy, and errors."""
        self.requested_urls: list[str] = []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requested_urls.append(request.url))

    def open(self, fragment: str = "") -> None:
        """Open the page and wait until all operations are shown."""
        self.page.goto(f"{self.url}{fragment}")
        expect(self.page.locator("#operations-Monitoring-getMetrics")).to_be_visible()

    def authorize(self, api_key: str) -> None:
        """Enter an API key."""
        self.page.get_by_role("button", name="Authorize").first.click()
        dialog = self.page.locator(".dialog-ux")
        dialog.get_by_label("Value").first.fill(api_key)
        dialog.get_by_role("button", name="Apply credentials").first.click()
        dialog.get_by_role("button", name="Close").first.click()

    def start_trying(self, operation: str) -> Locator:
        """Open an operation, such as `Tasks-createTask`, and make its fields editable."""
        section = self.page.locator(f"#operations-{operation}")
        section.locator(".opblock-summary-control").click()
        section.get_by_role("button", name="Try it out").click()
        return section

    def execute(self, section: Locator) -> tuple[int, str]:
        """Send the request of an operation; return the status and the body of the response."""
        section.get_by_role("button", name="Execute").click()
        response = section.locator(".live-responses-table .response")
        status = int(response.locator(".response-col_status").inner_text().split()[0])
        return status, response.locator(".highlight-code pre").first.inner_text()


@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_operations_are_shown_and_tried(
    browser: Browser, tenants: Tenants, width: int, scheme: Scheme
) -> None:
    """With an API key, operations can be tried; the page shows data as text and uses one host."""
    reference = Reference(browser, tenants, width, scheme)
    page = reference.page
    paths = tenants.service.request("GET", "/openapi.json")[1]["paths"]
    reference.open()

    assert sum(map(len, paths.values())) == page.locator(".opblock").count()
    reference.authorize(tenants.secrets["ann"])
    section = reference.start_trying("Tasks-createTask")
    key = f"{width} {XSS}"
    task = {"targetUrl": "https://example.com/", "idempotencyKey": key, "delayMs": 3_600_000}
    section.locator("textarea").fill(json.dumps(task))
    status, created = reference.execute(section)
    assert (201, key) == (status, json.loads(created)["idempotencyKey"])
    section = reference.start_trying("Tasks-getTask")
    section.get_by_placeholder("taskId").fill(json.loads(created)["taskId"])
    status, found = reference.execute(section)
    assert (200, key) == (status, json.loads(found)["idempotencyKey"])

    assert page.evaluate("window.pwned") is None
    assert ("dark" == scheme) == page.evaluate("document.documentElement.matches('.dark-mode')")
    assert width == page.evaluate("document.documentElement.scrollWidth")
    assert [] == reference.messages
    origin = reference.url.removesuffix("docs")
    foreign = [url for url in reference.requested_urls if not url.startswith((origin, "data:"))]
    assert [] == foreign
    page.close()


def test_a_request_without_an_api_key_shows_the_problem(browser: Browser, tenants: Tenants) -> None:
    """Without an API key, the response is a problem, whose type links to its row."""
    reference = Reference(browser, tenants, 1440, "light")
    reference.open()
    # Chromium itself logs responses with an error status, perhaps after the page has shown them.
    with reference.page.expect_console_message(lambda message: "401" in message.text):
        status, body = reference.execute(reference.start_trying("Tasks-listTasks"))
    assert 401 == status
    assert 1 == len(reference.messages)

    reference.page.goto("about:blank")
    reference.open("#" + json.loads(body)["type"].partition("#")[2])
    expect(reference.page.locator("tr:target")).to_contain_text("api-key-required")
    expect(reference.page.locator("tr:target")).to_be_in_viewport()
    reference.page.close()
