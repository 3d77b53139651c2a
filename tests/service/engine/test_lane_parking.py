from __future__ import annotations

import asyncio

from tarry.core.breaker import Breaker
from tarry.service.model import Status
from tarry.service.store import Lease
from tests.service.engine.harness import (
    BUSY,
    OK,
    EngineHarness,
    FakeTarget,
    run,
)


def test_lane_is_parked_when_its_breaker_opens() -> None:
    """Its tasks return to the store, and none is sent."""

    async def main() -> None:
        target = FakeTarget(BUSY)
        harness = EngineHarness(
            target, breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0)
        )
        await harness.engine.start()
        tasks = await harness.add(
            *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)]
        )
        await asyncio.sleep(5)
        lane = await harness.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is not None
        assert 0 == len(harness.engine.worker.leased_tasks)
        sent = len(target.requests)

        await asyncio.sleep(20)
        assert sent == len(target.requests)
        assert "parked" in harness.event_kinds()
        await harness.engine.stop(1)

    run(main)


def test_parked_lane_is_probed_and_recovers() -> None:
    """After its time a few probes are sent; if they succeed, the other tasks follow."""

    async def main() -> None:
        target = FakeTarget(*[BUSY] * 20, OK)
        harness = EngineHarness(
            target, breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0)
        )
        await harness.engine.start()
        tasks = await harness.add(
            *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)]
        )
        await asyncio.sleep(300)

        assert {Status.SUCCEEDED} == {(await harness.task(task)).status for task in tasks}
        event_kinds = harness.event_kinds()
        assert (
            event_kinds.index("parked")
            < event_kinds.index("probing")
            < event_kinds.index("resumed")
        )
        lane = await harness.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is None
        await harness.engine.stop(1)

    run(main)


def test_failed_probe_parks_the_lane_for_longer() -> None:
    """Each opening doubles the time, and the store has the number of openings."""

    async def main() -> None:
        harness = EngineHarness(
            FakeTarget(BUSY), breaker=lambda: Breaker(min_calls=5, open_for=30.0, spread=0.0)
        )
        await harness.engine.start()
        tasks = await harness.add(
            *[harness.new_task(overrides={"maxAttempts": 50}) for _ in range(20)]
        )
        await asyncio.sleep(40)
        lane = await harness.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert lane.parked_until is not None
        assert 2 == lane.opened
        left = lane.parked_until - harness.context.clock.now()
        assert 45_000 < left <= 60_000
        await harness.engine.stop(1)

    run(main)


def test_breaker_state_is_shared_through_the_store() -> None:
    """A second worker without failures gets probes only, and parks for the right time."""

    async def main() -> None:
        def breaker() -> Breaker:
            return Breaker(min_calls=5, open_for=30.0, spread=0.0)

        first = EngineHarness(FakeTarget(BUSY), breaker=breaker)
        tasks = await first.add(*[first.new_task(overrides={"maxAttempts": 50}) for _ in range(20)])
        await asyncio.sleep(5)
        await first.engine.stop(1)

        target = FakeTarget(BUSY)
        second = EngineHarness(
            target,
            store=first.store,
            seed=2,
            breaker=breaker,
            lease=Lease("second", 70_000, 1_000),
        )
        await second.engine.start()
        await asyncio.sleep(35)
        assert 1 <= len(target.requests) <= 3
        lane = await first.store.get_lane(tasks[0].lane)
        assert lane is not None
        assert 2 == lane.opened
        await second.engine.stop(1)

    run(main)
