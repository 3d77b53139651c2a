from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import pytest

from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.encryption import Codec
from tarry.service.engine.attempts import final_result
from tarry.service.engine.context import EngineLimits
from tarry.service.engine.engine import Engine
from tarry.service.engine.result_writer import build_callback_task
from tarry.service.model import AttemptRecord, Status, Task, TaskContent
from tarry.service.records.lane_activity import read_lane_activity
from tarry.service.store import (
    ClaimResult,
    FinishStatus,
    LeaseTerms,
    Release,
    TaskResult,
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

TASK = Task(
    id="i",
    tenant="t",
    lane="t/https:a:443",
    key="k",
    fingerprint=b"",
    packed_content=b"",
    attempts=2,
)
CONTENT = TaskContent(url="https://a/x?token=hush", callback_url="https://b/done")


def test_callback_has_the_result_of_the_task() -> None:
    """A callback has the task's result as JSON, with the target URL without its query."""
    attempt = AttemptRecord(
        attempt_number=3, scheduled_at=1, started_at=1, response_status=410, outcome="permanent"
    )
    result = final_result(TASK, attempt, Status.EXHAUSTED, "permanent")

    callback = build_callback_task(TASK, CONTENT, result, new_id=lambda: "j", pack=Codec().pack)

    content = Codec().unpack(callback.packed_content)
    assert {
        "taskId": "i",
        "idempotencyKey": "k",
        "targetUrl": "https://a/x",
        "status": "EXHAUSTED",
        "reason": "permanent",
        "attemptNumber": 3,
        "responseStatus": 410,
        "createdAt": 0,
    } == msgspec.json.decode(content.body)
    assert ("https://b/done", len(content.body)) == (content.url, content.body_size)
    assert "default" == callback.policy_id


def test_callback_uses_the_policy_that_the_task_names() -> None:
    """The callback has the task's `callbackPolicyId`."""
    content = msgspec.structs.replace(CONTENT, callback_policy_id="webhook")
    result = final_result(TASK, None, Status.SUCCEEDED, None)

    callback = build_callback_task(TASK, content, result, new_id=lambda: "j", pack=Codec().pack)
    assert "webhook" == callback.policy_id


async def test_callback_is_a_separate_task() -> None:
    """The result of a task is posted to its `callbackUrl`, and retried like any task."""

    async def respond_by_url(request: DeliveryRequest) -> DeliveryResult:
        return OK if "a.example" in request.url or len(target.requests) > 2 else BUSY

    target = FakeTarget(respond_by_url)
    harness = EngineHarness(target)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(callback_url="http://hook.example/done"))
    await asyncio.sleep(30)
    await harness.engine.stop(1)

    callback = target.requests[-1]
    assert "http://hook.example/done" == callback.url
    payload = msgspec.json.decode(callback.body)
    assert (task.id, "SUCCEEDED", 200) == (
        payload["taskId"],
        payload["status"],
        payload["responseStatus"],
    )
    assert 3 == len(target.requests)


class FaultyStore:
    """A store whose `failing_methods` raise `StoreUnavailable`."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.failing_methods: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name not in self.failing_methods:
            return method

        async def fail(*_args: object, **_kwargs: object) -> None:
            msg = f"{name}: the disk is full"
            raise StoreUnavailable(msg)

        return fail


async def test_result_is_written_after_a_store_outage() -> None:
    """A result is written when the store recovers; until then, health reports the store."""
    target = FakeTarget()
    harness = EngineHarness(target)
    faulty_store = FaultyStore(harness.store)
    harness = EngineHarness(target, store=faulty_store)
    await harness.engine.start()
    faulty_store.failing_methods = {"finish", "claim", "sweep"}
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(20)
    assert "store" in harness.context.health.failing
    assert 1 == len(target.requests)

    faulty_store.failing_methods = set()
    await asyncio.sleep(5)
    assert {} == harness.context.health.failing
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    assert 1 == len(target.requests)
    await harness.engine.stop(1)


async def test_a_stop_waits_for_a_store_without_partitions_that_responds_again() -> None:
    """No other partition works meanwhile, so the wait ends only at the deadline of the stop."""
    target = FakeTarget()
    harness = EngineHarness(target)
    faulty_store = FaultyStore(harness.store)
    harness = EngineHarness(target, store=faulty_store)
    await harness.engine.start()
    faulty_store.failing_methods = {"finish"}
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(1)
    stopping = asyncio.ensure_future(harness.engine.stop(600))
    await asyncio.sleep(20)
    assert not stopping.done()
    faulty_store.failing_methods = set()
    await stopping
    assert Status.SUCCEEDED is (await harness.get_task(task)).status


class RecordingStore:
    """A store that records the time of each call of `add` and `finish`."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: list[tuple[str, float]] = []

    def __getattr__(self, name: str) -> Any:
        if name in {"add", "finish"}:
            self.calls.append((name, asyncio.get_running_loop().time()))
        return getattr(self.store, name)


