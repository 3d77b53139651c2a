"""The documentation site, built by mkdocs and read with a real browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

import tarry
from tests.integration.browser import CHROMIUM_ARGUMENTS, PAGE_TIMEOUT_MS
from tests.openapi_document import get_openapi_document
from tests.public_api import PUBLIC_MODULES
from tests.test_docs import DOCS, ROOT

pytestmark = pytest.mark.timeout(300)

EXTERNAL_RESOURCE = re.compile(
    r"<(?:script|img|iframe|link(?! rel=\"?canonical))\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>"
)


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_args: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; any warning, such as a link to a missing heading, is an error."""
    python = ROOT / ".venv" / "docs" / "bin" / "python"
    assert python.exists(), "the environment of mkdocs is missing: run `make docs`"
    folder = tmp_path_factory.mktemp("documentation") / "site"

    done = subprocess.run(
        [str(python), "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    return folder


def test_site_has_every_page(site: Path) -> None:
    """The site has each page of docs/ and the generated pages, which load nothing from others."""
    pages = {path.stem: path.read_text("utf-8") for path in site.glob("*.html")}

    generated = {"reference-cli", "reference-http", "reference-python"}
    assert {path.stem for path in DOCS.glob("*.md")} | generated == set(pages) - {"404"}
    assert [] == [found for text in pages.values() for found in EXTERNAL_RESOURCE.findall(text)]


def test_reference_has_the_public_names_operations_and_commands(site: Path) -> None:
    """The generated pages have headings for public names, API operations, types and commands."""
    headings = {
        name: set(re.findall(r'<h[23] id="([^"]+)"', (site / f"{name}.html").read_text("utf-8")))
        for name in ("reference-cli", "reference-http", "reference-python")
    }

    names = {f"tarry.{name}" for name in tarry.__all__ if f"tarry.{name}" not in PUBLIC_MODULES}
    assert names | {"tarry.client.ServiceError"} <= headings["reference-python"]
    schemas = get_openapi_document()["components"]["schemas"]
    assert {"post-retry-tasks", *map(str.lower, schemas)} <= headings["reference-http"]
    assert {"tarry-serve", "tarry-tasks-list"} <= headings["reference-cli"]


def test_code_of_the_pages_is_highlighted(site: Path) -> None:
    """No code fence is shown as text, although tests use words after the language of a fence."""
    for page in site.glob("*.html"):
        text = page.read_text("utf-8")
        assert "```" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL), page.name


@pytest.fixture
def site_url(site: Path) -> Iterator[str]:
    """Serve the site on this machine."""
    handler = partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def test_search_finds_a_page(site_url: str) -> None:
    """A reader finds a page with the search, without errors and requests to other hosts."""
    path = shutil.which("chromium")
    assert path is not None, "no chromium on PATH: run .ci/programs"
    messages: list[str] = []
    urls: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(PAGE_TIMEOUT_MS)
        page.on("console", lambda message: messages.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(site_url)

        page.locator(".md-search__input").fill("TarryBreakerFlapping")
        page.locator(".md-search-result__link").first.click()
        page.wait_for_url("**/alerts.html*")

        heading = page.locator("h1").inner_text()
        browser.close()

    assert "Alerts and dashboard" in heading
    assert [] == messages
    assert [] == [url for url in urls if not url.startswith(site_url)]


def test_copy_button_copies_commands(site_url: str) -> None:
    """The copy button of a console block copies neither prompts nor output."""
    path = shutil.which("chromium")
    assert path is not None, "no chromium on PATH: run .ci/programs"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        page = context.new_page()
        page.set_default_timeout(PAGE_TIMEOUT_MS)
        page.goto(f"{site_url}service.html")
        copied: list[str] = []
        for block in page.locator(".highlight").all()[:2]:
            block.hover()
            block.locator("button[data-md-type=copy]").click()
            copied.append(page.evaluate("navigator.clipboard.readText()"))
        browser.close()

    install, curl = copied
    assert ["tarry serve --dev"] == install.splitlines()[1:]
    assert install.startswith("pip install 'tarry[service]'")
    assert (
        """curl -s http://127.0.0.1:8080/retry-tasks -H 'Content-Type: application/json' \\
    -H 'Prefer: wait=5' -d '{"targetUrl": "http://127.0.0.1:8080/healthz", "method": "GET"}'"""
        == curl
    )
