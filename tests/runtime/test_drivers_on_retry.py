"""`on_retry=`: a function or a logger for the retries of one function."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import tarry
from tarry.runtime.config import RetryConfig
from tarry.testing import VirtualClock
from tests.runtime.drivers import (
    ASYNC_DRIVERS,
    DRIVERS,
    FAIL,
    OK,
    SYNC_DRIVERS,
    Dependency,
    Driver,
    async_sleep,
)

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


@every_driver
def test_hook_gets_the_event_before_each_wait(driver: Driver, clock: VirtualClock) -> None:
    """The function is called with a `WillWait` before each wait, and not after the last attempt."""
    calls: list[tuple[float, tarry.WillWait]] = []
    dependency = Dependency(clock, FAIL)

    with pytest.raises(ConnectionError):
        driver.run(
            clock,
            dependency,
            attempts=3,
            on_retry=lambda event: calls.append((round(clock.elapsed, 6), event)),
        )

    assert [(0, 1, 0.05), (0.05, 2, 0.1)] == [
        (time, event.retry, event.delay) for time, event in calls
    ]
    for _time, event in calls:
        assert ("op", 2, "ConnectionError") == (event.operation, event.max_retries, event.detail)
        assert isinstance(event.error, ConnectionError)


@every_driver
def test_hook_is_called_while_the_log_is_off(
    driver: Driver, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The function is called before each wait, also if no log and no listener needs events."""
    caplog.set_level(logging.CRITICAL, "tarry")
    retries: list[int] = []

    driver.run(
        clock, Dependency(clock, FAIL, FAIL, OK), on_retry=lambda event: retries.append(event.retry)
    )

    assert [1, 2] == retries


def test_hook_does_not_make_successful_calls_slower() -> None:
    """With a hook, a call that succeeds at once still needs no `RunningCall`."""
    assert not RetryConfig(on=OSError, on_retry=print).needs_slow_path


@every_driver
def test_hook_is_not_called_without_a_retry(driver: Driver, clock: VirtualClock) -> None:
    """A call that succeeds at once does not call the function."""
    events: list[tarry.WillWait] = []

    assert "done" == driver.run(clock, Dependency(clock, OK), on_retry=events.append)

    assert [] == events


@every_driver
def test_hook_gets_the_event_of_the_listeners(driver: Driver, clock: VirtualClock) -> None:
    """The function gets an event that is equal to the one that listeners get."""
    hooked: list[tarry.Event] = []
    heard: list[tarry.Event] = []
    remove = tarry.listen(heard.append)
    driver.run(clock, Dependency(clock, FAIL, OK), on_retry=hooked.append)
    remove()

    assert hooked == [event for event in heard if isinstance(event, tarry.WillWait)]


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
def test_coroutine_function_is_awaited(driver: Driver, clock: VirtualClock) -> None:
    """The hook of an async call may be a coroutine function; the wait starts after it."""
    events: list[tarry.WillWait] = []
    dependency = Dependency(clock, FAIL, OK)

    async def renew_token(event: tarry.WillWait) -> None:
        await async_sleep(1.0)
        events.append(event)

    assert "done" == driver.run(clock, dependency, on_retry=renew_token)

    assert 1 == len(events)
    assert [0, 1.05] == dependency.starts


@every_driver
def test_error_of_the_hook_is_ignored(
    driver: Driver, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that raises does not affect the call; its error is logged."""

    def fail(event: tarry.WillWait) -> None:
        raise LookupError("a bug in the hook")

    assert "done" == driver.run(clock, Dependency(clock, FAIL, OK), on_retry=fail)

    assert "on_retry raised an error, which is ignored, function=<function " in caplog.text
    assert "a bug in the hook" in caplog.text


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
def test_error_of_an_async_hook_is_ignored(
    driver: Driver, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A coroutine function that raises does not affect the call; its error is logged."""

    async def fail(event: tarry.WillWait) -> None:
        raise LookupError("a bug in the hook")

    assert "done" == driver.run(clock, Dependency(clock, FAIL, OK), on_retry=fail)

    assert "a bug in the hook" in caplog.text


@every_driver
@pytest.mark.parametrize("is_adapter", [False, True])
def test_logger_logs_the_retries(
    driver: Driver, is_adapter: bool, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A logger logs the retries; the logger "tarry" logs only the other events."""
    caplog.set_level(logging.INFO)
    logger = logging.getLogger("app.billing")
    on_retry: Any = logging.LoggerAdapter(logger, {}) if is_adapter else logger

    driver.run(clock, Dependency(clock, FAIL, OK), on_retry=on_retry)

    assert [
        ("app.billing", "op: ConnectionError; retry 1 of 3 in 50 ms (ceiling 100 ms)"),
        ("tarry", "op: succeeded on attempt 2"),
    ] == [(record.name, record.getMessage()) for record in caplog.records]


@every_driver
def test_level_of_the_logger_is_obeyed(
    driver: Driver, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """A logger that is not enabled for warnings does not log the retries."""
    logger = logging.getLogger("app.quiet")
    logger.setLevel(logging.ERROR)

    driver.run(clock, Dependency(clock, FAIL, OK), on_retry=logger)

    assert [] == caplog.records


@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
def test_coroutine_function_for_a_plain_call(driver: Driver, clock: VirtualClock) -> None:
    """A coroutine function is rejected as the hook of a plain function."""

    async def renew_token(event: tarry.WillWait) -> None: ...

    rule = "on_retry is the coroutine function .*renew_token, which only an async call can await"
    with pytest.raises(tarry.ConfigurationTypeError, match=rule):
        driver.run(clock, Dependency(clock, OK), on_retry=renew_token)


@pytest.mark.parametrize("invalid", ["billing", dict], ids=repr)
def test_invalid_hook(invalid: Any) -> None:
    """A value that is neither a function nor a logger is rejected."""
    rule = "on_retry must be a function that takes a tarry.WillWait, or a logging.Logger"
    with pytest.raises(tarry.ConfigurationTypeError, match=rule):
        tarry.retry(on=OSError, on_retry=invalid)
