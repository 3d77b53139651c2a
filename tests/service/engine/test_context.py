from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, cast

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.engine.context import (
    ADDING,
    DATA,
    STORE,
    HealthCheck,
    ServiceHealth,
    StoreClock,
    check_partitions,
)
from tarry.service.store import StoreLost

if TYPE_CHECKING:
    from tarry.service.store import Store


class FakeMonotonicClock:
    """A monotonic clock that the test sets."""

    def __init__(self) -> None:
        self.time = 50.0

    def __call__(self) -> float:
        """Return the time."""
        return self.time


def test_nothing_is_due_before_the_first_synchronization() -> None:
    """A clock that was never synchronized is far in the past."""
    assert StoreClock(FakeMonotonicClock()).now_ms() < 0


def test_estimate_is_never_ahead_of_the_store() -> None:
    """The estimate assumes that the store read its clock when the reply arrived."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    sent_at = clock.local_ms()
    monotonic.time += 0.5
    clock.synchronize(sent_at, 1_000_000)

    assert 1_000_000 == clock.now_ms()
    monotonic.time += 1
    assert (1_001_000, 1001.0) == (clock.now_ms(), clock.now_s())
    monotonic.time += 0.000_75
    assert (1_001_000, 1_001_000.75) == (clock.now_ms(), clock.unrounded_ms())


def test_slow_reply_does_not_replace_a_more_precise_estimate() -> None:
    """A slow reply gives a lower estimate, which does not replace that of a fast reply."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    clock.synchronize(clock.local_ms(), 1_000_000)
    sent_at = clock.local_ms()
    monotonic.time += 2.0
    clock.synchronize(sent_at, 1_000_500)  # read half a second after the request was sent

    assert 1_002_000 == clock.now_ms()


def test_store_clock_that_was_set_back_is_followed() -> None:
    """A reply that is too early for any network delay shows that the clock was set back."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    clock.synchronize(clock.local_ms(), 1_000_000)
    clock.synchronize(clock.local_ms(), 400_000)

    assert 400_000 == clock.now_ms()


def test_store_clock_that_was_set_forward_is_followed() -> None:
    """A later time of the store replaces the estimate."""
    monotonic = FakeMonotonicClock()
    clock = StoreClock(monotonic)
    clock.synchronize(clock.local_ms(), 1_000_000)
    clock.synchronize(clock.local_ms(), 9_000_000)

    assert 9_000_000 == clock.now_ms()


def test_component_that_fails_and_works_in_turn_stays_failing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of ten failures and ten successes a second, one line is logged; a recovery is another one."""
    monotonic = FakeMonotonicClock()
    health = ServiceHealth(monotonic)
    with caplog.at_level(logging.WARNING, "tarry.service"):
        for _ in range(100):
            health.mark_failing("adding", "memory is full")
            monotonic.time += 0.05
            health.mark_healthy("adding")
            assert {"adding": "memory is full"} == health.failing
            monotonic.time += 0.05
        monotonic.time += 3
        assert {} == health.failing
    assert ["adding is failing: memory is full", "adding has recovered"] == [
        record.message for record in caplog.records
    ]


def test_component_without_a_success_does_not_recover() -> None:
    """Time alone is no recovery."""
    monotonic = FakeMonotonicClock()
    health = ServiceHealth(monotonic)
    health.mark_failing("store", "down")
    health.mark_healthy("store")
    health.mark_failing("store", "down")
    monotonic.time += 1_000
    assert {"store": "down"} == health.failing
    health.mark_healthy("store")
    assert {} == health.failing


def test_component_that_fails_again_soon_must_work_longer() -> None:
    """The time doubles with each failure within a minute of a recovery, up to 30 s."""
    monotonic = FakeMonotonicClock()
    health = ServiceHealth(monotonic)

    def recover() -> int:
        """Return how many seconds a recovery takes."""
        health.mark_failing("store", "down")
        for second in range(1_000):
            health.mark_healthy("store")
            if not health.failing:
                return second
            monotonic.time += 1
        raise AssertionError

    assert [3, 6, 12, 24, 30, 30] == [recover() for _ in range(6)]
    monotonic.time += 60
    assert 3 == recover()


