from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine.context import EngineLimits
from tarry.service.engine.lanes import Lanes, LocalLane, build_breaker
from tarry.service.model import Status, Task
from tarry.service.records.workers import list_workers
from tarry.service.shutdown import GRACE_S
from tarry.service.store import (
    CancelStatus,
    FinishStatus,
    LaneWriteStatus,
    RecordChange,
    Release,
    Retention,
    RetryNowStatus,
    SweepResult,
)
from tests.service.engine.harness import (
    BUSY,
    EPOCH_S,
    OK,
    EngineHarness,
    FakeTarget,
    new_breaker,
)
from tests.service.stores.reference_store import ReferenceStore


class UncancellableStore(ReferenceStore):
    """A store some of whose calls never return, and ignore that they are cancelled."""

    hanging: frozenset[str] = frozenset()

    async def _hang(self, name: str) -> None:
        while name in self.hanging:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                if name not in self.hanging:
                    raise

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        """Remove expired tasks, or hang."""
        await self._hang("sweep")
        return await super().sweep(retention, limit)

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        """Write or remove a heartbeat, or hang."""
        is_removal = any(change.value is None for change in changes)
        await self._hang("remove_worker" if is_removal else "record_worker")
        return await super().write_records(changes)

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Release leases, or hang."""
        await self._hang("release")
        return await super().release(releases)


@pytest.mark.parametrize(
    ("hanging", "abandoned"),
    [
        (["sweep"], ["Maintenance.run"]),
        (["record_worker"], ["Heartbeat.run"]),
        (["release"], ["ResultWriter._write_releases"]),
        (["remove_worker"], ["Heartbeat.remove", "Heartbeat.remove"]),
    ],
)
async def test_stop_ends_although_calls_of_the_store_ignore_cancellations(
    hanging: list[str], abandoned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A stop takes at most its timeout and a few seconds, and other steps are not affected."""
    loop = asyncio.get_running_loop()
    store = UncancellableStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(FakeTarget(), store=store)
    await harness.engine.start()
    store.hanging = frozenset(hanging)
    await asyncio.sleep(7)  # the next step of the maintenance and the next heartbeat hang
    (leased,) = await harness.add(harness.new_task(delay_ms=500))
    stopped_at = loop.time()
    await harness.engine.stop(10)

    assert loop.time() - stopped_at <= 10 + GRACE_S
    is_released = (await harness.get_task(leased)).worker is None
    assert ("release" not in hanging) is is_released
    is_removed = [] == await list_workers(store)
    assert ("remove_worker" not in hanging) is is_removed
    store.hanging = frozenset()
    messages = [message for message in caplog.messages if "shutdown" in message]
    assert abandoned == [message.rpartition(": ")[2] for message in messages]


async def test_cancel_of_a_leased_task_before_its_attempt_is_immediate() -> None:
    """A leased task that is not due yet is cancelled at once, and is not sent."""
    target = FakeTarget()
    harness = EngineHarness(target)
    (task,) = await harness.add(harness.new_task(delay_ms=500))
    assert CancelStatus.CANCELLED is await harness.engine.cancel("default", task.id)
    await asyncio.sleep(5)

    assert Status.CANCELLED is (await harness.get_task(task)).status
    assert [] == target.requests
    assert CancelStatus.FINISHED is await harness.engine.cancel("default", task.id)
    assert await harness.engine.cancel("other", task.id) is None


async def test_waiting_callers_are_notified_if_the_cancelled_task_cannot_be_read() -> None:
    harness = EngineHarness(FakeTarget())
    (task,) = await harness.add(harness.new_task(delay_ms=500))
    waiting = asyncio.ensure_future(harness.engine.wait_until_finished(task.id, 60))
    await asyncio.sleep(0)

    async def fail(tenant: str, task_id: str) -> None:
        raise StoreUnavailable("the store is down")

    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(StoreUnavailable):
        monkeypatch.setattr(harness.store, "get_task", fail)
        await harness.engine.cancel("default", task.id)
    await asyncio.sleep(0)

    assert waiting.done()
    finished_task = await waiting
    assert finished_task is not None
    assert Status.CANCELLED is finished_task.status


