"""Conformance cases: heartbeats of processes, wake-ups, shared pauses, and cancelled calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from tarry.service.model import LaneWait, WorkerRecord
from tarry.service.records.workers import (
    MAX_LISTED_WORKERS,
    WORKER_EXPIRY_MS,
    list_workers,
    record_worker,
    remove_worker,
)
from tarry.service.store import ConfiguredLimits, NewTask, Release, Retention
from tests.service.stores.harness import (
    DAY_MS,
    HOUR_MS,
    LANE,
    LEASE,
    OTHER_LEASE,
    START_MS,
    StoreHarness,
    conformance_case,
    task,
    task_id,
)

WORKER = WorkerRecord(
    name="host-1-a",
    host="host",
    pid=1,
    role="worker",
    version="1.2.3",
    started_at=START_MS - HOUR_MS,
    running_attempts=3,
    leased_tasks=7,
    allow_target=("10.0.0.0/8",),
    waiting_lanes={
        "acme/http:b.example:80": LaneWait("retry-budget", START_MS),
        "acme/http:c.example:80": LaneWait("rate-limit"),
    },
    blocked_lanes={"acme/http:a.example:80": "The target is not allowed."},
)
_MAX_CANCELLED_ITERATION = 12
"""More iterations of the event loop than a store needs to send a request."""
OTHER_WORKER = WorkerRecord(name="höst-2-b", host="höst", pid=2, role="api")


@conformance_case
async def workers_are_listed_by_name(harness: StoreHarness) -> None:
    """A heartbeat is listed with the store's time until the process is removed."""
    assert [] == await list_workers(harness.store)
    await record_worker(harness.store, OTHER_WORKER)
    harness.clock.advance(5)
    await record_worker(harness.store, replace(WORKER, seen_at=START_MS + DAY_MS))
    await harness.reopen()

    expected = [replace(WORKER, seen_at=START_MS + 5), replace(OTHER_WORKER, seen_at=START_MS)]
    assert expected == await list_workers(harness.store)
    for _ in range(2):
        await remove_worker(harness.store, OTHER_WORKER.name)
        await remove_worker(harness.store, "unknown")
    assert expected[:1] == await list_workers(harness.store)


@conformance_case
async def a_heartbeat_replaces_the_last_one(harness: StoreHarness) -> None:
    """Of each process, only the last heartbeat is listed; changing the result changes nothing."""
    await record_worker(harness.store, WORKER)
    harness.clock.advance(WORKER_EXPIRY_MS - 1)
    await record_worker(harness.store, replace(WORKER, running_attempts=9, leased_tasks=10))
    [listed] = await list_workers(harness.store)
    assert (9, 10, harness.clock.now) == (
        listed.running_attempts,
        listed.leased_tasks,
        listed.seen_at,
    )
    listed.pid = 99
    assert [WORKER.pid] == [worker.pid for worker in await list_workers(harness.store)]


@conformance_case
async def a_silent_worker_is_not_listed(harness: StoreHarness) -> None:
    """A process without a recent heartbeat is left out; after a sweep it can be recorded again."""
    await record_worker(harness.store, WORKER)
    harness.clock.advance(WORKER_EXPIRY_MS - 1)
    await record_worker(harness.store, OTHER_WORKER)
    assert 2 == len(await list_workers(harness.store))
    harness.clock.advance(1)
    for _ in range(2):
        names = [worker.name for worker in await list_workers(harness.store)]
        assert [OTHER_WORKER.name] == names
        await harness.store.sweep(Retention(DAY_MS, DAY_MS), 10)
    await record_worker(harness.store, WORKER)
    assert 2 == len(await list_workers(harness.store))


@conformance_case
async def the_list_of_workers_is_bounded(harness: StoreHarness) -> None:
    """At most `MAX_LISTED_WORKERS` processes are returned, the first by name."""
    names = [f"worker {number:05}" for number in range(MAX_LISTED_WORKERS + 2)]
    await asyncio.gather(
        *(record_worker(harness.store, replace(WORKER, name=name)) for name in names)
    )

    listed = await list_workers(harness.store)
    assert names[:MAX_LISTED_WORKERS] == [worker.name for worker in listed]


