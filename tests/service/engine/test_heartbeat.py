"""Several processes: heartbeats, roles, wake-ups, and pauses that reach all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine.claim_turns import TURN_MS
from tarry.service.engine.context import EngineLimits
from tarry.service.model import LaneRecord, LaneWait, Status, WorkerRecord
from tarry.service.records.workers import list_workers, record_worker
from tarry.service.store import (
    MAX_LISTED_RECORDS,
    ClaimResult,
    LeaseTerms,
    RecordChange,
    StoredRecord,
)
from tests.service.engine.harness import EPOCH_S, LEASE, OK, EngineHarness, FakeTarget
from tests.service.stores.reference_store import ReferenceState, ReferenceStore

OTHER_LEASE = LeaseTerms("other", LEASE.length_ms, LEASE.horizon_ms)
API_LEASE = LeaseTerms("api", LEASE.length_ms, LEASE.horizon_ms)
LANE = "default/http:a.example:80"


class FailingStore(ReferenceStore):
    """A store that cannot record or remove workers while `fails` is true.

    While `list_fails` is true, it cannot list them.
    """

    fails = list_fails = ping_fails = False

    async def ping(self, partition: int | None = None) -> int:
        """Return the time; raise an unexpected error while `ping_fails` is true."""
        if self.ping_fails:
            raise ValueError
        return await super().ping(partition)

    async def list_records(
        self, owner: str, kind: str, *, after: str = "", limit: int = MAX_LISTED_RECORDS
    ) -> tuple[int, list[StoredRecord]]:
        """Return the records."""
        if self.list_fails:
            raise StoreUnavailable("the server is unavailable")
        return await super().list_records(owner, kind, after=after, limit=limit)

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        """Write or delete records."""
        if self.fails:
            raise StoreUnavailable("the server is unavailable")
        return await super().write_records(changes)


def new_store(state: ReferenceState | None = None) -> FailingStore:
    """Return a store on the clock of the running event loop."""
    loop = asyncio.get_running_loop()
    return FailingStore(lambda: int((EPOCH_S + loop.time()) * 1000), state)


async def test_a_process_is_listed_until_it_stops() -> None:
    """A heartbeat has the start time and the current load; a clean stop removes the process."""
    started = asyncio.Event()
    release = asyncio.Event()

    async def respond(_: DeliveryRequest) -> DeliveryResult:
        started.set()
        await release.wait()
        return OK

    harness = EngineHarness(FakeTarget(respond), store=new_store())
    await harness.engine.start()
    start_ms = await harness.store.ping()
    await harness.add(harness.new_task(), harness.new_task(delay_ms=900_000))
    await started.wait()
    await asyncio.sleep(6)
    [worker] = await list_workers(harness.store)
    assert ("worker", "host", "all", 1, 1) == (
        worker.name, worker.host, worker.role, worker.running_attempts, worker.leased_tasks
    )  # fmt: skip
    assert worker.started_at == start_ms < worker.seen_at
    await asyncio.sleep(600)
    assert [worker.name] == [other.name for other in await list_workers(harness.store)]
    release.set()
    await harness.engine.stop(1)
    assert [] == await list_workers(harness.store)


async def test_a_process_is_listed_again_when_the_store_recovers() -> None:
    """Heartbeats continue after a failure of the store, and a failure does not stop a shutdown."""
    store = new_store()
    harness = EngineHarness(FakeTarget(), store=store)
    await harness.engine.start()
    await asyncio.sleep(1)
    store.fails = True
    await asyncio.sleep(60)
    assert [] == await list_workers(store)
    store.fails = False
    await asyncio.sleep(6)
    assert 1 == len(await list_workers(store))
    store.fails = True
    await harness.engine.stop(1)
    assert 1 == len(await list_workers(store))


async def test_heartbeats_continue_after_an_unexpected_error_of_the_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error is logged. Without heartbeats, others would consider the process dead."""
    store = new_store()
    harness = EngineHarness(FakeTarget(), store=store)
    await harness.engine.start()
    store.ping_fails = True
    await asyncio.sleep(60)
    assert 1 == len(await list_workers(store))
    store.ping_fails = False
    await harness.engine.stop(1)
    assert {"check of the store failed"} == set(caplog.messages)


