from __future__ import annotations

import asyncio
from collections.abc import Sequence
from email.utils import formatdate
from typing import Any

import pytest
from cryptography.fernet import Fernet

from tarry.core.adaptive_limit import AdaptiveLimit
from tarry.service.delivery import (
    DeliveryCallback,
    DeliveryRequest,
    DeliveryResult,
    Fault,
    PendingDelivery,
)
from tarry.service.encryption import Codec
from tarry.service.engine.context import EngineLimits
from tarry.service.model import LOST, AttemptRecord, Status, TaskContent
from tarry.service.payloads import BodyStoreUnavailable
from tarry.service.store import (
    CancelStatus,
    FinishStatus,
    LeaseTerms,
    Release,
    TaskResult,
)
from tests.service.engine.harness import (
    BUSY,
    EPOCH_S,
    LEASE,
    OK,
    EngineHarness,
    FakeTarget,
    new_breaker,
)
from tests.service.stores.reference_store import ReferenceStore

ONE_RETRY_AFTER_500_MS = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}


async def test_internal_failure_counts_no_attempt() -> None:
    """An internal failure counts no attempt, and health reports the delivery as failing."""
    internal_failure = DeliveryResult(fault=Fault.INTERNAL, error="proxy down")
    target = FakeTarget(*[internal_failure] * 30, OK)
    harness = EngineHarness(target)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(10)
    assert {"delivery": "proxy down"} == harness.context.health.failing
    assert 0 == (await harness.get_task(task)).attempts

    await asyncio.sleep(100)
    finished = await harness.get_task(task)
    assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
    assert {} == harness.context.health.failing
    await harness.engine.stop(1)


async def test_delivery_that_raises_is_an_internal_failure() -> None:
    """A delivery that raises an exception is repeated, and counts no attempt."""

    async def raise_error(_request: DeliveryRequest) -> DeliveryResult:
        msg = "bug"
        raise RuntimeError(msg)

    harness = EngineHarness(FakeTarget(raise_error, OK))
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(10)
    await harness.engine.stop(1)

    finished = await harness.get_task(task)
    assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)


