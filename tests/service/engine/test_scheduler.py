from __future__ import annotations

import asyncio
from collections.abc import Collection

from tarry.service.delivery import DeliveryResult
from tarry.service.model import Status
from tarry.service.store import ClaimResult, LeaseTerms
from tests.service.engine.harness import (
    EPOCH_S,
    OK,
    EngineHarness,
    FakeTarget,
    run,
)
from tests.service.stores.reference_store import ReferenceStore


def test_retry_beyond_the_horizon_is_claimed() -> None:
    """A retry that is due after the horizon returns to the store, and is claimed in time."""

    async def main() -> None:
        harness = EngineHarness(
            FakeTarget(DeliveryResult(status=503, headers=[("retry-after", "100")]), OK)
        )
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(1)
        waiting = await harness.get_task(task)
        assert (Status.PENDING, None) == (waiting.status, waiting.worker)
        assert not len(harness.engine.worker.leased_tasks)

        await harness.engine.start()
        await asyncio.sleep(200)
        await harness.engine.stop(1)
        log = await harness.list_attempts(task)
        assert ["transient", "success"] == [attempt.outcome for attempt in log]
        assert 100_000 <= log[1].started_at - log[0].started_at
        assert 0 <= log[1].started_at - log[1].scheduled_at <= 1

    run(main)


class SlowClaimStore(ReferenceStore):
    """A store that replies to a claim one second after it has leased the tasks."""

    async def claim(
        self, terms: LeaseTerms, *, limit: int, per_lane: int, skipped_lanes: Collection[str] = ()
    ) -> ClaimResult:
        """Claim, and reply a second later."""
        claimed = await super().claim(
            terms, limit=limit, per_lane=per_lane, skipped_lanes=skipped_lanes
        )
        await asyncio.sleep(1)
        return claimed


def test_stop_releases_the_tasks_of_a_running_claim() -> None:
    """Tasks of a claim that runs during a stop are released, not left until leases expire."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = SlowClaimStore(lambda: int((EPOCH_S + loop.time()) * 1000))
        harness = EngineHarness(FakeTarget(OK), store=store)
        new_task = harness.new_task()
        await store.add([new_task])
        await harness.engine.start()
        await asyncio.sleep(0.5)

        await harness.engine.stop(30)

        task = await harness.get_task(new_task.task)
        assert (Status.PENDING, None, 0) == (task.status, task.worker, task.attempts)

    run(main)


def test_stop_does_not_wait_for_a_slow_claim_beyond_its_timeout() -> None:
    """A stop ends within its timeout although a claim takes longer."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        store = SlowClaimStore(lambda: int((EPOCH_S + loop.time()) * 1000))
        harness = EngineHarness(FakeTarget(OK), store=store)
        await harness.engine.start()
        await asyncio.sleep(0.1)
        started_at = loop.time()

        await harness.engine.stop(0.5)

        assert loop.time() - started_at <= 0.5

    run(main)