async def test_results_are_written_together_with_new_tasks() -> None:
    """A result waits for 5 ms; if a task is added meanwhile, both are written at the same time."""
    store = RecordingStore(EngineHarness(FakeTarget()).store)
    harness = EngineHarness(FakeTarget(), store=cast("Any", store))
    begin = asyncio.get_running_loop().time()
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(0.003)
    assert Status.IN_FLIGHT is (await harness.get_task(task)).status
    (other_task,) = await harness.add(harness.new_task())
    await asyncio.sleep(0.001)
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    await asyncio.sleep(0.01)
    assert Status.SUCCEEDED is (await harness.get_task(other_task)).status
    times = [(name, round((at - begin) * 1000)) for name, at in store.calls]
    assert [("add", 0), ("add", 3), ("finish", 3), ("finish", 8)] == times
    await harness.engine.stop(1)


async def test_result_that_a_caller_awaits_is_written_at_once() -> None:
    """`Prefer: wait` does not take longer than the attempt."""
    harness = EngineHarness(FakeTarget())
    new_task, loop = harness.new_task(), asyncio.get_running_loop()
    begin = loop.time()
    wait = asyncio.ensure_future(harness.engine.wait_until_finished(new_task.task.id, 5))
    await harness.add(new_task)
    finished = await wait
    assert finished is not None
    assert (Status.SUCCEEDED, begin) == (finished.status, loop.time())
    await harness.engine.stop(1)


async def test_retry_without_a_delay_is_not_late() -> None:
    """A result is written at once if the next attempt is due at once."""
    target = FakeTarget(BUSY, OK)
    harness = EngineHarness(target)
    # With this random number, full jitter chooses no delay.
    harness.engine = Engine(msgspec.structs.replace(harness.context, draw=lambda: 0.0))
    await harness.add(harness.new_task())
    await asyncio.sleep(1)
    assert 2 == len(target.times)
    assert target.times[0] == target.times[1]
    await harness.engine.stop(1)


async def test_retry_with_a_short_delay_is_not_late() -> None:
    """A result lingers for half of the time until the next attempt, the rest is for the write."""
    target = FakeTarget(BUSY, OK)
    store = RecordingStore(EngineHarness(FakeTarget()).store)
    harness = EngineHarness(target, store=cast("Any", store))
    # With this random number, full jitter chooses 3 % of the first delay of a second.
    harness.engine = Engine(msgspec.structs.replace(harness.context, draw=lambda: 0.03))
    harness.engine.worker.result_writer.set_process_count(process_count=4)
    begin = asyncio.get_running_loop().time()
    await harness.add(harness.new_task())
    await asyncio.sleep(1)
    [_, (name, written_at), _] = store.calls
    assert ("finish", 15) == (name, round((written_at - begin) * 1000))
    assert 30 == round((target.times[1] - begin) * 1000)
    await harness.engine.stop(1)


async def test_caller_does_not_wait_for_the_end_of_a_linger() -> None:
    """If a caller begins to wait for a task whose result lingers, the result is written at once."""
    harness, loop = EngineHarness(FakeTarget(OK)), asyncio.get_running_loop()
    harness.engine.worker.result_writer.set_process_count(4)
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(0.01)
    assert Status.IN_FLIGHT is (await harness.get_task(task)).status
    began_at = loop.time()
    finished_task = await harness.engine.wait_until_finished(task.id, 1.0)
    assert finished_task is not None
    assert began_at == loop.time()
    await harness.engine.stop(1)


