"""A real Chromium for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

PAGE_TIMEOUT_MS = 240_000
"""Only a page that hangs takes this long. Playwright's 30 s were too short on a busy machine."""
CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium, or fail with the install command."""
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("no chromium on PATH: run .ci/programs, or apt-get install chromium as root")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        yield browser
        browser.close()
