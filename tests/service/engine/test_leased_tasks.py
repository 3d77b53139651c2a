from __future__ import annotations

import asyncio

from tarry.service.delivery.messages import DeliveryRequest, DeliveryResult
from tarry.service.engine.context import EngineLimits
from tarry.service.model import Status
from tests.service.engine.harness import (
    BUSY,
    EPOCH,
    OK,
    EngineHarness,
    FakeTarget,
    run,
)
from tests.service.stores.model_store import ModelStore


def test_retry_within_the_horizon_keeps_its_lease() -> None:
    """A retry that is due soon is not claimed again: it stays with its worker."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(BUSY, OK))
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(0)
        await asyncio.sleep(3)

        assert (
            Status.SUCCEEDED is (await harness.task(task)).status
        )  # no scheduler runs in this test

    run(main)


def test_slow_lane_does_not_block_another() -> None:
    """A lane that never responds uses only its own in-flight limit."""

    async def main() -> None:
        async def never(request: DeliveryRequest) -> DeliveryResult:
            if "slow" in request.url:
                await asyncio.sleep(1000)
            return OK

        limits = EngineLimits(in_flight=20, lane_in_flight=10)
        harness = EngineHarness(FakeTarget(never), limits=limits)
        await harness.engine.start()
        await harness.add(*[harness.new_task("http://slow.example:80/") for _ in range(100)])
        quick = await harness.add(
            *[harness.new_task("http://quick.example:80/") for _ in range(100)]
        )
        await asyncio.sleep(1)

        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in quick}

    run(main)


def test_due_retry_is_sent_before_queued_first_attempts() -> None:
    """A retry has a promised time; first attempts in the queue of its lane do not."""

    async def main() -> None:
        async def slow(_request: DeliveryRequest) -> DeliveryResult:
            await asyncio.sleep(0.1)
            return OK

        target = FakeTarget(BUSY, slow)
        harness = EngineHarness(target, limits=EngineLimits(lane_in_flight=1))
        await harness.engine.start()
        tasks = await harness.add(*[harness.new_task() for _ in range(50)])
        await asyncio.sleep(30)

        (log,) = [log for log in [await harness.attempts(task) for task in tasks] if len(log) == 2]
        waited = (log[1].started_at - log[1].scheduled_at) / 1000
        assert 51 == len(target.requests)
        assert waited <= 0.1

    run(main)


QUICK = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}


def test_clock_jump_does_not_delay_a_retry() -> None:
    """A task that was added during the jump does not set a timer for an hour."""

    async def main() -> None:
        loop, jump = asyncio.get_running_loop(), 0
        store = ModelStore(lambda: int((EPOCH + loop.time() + jump) * 1000))
        harness = EngineHarness(FakeTarget(OK, BUSY, OK), store=store)
        await harness.engine.start()
        await asyncio.sleep(5.1)

        jump = 3600
        await harness.engine.submit([harness.new_task()])
        await asyncio.sleep(5)
        (task,) = await harness.engine.submit([harness.new_task(overrides=QUICK)])
        await asyncio.sleep(5)

        assert Status.SUCCEEDED is (await harness.task(task.task)).status
        assert ["transient", "success"] == [
            one.outcome for one in await harness.attempts(task.task)
        ]
        await harness.engine.stop(1)

    run(main)