async def test_cancel_during_an_attempt_prevents_the_next() -> None:
    """A task that is cancelled during an attempt logs this attempt, and is not retried."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(1)
        return BUSY

    target = FakeTarget(respond_slowly)
    harness = EngineHarness(target)
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(0.1)
    assert CancelStatus.REQUESTED is await harness.engine.cancel("default", task.id)
    await asyncio.sleep(60)

    finished = await harness.get_task(task)
    assert (Status.CANCELLED, 1) == (finished.status, len(await harness.list_attempts(task)))
    assert 1 == len(target.requests)


async def test_a_leased_task_runs_or_waits_for_a_slot() -> None:
    """The engine reports whether an attempt of a task runs, if the task is leased here."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(1)
        return OK

    harness = EngineHarness(
        FakeTarget(respond_slowly), limits=EngineLimits(max_lane_running_attempts=1)
    )
    tasks = await harness.add(harness.new_task(), harness.new_task())
    await asyncio.sleep(0.5)
    assert [True, False] == [harness.engine.is_running(task.id) for task in tasks]
    await asyncio.sleep(1)
    assert [None, True] == [harness.engine.is_running(task.id) for task in tasks]
    await asyncio.sleep(60)


async def test_retry_now_sends_at_once() -> None:
    """Retry now sends a leased task and a task in the store at once, and each only once."""
    target = FakeTarget()
    harness = EngineHarness(target)
    await harness.engine.start()
    near, far = await harness.add(
        harness.new_task(delay_ms=900), harness.new_task(delay_ms=900_000)
    )
    assert RetryNowStatus.DUE is await harness.engine.retry_now("default", near.id)
    assert RetryNowStatus.DUE is await harness.engine.retry_now("default", far.id)
    await asyncio.sleep(0.5)
    assert 2 == len(target.requests)

    await asyncio.sleep(1000)
    assert 2 == len(target.requests)
    assert RetryNowStatus.SUCCEEDED is await harness.engine.retry_now("default", near.id)
    assert await harness.engine.retry_now("default", "0190a000-0000-7000-8000-ffffffffffff") is None
    await harness.engine.stop(1)


async def test_resume_closes_the_breaker_of_the_lane() -> None:
    """Resuming a lane closes its open breaker, and the tasks of the lane are sent."""
    target = FakeTarget(*[BUSY] * 5, OK)
    harness = EngineHarness(
        target, build_breaker=lambda: new_breaker(min_calls=5, open_for=300.0, spread=0.0)
    )
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(5)])
    await asyncio.sleep(10)
    assert 5 == len(target.requests)
    stats = harness.engine.local_stats(tasks[0].lane)
    assert stats is not None
    assert "open" == stats.breaker

    await harness.engine.resume(tasks[0].lane)
    await asyncio.sleep(20)
    assert {Status.SUCCEEDED} == {(await harness.get_task(task)).status for task in tasks}
    await harness.engine.reset(tasks[0].lane)
    assert harness.engine.local_stats("default/http:unknown.example:80") is None
    await harness.engine.stop(1)


async def test_new_task_is_sent_without_a_claim() -> None:
    """A new task that is due is sent at once, with its idempotency key and attempt number."""
    target = FakeTarget()
    harness = EngineHarness(target)
    (task,) = await harness.add(harness.new_task(body=b"hello", headers={"x-a": "1"}))
    await asyncio.sleep(0.1)

    (request,) = target.requests
    assert ("http://a.example:80/", "POST", b"hello") == (request.url, request.method, request.body)
    retry_headers = [("Idempotency-Key", task.key), ("X-Retry-Attempt", "1")]
    assert [("x-a", "1"), *retry_headers] == list(request.headers.items())
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    assert ["added", "attempt", "succeeded"] == harness.event_kinds()


