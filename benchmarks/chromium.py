"""Starts Chromium for the benchmark of the dashboard and for the tests of pages."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from playwright.sync_api import Browser, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

CHROMIUM_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium_path() -> str:
    """Return the path of Chromium, or raise FileNotFoundError with the install command."""
    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError(
            "no chromium on PATH: run .ci/programs, or apt-get install chromium as root"
        )
    return path


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium."""
    path = chromium_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(CHROMIUM_ARGUMENTS))
        yield browser
        browser.close()
