"""The values that the predicates `on` and `until` may return."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

import tarry
from tarry import Kind, Outcome
from tarry.testing import VirtualClock
from tests.runtime.drivers import (
    ASYNC_DRIVERS,
    DRIVERS,
    FAIL,
    FUNCTION_DRIVERS,
    OK,
    RESULT_DRIVERS,
    Dependency,
    Driver,
    Step,
    async_sleep,
)

ASYNC_FUNCTION_DRIVERS = [driver for driver in ASYNC_DRIVERS if driver in FUNCTION_DRIVERS]


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
@pytest.mark.parametrize("delay", [0, 3, 2.5])
def test_number_from_on_is_the_delay(driver: Driver, delay: float, clock: VirtualClock) -> None:
    """If `on` returns a number, the next attempt starts after exactly that many seconds."""
    dependency = Dependency(clock, FAIL, FAIL, OK)

    assert "done" == driver.run(clock, dependency, on=lambda _: delay)

    assert [0, delay, 2 * delay] == dependency.starts


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
def test_timedelta_from_on_is_the_delay(driver: Driver, clock: VirtualClock) -> None:
    """If `on` returns a `timedelta`, the next attempt starts after exactly that time."""
    dependency = Dependency(clock, FAIL, OK)

    assert "done" == driver.run(clock, dependency, on=lambda _: timedelta(minutes=1))

    assert [0, 60] == dependency.starts


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
@pytest.mark.parametrize(
    ("answer", "starts"), [(True, [0, 2.05]), (5, [0, 7]), (False, [0]), (Kind.PERMANENT, [0])]
)
def test_on_decides_about_timeouts(
    driver: Driver, answer: Any, starts: list[float], clock: VirtualClock
) -> None:
    """A predicate `on` decides whether and when an attempt that timed out is retried."""
    dependency = Dependency(clock, Step(duration_s=9.0), OK)

    def classify(error: Exception) -> Any:
        assert isinstance(error, tarry.AttemptTimeout)
        return answer

    if len(starts) > 1:
        assert "done" == driver.run(clock, dependency, on=classify, timeout=2.0)
    else:
        with pytest.raises(tarry.AttemptTimeout) as caught:
            driver.run(clock, dependency, on=classify, timeout=2.0)
        record = tarry.record_of(caught.value)
        assert record is not None
        assert tarry.Reason.PERMANENT is record.reason

    assert starts == dependency.starts


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
@pytest.mark.parametrize(
    "answer",
    [False, Kind.PERMANENT, Outcome(Kind.PERMANENT)],
    ids=["false", "kind", "outcome"],
)
def test_timeouts_that_on_rejects_open_the_breaker(
    driver: Driver, answer: Any, clock: VirtualClock
) -> None:
    """An attempt that timed out counts for the breaker, also if `on` rejects the retry."""
    downstream = tarry.Downstream("d", breaker=tarry.Breaker(timeouts=3, spread=0))
    dependency = Dependency(clock, Step(duration_s=9.0))
    options: dict[str, Any] = {"on": lambda _: answer, "timeout": 2.0, "downstream": downstream}

    for _ in range(3):
        with pytest.raises(tarry.AttemptTimeout):
            driver.run(clock, dependency, **options)
    with pytest.raises(tarry.BreakerOpen) as caught:
        driver.run(clock, dependency, **options)

    assert isinstance(caught.value.__cause__, tarry.AttemptTimeout)
    assert 3 == len(dependency.starts)


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
def test_timeout_of_an_inner_call_counts_once(driver: Driver, clock: VirtualClock) -> None:
    """A timeout that an inner call has counted is not counted for the outer breaker."""
    downstream = tarry.Downstream("d", breaker=tarry.Breaker(timeouts=1))
    dependency = Dependency(clock, Step(duration_s=9.0))

    async def inner() -> object:
        return await tarry.acall(dependency.acall, on=lambda _: False, timeout=2.0)

    with pytest.raises(tarry.AttemptTimeout):
        outer = driver.wrap(inner, on=lambda _: False, timeout=5.0, downstream=downstream)
        driver.run_function(clock, outer)

    assert tarry.BreakerState.CLOSED is downstream.state


@pytest.mark.parametrize("driver", ASYNC_DRIVERS, ids=str)
def test_on_is_not_called_for_the_deadline(driver: Driver, clock: VirtualClock) -> None:
    """An attempt that the deadline ends has the reason `deadline`, whatever `on` would return."""
    dependency = Dependency(clock, Step(duration_s=9.0))

    with pytest.raises(tarry.DeadlineExceeded) as caught:
        driver.run(clock, dependency, on=lambda _: False, timeout=5.0, deadline=2.0)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert tarry.Reason.DEADLINE is record.reason


@pytest.mark.parametrize("driver", [d for d in ASYNC_DRIVERS if d in RESULT_DRIVERS], ids=str)
def test_timeout_is_retried_without_on(driver: Driver, clock: VirtualClock) -> None:
    """With `until` and no `on`, an attempt that timed out is retried."""
    dependency = Dependency(clock, Step(duration_s=9.0), Step(200))

    assert 200 == driver.run(clock, dependency, on=None, until=lambda _: True, timeout=2.0)

    assert [0, 2.05] == dependency.starts


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
@pytest.mark.parametrize(
    "answer", [Kind.THROTTLED, Outcome(Kind.THROTTLED)], ids=["kind", "outcome"]
)
def test_failure_from_until_is_retried(driver: Driver, answer: Any, clock: VirtualClock) -> None:
    """A result for which `until` returns a retryable outcome is retried after its delay."""
    dependency = Dependency(clock, Step(503), Step(200))

    assert 200 == driver.run(
        clock,
        dependency,
        until=lambda status: status == 200 or answer,
    )

    assert [0, 0.5] == dependency.starts  # the delay of throttled attempts


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_hint_from_until_is_obeyed(driver: Driver, clock: VirtualClock) -> None:
    """The server's hint in an outcome that `until` returns is a floor for the delay."""
    dependency = Dependency(clock, Step(503), Step(200))

    def classify_status(status: int) -> Outcome:
        return tarry.outcome_of_status(status, {"Retry-After": "7"}, now=0.0)

    assert 200 == driver.run(clock, dependency, until=classify_status)

    assert 7 <= dependency.starts[1] <= 7.7


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_failure_from_until_is_not_a_success(driver: Driver, clock: VirtualClock) -> None:
    """A result for which `until` never returns a success raises `ResultNotAccepted`."""
    dependency = Dependency(clock, Step(503))

    with pytest.raises(tarry.ResultNotAccepted) as caught:
        driver.run(clock, dependency, until=lambda _: Outcome(Kind.TRANSIENT), attempts=2)

    assert (503, 2) == (caught.value.result, len(dependency.starts))


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_permanent_failure_from_until_ends_the_call(driver: Driver, clock: VirtualClock) -> None:
    """A result for which `until` returns a permanent outcome is returned without a retry."""
    dependency = Dependency(clock, Step(404), Step(200))

    assert 404 == driver.run(clock, dependency, until=lambda _: Outcome(Kind.PERMANENT))

    assert [0] == dependency.starts


