"""Listeners of the event bus."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import tarry
from tarry import Succeeded
from tarry.testing import VirtualClock, captured_events
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver


def succeed() -> str:
    """Return a result."""
    return "done"


def operations(events: list[tarry.Event]) -> list[str]:
    """Return the names of the calls that succeeded."""
    return [event.operation for event in events if isinstance(event, Succeeded)]


def test_listener_gets_events_until_it_is_removed() -> None:
    received: list[tarry.Event] = []

    tarry.call(succeed, on=ConnectionError, name="before")
    remove = tarry.listen(received.append)
    tarry.call(succeed, on=ConnectionError, name="during")
    remove()
    tarry.call(succeed, on=ConnectionError, name="after")

    assert ["during"] == operations(received)


def test_listener_can_be_removed_twice() -> None:
    """Removing a listener again does nothing."""
    received: list[tarry.Event] = []
    remove = tarry.listen(received.append)

    remove()
    remove()

    tarry.call(succeed, on=ConnectionError)
    assert [] == received


def test_listener_that_was_added_twice() -> None:
    """A listener that was added twice gets each event twice, and is removed twice."""
    received: list[tarry.Event] = []
    listener = received.append
    remove_first = tarry.listen(listener)
    remove_second = tarry.listen(listener)

    try:
        tarry.call(succeed, on=ConnectionError, name="twice")
        assert ["twice", "twice"] == operations(received)
        remove_first()
        remove_first()  # the second removal has no effect
        received.clear()
        tarry.call(succeed, on=ConnectionError, name="once")
        assert ["once"] == operations(received)
    finally:
        remove_first()
        remove_second()


def test_listeners_are_called_in_order() -> None:
    """Listeners are called in the order in which they were added."""
    received: list[str] = []
    removers = [
        tarry.listen(lambda _: received.append("first")),
        tarry.listen(lambda _: received.append("second")),
    ]

    tarry.call(succeed, on=ConnectionError)

    for remove in removers:
        remove()
    assert ["first", "second"] * 2 == received


def test_decorated_before_the_listener_was_added() -> None:
    """A listener gets events of functions that were decorated before it was added."""
    decorated = tarry.retry(on=ConnectionError, name="early")(succeed)
    decorated()

    with captured_events() as events:
        decorated()

    assert ["early"] == operations(events)


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_listener_that_raises(
    driver: Driver, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A listener that raises affects neither the call nor other listeners, and is logged."""

    def broken(_event: tarry.Event) -> None:
        raise RuntimeError("a bug in the listener")

    remove = tarry.listen(broken)
    try:
        with captured_events() as events:
            assert "done" == driver.run(clock, Dependency(clock, FAIL, OK))
    finally:
        remove()

    assert ["op"] == operations(events)
    reports = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert 6 == len(reports)
    assert "a bug in the listener" in caplog.text


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_call_without_listeners(driver: Driver, clock: VirtualClock) -> None:
    """Without listeners and with logging off, a call works as usual."""
    logger = logging.getLogger("tarry")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        assert "done" == driver.run(clock, Dependency(clock, FAIL, OK))
        with pytest.raises(ConnectionError) as caught:
            driver.run(clock, Dependency(clock, FAIL))
    finally:
        logger.setLevel(level)

    assert 1 == len(caught.value.__notes__)


class Listener:
    """A listener whose class is passed instead of an object."""

    def __call__(self, event: tarry.Event) -> None:
        """Ignore the event."""


@pytest.mark.parametrize(
    ("invalid", "advice"), [(Listener, r": pass Listener\(\)$"), ("log", "got 'log'$")]
)
def test_invalid_listeners_are_rejected(invalid: Any, advice: str) -> None:
    """A listener that is a class or a text is rejected."""
    with pytest.raises(tarry.ConfigurationTypeError, match=f"the event as its argument.*{advice}"):
        tarry.listen(invalid)


def test_listener_may_make_calls_itself(clock: VirtualClock) -> None:
    """A listener may make a call with retries, which does not deadlock."""
    downstream = tarry.Downstream("payments", breaker=tarry.Breaker(), budget=tarry.TokenBudget())

    def report(event: tarry.Event) -> None:
        if isinstance(event, tarry.AttemptFailed) and event.operation == "op":
            tarry.call(succeed, on=ConnectionError, name="report", downstream=downstream)

    remove = tarry.listen(report)
    try:
        with captured_events() as events:
            tarry.call(
                Dependency(clock, FAIL, OK).call,
                on=ConnectionError,
                name="op",
                downstream=downstream,
            )
    finally:
        remove()

    assert ["report", "op"] == operations(events)


def test_listener_may_remove_itself() -> None:
    """A listener that removes itself gets no more events."""
    received: list[tarry.Event] = []

    def once(event: tarry.Event) -> None:
        received.append(event)
        remove()

    remove = tarry.listen(once)
    tarry.call(succeed, on=ConnectionError)

    assert 1 == len(received)


def test_events_are_immutable_values() -> None:
    """Events are equal by their fields and cannot be changed."""
    event = Succeeded("op", None, 1)

    assert Succeeded("op", None, 1) == event
    with pytest.raises(AttributeError):
        event.attempts = 2  # type: ignore[misc]
