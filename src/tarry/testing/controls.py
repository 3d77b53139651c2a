"""Context managers for tests. Each of them affects the whole process."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from tarry.core.checks import check_count
from tarry.errors import ConfigurationError
from tarry.runtime.clocks import system
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from tarry.core.events import Event
    from tarry.runtime.clocks import CancelToken


@contextmanager
def no_wait() -> Generator[None]:
    """Make every wait return at once. Decisions, delays and events are unchanged."""
    previous = system.sleep, system.async_sleep
    system.sleep, system.async_sleep = _sleep, _async_sleep
    try:
        yield
    finally:
        system.sleep, system.async_sleep = previous


@contextmanager
def capped_attempts(max_attempts: int) -> Generator[None]:
    """Limit every call to `max_attempts` attempts."""
    previous = system.max_attempts
    system.max_attempts = check_count("max_attempts", max_attempts)
    try:
        yield
    finally:
        system.max_attempts = previous


@contextmanager
def scripted_random(numbers: Iterable[float]) -> Generator[None]:
    """Use these numbers instead of random numbers; the last number is repeated."""
    script = [float(number) for number in numbers]
    if not script or not all(0 <= number < 1 for number in script):
        raise ConfigurationError("numbers", "must be at least one number from [0, 1)", script)
    script.reverse()

    def draw() -> float:
        return script.pop() if len(script) > 1 else script[0]

    previous = system.draw
    system.draw = draw
    try:
        yield
    finally:
        system.draw = previous


@contextmanager
def captured_events() -> Generator[list[Event]]:
    """Collect every event into a list."""
    events: list[Event] = []
    remove = bus.listen(events.append)
    try:
        yield events
    finally:
        remove()


def _sleep(seconds: float, cancel: CancelToken | None) -> None:
    """Return at once."""


async def _async_sleep(seconds: float) -> None:
    """Return at once."""
