"""Virtual time for tests of the engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.service.engine.harness import run


@pytest.fixture(autouse=True)
def run_async() -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Run coroutine functions on virtual time."""
    return run