# --- coroutine functions --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "driver", [driver for driver in ASYNC_DRIVERS if driver.form != "block"], ids=str
)
@pytest.mark.parametrize(
    ("answer", "starts"),
    [
        (True, [0, 1.05]),
        (3, [0, 4]),
        (Kind.THROTTLED, [0, 1.5]),
        (Outcome(Kind.TRANSIENT), [0, 1.05]),
    ],
    ids=repr,
)
def test_coroutine_function_as_on(
    driver: Driver, answer: Any, starts: list[float], clock: VirtualClock
) -> None:
    """For async calls, `on` may be a coroutine function, which returns what a plain one returns."""
    dependency = Dependency(clock, FAIL, OK)

    async def classify(error: Exception) -> Any:
        await async_sleep(1.0)
        return answer

    assert "done" == driver.run(clock, dependency, on=classify)

    assert starts == dependency.starts


@pytest.mark.parametrize("driver", ASYNC_FUNCTION_DRIVERS, ids=str)
def test_coroutine_function_as_on_decides_not_to_retry(driver: Driver, clock: VirtualClock) -> None:
    """If a coroutine function as `on` returns False, the error is raised."""
    dependency = Dependency(clock, FAIL)

    async def classify(error: Exception) -> bool:
        return False

    with pytest.raises(ConnectionError):
        driver.run(clock, dependency, on=classify)

    assert [0] == dependency.starts


