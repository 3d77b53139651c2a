"""The dashboard of a real service in a real browser, and a target that responds with HTML."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, Page, Request

from tests.integration.browser import PAGE_TIMEOUT_MS
from tests.integration.service import Service

Scheme = Literal["light", "dark"]
IDLE_CHECK_MS = 200
READ_INTERVAL_MS = 500
"""The interval at which a page reads its data while they change."""

XSS = "<img/src=x/onerror='window.pwned=1'><svg/onload=\"window.pwned=1\">"
"""HTML that sets a variable of the page if it is not shown as text. Valid in a URL: no spaces."""


class OpenedDashboard:
    """An open page of the dashboard, with everything that went wrong on it."""

    def __init__(self, browser: Browser, service: Service, width: int, scheme: Scheme) -> None:
        self.url = f"http://127.0.0.1:{service.port}/"
        self.page: Page = browser.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        self.page.set_default_timeout(PAGE_TIMEOUT_MS)
        self.width = width
        self.messages: list[str] = []
        """Console messages, errors, and requests to other hosts."""
        self.expected_statuses: set[int] = set()
        """Error statuses of responses. Chromium logs them, perhaps after they are shown."""
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", self._check_host)
        self._open_streams: set[Request] = set()
        """Requests for `/events` that have not ended."""
        self.page.on("requestfinished", self._remove_stream)
        self.page.on("requestfailed", self._remove_stream)

    def _check_host(self, request: Request) -> None:
        if request.url == f"{self.url}events":
            self._open_streams.add(request)
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.messages.append(f"requested: {request.url}")

    def _remove_stream(self, request: Request) -> None:
        self._open_streams.discard(request)

    def show(self, fragment: str) -> Page:
        """Open a page of the dashboard, such as `tasks?status=PENDING`."""
        # A change of the fragment does not load the document again, so the page is reloaded.
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}#/{fragment}")
        self.wait_until_shown()
        return self.page

    def wait_until_shown(self) -> None:
        """Wait until the data of the page is shown."""
        self.page.wait_for_selector("main:not([aria-busy]) h1")

    @contextmanager
    def read_after_event(self, url: str) -> Iterator[None]:
        """Stop the timers of a live page; at the end wait until it has read `url` after an event.

        Call `page.clock.install()` before the page is loaded, and `page.clock.resume()` at the end.
        """
        page = self.page
        live = page.get_by_role("status").get_by_text("Live", exact=True)
        live.wait_for()
        page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)
        page.wait_for_timeout(IDLE_CHECK_MS)
        while not self._open_streams:  # the page still reads changes of its data
            page.clock.run_for(READ_INTERVAL_MS)
            page.wait_for_timeout(IDLE_CHECK_MS)
        with page.expect_response(url):
            yield

    def check_text(self) -> None:
        """Check that the page has not used HTML of others."""
        assert self.page.evaluate("window.pwned") is None
        assert 0 == self.page.locator("main img, main script").count()

    def check(self) -> None:
        """Check that nothing failed, no HTML of others was used, and the page is not too wide."""
        expected = [f"responded with a status of {status} " for status in self.expected_statuses]
        unexpected = [
            message for message in self.messages if not any(text in message for text in expected)
        ]
        assert [] == unexpected
        self.check_text()
        assert self.width == self.page.evaluate("document.documentElement.scrollWidth")
        unnamed: list[str] = self.page.evaluate(UNNAMED_CONTROLS)
        assert [] == unnamed


@contextmanager
def open_dashboard(
    browser: Browser, service: Service, *, width: int = 1280, scheme: Scheme = "light"
) -> Iterator[OpenedDashboard]:
    """Open the dashboard; check at the end that nothing went wrong."""
    dashboard = OpenedDashboard(browser, service, width, scheme)
    try:
        yield dashboard
        dashboard.check()
    finally:
        dashboard.page.close()


class HtmlTarget:
    """A target whose responses contain HTML. `statuses` are the statuses of paths, in order."""

    def __init__(self) -> None:
        self.statuses: dict[str, list[int]] = {}
        """By path; the last status is repeated. Other paths have the status 200."""
        self.retry_after: dict[str, str] = {}
        """The header of the next response, by path."""
        target = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                statuses = target.statuses.get(self.path, [200])
                body = XSS.encode()
                self.send_response(statuses.pop(0) if len(statuses) > 1 else statuses[0])
                if self.path in target.retry_after:
                    self.send_header("retry-after", target.retry_after.pop(self.path))
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST  # noqa: N815 - named by BaseHTTPRequestHandler

            def log_message(self, *_args: object) -> None:
                """Log nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port: int = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@contextmanager
def html_target() -> Iterator[HtmlTarget]:
    """Run a target."""
    target = HtmlTarget()
    try:
        yield target
    finally:
        target.server.shutdown()
        target.server.server_close()


UNNAMED_CONTROLS = """() => [
    ...document.querySelectorAll("button, input, select, textarea, a, svg"),
  ].filter((control) => {
    const name = control.getAttribute("aria-label") || control.textContent.trim() ||
      [...(control.labels ?? [])].map((label) => label.textContent.trim()).join("");
    return !name && !control.closest("[hidden]");
  }).map((control) => control.outerHTML)"""
