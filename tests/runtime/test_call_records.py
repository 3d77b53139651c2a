"""`record_calls`: the records of the calls in a block, also of those that succeeded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest

import tarry
from tarry import Downstream, Kind, Outcome, Reason
from tarry.runtime import scopes
from tarry.testing import VirtualClock
from tests.runtime.drivers import DRIVERS, FAIL, OK, RESULT_DRIVERS, Dependency, Driver, Step

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)


@every_driver
@pytest.mark.parametrize("name", [None, "payments"])
def test_call_that_succeeds_is_recorded(
    driver: Driver, name: str | None, clock: VirtualClock
) -> None:
    """The record of a call that succeeds has its attempts, its waits and no reason."""
    downstream = None if name is None else Downstream(name, breaker=tarry.Breaker())
    with tarry.record_calls() as records:
        driver.run(clock, Dependency(clock, FAIL, FAIL, OK), downstream=downstream)
        driver.run(clock, Dependency(clock, OK), downstream=downstream)

    assert [("op", name, 3, None), ("op", name, 1, None)] == [
        (record.operation, record.downstream, record.attempts, record.reason) for record in records
    ]
    assert 0.15 == pytest.approx(records[0].waited)
    assert [1, 2] == [step.attempt for step in records[0].steps]
    assert ((), 0) == (records[1].steps, records[1].waited)


@every_driver
def test_call_that_fails_is_recorded(driver: Driver, clock: VirtualClock) -> None:
    with tarry.record_calls() as records, pytest.raises(ConnectionError) as caught:
        driver.run(clock, Dependency(clock, Step(raises=ConnectionError())), attempts=2)

    assert [tarry.record_of(caught.value)] == records


@pytest.mark.parametrize("driver", RESULT_DRIVERS, ids=str)
def test_permanent_result_is_recorded(driver: Driver, clock: VirtualClock) -> None:
    """A call that ends with a result that is a permanent failure is recorded with the reason."""
    with tarry.record_calls() as records:
        driver.run(clock, Dependency(clock, Step(404)), until=lambda _: Outcome(Kind.PERMANENT))

    assert [Reason.PERMANENT] == [record.reason for record in records]


def test_calls_of_a_fallback_are_recorded_after_the_call(clock: VirtualClock) -> None:
    """A call that a fallback makes ends after the call that was given up."""

    @tarry.retry(on=ConnectionError, name="cache")
    def read_cache(_: Exception) -> str:
        return "cached"

    with tarry.record_calls() as records:
        load = Dependency(clock, FAIL).call
        tarry.call(load, on=ConnectionError, attempts=1, name="load", fallback=read_cache)

    assert ["load", "cache"] == [record.operation for record in records]


def test_calls_of_threads_that_copy_the_context_are_recorded() -> None:
    """Calls in a thread of `asyncio.to_thread`, or of `timeout=`, are recorded."""
    inner = tarry.retry(on=ConnectionError, name="inner")(lambda: None)
    with tarry.record_calls() as records:
        asyncio.run(asyncio.to_thread(inner))
        tarry.call(inner, on=ConnectionError, timeout=60, name="outer")

    assert ["inner", "inner", "outer"] == [record.operation for record in records]


def test_cancelled_call_has_no_record(clock: VirtualClock) -> None:
    """A call that is cancelled while it waits is not recorded."""
    token = tarry.CancelToken()
    token.cancel()
    with tarry.record_calls() as records, pytest.raises(tarry.Cancelled):
        tarry.call(Dependency(clock, FAIL).call, on=ConnectionError, cancel=token)

    assert [] == records


def test_block_that_ends_while_another_thread_records() -> None:
    """A block that ends between the test and the use of its list does not break a call."""
    values: Iterator[list[object] | None] = iter([[], None])
    handle: Any = type("EndingHandle", (), {"records": property(lambda _: next(values))})()
    context = copy_context()
    context.run(scopes.current_scope.set, scopes.Scope(handle, None, None))

    assert [[]] == context.run(lambda: list(scopes.recordings()))


def test_hedged_calls_are_recorded(clock: VirtualClock) -> None:
    """Hedged calls are recorded, those that succeed and those that fail."""

    async def main() -> None:
        await tarry.hedge(Dependency(clock, OK).acall, after=1, name="fast")
        with pytest.raises(ConnectionError):
            await tarry.hedge(Dependency(clock, FAIL).acall, after=1, name="broken")

    with tarry.record_calls() as records:
        clock.run(main)

    assert [("fast", 1, None), ("broken", 1, Reason.PERMANENT)] == [
        (record.operation, record.attempts, record.reason) for record in records
    ]


def test_inner_calls_come_first(clock: VirtualClock) -> None:
    """The records are in the order in which the calls ended, so the outer call is the last."""
    inner = tarry.retry(on=OSError, name="inner")(Dependency(clock, OK).call)

    with tarry.record_calls() as records:
        tarry.call(inner, on=OSError, name="outer")

    assert ["inner", "outer"] == [record.operation for record in records]


def test_only_calls_in_the_block_are_recorded(clock: VirtualClock) -> None:
    """Calls before and after the block are not recorded; each surrounding block has its calls."""
    call = tarry.retry(on=OSError)(Dependency(clock, OK).call)

    call()
    with tarry.record_calls() as outer:
        call()
        with tarry.record_calls() as inner:
            call()
    call()

    assert (2, 1) == (len(outer), len(inner))


def test_block_sets_no_deadline(clock: VirtualClock) -> None:
    """A block that records calls does not change the deadline."""
    with tarry.record_calls():
        assert tarry.remaining() is None
        with tarry.deadline(5), tarry.record_calls():
            assert 5 == tarry.remaining()


def test_tasks_of_the_block_are_recorded_while_it_lasts(clock: VirtualClock) -> None:
    """A call of a task that was started in the block is recorded, if it ends before the block."""

    @tarry.retry(on=OSError, name="op")
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def main() -> int:
        with tarry.record_calls() as records:
            tasks = [asyncio.create_task(sleep(seconds)) for seconds in (1, 3)]
            await asyncio.sleep(2)
        await asyncio.gather(*tasks)
        return len(records)

    assert 1 == clock.run(main)