@pytest.fixture
def constant_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not limit the rate of lanes in which attempts fail, so that only the budget does."""
    monkeypatch.setattr(AdaptiveLimit, "_adapt_rate", lambda *_: None)


@pytest.mark.usefixtures("constant_rate")
async def test_empty_retry_budget_defers_without_counting_attempts() -> None:
    """Retries that the budget rejects are deferred, and succeed later."""
    target = FakeTarget(*[BUSY] * 600, OK)
    limits = EngineLimits(max_lane_running_attempts=1000, max_running_attempts=1000)
    harness = EngineHarness(
        target, limits=limits, build_breaker=lambda: new_breaker(min_calls=10_000)
    )
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(300)])
    await asyncio.sleep(300)

    assert {Status.SUCCEEDED} == {(await harness.get_task(task)).status for task in tasks}
    assert 900 == sum([(await harness.get_task(task)).attempts for task in tasks])
    assert "deferred" in harness.event_kinds()
    await harness.engine.stop(1)


@pytest.mark.usefixtures("constant_rate")
async def test_deferred_retries_return_at_the_rate_of_the_budget() -> None:
    """Fewer than three retries are deferred for each one that the budget admits."""
    target = FakeTarget(BUSY)
    harness = EngineHarness(target, build_breaker=lambda: new_breaker(min_calls=10**6))
    await harness.engine.start()
    overrides = {"maxAttempts": 50, "initialDelayMs": 100, "maxDelayMs": 100}
    await harness.add(*[harness.new_task(overrides=overrides) for _ in range(500)])
    await asyncio.sleep(60)

    deferred_count = harness.event_kinds().count("deferred")
    retry_count = len(target.requests) - 500
    assert deferred_count < 3 * retry_count
    await harness.engine.stop(1)


async def test_used_up_total_budget_prevents_an_attempt() -> None:
    """A task whose total budget ended in a paused lane is exhausted without an attempt."""
    target = FakeTarget(OK)
    harness = EngineHarness(target)
    (task,) = await harness.add(harness.new_task(overrides={"totalBudgetMs": 5000}))
    await harness.engine.pause(task.lane)  # too late for the attempt in flight
    (late,) = await harness.add(harness.new_task(overrides={"totalBudgetMs": 5000}))
    await asyncio.sleep(10)
    await harness.engine.resume(task.lane)
    await harness.engine.start()
    await asyncio.sleep(5)
    await harness.engine.stop(1)

    finished = await harness.get_task(late)
    assert (Status.EXHAUSTED, "total-budget", 0) == (
        finished.status,
        finished.reason,
        finished.attempts,
    )
    assert 1 == len(target.requests)


async def test_task_whose_lease_has_expired_is_not_started() -> None:
    """A worker that was suspended past its lease releases the task instead of sending it."""
    target = FakeTarget()
    suspended_s = 0.0
    loop = asyncio.get_running_loop()
    harness = EngineHarness(
        target,
        lease=LeaseTerms("worker", 40_000, 1_000),
        monotonic=lambda: loop.time() + suspended_s,
    )
    (task,) = await harness.add(harness.new_task(delay_ms=900))
    suspended_s = 60.0
    await asyncio.sleep(2)

    assert [] == target.requests
    assert Status.PENDING is (await harness.get_task(task)).status


async def test_waiting_task_does_not_lose_its_lease() -> None:
    """Tasks that wait for a slot are neither logged as lost nor dead letters that were not sent."""

    async def hang(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(30.0)
        return DeliveryResult(fault=Fault.TIMEOUT, error="no response", duration_ms=30_000.0)

    target = FakeTarget(hang)
    harness = EngineHarness(
        target,
        limits=EngineLimits(max_running_attempts=2),
        build_breaker=lambda: new_breaker(min_calls=1_000),
    )
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(100)])
    await asyncio.sleep(1200)

    for task in tasks:
        attempts = await harness.list_attempts(task)
        assert LOST not in [attempt.outcome for attempt in attempts]
        assert attempts or (await harness.get_task(task)).status is not Status.EXHAUSTED
    await harness.engine.stop(60)


async def test_many_due_tasks_do_not_block_the_event_loop() -> None:
    """Of many due tasks, 16 are started at a time, and other callbacks run in between."""

    async def hang(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(30.0)
        return OK

    harness = EngineHarness(
        FakeTarget(OK, hang),
        limits=EngineLimits(max_running_attempts=1_000, max_lane_running_attempts=1_000),
    )
    await harness.add(harness.new_task())  # loads the policy
    await asyncio.sleep(1)
    urls = [f"http://host{number}.example:80/" for number in range(200)]
    await harness.store.add([harness.new_task(url) for url in urls])
    claimed = await harness.store.claim(harness.context.lease_terms, limit=200, per_lane=1)
    worker = harness.engine.worker
    worker.add(claimed.tasks)

    counts = [worker.running_count]
    for _ in range(4):
        await asyncio.sleep(0)
        counts.append(worker.running_count)

    assert [16, 32, 48, 64, 80] == counts
    await harness.engine.stop(60)


async def test_clock_of_the_store_jumps_past_all_leases() -> None:
    """Leases of a live process are renewed: no attempt is repeated or lost."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(20)
        return OK

    target, loop, jump_s = FakeTarget(respond_slowly), asyncio.get_running_loop(), 0.0
    harness = EngineHarness(
        target,
        store=ReferenceStore(lambda: int((EPOCH_S + loop.time() + jump_s) * 1000)),
        limits=EngineLimits(max_running_attempts=5),
    )
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(20)])
    await asyncio.sleep(10)
    jump_s = 3600.0
    await asyncio.sleep(200)

    assert 20 == len(target.requests)
    for task in tasks:
        assert ["success"] == [entry.outcome for entry in await harness.list_attempts(task)]
    await harness.engine.stop(1)


async def test_renewed_lease_of_an_unknown_task_is_released() -> None:
    """A task whose lease this process does not know is sent after that lease has expired."""
    harness = EngineHarness(FakeTarget(OK))
    new_task = harness.new_task()
    new_task.lease_on_add = True
    await harness.store.add([new_task], LEASE)  # the engine gets no reply
    await harness.engine.start()
    await asyncio.sleep(LEASE.length_ms / 1000 + 5)

    log = await harness.list_attempts(new_task.task)
    assert ["success"] == [attempt.outcome for attempt in log]
    await harness.engine.stop(1)


