"""The context managers for tests: each applies during its block."""

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
def test_no_wait_in_plain_code(driver: Driver) -> None:
    """Waits of days return at once; decisions and delays are unchanged."""
    clock = VirtualClock()  # not entered: only `no_wait` keeps it from waiting
    policy = tarry.Policy(initial_delay=86_400, max_delay=86_400, jitter="none")

    with no_wait(), captured_events() as events:
        driver.run(clock, Dependency(clock, FAIL, OK), policy=policy)

    assert [86_400] == [event.delay for event in events if type(event) is WillWait]


def test_no_wait_in_coroutines() -> None:
    """Coroutines do not wait either, on asyncio and trio."""
    clock = VirtualClock()
    policy = tarry.Policy(initial_delay=86_400, max_delay=86_400, jitter="none")

    async def main() -> object:
        dependency = Dependency(clock, FAIL, OK)
        return await tarry.acall(dependency.acall, on=ConnectionError, policy=policy)

    with no_wait():
        assert "done" == asyncio.run(main())
        assert "done" == trio.run(main)


def test_no_wait_ends_with_its_block() -> None:
    """After the block, waits are real again."""
    with VirtualClock() as clock, scripted_random([0.5]):
        with no_wait():
            tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)
        assert 0 == clock.elapsed
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)

    assert pytest.approx(0.05) == clock.elapsed


def test_no_wait_ends_with_an_error() -> None:
    """A block that an error leaves restores the waits too."""
    with VirtualClock() as clock, scripted_random([0.5]):
        with pytest.raises(ConnectionError), no_wait():
            tarry.call(Dependency(clock, FAIL).call, on=ConnectionError)
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)

    assert pytest.approx(0.05) == clock.elapsed


# --- capped_attempts ------------------------------------------------------------------------------


@every_driver
@pytest.mark.parametrize("guarded", [False, True], ids=["plain", "downstream"])
@pytest.mark.parametrize("limit", [1, 2, 4, 9])
def test_capped_attempts(driver: Driver, guarded: bool, limit: int) -> None:
    """No call makes more attempts than the cap, and the cap raises none."""
    downstream = Downstream("payments") if guarded else None
    with VirtualClock() as clock, capped_attempts(limit):
        dependency = Dependency(clock, FAIL)
        with pytest.raises(ConnectionError):
            driver.run(clock, dependency, downstream=downstream)

    assert min(limit, 4) == len(dependency.starts)


def test_events_have_the_cap() -> None:
    """Events have the cap as `max_attempts`, not the value of the policy."""
    with VirtualClock() as clock, capped_attempts(2), captured_events() as events:
        tarry.call(Dependency(clock, OK).call, on=ConnectionError, name="op")

    assert tarry.AttemptStarted("op", None, 1, 2) == events[0]


def test_capped_attempts_end_with_their_block() -> None:
    """After a block, the cap of the outer block applies again."""
    with VirtualClock() as clock:
        dependency = Dependency(clock, FAIL)
        made = []
        with capped_attempts(3):
            with capped_attempts(1):
                made.append(attempts_of(dependency))
            made.append(attempts_of(dependency))
        made.append(attempts_of(dependency))

    assert [1, 3, 4] == made


def attempts_of(dependency: Dependency) -> int:
    """Return the number of attempts of a call."""
    before = len(dependency.starts)
    with pytest.raises(ConnectionError):
        tarry.call(dependency.call, on=ConnectionError)
    return len(dependency.starts) - before


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
def test_wrong_cap(limit: int) -> None:
    """A cap is a whole number from 1."""
    with (
        pytest.raises(tarry.ConfigurationError, match="max_attempts must be"),
        capped_attempts(limit),
    ):
        pass


# --- scripted_random ------------------------------------------------------------------------------


@every_driver
def test_scripted_random(driver: Driver) -> None:
    """The numbers are used in order, and the last one repeats."""
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
    """The numbers may come from a generator."""
    with VirtualClock() as clock, scripted_random(number / 10 for number in (5, 0)):
        tarry.call(Dependency(clock, FAIL, OK).call, on=ConnectionError)

    assert pytest.approx(0.05) == clock.elapsed


@pytest.mark.parametrize("numbers", [[], [1.0], [-0.1], [0.5, float("nan")]], ids=str)
def test_wrong_script(numbers: list[float]) -> None:
    """An empty script or a number outside [0, 1) is rejected."""
    with pytest.raises(tarry.ConfigurationError, match="numbers must be"), scripted_random(numbers):
        pass


@pytest.mark.parametrize("driver", [SYNC_DRIVERS[0], *ASYNC_DRIVERS[::4]], ids=str)
def test_random_numbers_are_restored_after_the_block(driver: Driver) -> None:
    """After the block delays are random again."""
    drawn = set()
    with VirtualClock() as clock, captured_events() as events:
        with scripted_random([0.25]):
            driver.run(clock, Dependency(clock, FAIL, OK))
        for _ in range(5):
            driver.run(clock, Dependency(clock, FAIL, OK))
        drawn = {event.delay for event in events if type(event) is WillWait}

    assert 6 == len(drawn)


# --- captured_events ------------------------------------------------------------------------------


def test_captured_events_end_with_their_block() -> None:
    """Events after the block are not captured."""
    with captured_events() as events:
        tarry.call(lambda: 1, on=ConnectionError)
    tarry.call(lambda: 2, on=ConnectionError)

    assert 2 == len(events)


def test_captured_events_inside_each_other() -> None:
    """Each block has its own list."""
    with captured_events() as outer:
        tarry.call(lambda: 1, on=ConnectionError)
        with captured_events() as inner:
            tarry.call(lambda: 2, on=ConnectionError)

    assert (4, 2) == (len(outer), len(inner))