class PartitionedStore:
    """A store with two partitions, of which some fail."""

    partition_count = 2

    def __init__(self) -> None:
        self.failing: set[int] = set()
        self.hanging: set[int] = set()

    async def ping(self, partition: int | None = None) -> int:
        """Return a time, unless the partition fails."""
        assert partition is not None
        if partition in self.hanging:
            await asyncio.sleep(3600)
        if partition in self.failing:
            error = StoreUnavailable("no reply in time")
            error.partition = partition
            raise error
        return 0


def test_a_partition_that_fails_does_not_make_the_process_unready() -> None:
    """It is unready if all partitions fail, or one is lost; failing components are named."""
    monotonic = FakeMonotonicClock()
    health = ServiceHealth(monotonic)
    health.partition_count = 2
    store = PartitionedStore()

    def check() -> None:
        asyncio.run(check_partitions(cast("Store", store), health))

    store.failing = {1}
    check()
    assert {"adding partition 1": "no reply in time"} == health.failing
    assert {} == health.blocking
    store.failing = {0, 1}
    check()
    assert {"adding partition 0", "adding partition 1"} == health.blocking.keys()
    monotonic.time += 3
    store.failing = set()
    check()
    assert {} == health.failing

    lost = StoreLost("empty")
    lost.partition = 1
    health.mark_failing("store", lost)
    assert {"data partition 1": "empty"} == health.blocking
    delivery = RuntimeError("proxy down")
    health.mark_failing("delivery", delivery)
    assert {"data partition 1", "delivery"} == health.blocking.keys()


def test_a_partition_that_does_not_respond_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """That no tasks can be added to it is logged only if that lasts longer, and both are named."""
    monotonic = FakeMonotonicClock()
    health = ServiceHealth(monotonic)
    health.partition_count = 2
    error = StoreUnavailable("node down")
    error.partition = 1

    def mark_healthy(component: str) -> None:
        health.mark_healthy(component, 1)
        monotonic.time += 60
        assert f"{component} partition 1" not in health.failing

    health.mark_failing(STORE, error)
    health.mark_failing(ADDING, error)
    assert {"store partition 1", "adding partition 1"} == health.failing.keys()
    mark_healthy(ADDING)
    mark_healthy(STORE)
    assert ["store partition 1 is failing: node down", "store partition 1 has recovered"] == [
        record.getMessage() for record in caplog.records
    ]
    caplog.clear()

    health.mark_failing(STORE, error)
    health.mark_failing(ADDING, error)
    mark_healthy(STORE)
    mark_healthy(ADDING)
    assert [
        "store partition 1 is failing: node down",
        "store partition 1 has recovered",
        "adding partition 1 is failing: node down",
        "adding partition 1 has recovered",
    ] == [record.getMessage() for record in caplog.records]


async def test_a_partition_that_hangs_does_not_make_the_process_unready() -> None:
    """Its check ends before that of the whole store, so only this partition is failing."""
    now = asyncio.get_running_loop().time
    health, store = ServiceHealth(now), PartitionedStore()
    health.partition_count, store.hanging = 2, {1}
    check = HealthCheck(
        health,
        (ADDING, DATA),
        partial(check_partitions, cast("Store", store), health),
        now,
        interval_s=1.0,
        failing_interval_s=1.0,
    )
    await check.run_if_due()
    assert {"adding partition 1": "no response for 3.8 s"} == health.failing
    assert {} == health.blocking


def test_a_partition_that_works_again_recovers_without_tasks() -> None:
    """A failure of maintenance ends with the next check, although nothing is claimed."""
    monotonic = FakeMonotonicClock()
    health = ServiceHealth(monotonic)
    health.partition_count = 2
    error = StoreUnavailable("connection refused")
    error.partition = 1
    health.mark_failing("store", error)
    assert {"store partition 1": "connection refused"} == health.failing
    monotonic.time += 3
    asyncio.run(check_partitions(cast("Store", PartitionedStore()), health))
    assert {} == health.failing