@pytest.mark.parametrize(("lost_count", "sent_count"), [(1, 1), (9, 1), (10, 0)])
async def test_only_the_tenth_lost_attempt_exhausts_a_task(
    lost_count: int, sent_count: int
) -> None:
    """Lost attempts do not count for `maxAttempts`, but the tenth exhausts the task."""
    target = FakeTarget(OK)
    harness = EngineHarness(target, limits=EngineLimits(max_running_attempts=1))
    new_task = harness.new_task(overrides={"maxAttempts": 1})
    new_task.lease_on_add = True
    await harness.store.add([new_task], LeaseTerms("dead", 10_000, 1_000))
    for worker in range(lost_count - 1):
        await asyncio.sleep(11)
        lease = LeaseTerms(f"dead {worker}", 10_000, 1_000)
        assert (await harness.store.claim(lease, limit=1, per_lane=1)).tasks
    await asyncio.sleep(11)

    await harness.engine.start()
    await asyncio.sleep(5)

    finished = await harness.get_task(new_task.task)
    assert sent_count == len(target.requests)
    assert (Status.SUCCEEDED if sent_count else Status.EXHAUSTED) is finished.status
    outcomes = [attempt.outcome for attempt in await harness.list_attempts(finished)]
    assert ["lost"] * lost_count == outcomes[:lost_count]
    assert [1] == [event.attempts for event in harness.published if event.kind == "lost"]
    page, _ = harness.metrics.render(await harness.store.counters(), 0.0)
    assert b'retry_attempts_total{lane="",outcome="lost",policy=""} 1.0' in page


async def test_replays_do_not_allow_more_attempts_than_can_be_numbered() -> None:
    """A task with ten million attempts is exhausted, although the policy allows another one."""
    target = FakeTarget(OK)
    harness = EngineHarness(target)
    await harness.add(harness.new_task())  # loads the policy
    await asyncio.sleep(1)
    await harness.store.add([harness.new_task()])
    claimed = await harness.store.claim(harness.context.lease_terms, limit=1, per_lane=1)
    [task] = claimed.tasks
    task.attempts = task.attempts_before_replay = 10_000_000
    harness.engine.worker.add([task])
    await asyncio.sleep(1)

    finished = await harness.get_task(task)
    assert (Status.EXHAUSTED, "attempts") == (finished.status, finished.reason)
    assert 1 == len(target.requests)


async def test_slow_body_read_counts_no_attempt() -> None:
    """Reading the body uses the attempt timeout; a read that exceeds it is repeated."""
    read_durations_s = [100.0, 10.0]

    async def read_slowly(_content: TaskContent) -> bytes:
        await asyncio.sleep(read_durations_s.pop(0))
        return b"large"

    target = FakeTarget(OK)
    harness = EngineHarness(target, read_body=read_slowly)
    await harness.engine.start()
    (task,) = await harness.add(
        harness.new_task(body_ref="x", overrides={"attemptTimeoutMs": 60_000})
    )
    await asyncio.sleep(90)

    (request,) = target.requests
    assert (b"large", 50.0) == (request.body, round(request.timeout))
    finished = await harness.get_task(task)
    assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
    await harness.engine.stop(1)


@pytest.mark.parametrize(("timeout_ms", "max_wait_s"), [(30_000, 1.0), (700, 0.35)])
async def test_attempt_of_cloud_tasks_does_not_wait_for_a_store_that_hangs(
    timeout_ms: int, max_wait_s: float
) -> None:
    """The attempt is sent without the headers about earlier attempts, in half of its timeout."""

    class HangingStore(ReferenceStore):
        async def list_attempts(
            self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
        ) -> list[AttemptRecord]:
            await asyncio.sleep(3_600)
            return await super().list_attempts(tenant, task_id, after=after, limit=limit)

    loop = asyncio.get_running_loop()
    store = HangingStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    target = FakeTarget(BUSY, OK)
    harness = EngineHarness(target, store=store)
    await harness.engine.start()
    overrides: dict[str, Any] = {"attemptTimeoutMs": timeout_ms, "initialDelayMs": 400}
    overrides["jitterType"] = "NONE"
    await harness.add(harness.new_task(vendor="cloud_tasks", overrides=overrides))
    await asyncio.sleep(3)
    first, second = target.requests
    assert "X-CloudTasks-TaskRetryReason" not in second.headers
    assert ("0", "1") == tuple(
        request.headers["X-CloudTasks-TaskRetryCount"] for request in (first, second)
    )
    wait_s = target.times[1] - target.times[0] - 0.4
    assert max_wait_s - 0.001 < wait_s < max_wait_s + 0.1
    assert second.timeout == pytest.approx(timeout_ms / 1000 - max_wait_s)
    await harness.engine.stop(1)