@conformance_case
async def processes_that_lease_tasks_share_the_limits(harness: StoreHarness) -> None:
    """A process that leases tasks is counted, one with the role `api` is not."""

    async def process_count() -> int:
        limits = await harness.store.load_limits(ConfiguredLimits(version=-1))
        assert limits is not None
        return limits.process_count

    assert 1 == await process_count()
    first = harness.store
    await record_worker(first, replace(WORKER, name="api", role="api"))
    await record_worker(first, replace(WORKER, name=LEASE.worker))
    await harness.add(task(1))
    await harness.claim(LEASE)
    assert 1 == await process_count()
    if await harness.reopen() is first:  # data in memory has one store
        return
    await record_worker(harness.store, replace(WORKER, name=OTHER_LEASE.worker, role="all"))
    await harness.add(task(2))
    await harness.claim(OTHER_LEASE)
    assert 2 == await process_count()


@conformance_case
async def paused_lanes_are_loaded_with_the_limits(harness: StoreHarness) -> None:
    """Each pause and resumption is a new version of the limits, which contain the paused lanes."""
    known = ConfiguredLimits()
    for paused in (True, False):
        if paused:
            await harness.store.pause(LANE)
        else:
            await harness.store.resume(LANE)
        loaded = await harness.store.load_limits(known)
        assert loaded is not None
        assert loaded.version > known.version
        assert frozenset([LANE] if paused else []) == loaded.paused_lanes
        assert await harness.store.load_limits(loaded) is None
        known = loaded


@conformance_case
async def other_stores_are_woken_by_claimable_tasks(harness: StoreHarness) -> None:
    """Tasks that become claimable call the callback of another store, until it is closed."""
    first, woken = harness.store, asyncio.Event()
    first.listen(woken.set)
    if await harness.reopen() is first:  # data in memory has one store
        return
    store = harness.store

    async def wait() -> None:
        async with asyncio.timeout(20):
            await woken.wait()
        woken.clear()

    await asyncio.sleep(0)
    await store.add([NewTask(task(1))])
    await wait()
    leased = (await harness.claim()).tasks
    await store.release([Release(leased[0])])
    await wait()
    await store.retry_now("acme", task_id(1))
    await wait()
    await store.park(LANE, START_MS + DAY_MS, probes=1, consecutive_opens=1)
    await store.unpark(LANE)
    await wait()
    await store.pause(LANE)
    await store.resume(LANE)
    await wait()
    await first.close()
    await store.add([NewTask(task(2))])


@conformance_case
async def cancelled_calls_raise(harness: StoreHarness) -> None:
    """A call that is cancelled before it returns raises CancelledError.

    Otherwise, a loop that a shutdown has cancelled would continue.
    """
    store = harness.store
    calls: list[Callable[[], Awaitable[object]]] = [
        store.ping,
        lambda: list_workers(store),
        lambda: store.sweep(Retention(DAY_MS, DAY_MS), 10),
    ]
    for call in calls:
        await call()  # opens a connection
        for iteration in range(1, _MAX_CANCELLED_ITERATION):
            await _cancel_in_iteration(iteration, call)
        await call()


async def _cancel_in_iteration(iteration: int, call: Callable[[], Awaitable[object]]) -> None:
    """Cancel a call in an iteration of the event loop, unless it has returned before."""
    ended = asyncio.Event()
    has_returned = False

    async def run() -> None:
        nonlocal has_returned
        try:
            await call()
            has_returned = True
        finally:
            ended.set()

    running = asyncio.ensure_future(run())
    for _ in range(iteration):
        await asyncio.sleep(0)
    if running.done():
        return
    running.cancel()
    await ended.wait()
    assert not has_returned, f"the cancellation in iteration {iteration} was ignored"
