"""A real Chromium for tests of pages."""

from __future__ import annotations

from benchmarks.chromium import CHROMIUM_ARGUMENTS, chromium

__all__ = ["CHROMIUM_ARGUMENTS", "PAGE_TIMEOUT_MS", "chromium"]

PAGE_TIMEOUT_MS = 240_000
"""Only a page that hangs takes this long. Playwright's 30 s were too short on a busy machine."""