@pytest.mark.parametrize(("blocked_count", "is_own"), [(200, False), (201, True)])
async def test_a_process_whose_blocked_lanes_are_not_all_known_owns_no_lane(
    blocked_count: int, is_own: bool
) -> None:
    """A heartbeat names up to 201. Another lane could be left to a process that blocks it."""
    harness = EngineHarness(FakeTarget(), store=new_store())
    blocked = {f"default/{number}": "private address" for number in range(blocked_count)}
    other = WorkerRecord(name="other", host="host", pid=2, role="all", blocked_lanes=blocked)
    await record_worker(harness.store, other)
    await harness.engine.announce()
    lanes = [f"default/http://host-{number}" for number in range(20)]
    assert is_own == all(map(harness.lanes.owners.is_own, lanes))


async def test_a_process_that_was_killed_owns_no_lane_soon() -> None:
    """It is listed for half a minute. Meanwhile, its limited lanes have other owners."""
    harness = EngineHarness(FakeTarget(), store=new_store())
    await record_worker(harness.store, WorkerRecord(name="other", host="host", pid=2))
    await harness.engine.start()
    lanes = [f"default/http://host-{number}" for number in range(20)]
    await asyncio.sleep(6)
    assert not all(map(harness.lanes.owners.is_own, lanes))
    await asyncio.sleep(9.5)
    assert all(map(harness.lanes.owners.is_own, lanes))
    assert 2 == len(await list_workers(harness.store))
    await harness.engine.stop(1)


async def test_an_api_process_stores_tasks_and_wakes_a_worker() -> None:
    """A task that an `api` process accepts is delivered by another process without a delay."""
    state = ReferenceState()
    target, no_target = FakeTarget(OK), FakeTarget(OK)
    api = EngineHarness(no_target, store=new_store(state), role="api")
    worker = EngineHarness(target, store=new_store(state), lease=OTHER_LEASE, seed=2, role="worker")
    for harness in (api, worker):
        await harness.engine.start()
    await asyncio.sleep(10.2)
    [task] = await api.add(api.new_task())
    assert (Status.PENDING, None) == (task.status, task.worker)
    added_at = asyncio.get_running_loop().time()
    await asyncio.sleep(0.4)  # shorter than the poll interval
    assert Status.SUCCEEDED is (await api.get_task(task)).status
    assert target.times[0] - added_at < 0.1
    assert [] == no_target.requests
    for harness in (api, worker):
        await harness.engine.stop(1)


async def test_an_api_process_adopts_the_clock_of_the_store_if_it_cannot_list_workers() -> None:
    """After the clock of the store is set back, the clock of the process follows."""
    loop, offset_s = asyncio.get_running_loop(), 0
    store = FailingStore(lambda: int((EPOCH_S + loop.time() - offset_s) * 1000))
    api = EngineHarness(FakeTarget(OK), store=store, role="api")
    await api.engine.start()
    await asyncio.sleep(1)
    store.list_fails, offset_s = True, 60
    await asyncio.sleep(30)
    assert abs(api.context.clock.now_ms() - await store.ping()) <= 1
    await api.engine.stop(1)