async def test_result_after_a_lost_lease_is_discarded() -> None:
    """After another worker has claimed a task, a result of the first worker is discarded."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(200)  # longer than the attempt timeout and the lease
        return OK

    first = EngineHarness(FakeTarget(respond_slowly))
    (task,) = await first.add(first.new_task())
    second = EngineHarness(
        FakeTarget(OK), store=first.store, seed=2, lease=LeaseTerms("second", 70_000, 1_000)
    )
    await second.engine.start()
    await asyncio.sleep(150)
    stored = await first.get_task(task)
    assert (Status.SUCCEEDED, 2) == (stored.status, stored.attempts)
    outcomes = [attempt.outcome for attempt in await first.list_attempts(task)]
    assert ["lost", "success"] == outcomes

    await asyncio.sleep(100)
    assert stored == await first.get_task(task)
    assert 1 == first.event_kinds().count("superseded")
    page, _ = first.metrics.render(await first.store.counters(), 0.0)
    assert b"retry_superseded_total 1.0" in page
    await second.engine.stop(1)


async def test_rejected_result_does_not_affect_its_group() -> None:
    """If the store rejects one result of a group, the other results are written."""
    loop = asyncio.get_running_loop()

    class RejectingStore(ReferenceStore):
        async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
            if any(result.task.key == "rejected" for result in results):
                raise ValueError
            return await super().finish(results)

    harness = EngineHarness(
        FakeTarget(OK), store=RejectingStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    )
    await harness.engine.start()
    rejected, *others = await harness.add(
        harness.new_task(key="rejected"), *[harness.new_task() for _ in range(20)]
    )
    await asyncio.sleep(5)

    assert {Status.SUCCEEDED} == {(await harness.get_task(task)).status for task in others}
    assert Status.IN_FLIGHT is (await harness.get_task(rejected)).status
    await harness.engine.stop(1)


class OutageStore(ReferenceStore):
    """A store that raises `StoreUnavailable` while `is_unavailable` is set."""

    is_unavailable = False

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Claim, or raise during an outage."""
        self._check_available()
        return await super().claim(terms, limit=limit, per_lane=per_lane, lane_limits=lane_limits)

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write results, or raise during an outage."""
        self._check_available()
        return await super().finish(results)

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Release leases, or raise during an outage."""
        self._check_available()
        return await super().release(releases)

    async def release_unknown_leases(
        self, terms: LeaseTerms, known_ids: Collection[str], partition: int | None = None
    ) -> int:
        """Release leases, or raise during an outage."""
        self._check_available()
        return await super().release_unknown_leases(terms, known_ids)

    def _check_available(self) -> None:
        if self.is_unavailable:
            raise StoreUnavailable("the store is unavailable")


@pytest.mark.parametrize("count", [20, 1900, 2900])
@pytest.mark.parametrize("outage_s", [60.0, 100.0, 101.3, 120.7])
async def test_attempts_made_during_a_store_outage_are_not_repeated(
    outage_s: float, count: int
) -> None:
    """Results are written, even after their leases have expired."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(1)
        return OK

    target, loop = FakeTarget(respond_slowly), asyncio.get_running_loop()
    store = OutageStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(target, store=store, lease=LeaseTerms("worker", 70_000, 1_000))
    await harness.engine.start()
    urls = [f"http://{number % 40}.example:80/" for number in range(count)]
    tasks = await harness.add(*[harness.new_task(url) for url in urls])
    await asyncio.sleep(0.5)
    store.is_unavailable = True
    await asyncio.sleep(outage_s)
    store.is_unavailable = False
    await asyncio.sleep(30)

    assert count == len(target.requests)
    logs = [[attempt.outcome for attempt in await harness.list_attempts(task)] for task in tasks]
    assert [["success"]] * count == logs
    (later,) = await harness.add(harness.new_task())
    await asyncio.sleep(5)
    assert Status.SUCCEEDED is (await harness.get_task(later)).status
    await harness.engine.stop(1)


async def test_tasks_that_wait_during_a_store_outage_are_not_lost() -> None:
    """Leases that could not be released during an outage are renewed or released after it."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(25)
        return OK

    target, loop = FakeTarget(respond_slowly), asyncio.get_running_loop()
    store = OutageStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    limits = EngineLimits(max_running_attempts=2)
    harness = EngineHarness(target, store=store, limits=limits)
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(50)])
    for _ in range(3):
        await asyncio.sleep(30)
        store.is_unavailable = True
        await asyncio.sleep(100)
        store.is_unavailable = False
    await asyncio.sleep(1500)

    logs = [[attempt.outcome for attempt in await harness.list_attempts(task)] for task in tasks]
    assert [["success"]] * 50 == logs
    assert 50 == len(target.requests)
    await harness.engine.stop(1)


