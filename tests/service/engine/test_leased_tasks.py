"""Tasks that are leased to a process: when and in which order they are sent."""

from __future__ import annotations

import asyncio

from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine.context import EngineLimits
from tarry.service.model import Status
from tests.service.engine.harness import (
    BUSY,
    EPOCH_S,
    OK,
    EngineHarness,
    FakeTarget,
)
from tests.service.stores.reference_store import ReferenceStore


async def test_retry_that_is_due_soon_keeps_its_lease() -> None:
    """A retry that is due soon keeps its lease, and is sent without a claim."""
    harness = EngineHarness(FakeTarget(BUSY, OK))
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(0)
    await asyncio.sleep(3)

    # The scheduler is not started in this test, so no task can be claimed.
    assert Status.SUCCEEDED is (await harness.get_task(task)).status


async def test_slow_lane_does_not_block_another() -> None:
    """A lane whose target does not respond uses no more attempts than its own limit."""

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        if "slow" in request.url:
            await asyncio.sleep(1000)
        return OK

    limits = EngineLimits(max_running_attempts=20, max_lane_running_attempts=10)
    harness = EngineHarness(FakeTarget(respond), limits=limits)
    await harness.engine.start()
    await harness.add(*[harness.new_task("http://slow.example:80/") for _ in range(100)])
    quick = await harness.add(*[harness.new_task("http://quick.example:80/") for _ in range(100)])
    await asyncio.sleep(1)

    assert {Status.SUCCEEDED} == {(await harness.get_task(task)).status for task in quick}


async def test_due_retry_is_sent_before_queued_first_attempts() -> None:
    """A due retry waits for at most one running attempt, although 48 first attempts wait."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(0.1)
        return OK

    target = FakeTarget(BUSY, respond_slowly)
    harness = EngineHarness(target, limits=EngineLimits(max_lane_running_attempts=1))
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(50)])
    await asyncio.sleep(30)

    (log,) = [log for log in [await harness.list_attempts(task) for task in tasks] if len(log) == 2]
    waited_s = (log[1].started_at - log[1].scheduled_at) / 1000
    assert 51 == len(target.requests)
    assert waited_s <= 0.1


ONE_RETRY_AFTER_500_MS = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}


async def test_clock_jump_does_not_delay_a_retry() -> None:
    """After the store's clock jumps by an hour, a retry is still sent after its delay."""
    loop, jump_s = asyncio.get_running_loop(), 0
    store = ReferenceStore(lambda: int((EPOCH_S + loop.time() + jump_s) * 1000))
    harness = EngineHarness(FakeTarget(OK, BUSY, OK), store=store)
    await harness.engine.start()
    await asyncio.sleep(5.1)

    jump_s = 3600
    await harness.engine.submit([harness.new_task()])
    await asyncio.sleep(5)
    (added,) = await harness.engine.submit([harness.new_task(overrides=ONE_RETRY_AFTER_500_MS)])
    await asyncio.sleep(5)

    assert Status.SUCCEEDED is (await harness.get_task(added.task)).status
    assert ["transient", "success"] == [
        attempt.outcome for attempt in await harness.list_attempts(added.task)
    ]
    await harness.engine.stop(1)


async def test_due_task_starts_although_the_event_loop_is_busy() -> None:
    """When an attempt ends, a task that is due starts, before the event loop checks its timer."""
    loop, busy_s = asyncio.get_running_loop(), 0.0

    async def respond_late(_request: DeliveryRequest) -> DeliveryResult:
        nonlocal busy_s
        await asyncio.sleep(0.1)
        busy_s = 0.5  # the event loop has handled other responses for this time
        return OK

    target = FakeTarget(respond_late, OK)
    harness = EngineHarness(target, monotonic=lambda: loop.time() + busy_s)
    later = harness.new_task("http://b.example:80/", tenant="other", delay_ms=500)
    await harness.add(harness.new_task(), later)
    await asyncio.sleep(0.2)

    assert ["a.example", "b.example"] == [request.url[7:16] for request in target.requests]