class ClaimTimesStore(FailingStore):
    """A store that records when each claim is made: ms since the start of a round of two turns."""

    def __init__(self, clock: Callable[[], int], state: ReferenceState) -> None:
        super().__init__(clock, state)
        self.claim_times: list[int] = []

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Claim, and record the time."""
        result = await super().claim(terms, limit=limit, per_lane=per_lane, lane_limits=lane_limits)
        self.claim_times.append(result.now % (2 * TURN_MS))
        return result


async def test_processes_claim_in_turns_while_tasks_arrive() -> None:
    """While another process adds tasks, each of two workers claims in its own turn."""
    state, loop = ReferenceState(), asyncio.get_running_loop()

    def now_ms() -> int:
        return int((EPOCH_S + loop.time()) * 1000)

    target = FakeTarget(OK)
    api = EngineHarness(target, store=new_store(state), lease=API_LEASE, role="api")
    stores = [ClaimTimesStore(now_ms, state) for _ in range(2)]
    workers = [
        EngineHarness(target, store=store, lease=lease, seed=seed, role="worker")
        for seed, (store, lease) in enumerate(zip(stores, (LEASE, OTHER_LEASE), strict=True), 2)
    ]
    for harness in (api, *workers):
        await harness.engine.start()
    await asyncio.sleep(20)
    assert 3 == len(await list_workers(api.store))
    assert [2, 2] == [worker.context.claim_turns.process_count for worker in workers]
    assert {2} == {worker.context.claim_turns.claim_factor for worker in workers}
    tasks = await api.add(*(api.new_task() for _ in range(200)))
    await asyncio.sleep(0.5)
    for store in stores:
        store.claim_times.clear()
    for _ in range(1_000):
        tasks += await api.add(api.new_task())
        await asyncio.sleep(0.001)
    times = [store.claim_times for store in stores]
    for claim_times in times:
        assert 20 <= len(claim_times) <= 50
    await asyncio.sleep(0.1)
    # The first claims were made at once. "other" has the first turn, "worker" the second.
    assert [{TURN_MS}, {0}] == [set(claim_times[1:]) for claim_times in times]
    for harness in (*workers, api):
        await harness.engine.stop(1)
    assert len(tasks) == len(target.requests) == 1_200


async def test_results_of_several_processes_wait_longer() -> None:
    """Results linger for 5 ms with one process, and for up to 40 ms while there are several."""
    state = ReferenceState()
    harness = EngineHarness(FakeTarget(OK), store=new_store(state))
    buffer = harness.engine.worker.result_writer.results[0]
    await harness.engine.start()
    await asyncio.sleep(6)
    assert 0.005 == buffer.linger_s
    others = []
    for count, linger_s in enumerate((0.02, 0.03, 0.04, 0.04), 2):
        lease = LeaseTerms(f"other-{count}", LEASE.length_ms, LEASE.horizon_ms)
        other = EngineHarness(FakeTarget(OK), store=new_store(state), lease=lease, seed=count)
        others.append(other)
        await other.engine.start()
        await asyncio.sleep(6)
        assert count == harness.context.claim_turns.process_count
        assert linger_s == buffer.linger_s
    for other in others:
        await other.engine.stop(1)
    await asyncio.sleep(6)
    assert 0.005 == buffer.linger_s
    await harness.engine.stop(1)


async def test_an_api_process_stops_at_once() -> None:
    """A process that makes no attempts does not use the time for running attempts."""
    harness = EngineHarness(FakeTarget(), store=new_store(), role="api")
    await harness.engine.start()
    await asyncio.sleep(1.5)
    stopped_at = asyncio.get_running_loop().time()
    await harness.engine.stop(30)
    assert stopped_at == asyncio.get_running_loop().time()
    assert [] == await list_workers(harness.store)


async def test_an_api_process_keeps_its_clock() -> None:
    """A process that makes no claims reads the store's time with its heartbeats."""
    offset_ms = 0
    loop = asyncio.get_running_loop()
    store = ReferenceStore(lambda: int((EPOCH_S + loop.time()) * 1000) + offset_ms)
    harness = EngineHarness(FakeTarget(), store=store, role="api")
    await harness.engine.start()
    offset_ms = 60_000
    await asyncio.sleep(6)
    assert abs(harness.context.clock.now_ms() - await store.ping()) <= 1
    await harness.engine.stop(1)


async def test_a_pause_in_one_process_stops_the_others() -> None:
    """Tasks that another process has leased are released within two seconds of a pause."""
    state, target = ReferenceState(), FakeTarget(OK)
    first = EngineHarness(FakeTarget(OK), store=new_store(state), role="api")
    lease = LeaseTerms("other", LEASE.length_ms, 60_000)  # leased a minute before the due time
    second = EngineHarness(target, store=new_store(state), lease=lease, seed=2)
    for harness in (first, second):
        await harness.engine.start()
    [task] = await first.add(first.new_task(delay_ms=10_000))
    await asyncio.sleep(3)
    assert "other" == (await first.get_task(task)).worker
    await first.engine.pause(LANE)
    await asyncio.sleep(2)
    assert Status.PENDING is (await first.get_task(task)).status
    await asyncio.sleep(60)
    assert [] == target.requests
    await first.engine.resume(LANE)
    await asyncio.sleep(0.4)
    assert Status.SUCCEEDED is (await first.get_task(task)).status
    for harness in (first, second):
        await harness.engine.stop(1)