@pytest.mark.parametrize(
    ("lanes", "tenant_leases", "leased"),
    [
        ("aaaa", 3, "1110"),
        ("fffff", 0, "11110"),  # the limit for fast lanes is 4
        ("fffff", 9, "11111"),
        ("sssss", 9, "11000"),
        ("ssfsafts", 9, "11101100"),
        ("afafafaf", 2, "11010100"),
        ("afafafaf", 0, "01010101"),
        ("tttta", 9, "00001"),
        ("sasasasa", 9, "11110101"),
        ("a", 1, "1"),
        ("a", 0, "0"),
        ("f", 0, "1"),
        ("s", 0, "0"),
        ("t", 9, "0"),
    ],
)
async def test_leases_of_a_batch_are_limited_by_tenant_and_lane(
    monkeypatch: pytest.MonkeyPatch, lanes: str, tenant_leases: int, leased: str
) -> None:
    """The first tasks of each lane get the leases that are free for the tenant and the lane.

    The lanes: `a` is new, `f` fast, `s` slow with a capacity of 2, and the breaker of `t` is open.
    """
    capacities: dict[str, int] = {}
    monkeypatch.setattr(Lanes, "lease_allowance", lambda *_: tenant_leases)
    monkeypatch.setattr(Lanes, "lease_capacity", lambda _, lane: capacities[lane.name])
    is_tripped = property(lambda lane: "t.example" in lane.name)
    monkeypatch.setattr(LocalLane, "is_tripped", is_tripped)
    harness = EngineHarness(FakeTarget())
    for name, capacity in (("f", 9), ("s", 2), ("t", 9)):
        lane = harness.lanes[f"default/http:{name}.example:80"]
        capacities[lane.name] = capacity
        lane.is_slow = name == "s"
    free_leases = harness.engine.worker.leased_tasks.free_leases
    monkeypatch.setattr(harness.lanes, "reserved_leases", free_leases - 4)
    tasks = [harness.new_task(f"http://{name}.example:80/") for name in lanes]

    harness.engine.submit(tasks)
    assert leased == "".join(str(int(task.lease_on_add)) for task in tasks)


async def test_caller_continues_before_attempts_start() -> None:
    """The API responds to a request before the attempts of its tasks start."""
    target = FakeTarget()
    harness = EngineHarness(target)
    await harness.add(harness.new_task())
    await asyncio.sleep(1)  # the policy is loaded
    await harness.engine.submit([harness.new_task() for _ in range(3)])

    assert 1 == len(target.requests)
    await asyncio.sleep(1)
    assert 4 == len(target.requests)


async def test_cancelled_caller_does_not_stop_its_task() -> None:
    """A task is sent although the call that adds it is cancelled before the store replies."""
    target = FakeTarget(OK)
    harness = EngineHarness(target)
    add, may_write = harness.store.add, asyncio.Event()

    async def add_slowly(*args: Any, **options: Any) -> Any:
        await may_write.wait()
        return await add(*args, **options)

    harness.store.add = add_slowly  # type: ignore[method-assign]
    adding = asyncio.ensure_future(harness.add(harness.new_task()))
    await asyncio.sleep(1)
    adding.cancel()
    await asyncio.wait([adding])
    may_write.set()
    await asyncio.sleep(1)

    assert adding.cancelled()
    assert 1 == len(target.requests)