async def test_failing_body_store_is_not_a_failing_delivery() -> None:
    """A body that cannot be read marks the body store as failing until a check succeeds."""
    is_failing = True

    async def read_body(_content: TaskContent) -> bytes:
        if is_failing:
            raise BodyStoreUnavailable("wrong secret")
        return b"large"

    async def check() -> None:
        if is_failing:
            raise BodyStoreUnavailable("wrong secret")

    harness = EngineHarness(FakeTarget(OK), read_body=read_body, check_body_store=check)
    await harness.engine.start()
    with_body, without_body = await harness.add(harness.new_task(body_ref="x"), harness.new_task())
    await asyncio.sleep(20)
    assert {"bodies": "wrong secret"} == harness.context.health.failing
    assert Status.SUCCEEDED is (await harness.get_task(without_body)).status

    is_failing = False
    await asyncio.sleep(10)
    assert {} == harness.context.health.failing
    finished = await harness.get_task(with_body)
    assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
    await harness.engine.stop(1)


async def test_date_in_retry_after_is_read_by_the_wall_clock() -> None:
    """The store's time may differ from the wall clock, to which the target's date refers."""
    loop = asyncio.get_running_loop()
    wall_clock_s = EPOCH_S + 3600.0
    date = formatdate(wall_clock_s + loop.time() + 10, usegmt=True)
    target = FakeTarget(DeliveryResult(status=503, headers=[("retry-after", date)]), OK)
    harness = EngineHarness(target, unix_time=lambda: wall_clock_s + loop.time())
    await harness.engine.start()
    await harness.add(harness.new_task())
    await asyncio.sleep(60)

    first, second = target.times
    assert 9 <= second - first <= 12
    await harness.engine.stop(1)


async def test_task_that_cannot_be_started_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task whose start raises an error is released, and other tasks are sent."""
    harness = EngineHarness(FakeTarget(OK), limits=EngineLimits(max_running_attempts=1))
    get_cached = harness.context.policies.get_cached

    def get_cached_or_fail(task, overrides):  # type: ignore[no-untyped-def]
        if task.key == "broken":
            raise ZeroDivisionError
        return get_cached(task, overrides)

    monkeypatch.setattr(harness.context.policies, "get_cached", get_cached_or_fail)
    await harness.engine.start()
    bad, good = await harness.add(harness.new_task(key="broken"), harness.new_task())
    await asyncio.sleep(5)

    assert Status.SUCCEEDED is (await harness.get_task(good)).status
    bad = await harness.get_task(bad)
    assert (Status.PENDING, 0) == (bad.status, bad.attempts)
    await harness.engine.stop(1)


async def test_encryption_recovers_when_no_undecryptable_task_is_left() -> None:
    """A task whose key is missing makes the encryption failing until it is cancelled."""
    harness = EngineHarness(FakeTarget(OK))
    encrypted = harness.new_task()
    codec = Codec([Fernet.generate_key().decode()])
    encrypted.task.packed_content = codec.pack(TaskContent(url="http://a.example/"))
    await harness.store.add([encrypted])
    task = encrypted.task
    await harness.engine.start()
    (other,) = await harness.add(harness.new_task())
    failing = harness.context.health.failing
    await asyncio.sleep(400)  # it is tried again every minute
    assert ["encryption"] == list(failing)
    assert Status.SUCCEEDED is (await harness.get_task(other)).status

    await harness.engine.cancel(task.tenant, task.id)
    await asyncio.sleep(200)
    assert {} == failing
    await harness.engine.stop(1)


async def test_task_with_damaged_content_becomes_a_dead_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Damaged content can never be sent; it does not affect the health of the service."""
    harness = EngineHarness(FakeTarget(OK))
    damaged = harness.new_task()
    damaged.task.packed_content = damaged.task.packed_content[:-1]
    await harness.store.add([damaged])
    task = damaged.task
    await harness.engine.start()
    await asyncio.sleep(5)

    finished = await harness.get_task(task)
    assert (Status.EXHAUSTED, "permanent", 0) == (
        finished.status,
        finished.reason,
        finished.attempts,
    )
    assert {} == harness.context.health.failing
    assert f"task content is damaged, task={task.id}" in caplog.text
    await harness.engine.stop(1)