async def test_a_pause_that_overtakes_a_claim_is_applied() -> None:
    """Tasks of a lane that was paused after the claim, but before its reply, are released."""
    harness = EngineHarness(FakeTarget(OK), store=new_store())
    [task] = await harness.add(harness.new_task(delay_ms=1_500))
    store, claim = harness.store, harness.store.claim

    async def claim_and_pause(*arguments: Any, **options: Any) -> ClaimResult:
        result = await claim(*arguments, **options)
        await store.pause(LANE)
        await harness.engine.scheduler.load_limits()
        return result

    await asyncio.sleep(1)
    store.claim = claim_and_pause  # type: ignore[method-assign]
    [leased] = (await harness.engine.scheduler.run_once()).tasks
    assert task.id == leased.id
    assert harness.lanes[LANE].is_paused
    await asyncio.sleep(10)
    assert Status.PENDING is (await harness.get_task(task)).status
    await harness.engine.stop(1)


async def test_the_rate_of_a_tenant_is_shared() -> None:
    """Each process that accepts requests gets an equal share of `tenant_tasks_per_s`."""
    state = ReferenceState()
    limits = EngineLimits(tenant_tasks_per_s=10.0, tenant_burst=40.0)
    harnesses = [
        EngineHarness(
            FakeTarget(),
            store=new_store(state),
            limits=limits,
            lease=LeaseTerms(f"process {index}", LEASE.length_ms, LEASE.horizon_ms),
            role=role,
        )
        for index, role in enumerate(("api", "all", "worker", "worker"))
    ]
    for harness in harnesses:
        await harness.engine.start()
    await asyncio.sleep(6)
    limiter = harnesses[0].engine.rate_limiter
    assert limiter is not None
    assert 20 == limiter.take_up_to("acme", 100)
    await asyncio.sleep(1)
    assert 5 == limiter.take_up_to("acme", 100)
    for harness in harnesses:
        await harness.engine.stop(1)


async def test_processes_that_allow_different_targets_are_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A process warns of each other list of allowed targets, not of each process."""
    with caplog.at_level(logging.WARNING, "tarry.service"):
        store = new_store()
        process = WorkerRecord(name="a", host="h", pid=1, allow_target=("10.0.0.0/8", "--dev"))
        for name in ("a", "b"):
            await record_worker(store, msgspec.structs.replace(process, name=name))
        harness = EngineHarness(FakeTarget(OK), store=store)
        await harness.engine.start()
        await asyncio.sleep(12)
        await harness.engine.stop(1)
    [message] = caplog.messages
    assert message.endswith(
        f"process={LEASE.worker} allow_target=none process=a allow_target=10.0.0.0/8,--dev"
    )


async def test_reasons_of_other_processes_are_shown_while_the_lane_has_tasks() -> None:
    """The earliest due task of all processes decides; a reason of a newer version is ignored."""
    harness = EngineHarness(FakeTarget(), store=new_store(), role="api")
    now = harness.context.clock.now_ms()
    [task] = await harness.add(harness.new_task())
    for number, wait in enumerate(
        [LaneWait("rate-limit"), LaneWait("secret", now - 5_000), LaneWait("retry-budget", now)]
    ):
        lanes = {task.lane: wait, "default/http:new.example:80": LaneWait("moon-phase", 1)}
        other = WorkerRecord(name=f"other-{number}", host="h", pid=2, waiting_lanes=lanes)
        await record_worker(harness.store, other)
    await harness.engine.announce()
    record = await harness.store.get_lane(task.lane)
    assert record is not None
    assert "secret" == harness.engine.waiting_for(record)
    backlog = await harness.engine.series.read_backlog()
    assert ("secret", True) == (backlog.waiting_for, backlog.oldest_due_age_ms >= 5_000)
    for empty in ("default/http:new.example:80", task.lane):
        record = LaneRecord(name=empty, tenant="default", pending=int(empty != task.lane))
        assert harness.engine.waiting_for(record) is None
