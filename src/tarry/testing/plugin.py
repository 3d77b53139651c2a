"""The pytest plugin: fixtures and a marker for tests of programs that use tarry.

tarry_no_wait     waits return at once
tarry_events      the events of the test, as a list
tarry_clock       virtual time
@pytest.mark.tarry(attempts=2, wait=False)   caps attempts and skips waits
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from tarry.testing import VirtualClock, capped_attempts, captured_events, no_wait

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tarry.core.events import Event


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "tarry(attempts=None, wait=True): cap attempts, or skip waits, in this test"
    )


@pytest.fixture(autouse=True)
def _tarry_marker(request: pytest.FixtureRequest) -> Iterator[None]:
    marker = request.node.get_closest_marker("tarry")
    if marker is None:
        yield
        return
    unknown = [*map(repr, marker.args), *(set(marker.kwargs) - {"attempts", "wait"})]
    if unknown:
        msg = f"@pytest.mark.tarry takes attempts= and wait=, got {', '.join(unknown)}"
        raise pytest.UsageError(msg)
    with ExitStack() as stack:
        if marker.kwargs.get("attempts") is not None:
            stack.enter_context(capped_attempts(marker.kwargs["attempts"]))
        if marker.kwargs.get("wait", True) is False:
            stack.enter_context(no_wait())
        yield


@pytest.fixture
def tarry_no_wait() -> Iterator[None]:
    """Make every wait return at once."""
    with no_wait():
        yield


@pytest.fixture
def tarry_events() -> Iterator[list[Event]]:
    """Collect the events of this test."""
    with captured_events() as events:
        yield events


@pytest.fixture
def tarry_clock() -> Iterator[VirtualClock]:
    """Run the test in virtual time."""
    with VirtualClock() as clock:
        yield clock