async def test_paused_lane_gets_no_retry() -> None:
    """The retry of a task in a paused lane waits until the lane is resumed."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(0.1)
        return BUSY

    target = FakeTarget(respond_slowly)
    harness = EngineHarness(target)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(overrides=ONE_RETRY_AFTER_500_MS))
    await asyncio.sleep(0.05)

    await harness.engine.pause(task.lane)
    await asyncio.sleep(60)
    sent_while_paused = len(target.requests)
    await harness.engine.resume(task.lane)
    await asyncio.sleep(5)

    assert (1, 2) == (sent_while_paused, len(target.requests))
    await harness.engine.stop(1)


class SlowResultStore(ReferenceStore):
    """A store that is slow to write results and to release leases."""

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Wait, then write results."""
        await asyncio.sleep(0.3)
        return await super().finish(results)

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Wait, then release leases."""
        await asyncio.sleep(0.3)
        return await super().release(releases)


def new_slow_harness(target: FakeTarget) -> EngineHarness:
    """Return an engine with a slow store."""
    loop = asyncio.get_running_loop()
    return EngineHarness(target, store=SlowResultStore(lambda: int((EPOCH_S + loop.time()) * 1000)))


async def test_pause_applies_to_a_result_being_written() -> None:
    """A retry whose result is written during the pause is released, not sent."""
    target = FakeTarget(BUSY, OK)
    harness = new_slow_harness(target)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(overrides=ONE_RETRY_AFTER_500_MS))
    await asyncio.sleep(0.1)

    await harness.engine.pause(task.lane)
    await asyncio.sleep(60)

    assert 1 == len(target.requests)
    assert (Status.PENDING, None) == (
        (await harness.get_task(task)).status,
        (await harness.get_task(task)).worker,
    )
    await harness.store.resume(task.lane)  # by another process
    await asyncio.sleep(5)
    assert 2 == len(target.requests)
    assert not harness.lanes[task.lane].is_paused
    await harness.engine.stop(1)


async def test_task_cancelled_during_its_release_is_reported() -> None:
    """Listeners and a waiting caller are notified if a task is cancelled during its release."""
    harness = new_slow_harness(FakeTarget(OK))
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(delay_ms=900))
    waiting = asyncio.create_task(harness.engine.wait_until_finished(task.id, 30))
    await harness.engine.pause(task.lane)
    await asyncio.sleep(0.1)

    assert CancelStatus.REQUESTED is await harness.engine.cancel("default", task.id)

    finished_task = await waiting
    assert finished_task is not None
    assert Status.CANCELLED is finished_task.status
    assert "cancelled" in harness.event_kinds()
    await harness.engine.stop(1)


async def test_stop_releases_waiting_tasks_and_waits_for_attempts() -> None:
    """A stop releases queued tasks, and records the result of a running attempt."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(3)
        return OK

    harness = EngineHarness(FakeTarget(respond_slowly), limits=EngineLimits(max_running_attempts=1))
    await harness.engine.start()
    running, queued = await harness.add(harness.new_task(), harness.new_task())
    await asyncio.sleep(1)
    await harness.engine.stop(10)

    assert Status.SUCCEEDED is (await harness.get_task(running)).status
    released = await harness.get_task(queued)
    assert (Status.PENDING, None, 0) == (released.status, released.worker, released.attempts)


