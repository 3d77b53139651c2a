from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tarry.core.breaker import Breaker
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.engine.context import EngineLimits
from tarry.service.model import Status, TaskContent
from tarry.service.store import (
    CancelStatus,
    FinishStatus,
    LeaseTerms,
    Release,
    TaskResult,
)
from tests.service.engine.harness import (
    BUSY,
    EPOCH,
    OK,
    EngineHarness,
    FakeTarget,
    run,
)
from tests.service.stores.model_store import ModelStore

QUICK = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}


def test_internal_failure_counts_no_attempt() -> None:
    """It does not affect the breaker either, and the delivery is reported as failing."""

    async def main() -> None:
        ours = DeliveryResult(fault=Fault.INTERNAL, error="proxy down")
        target = FakeTarget(*[ours] * 30, OK)
        harness = EngineHarness(target)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(10)
        assert {"delivery": "proxy down"} == harness.context.health.failing
        assert 0 == (await harness.task(task)).attempts

        await asyncio.sleep(100)
        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)
        assert {} == harness.context.health.failing
        await harness.engine.stop(1)

    run(main)


def test_delivery_that_raises_is_an_internal_failure() -> None:
    """An exception in the delivery delays the task, and counts no attempt."""

    async def broken(_request: DeliveryRequest) -> DeliveryResult:
        msg = "bug"
        raise RuntimeError(msg)

    async def main() -> None:
        harness = EngineHarness(FakeTarget(broken, OK))
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(10)
        await harness.engine.stop(1)

        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)

    run(main)


def test_empty_retry_budget_defers_without_counting_attempts() -> None:
    """Retries above the budget are deferred; all tasks succeed in the end."""

    async def main() -> None:
        target = FakeTarget(*[BUSY] * 300, OK)
        limits = EngineLimits(max_lane_running_attempts=1000, max_running_attempts=1000)
        harness = EngineHarness(target, limits=limits, breaker=lambda: Breaker(min_calls=10_000))
        await harness.engine.start()
        tasks = await harness.add(*[harness.new_task() for _ in range(300)])
        await asyncio.sleep(120)

        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in tasks}
        assert {2} == {(await harness.task(task)).attempts for task in tasks}
        assert "deferred" in harness.event_kinds()
        await harness.engine.stop(1)

    run(main)


def test_deferred_retries_return_at_the_rate_of_the_budget() -> None:
    """They come back one after the other, about as fast as the budget admits them."""

    async def main() -> None:
        target = FakeTarget(BUSY)
        harness = EngineHarness(target, breaker=lambda: Breaker(min_calls=10**6))
        await harness.engine.start()
        overrides = {"maxAttempts": 50, "initialDelayMs": 100, "maxDelayMs": 100}
        await harness.add(*[harness.new_task(overrides=overrides) for _ in range(500)])
        await asyncio.sleep(60)

        deferred = harness.event_kinds().count("deferred")
        retries = len(target.requests) - 500
        assert deferred < 3 * retries
        await harness.engine.stop(1)

    run(main)


def test_total_budget_ends_a_task_before_an_attempt() -> None:
    """A task whose total budget is used up is exhausted without another attempt."""

    async def main() -> None:
        target = FakeTarget(OK)
        harness = EngineHarness(target)
        (task,) = await harness.add(harness.new_task(overrides={"totalBudgetMs": 5000}))
        await harness.engine.pause(task.lane)  # too late for the attempt in flight
        later = harness.new_task(overrides={"totalBudgetMs": 5000})
        (late,) = await harness.add(later)
        await asyncio.sleep(10)
        await harness.engine.resume(task.lane)
        await harness.engine.start()
        await asyncio.sleep(5)
        await harness.engine.stop(1)

        ended = await harness.task(late)
        assert (Status.EXHAUSTED, "total-budget", 0) == (
            ended.status,
            ended.reason,
            ended.attempts,
        )
        assert 1 == len(target.requests)

    run(main)