async def test_stop_during_a_store_outage_cancels_all_writes() -> None:
    """After a stop, no asyncio task that calls the store is left."""
    loop = asyncio.get_running_loop()
    store = OutageStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(FakeTarget(OK), store=store)
    await harness.engine.start()
    await harness.add(harness.new_task(), harness.new_task(delay_ms=900))
    store.is_unavailable = True

    await harness.engine.stop(5)

    assert {asyncio.current_task()} == asyncio.all_tasks()


async def test_lane_is_parked_when_its_breaker_opens() -> None:
    """When a breaker opens, the tasks of its lane are released, and none is sent."""
    target = FakeTarget(BUSY)
    harness = EngineHarness(
        target, build_breaker=lambda: new_breaker(min_calls=5, open_for=30.0, spread=0.0)
    )
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)])
    await asyncio.sleep(5)
    lane = await harness.store.get_lane(tasks[0].lane)
    assert lane is not None
    assert lane.parked_until is not None
    assert 0 == len(harness.engine.worker.leased_tasks)
    sent_count = len(target.requests)

    await asyncio.sleep(20)
    assert sent_count == len(target.requests)
    assert "parked" in harness.event_kinds()
    await harness.engine.stop(1)


async def test_parked_lane_is_probed_and_recovers() -> None:
    """After its parking a lane gets probes; if they succeed, the other tasks are sent."""
    target = FakeTarget(*[BUSY] * 8, OK)  # a new lane starts 8 attempts at a time
    harness = EngineHarness(
        target, build_breaker=lambda: new_breaker(min_calls=5, open_for=30.0, spread=0.0)
    )
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)])
    await asyncio.sleep(300)

    assert {Status.SUCCEEDED} == {(await harness.get_task(task)).status for task in tasks}
    event_kinds = harness.event_kinds()
    assert event_kinds.index("parked") < event_kinds.index("probing") < event_kinds.index("resumed")
    lane = await harness.store.get_lane(tasks[0].lane)
    assert lane is not None
    assert lane.parked_until is None
    await harness.engine.stop(1)