@pytest.mark.parametrize("driver", ASYNC_FUNCTION_DRIVERS, ids=str)
@pytest.mark.parametrize("answer", [True, False])
def test_coroutine_function_as_on_decides_about_timeouts(
    driver: Driver, answer: bool, clock: VirtualClock
) -> None:
    """A coroutine function as `on` decides whether an attempt that timed out is retried."""
    dependency = Dependency(clock, Step(duration_s=9.0), OK)

    async def classify(error: Exception) -> bool:
        assert isinstance(error, tarry.AttemptTimeout)
        return answer

    if answer:
        assert "done" == driver.run(clock, dependency, on=classify, timeout=2.0)
    else:
        with pytest.raises(tarry.AttemptTimeout):
            driver.run(clock, dependency, on=classify, timeout=2.0)

    assert 1 + answer == len(dependency.starts)


@pytest.mark.parametrize("driver", ASYNC_FUNCTION_DRIVERS, ids=str)
def test_timeout_that_a_coroutine_function_rejects_opens_the_breaker(
    driver: Driver, clock: VirtualClock
) -> None:
    """An attempt that timed out counts for the breaker, also if an async `on` rejects the retry."""
    downstream = tarry.Downstream("d", breaker=tarry.Breaker(timeouts=1))
    dependency = Dependency(clock, Step(duration_s=9.0))

    async def classify(error: Exception) -> bool:
        return False

    with pytest.raises(tarry.AttemptTimeout):
        driver.run(clock, dependency, on=classify, timeout=2.0, downstream=downstream)

    assert tarry.BreakerState.OPEN is downstream.state


@pytest.mark.parametrize("driver", ASYNC_FUNCTION_DRIVERS, ids=str)
def test_error_that_a_layer_below_has_retried(driver: Driver, clock: VirtualClock) -> None:
    """An error that an inner call has given up on is not retried, whatever `on` returns."""
    dependency = Dependency(clock, FAIL)

    async def inner() -> object:
        return await tarry.acall(dependency.acall, on=ConnectionError, attempts=2)

    async def classify(error: Exception) -> bool:
        return True

    with pytest.raises(ConnectionError):
        driver.run_function(clock, driver.wrap(inner, on=classify))

    assert 2 == len(dependency.starts)


@pytest.mark.parametrize("driver", ASYNC_FUNCTION_DRIVERS, ids=str)
def test_coroutine_function_as_until(driver: Driver, clock: VirtualClock) -> None:
    """For async calls, `until` may be a coroutine function; its outcomes are obeyed too."""
    dependency = Dependency(clock, Step(429), Step(503), Step(200))

    async def is_done(status: int) -> bool | Outcome:
        await async_sleep(1.0)
        return Outcome(Kind.THROTTLED) if status == 429 else status == 200

    assert 200 == driver.run(clock, dependency, until=is_done)

    assert [0, 1.5, 2.6] == dependency.starts