def test_task_whose_lease_has_expired_is_not_started() -> None:
    """A worker that was suspended past its lease releases the task instead of sending it."""

    async def main() -> None:
        target = FakeTarget()
        ahead = 0.0
        loop = asyncio.get_running_loop()
        harness = EngineHarness(
            target,
            lease=LeaseTerms("worker", 40_000, 1_000),
            monotonic=lambda: loop.time() + ahead,
        )
        (task,) = await harness.add(harness.new_task(delay=900))
        ahead = 60.0  # the process was suspended meanwhile
        await asyncio.sleep(2)

        assert [] == target.requests
        assert Status.PENDING is (await harness.task(task)).status

    run(main)


@pytest.mark.parametrize(("lost", "sent"), [(1, 1), (9, 1), (10, 0)])
def test_lost_attempt_does_not_exhaust_a_task(lost: int, sent: int) -> None:
    """It may not have been sent, so it is repeated, but not for ever."""

    async def main() -> None:
        target = FakeTarget(OK)
        harness = EngineHarness(target, limits=EngineLimits(max_running_attempts=1))
        new_task = harness.new_task(overrides={"maxAttempts": 1})
        new_task.lease_on_add = True
        await harness.store.add([new_task], LeaseTerms("dead", 10_000, 1_000))
        for worker in range(lost - 1):
            await asyncio.sleep(11)
            lease = LeaseTerms(f"dead {worker}", 10_000, 1_000)
            assert (await harness.store.claim(lease, limit=1, per_lane=1)).tasks
        await asyncio.sleep(11)

        await harness.engine.start()
        await asyncio.sleep(5)

        ended = await harness.task(new_task.task)
        assert sent == len(target.requests)
        assert (Status.SUCCEEDED if sent else Status.EXHAUSTED) is ended.status
        assert ["lost"] * lost == [one.outcome for one in await harness.attempts(ended)][:lost]
        assert [1] == [event.attempts for event in harness.published if event.kind == "lost"]
        page, _ = harness.metrics.render(await harness.store.counters(), 0.0)
        assert b'retry_attempts_total{outcome="lost",policy=""} 1.0' in page

    run(main)


def test_slow_body_read_counts_no_attempt() -> None:
    """The attempt timeout includes reading the body, so that the lease lasts longer."""

    async def main() -> None:
        waits = [100.0, 10.0]

        async def read(_content: TaskContent) -> bytes:
            await asyncio.sleep(waits.pop(0))
            return b"large"

        target = FakeTarget(OK)
        harness = EngineHarness(target, read_body=read)
        await harness.engine.start()
        (task,) = await harness.add(
            harness.new_task(body_ref="x", overrides={"attemptTimeoutMs": 60_000})
        )
        await asyncio.sleep(90)

        (request,) = target.requests
        assert (b"large", 50.0) == (request.body, round(request.timeout))
        ended = await harness.task(task)
        assert (Status.SUCCEEDED, 1) == (ended.status, ended.attempts)
        await harness.engine.stop(1)

    run(main)


def test_task_that_cannot_be_started_does_not_block_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error is logged, and the task is released."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(OK), limits=EngineLimits(max_running_attempts=1))
        get_cached = harness.context.policies.get_cached

        def broken(task, overrides):  # type: ignore[no-untyped-def]
            if task.key == "broken":
                raise ZeroDivisionError
            return get_cached(task, overrides)

        monkeypatch.setattr(harness.context.policies, "get_cached", broken)
        await harness.engine.start()
        bad, good = await harness.add(harness.new_task(key="broken"), harness.new_task())
        await asyncio.sleep(5)

        assert Status.SUCCEEDED is (await harness.task(good)).status
        bad = await harness.task(bad)
        assert (Status.PENDING, 0) == (bad.status, bad.attempts)
        await harness.engine.stop(1)

    run(main)


def test_paused_lane_gets_no_retry() -> None:
    """The attempt in flight finishes; its retry waits until the lane is resumed."""

    async def main() -> None:
        async def busy(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.1)
            return BUSY

        target = FakeTarget(busy)
        harness = EngineHarness(target)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.05)

        await harness.engine.pause(task.lane)
        await asyncio.sleep(60)
        paused = len(target.requests)
        await harness.engine.resume(task.lane)
        await asyncio.sleep(5)

        assert (1, 2) == (paused, len(target.requests))
        await harness.engine.stop(1)

    run(main)


