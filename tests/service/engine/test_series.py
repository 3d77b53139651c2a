"""Series: the counts of each interval are added to the store, without a cost for each task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine.context import EngineLimits
from tarry.service.model import Status
from tarry.service.records.series import SeriesPoint, list_series
from tarry.service.store import LeaseTerms, RecordChange
from tests.service.engine.harness import BUSY, EPOCH_S, LEASE, OK, EngineHarness, FakeTarget
from tests.service.stores.reference_store import ReferenceState, ReferenceStore

OTHER_LEASE = LeaseTerms("zz", LEASE.length_ms, LEASE.horizon_ms)
GONE = DeliveryResult(status=410, duration_ms=1.0)
START_MS = int(EPOCH_S * 1000) + 1_000_000  # the virtual clock starts at 1,000 s
SHORT_MS, LONG_MS = 10_000, 300_000


class FailingStore(ReferenceStore):
    """A store that cannot record series while `fails` is true."""

    fails = False
    record_count = 0

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        """Write records."""
        if any(change.kind.startswith("series") for change in changes):
            if self.fails:
                raise StoreUnavailable("the server is unavailable")
            self.record_count += 1
        return await super().write_records(changes)


def new_store(state: ReferenceState | None = None) -> FailingStore:
    """Return a store on the clock of the running event loop."""
    loop = asyncio.get_running_loop()
    return FailingStore(lambda: int((EPOCH_S + loop.time()) * 1000), state)


async def deliver(harness: EngineHarness, task_count: int = 1) -> None:
    """Add tasks one after another, and wait for their results."""
    for _ in range(task_count):
        await harness.add(harness.new_task(overrides={"jitterType": "NONE"}))
        await asyncio.sleep(2)


def counts_of(points: list[SeriesPoint], prefix: str) -> dict[str, int]:
    """Return the sums over all points whose names begin with `prefix`, without the prefix."""
    sums: dict[str, int] = {}
    for point in points:
        for name, count in point.sums.items():
            if name.startswith(prefix):
                key = name.removeprefix(prefix)
                sums[key] = sums.get(key, 0) + count
    return sums


async def test_counts_are_recorded_at_the_end_of_each_interval() -> None:
    """Attempts, finished tasks, lags and delays are in the point of the interval that had them."""
    store = new_store()
    harness = EngineHarness(FakeTarget(OK, BUSY, OK, GONE, OK), store=store)
    await harness.engine.start()
    await deliver(harness, 3)
    assert 0 == store.record_count
    await asyncio.sleep(10)
    await deliver(harness)
    await harness.engine.stop(1)

    first, second = await list_series(store, SHORT_MS, since=0)
    assert [START_MS, START_MS + SHORT_MS] == [first.at, second.at]
    assert {"success": 2, "transient": 1, "permanent": 1} == counts_of([first], "attempts.")
    finished = {"succeeded.first": 1, "succeeded.retried": 1, "exhausted.first": 1}
    assert finished == counts_of([first], "finished.")
    assert {"1": 4} == counts_of([first], "lag.")
    assert {"1000": 1} == counts_of([first], "delay.")
    assert {"success": 1} == counts_of([second], "attempts.")
    [long_point] = await list_series(store, LONG_MS, since=0)
    for prefix in ("attempts.", "finished.", "lag.", "delay.", "backlog."):
        assert counts_of([first, second], prefix) == counts_of([long_point], prefix)


async def test_readers_also_get_counts_that_are_not_stored_yet() -> None:
    """In the process that has counted, a point is exact before and after it is recorded."""
    harness = EngineHarness(FakeTarget(), store=new_store())
    await harness.engine.start()
    assert [] == await harness.engine.series.read(SHORT_MS, START_MS)
    for expected in (1, 2):
        await deliver(harness)
        for step_ms in (SHORT_MS, LONG_MS):
            [point] = await harness.engine.series.read(step_ms, START_MS)
            at = START_MS - START_MS % step_ms
            assert (at, expected) == (point.at, point.sums["attempts.success"])
    await harness.engine.series.record()
    await deliver(harness)
    [point] = await harness.engine.series.read(SHORT_MS, START_MS)
    assert 3 == point.sums["attempts.success"]
    assert [] == await harness.engine.series.read(SHORT_MS, START_MS + SHORT_MS)
    await harness.engine.stop(1)


async def test_one_process_samples_the_backlog() -> None:
    """Each interval has one sample of the tasks by status and of the age of the oldest due task."""
    state = ReferenceState()
    harness = EngineHarness(FakeTarget(BUSY), store=new_store(state))
    other = EngineHarness(FakeTarget(BUSY), store=new_store(state), lease=OTHER_LEASE, seed=2)
    await harness.engine.start()
    await other.engine.start()
    await harness.add(harness.new_task(delay_ms=900_000), harness.new_task(delay_ms=900_000))
    await asyncio.sleep(25)
    points = await list_series(harness.store, SHORT_MS, since=0)
    assert [(1, 2, 0, 0)] * 2 == [
        (
            point.sums["samples"],
            point.sums["backlog.PENDING"],
            point.sums["backlog.EXHAUSTED"],
            point.sums["backlog.age_ms"],
        )
        for point in points
    ]
    await harness.engine.stop(1)  # the other process continues
    await asyncio.sleep(10)
    last = (await other.engine.series.read(SHORT_MS, 0))[-1]
    assert (START_MS + 2 * SHORT_MS, 1) == (last.at, last.sums["samples"])
    await other.engine.stop(1)


async def test_the_backlog_includes_leased_tasks_that_are_due() -> None:
    """The age of the oldest due task includes tasks that wait in this process."""
    limits = EngineLimits(max_running_attempts=1)
    release = asyncio.Event()

    async def respond(_: DeliveryRequest) -> DeliveryResult:
        await release.wait()
        return OK

    harness = EngineHarness(FakeTarget(respond), limits=limits)
    await harness.engine.start()
    await harness.add(harness.new_task(), harness.new_task())
    await asyncio.sleep(5)
    backlog = await harness.engine.series.read_backlog()
    assert 2 == backlog.task_counts[Status.IN_FLIGHT]
    assert 5_000 == backlog.oldest_due_age_ms
    release.set()
    await harness.engine.stop(1)


async def test_recording_continues_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Sums of a failed call are not sent again, because the store may have added them."""
    store = new_store()
    harness = EngineHarness(FakeTarget(), store=store)
    await harness.engine.start()
    store.fails = True
    await deliver(harness)
    await asyncio.sleep(10)
    store.fails = False
    await deliver(harness)
    await asyncio.sleep(10)
    assert {"success": 1} == counts_of(await list_series(store, SHORT_MS, since=0), "attempts.")
    await harness.engine.stop(1)
    assert "store is failing" in caplog.text
    assert "series failed" not in caplog.text