async def test_stop_cancels_an_attempt_that_exceeds_the_timeout(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An attempt that exceeds the stop timeout is cancelled and logged, its task stays leased."""

    async def never_respond(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(1e6)
        return OK

    harness = EngineHarness(FakeTarget(never_respond))
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(1)
    await harness.engine.stop(5)

    assert Status.IN_FLIGHT is (await harness.get_task(task)).status
    [message] = caplog.messages
    assert "attempts cancelled at stop, tasks wait until their leases expire, count=1" == message


class CallbackTarget(FakeTarget):
    """A target whose client calls back after a delay, unless the delivery is cancelled."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self._delay_s = delay_s
        self.cancelled_count = 0

    def start(self, request: DeliveryRequest, on_done: DeliveryCallback) -> PendingDelivery:
        """Start a delivery."""
        self.requests.append(request)
        timer = asyncio.get_running_loop().call_later(self._delay_s, on_done, OK)
        return CallbackDelivery(self, timer, on_done)


class CallbackDelivery:
    """A delivery to a CallbackTarget."""

    def __init__(
        self, target: CallbackTarget, timer: asyncio.TimerHandle, on_done: DeliveryCallback
    ) -> None:
        self._target = target
        self._timer = timer
        self._on_done = on_done

    def cancel(self) -> None:
        """Cancel the delivery, and call back at once."""
        self._timer.cancel()
        self._target.cancelled_count += 1
        self._on_done(asyncio.CancelledError())


class SlowStartTarget(CallbackTarget):
    """A target for which each start of a delivery takes a millisecond of processor time."""

    def __init__(self) -> None:
        super().__init__(delay_s=0.5)
        self.elapsed_s = 0.0

    def start(self, request: DeliveryRequest, on_done: DeliveryCallback) -> PendingDelivery:
        """Start a delivery after a millisecond."""
        self.elapsed_s += 0.001
        return super().start(request, on_done)


async def test_task_that_becomes_due_during_many_starts_waits_for_few_of_them() -> None:
    """While many tasks of one tenant are started, the due task of another tenant has its turn."""
    target, loop = SlowStartTarget(), asyncio.get_running_loop()
    harness = EngineHarness(
        target,
        limits=EngineLimits(max_running_attempts=1_000, max_lane_running_attempts=1_000),
        monotonic=lambda: loop.time() + target.elapsed_s,
    )
    new_task, url = harness.new_task, "http://b.example:80/"
    await harness.add(new_task(), new_task(url, tenant="b"))  # loads the policies
    await asyncio.sleep(1)
    target.requests.clear()
    many = [new_task(f"http://host{number}.example:80/") for number in range(50)]
    await harness.store.add([*many, new_task(url, tenant="b", delay_ms=20)])
    claimed = await harness.store.claim(harness.context.lease_terms, limit=60, per_lane=60)
    assert 51 == len(claimed.tasks)
    harness.engine.worker.add(claimed.tasks)
    for _ in range(5):  # they are started in slices
        await asyncio.sleep(0)
    urls = [request.url for request in target.requests]
    assert 51 == len(urls)
    assert 10 < urls.index(url) < 30
    await harness.engine.stop(60)


@pytest.mark.parametrize(
    ("delay_s", "status", "cancelled_count"),
    [(3.0, Status.SUCCEEDED, 0), (30.0, Status.IN_FLIGHT, 2)],
)
async def test_stop_waits_for_deliveries_that_call_back(
    delay_s: float, status: Status, cancelled_count: int
) -> None:
    """A stop waits for deliveries that call back, and cancels them after its timeout."""
    loop = asyncio.get_running_loop()
    target = CallbackTarget(delay_s)
    harness = EngineHarness(target)
    await harness.engine.start()
    tasks = await harness.add(harness.new_task(), harness.new_task())
    await asyncio.sleep(1)
    stopped_at = loop.time()
    await harness.engine.stop(5)

    assert min(delay_s - 1, 5) == pytest.approx(loop.time() - stopped_at, abs=0.5)
    assert [status] * 2 == [(await harness.get_task(task)).status for task in tasks]
    assert (2, cancelled_count) == (len(target.requests), target.cancelled_count)


async def test_result_shortly_before_the_end_of_a_stop_is_written() -> None:
    """During a stop, results do not linger: the stop may end before they are written."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(0.99)
        return OK

    async def hang(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(30)
        return OK

    harness = EngineHarness(FakeTarget(respond_slowly, hang))
    worker = harness.engine.worker
    worker.result_writer.set_process_count(4)
    tasks = await harness.add(harness.new_task(), harness.new_task())
    asyncio.get_running_loop().call_later(0.5, worker.result_writer.set_process_count, 4)
    await worker.stop(1.0)
    statuses = [(await harness.get_task(task)).status for task in tasks]
    assert [Status.SUCCEEDED, Status.IN_FLIGHT] == statuses


async def test_attempt_that_fails_during_stop_keeps_no_lease() -> None:
    """After a failed attempt during a stop, the task is PENDING, although its retry is near."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(0.3)
        return BUSY

    harness = EngineHarness(FakeTarget(respond_slowly))
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(overrides=ONE_RETRY_AFTER_500_MS))
    await asyncio.sleep(0.1)

    await harness.engine.stop(30)

    task = await harness.get_task(task)
    assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)


async def test_lease_renewed_during_stop_is_released() -> None:
    loop = asyncio.get_running_loop()

    class SlowFinishStore(ReferenceStore):
        async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
            await asyncio.sleep(1)
            return await super().finish(results)

    store = SlowFinishStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(FakeTarget(BUSY), store=store)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(overrides=ONE_RETRY_AFTER_500_MS))
    await asyncio.sleep(0.5)

    await harness.engine.stop(30)

    task = await harness.get_task(task)
    assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)
