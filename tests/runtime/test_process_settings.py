"""`tarry.set_active`: a switch that turns off the retries of the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tarry
from tarry import Reason
from tarry.testing import VirtualClock
from tests.runtime.drivers import DRIVERS, FAIL, OK, Dependency, Driver

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


@pytest.fixture(autouse=True)
def _inactive() -> Iterator[None]:
    """Turn off retries during each test."""
    tarry.set_active(False)
    yield
    tarry.set_active(True)


@every_driver
@pytest.mark.parametrize("has_listener", [False, True])
def test_no_call_is_retried(driver: Driver, has_listener: bool, clock: VirtualClock) -> None:
    """While retries are off, each call makes one attempt and raises its error."""
    dependency = Dependency(clock, FAIL, OK)
    remove = tarry.listen(lambda _: None) if has_listener else lambda: None

    with pytest.raises(ConnectionError) as caught:
        driver.run(clock, dependency)
    remove()

    record = tarry.record_of(caught.value)
    assert record is not None
    assert (1, Reason.RETRIES_OFF) == (record.attempts, record.reason)
    assert [tarry.Stop(Reason.RETRIES_OFF)] == [step.verdict for step in record.steps]
    assert caught.value.__notes__[0].endswith(" gave up after 1 attempt: retries are turned off")
    assert [0] == dependency.starts


@every_driver
def test_reason_of_a_policy_with_one_attempt(driver: Driver, clock: VirtualClock) -> None:
    """A call that has only one attempt anyway ends for lack of attempts."""
    with pytest.raises(ConnectionError) as caught:
        driver.run(clock, Dependency(clock, FAIL), attempts=1)

    record = tarry.record_of(caught.value)
    assert record is not None
    assert Reason.ATTEMPTS is record.reason


@every_driver
def test_retries_can_be_turned_on_again(driver: Driver, clock: VirtualClock) -> None:
    """After `set_active(True)`, functions that were decorated before are retried."""
    dependency = Dependency(clock, FAIL, OK)
    fn = dependency.call if driver.is_sync else dependency.acall
    call = driver.wrap(fn)
    tarry.set_active(True)

    assert "done" == driver.run_function(clock, call)
    assert 2 == len(dependency.starts)


async def test_plain_function_may_run_on_an_event_loop(clock: VirtualClock) -> None:
    """While retries are off, a plain function may run on an event loop: it never waits."""
    assert "done" == (tarry.call(Dependency(clock, OK).call, on=ConnectionError))


@pytest.mark.parametrize("value", ["no", 0, 1, None], ids=repr)
def test_only_a_bool_is_accepted(value: Any) -> None:
    """A value that is not a bool is rejected: "no" would turn retries on."""
    with pytest.raises(tarry.ConfigurationTypeError, match=r"^active must be True or False"):
        tarry.set_active(value)