class SlowResultStore(ModelStore):
    """A store that is slow to write results and to release leases."""

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Wait, then write."""
        await asyncio.sleep(0.3)
        return await super().finish(results)

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Wait, then release."""
        await asyncio.sleep(0.3)
        return await super().release(releases)


def slow_harness(target: FakeTarget) -> EngineHarness:
    """Return an engine with a slow store."""
    loop = asyncio.get_running_loop()
    return EngineHarness(target, store=SlowResultStore(lambda: int((EPOCH + loop.time()) * 1000)))


def test_pause_applies_to_a_result_being_written() -> None:
    """Its retry was decided before the pause and kept its lease: it is released."""

    async def main() -> None:
        target = FakeTarget(BUSY, OK)
        harness = slow_harness(target)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.1)

        await harness.engine.pause(task.lane)
        await asyncio.sleep(60)

        assert 1 == len(target.requests)
        assert (Status.PENDING, None) == (
            (await harness.task(task)).status,
            (await harness.task(task)).worker,
        )
        await harness.store.resume(task.lane)  # by another process
        await asyncio.sleep(5)
        assert 2 == len(target.requests)
        assert not harness.lanes[task.lane].is_paused
        await harness.engine.stop(1)

    run(main)


def test_task_cancelled_during_its_release_is_reported() -> None:
    """Listeners get the event, and a waiting caller gets the completion."""

    async def main() -> None:
        harness = slow_harness(FakeTarget(OK))
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(delay=900))
        finished_task = asyncio.create_task(harness.engine.wait_until_finished(task.id, 30))
        await harness.engine.pause(task.lane)
        await asyncio.sleep(0.1)

        assert CancelStatus.REQUESTED is await harness.engine.cancel("default", task.id)

        published = await finished_task
        assert published is not None
        assert Status.CANCELLED is published.status
        assert "cancelled" in harness.event_kinds()
        await harness.engine.stop(1)

    run(main)


def test_stop_releases_waiting_tasks_and_waits_for_attempts() -> None:
    """After a stop nothing is leased, and the attempt in flight is recorded."""

    async def main() -> None:
        async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(3)
            return OK

        harness = EngineHarness(
            FakeTarget(respond_slowly), limits=EngineLimits(max_running_attempts=1)
        )
        await harness.engine.start()
        runs, waits = await harness.add(harness.new_task(), harness.new_task())
        await asyncio.sleep(1)
        await harness.engine.stop(10)

        assert Status.SUCCEEDED is (await harness.task(runs)).status
        waiting = await harness.task(waits)
        assert (Status.PENDING, None, 0) == (waiting.status, waiting.worker, waiting.attempts)

    run(main)


def test_stop_has_a_timeout() -> None:
    """An attempt that takes longer is cancelled; its lease expires by itself."""

    async def main() -> None:
        async def never(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(1e6)
            return OK

        harness = EngineHarness(FakeTarget(never))
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(1)
        await harness.engine.stop(5)

        assert Status.IN_FLIGHT is (await harness.task(task)).status

    run(main)


def test_attempt_that_fails_during_stop_keeps_no_lease() -> None:
    """Its retry is due soon, but this process will not be there to run it."""

    async def main() -> None:
        async def busy(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.3)
            return BUSY

        harness = EngineHarness(FakeTarget(busy))
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.1)

        await harness.engine.stop(30)

        task = await harness.task(task)
        assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)

    run(main)


def test_lease_kept_during_stop_is_released() -> None:
    """The result that keeps it was submitted before the stop, and written after it."""

    async def main() -> None:
        loop = asyncio.get_running_loop()

        class SlowFinishes(ModelStore):
            async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
                await asyncio.sleep(1)
                return await super().finish(results)

        store = SlowFinishes(lambda: int((EPOCH + loop.time()) * 1000))
        harness = EngineHarness(FakeTarget(BUSY), store=store)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides=QUICK))
        await asyncio.sleep(0.5)

        await harness.engine.stop(30)

        task = await harness.task(task)
        assert (Status.PENDING, None, 1) == (task.status, task.worker, task.attempts)

    run(main)