async def test_history_does_not_name_a_success_as_the_last_failure() -> None:
    """If the breaker opens at a success, because enough attempts failed before, it is not named."""
    target = FakeTarget(BUSY, BUSY, BUSY, OK)
    harness = EngineHarness(target, build_breaker=lambda: new_breaker(min_calls=4))
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(4)])
    await asyncio.sleep(1)

    [activity] = (await read_lane_activity(harness.store, [tasks[0].lane])).values()
    assert "Too many attempts failed." == activity.changes[0].reason
    await harness.engine.stop(1)


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_history_of_a_breaker_is_stored(is_restarted: bool) -> None:
    """Each change of a breaker is recorded with its time and reason, also after a restart."""
    loop = asyncio.get_running_loop()
    start = loop.time()

    async def respond(_request: DeliveryRequest) -> DeliveryResult:
        if loop.time() < start + 20:
            return BUSY
        if loop.time() > start + 50:
            return OK
        await asyncio.sleep(2)
        return DeliveryResult(fault=Fault.TIMEOUT, duration_ms=2_000.0)

    target = FakeTarget(respond)
    arguments = {"min_calls": 5, "open_for": 30.0, "growth": 1.0, "spread": 0.0, "probes": 1}
    harness = EngineHarness(target, build_breaker=lambda: new_breaker(**arguments))
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)])
    await asyncio.sleep(5)
    if is_restarted:
        await harness.engine.stop(1)
        harness = EngineHarness(
            target, store=harness.store, seed=2, build_breaker=lambda: new_breaker(**arguments)
        )
        await harness.engine.start()
    await asyncio.sleep(300)

    [activity] = (await read_lane_activity(harness.store, [tasks[0].lane])).values()
    first, *others = activity.changes
    assert ("closed", "open", "Too many attempts failed, the last one: status 503.") == (
        first.before,
        first.after,
        first.reason,
    )
    assert [
        ("open", "half-open", "The open period has ended."),
        ("half-open", "open", "A probe failed: timeout."),
        ("open", "half-open", "The open period has ended."),
        ("half-open", "closed", "A probe succeeded."),
    ] == [(each.before, each.after, each.reason) for each in others]
    times = [(each.at - first.at) / 1000 for each in others]
    assert times == pytest.approx([30, 32, 62, 62], abs=1)
    await harness.engine.stop(1)


@pytest.mark.parametrize("action", ["resume", "reset"])
async def test_history_names_the_action_of_an_operator(action: str) -> None:
    """An operator who resumes or resets a lane closes its breaker; otherwise nothing changes."""
    harness = EngineHarness(FakeTarget(BUSY), build_breaker=lambda: new_breaker(min_calls=5))
    await harness.engine.start()
    [other, *tasks] = await harness.add(
        harness.new_task(delay_ms=900_000, url="http://b.example:80/"),
        *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)],
    )
    await asyncio.sleep(5)
    await harness.engine.pause(other.lane)
    for lane in (other.lane, tasks[0].lane):
        await getattr(harness.engine, action)(lane)

    activity = await read_lane_activity(harness.store, [other.lane, tasks[0].lane])
    assert [tasks[0].lane] == list(activity)
    verb = {"resume": "resumed", "reset": "reset"}[action]
    last = activity[tasks[0].lane].changes[-1]
    assert ("open", "closed", f"An operator {verb} the downstream.") == (
        last.before,
        last.after,
        last.reason,
    )
    await harness.engine.stop(1)


async def test_failed_probe_parks_the_lane_for_longer() -> None:
    """Each opening of the breaker doubles the parking; the store counts the openings."""
    harness = EngineHarness(
        FakeTarget(BUSY), build_breaker=lambda: new_breaker(min_calls=5, open_for=30.0, spread=0.0)
    )
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)])
    await asyncio.sleep(40)
    lane = await harness.store.get_lane(tasks[0].lane)
    assert lane is not None
    assert lane.parked_until is not None
    assert 2 == lane.consecutive_opens
    remaining_ms = lane.parked_until - harness.context.clock.now_ms()
    assert 45_000 < remaining_ms <= 60_000
    await harness.engine.stop(1)


async def test_breaker_state_is_shared_through_the_store() -> None:
    """A second worker sends only probes to a parked lane, and continues its open count."""
    build_breaker = partial(new_breaker, min_calls=5, spread=0.0)
    first = EngineHarness(FakeTarget(BUSY), build_breaker=build_breaker)
    tasks = await first.add(*[first.new_task(overrides={"maxAttempts": 50}) for _ in range(20)])
    await asyncio.sleep(5)
    await first.engine.stop(1)

    target = FakeTarget(BUSY)
    second = EngineHarness(
        target,
        store=first.store,
        seed=2,
        build_breaker=build_breaker,
        lease=LeaseTerms("second", 70_000, 1_000),
    )
    await second.engine.start()
    await asyncio.sleep(35)
    assert 1 <= len(target.requests) <= 3
    lane = await first.store.get_lane(tasks[0].lane)
    assert lane is not None
    assert 2 == lane.consecutive_opens
    await second.engine.stop(1)