async def test_single_task_is_stored_before_the_waiting_tasks_of_batches() -> None:
    """A task that is added after a batch of 1,000 tasks is in the next write to the store."""
    harness = EngineHarness(FakeTarget())
    written: list[list[str]] = []
    may_finish = asyncio.Event()
    add = harness.store.add

    async def record_and_add(tasks: Any, *args: Any, **kwargs: Any) -> Any:
        written.append([new_task.task.id for new_task in tasks])
        await may_finish.wait()
        return await add(tasks, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(harness.store, "add", record_and_add)
        batch = harness.engine.submit([harness.new_task() for _ in range(1000)])
        await asyncio.sleep(1)
        started_count = len(written)
        new_task = harness.new_task()
        single = harness.engine.submit([new_task])
        may_finish.set()
        await single
        await batch

    assert new_task.task.id in written[started_count]
    assert 1001 == sum(map(len, written))


async def test_overdue_tasks_are_claimed_and_finished_in_small_steps() -> None:
    """After a start with overdue tasks, a call claims at most 64 or finishes at most 128 tasks."""
    target = FakeTarget()
    harness = EngineHarness(target)
    urls = [f"http://host{number % 10}.example/" for number in range(1000)]
    await harness.store.add([harness.new_task(url) for url in urls])
    claimed_counts: list[int] = []
    finished_counts: list[int] = []
    claim, finish = harness.store.claim, harness.store.finish

    async def record_claim(*args: Any, **kwargs: Any) -> Any:
        result = await claim(*args, **kwargs)
        claimed_counts.append(len(result.tasks))
        return result

    async def record_finish(results: Any) -> Any:
        finished_counts.append(len(results))
        return await finish(results)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(harness.store, "claim", record_claim)
        monkeypatch.setattr(harness.store, "finish", record_finish)
        await harness.engine.start()
        await asyncio.sleep(10)
        await harness.engine.stop(1)

    assert (1000, 64) == (sum(claimed_counts), max(claimed_counts))
    assert 1000 == sum(finished_counts)
    assert max(finished_counts) <= 128
    assert 1000 == len(target.requests)


async def test_removed_lane_is_used_again() -> None:
    """New tasks of a lane that retention has removed are sent, although its breaker was open."""
    loop = asyncio.get_running_loop()
    store = ReferenceStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    target = FakeTarget(BUSY)
    harnesses = [
        EngineHarness(target, store=store, build_breaker=build_breaker, seed=seed)
        for seed in (1, 2)
    ]
    tasks: list[Task] = []
    for harness in harnesses:
        await harness.engine.start()
        tasks += await harness.add(*(harness.new_task() for _ in range(40)))
    await asyncio.sleep(5)
    lane = tasks[0].lane
    assert any(harness.lanes[lane].is_tripped for harness in harnesses)
    for task in tasks:
        await harnesses[0].engine.cancel(task.tenant, task.id)
    await asyncio.sleep(60)
    await store.sweep(Retention(0, 0), 1000)
    assert await store.get_lane(lane) is None

    target.responses = [OK]
    for harness in harnesses:
        [added] = await harness.add(harness.new_task())
        await asyncio.sleep(5)
        assert Status.SUCCEEDED is (await harness.get_task(added)).status
    for harness in harnesses:
        await harness.engine.stop(1)


async def test_lane_above_the_limit_is_not_paused() -> None:
    """A pause that the store rejects changes nothing in this process."""
    harness = EngineHarness(FakeTarget(OK), limits=EngineLimits(max_tenant_lanes=1))
    await harness.add(harness.new_task())
    name = "default/http:b.example:80"

    assert LaneWriteStatus.TOO_MANY_LANES is await harness.engine.pause(name)

    assert not harness.lanes[name].is_paused
    assert "paused" not in harness.event_kinds()


async def test_latencies_are_stored_last_when_the_engine_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the latencies cannot be stored, the figures over time are stored nevertheless."""
    harness = EngineHarness(FakeTarget())
    await harness.engine.start()
    await harness.add(harness.new_task())
    await asyncio.sleep(1)
    calls: list[str] = []
    write_records = harness.store.write_records

    async def write(changes: Sequence[RecordChange]) -> bool:
        calls.append(changes[0].kind)
        if changes[0].kind == "lane activity":
            raise StoreUnavailable("no connection")
        return await write_records(changes)

    monkeypatch.setattr(harness.store, "write_records", write)
    await harness.engine.stop(1)
    written = [kind for kind in calls if not kind.startswith("processes")]
    assert ["series 10000", "series 300000", "lane activity"] == written