@pytest.mark.parametrize("driver", ASYNC_FUNCTION_DRIVERS, ids=str)
@pytest.mark.parametrize("argument", ["on", "until"])
def test_error_of_a_coroutine_function_is_raised(
    driver: Driver, argument: str, clock: VirtualClock
) -> None:
    """An error of an async predicate ends the call and releases the permit of the attempt."""
    downstream = tarry.Downstream("d", max_in_flight=1)
    options: dict[str, Any] = {argument: failing_predicate, "downstream": downstream}

    for _ in range(2):
        with pytest.raises(LookupError, match="a bug in the predicate"):
            driver.run(clock, Dependency(clock, FAIL if argument == "on" else OK), **options)


async def failing_predicate(value: object) -> bool:
    """Raise an error."""
    raise LookupError("a bug in the predicate")


@pytest.mark.parametrize("driver", FUNCTION_DRIVERS, ids=str)
@pytest.mark.parametrize("argument", ["on", "until"])
def test_function_that_returns_an_awaitable(
    driver: Driver, argument: str, clock: VirtualClock
) -> None:
    """A plain predicate that returns a coroutine is rejected: the coroutine would count as true."""

    def predicate(value: object) -> Any:
        return failing_predicate(value)

    options: dict[str, Any] = {argument: predicate}
    with pytest.raises(tarry.ConfigurationTypeError, match=f"^{argument} returned an awaitable"):
        driver.run(clock, Dependency(clock, FAIL if argument == "on" else OK), **options)


# --- coroutine functions in blocks ----------------------------------------------------------------


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_block_awaits_predicates(loop: str, clock: VirtualClock) -> None:
    """`async with attempt:` awaits `on` and `until`, after the time limit of the attempt."""
    dependency = Dependency(clock, FAIL, Step(503), Step(200))

    async def is_retryable(error: Exception) -> bool:
        await async_sleep(1.0)
        return isinstance(error, ConnectionError)

    async def is_accepted(status: int) -> bool:
        await async_sleep(1.0)
        return status == 200

    async def call() -> None:
        async for attempt in tarry.attempts(on=is_retryable, until=is_accepted, timeout=0.5):
            async with attempt:
                attempt.set_result(await dependency.acall())

    (clock.run if loop == "asyncio" else clock.run_trio)(call)

    assert [0, 1.05, 2.15] == dependency.starts


def test_block_raises_an_error_that_an_async_predicate_rejects(clock: VirtualClock) -> None:
    """An error for which the coroutine function returns False leaves the loop."""
    dependency = Dependency(clock, FAIL)

    async def is_retryable(error: Exception) -> bool:
        return False

    async def call() -> None:
        async for attempt in tarry.attempts(on=is_retryable):
            async with attempt:
                await dependency.acall()

    with pytest.raises(ConnectionError):
        clock.run(call)

    assert [0] == dependency.starts


@pytest.mark.parametrize("argument", ["on", "until"])
def test_block_releases_its_permit_if_an_async_predicate_fails(
    argument: str, clock: VirtualClock
) -> None:
    """An error of an async predicate ends the call and releases the permit of the attempt."""
    downstream = tarry.Downstream("d", max_in_flight=1)
    options: dict[str, Any] = {"on": OSError, argument: failing_predicate}

    async def call() -> None:
        async for attempt in tarry.attempts(downstream=downstream, **options):
            async with attempt:
                attempt.set_result(1)
                if argument == "on":
                    raise ConnectionError

    for _ in range(2):
        with pytest.raises(LookupError, match="a bug in the predicate"):
            clock.run(call)


@pytest.mark.parametrize("argument", ["on", "until"])
def test_plain_with_cannot_await_predicates(argument: str, clock: VirtualClock) -> None:
    """`with attempt:` rejects a coroutine function before the block runs, and keeps no permit."""
    downstream = tarry.Downstream("d", max_in_flight=1)
    options: dict[str, Any] = {"on": OSError, argument: failing_predicate}

    async def call() -> None:
        async for attempt in tarry.attempts(downstream=downstream, **options):
            with attempt:
                raise AssertionError

    for _ in range(2):
        with pytest.raises(tarry.ConfigurationError, match="only `async with attempt:` can await"):
            clock.run(call)
