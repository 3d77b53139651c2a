"""Tests for the context managers of `tarry.testing`, which apply during their blocks."""

from __future__ import annotations

import asyncio

import pytest
import trio

import tarry
from tarry import Downstream, WillWait
from tarry.testing import (
    VirtualClock,
    capped_attempts,
    captured_events,
    no_wait,
    scripted_random,
)
from tests.runtime.drivers import ASYNC_DRIVERS, DRIVERS, FAIL, OK, SYNC_DRIVERS, Dependency, Driver

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


# --- no_wait --------------------------------------------------------------------------------------


@pytest.mark.parametrize("driver", SYNC_DRIVERS, ids=str)
def test_no_wait_in_synchronous_code(driver: Driver) -> None:
    """With `no_wait` waits of days return at once, and the delays in events are unchanged."""
    clock = VirtualClock()  # not entered, so that only `no_wait` prevents real waits
    policy = tarry.Policy(initial_delay=86_400, max_delay=86_400, jitter="none")

    with no_wait(), captured_events() as events:
        driver.run(clock, Dependency(clock, FAIL, OK), policy=policy)

    assert [86_400] == [event.delay for event in events if type(event) is WillWait]


def test_no_wait_in_coroutines() -> None:
    """With `no_wait` calls on asyncio and trio do not wait."""
    clock = VirtualClock()
    policy = tarry.Policy(initial_delay=86_400, max_delay=86_400, jitter="none")

    async def main() -> object:
        dependency = Dependency(clock, FAIL, OK)
        return await tarry.acall(dependency.acall, on=ConnectionError, policy=policy)

    with no_wait():
        assert "done" == asyncio.run(main())
        assert "done" == trio.run(main)


def test_no_wait_ends_with_its_block() -> None:
    """After the block calls wait again."""
    with VirtualClock() as clock, scripted_random([0.5]):
        with no_wait():
            tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)
        assert 0 == clock.elapsed
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)

    assert pytest.approx(0.05) == clock.elapsed


def test_no_wait_ends_with_an_error() -> None:
    """After an error in the block calls wait again."""
    with VirtualClock() as clock, scripted_random([0.5]):
        with pytest.raises(ConnectionError), no_wait():
            tarry.call(Dependency(clock, FAIL).call, on=ConnectionError)
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)

    assert pytest.approx(0.05) == clock.elapsed


# --- capped_attempts ------------------------------------------------------------------------------


@every_driver
@pytest.mark.parametrize("has_downstream", [False, True], ids=["no-downstream", "downstream"])
@pytest.mark.parametrize("limit", [1, 2, 4, 9])
def test_capped_attempts(driver: Driver, has_downstream: bool, limit: int) -> None:
    """A call makes the smaller of the cap and `max_attempts` of its policy."""
    downstream = Downstream("payments") if has_downstream else None
    with VirtualClock() as clock, capped_attempts(limit):
        dependency = Dependency(clock, FAIL)
        with pytest.raises(ConnectionError):
            driver.run(clock, dependency, downstream=downstream)

    assert min(limit, 4) == len(dependency.starts)


def test_cap_of_one_attempt_does_not_turn_retries_off() -> None:
    with (
        VirtualClock() as clock,
        capped_attempts(1),
        pytest.raises(ConnectionError) as caught,
    ):
        tarry.call(Dependency(clock, FAIL).call, on=ConnectionError)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert tarry.Reason.ATTEMPTS is record.reason


def test_events_have_the_cap() -> None:
    """Events have the cap as `max_attempts`, not the value of the policy."""
    with VirtualClock() as clock, capped_attempts(2), captured_events() as events:
        tarry.call(Dependency(clock, OK).call, on=ConnectionError, name="op")

    assert tarry.AttemptStarted("op", None, 1, 2) == events[0]


def test_capped_attempts_end_with_their_block() -> None:
    """After a block, the cap of the outer block applies again."""
    with VirtualClock() as clock:
        dependency = Dependency(clock, FAIL)
        attempts = []
        with capped_attempts(3):
            with capped_attempts(1):
                attempts.append(count_attempts(dependency))
            attempts.append(count_attempts(dependency))
        attempts.append(count_attempts(dependency))

    assert [1, 3, 4] == attempts


def count_attempts(dependency: Dependency) -> int:
    """Call a failing dependency and return the number of attempts."""
    before = len(dependency.starts)
    with pytest.raises(ConnectionError):
        tarry.call(dependency.call, on=ConnectionError)
    return len(dependency.starts) - before


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_invalid_cap(limit: int) -> None:
    """A cap that is not an int of at least 1 is rejected."""
    with (
        pytest.raises(tarry.ConfigurationError, match="max_attempts must be"),
        capped_attempts(limit),
    ):
        pass


# --- scripted_random ------------------------------------------------------------------------------


@every_driver
def test_scripted_random(driver: Driver) -> None:
    """The numbers are used in order, and the last number is repeated."""
    with (
        VirtualClock() as clock,
        scripted_random([0.1, 0.2]),
        captured_events() as events,
        pytest.raises(ConnectionError),
    ):
        driver.run(clock, Dependency(clock, FAIL))

    delays = [event.delay for event in events if type(event) is WillWait]
    assert [0.1 * 0.1, 0.2 * 0.2, 0.2 * 0.4] == pytest.approx(delays)


def test_scripted_random_takes_any_iterable() -> None:
    """The numbers can be a generator."""
    with VirtualClock() as clock, scripted_random(number / 10 for number in (5, 0)):
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)

    assert pytest.approx(0.05) == clock.elapsed


@pytest.mark.parametrize("numbers", [[], [1.0], [-0.1], [0.5, float("nan")]], ids=str)
def test_invalid_scripted_numbers(numbers: list[float]) -> None:
    """An empty list of numbers and a number outside [0, 1) are rejected."""
    with pytest.raises(tarry.ConfigurationError, match="numbers must be"), scripted_random(numbers):
        pass


@pytest.mark.parametrize("driver", [SYNC_DRIVERS[0], *ASYNC_DRIVERS[::4]], ids=str)
def test_random_numbers_are_restored_after_the_block(driver: Driver) -> None:
    """After the block delays are random again."""
    with VirtualClock() as clock, captured_events() as events:
        with scripted_random([0.25]):
            driver.run(clock, Dependency(clock, FAIL, OK))
        for _ in range(5):
            driver.run(clock, Dependency(clock, FAIL, OK))
        delays = {event.delay for event in events if type(event) is WillWait}

    assert 6 == len(delays)


# --- captured_events ------------------------------------------------------------------------------


def test_captured_events_end_with_their_block() -> None:
    """Events after the block are not captured."""
    with captured_events() as events:
        tarry.call(lambda: 1, on=ConnectionError)
    tarry.call(lambda: 2, on=ConnectionError)

    assert 2 == len(events)


def test_nested_captured_events() -> None:
    """Nested blocks capture events in separate lists."""
    with captured_events() as outer:
        tarry.call(lambda: 1, on=ConnectionError)
        with captured_events() as inner:
            tarry.call(lambda: 2, on=ConnectionError)

    assert (4, 2) == (len(outer), len(inner))
