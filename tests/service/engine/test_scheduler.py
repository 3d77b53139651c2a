from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

import pytest

from tarry.core.breaker import BreakerState
from tarry.errors import StoreUnavailable
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.model import Status
from tarry.service.store import (
    AddResult,
    ClaimResult,
    ConfiguredLimits,
    FinishStatus,
    LeaseTerms,
    NewTask,
    Release,
    TaskResult,
)
from tests.service.engine.harness import (
    BUSY,
    EPOCH_S,
    OK,
    EngineHarness,
    FakeTarget,
)
from tests.service.stores.reference_store import ReferenceStore

LANE = "default/http:a.example:80"


async def test_retry_beyond_the_horizon_is_claimed() -> None:
    """A retry that is due after the horizon returns to the store, and is claimed in time."""
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


class ClaimLimitStore(ReferenceStore):
    """A store that records the limits of each claim."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(lambda: int((EPOCH_S + loop.time()) * 1000))
        self.limits: list[tuple[int, int]] = []

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Claim, and record the limits."""
        self.limits.append((limit, per_lane))
        return await super().claim(terms, limit=limit, per_lane=per_lane, lane_limits=lane_limits)


async def test_claims_of_several_processes_are_larger() -> None:
    """A claim leases up to 64 tasks, or 128 if several processes share the store."""
    store = ClaimLimitStore()
    harness = EngineHarness(FakeTarget(OK), store=store)
    for names in ([], ["other"], []):
        harness.context.claim_turns.assign("worker", names)
        await harness.engine.scheduler.run_once()
    assert [(64, 128), (128, 128), (64, 128)] == store.limits


class SlowClaimStore(ReferenceStore):
    """A store that replies to a claim one second after it has leased the tasks."""

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Claim, and reply a second later."""
        claimed = await super().claim(
            terms, limit=limit, per_lane=per_lane, lane_limits=lane_limits
        )
        await asyncio.sleep(1)
        return claimed


async def test_stop_releases_the_tasks_of_a_running_claim() -> None:
    """Tasks of a claim that runs during a stop are released, not left until leases expire."""
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


async def test_stop_does_not_wait_for_a_slow_claim_beyond_its_timeout() -> None:
    """A stop ends within its timeout although a claim takes longer."""
    loop = asyncio.get_running_loop()
    store = SlowClaimStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(FakeTarget(OK), store=store)
    await harness.engine.start()
    await asyncio.sleep(0.1)
    started_at = loop.time()

    await harness.engine.stop(0.5)

    assert loop.time() - started_at <= 0.5


async def test_limits_with_a_smaller_version_are_applied() -> None:
    """After a failover that has lost a pause, the lane is not paused in this process either."""
    harness = EngineHarness(FakeTarget(OK))
    await harness.add(harness.new_task())
    scheduler, lane = harness.engine.scheduler, harness.lanes[LANE]
    replies = [ConfiguredLimits(7, paused_lanes=frozenset({LANE})), ConfiguredLimits(6)]

    async def load_limits(_known: ConfiguredLimits) -> ConfiguredLimits:
        return replies.pop(0)

    harness.store.load_limits = load_limits  # type: ignore[assignment, method-assign]
    await scheduler.load_limits()
    assert lane.is_paused
    await scheduler.load_limits()
    assert not lane.is_paused


async def test_limits_of_an_earlier_call_are_ignored() -> None:
    """A reply that arrives after the reply of a later call does not replace its limits."""
    harness = EngineHarness(FakeTarget(OK))
    replies = [(2.0, ConfiguredLimits(1)), (1.0, ConfiguredLimits(2))]

    async def load_limits(_known: ConfiguredLimits) -> ConfiguredLimits:
        delay, limits = replies.pop(0)
        await asyncio.sleep(delay)
        return limits

    harness.store.load_limits = load_limits  # type: ignore[assignment, method-assign]
    scheduler = harness.engine.scheduler
    await asyncio.gather(scheduler.load_limits(), scheduler.load_limits())
    assert 2 == harness.context.limit_table.stored.version


class LostReplyStore(ReferenceStore):
    """A store that applies the next call of the method `lost_reply`, and then raises an error."""

    lost_reply = ""

    async def add(
        self,
        tasks: Sequence[NewTask],
        terms: LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> list[AddResult]:
        """Add tasks."""
        added = await super().add(tasks, terms, quota=quota, lane_quota=lane_quota)
        self._lose_reply("add")
        return added

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Claim tasks; only the reply of a claim with tasks is lost."""
        claimed = await super().claim(
            terms, limit=limit, per_lane=per_lane, lane_limits=lane_limits
        )
        if claimed.tasks:
            self._lose_reply("claim")
        return claimed

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        """Write results."""
        statuses = await super().finish(results)
        self._lose_reply("finish")
        return statuses

    def _lose_reply(self, method: str) -> None:
        if self.lost_reply == method:
            self.lost_reply = ""
            raise StoreUnavailable("the writer process was killed")


def new_lost_reply_harness(target: FakeTarget) -> tuple[EngineHarness, LostReplyStore]:
    """Return a harness whose store can lose a reply."""
    loop = asyncio.get_running_loop()
    store = LostReplyStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    return EngineHarness(target, store=store), store


@pytest.mark.parametrize(
    ("method", "outcomes"),
    [("add", ["success"]), ("claim", ["success"]), ("finish", ["transient", "success"])],
)
async def test_lease_of_a_lost_reply_is_released(method: str, outcomes: list[str]) -> None:
    """A task whose lease this process does not know is sent soon, not when the lease expires."""
    target = FakeTarget(*[BUSY] * (len(outcomes) - 1), OK)
    harness, store = new_lost_reply_harness(target)
    await harness.engine.start()
    overrides = {"maxAttempts": 2, "initialDelayMs": 500, "jitterType": "NONE"}
    new_task = harness.new_task(overrides=overrides)
    store.lost_reply = method
    if method == "claim":
        await store.add([new_task])
    elif method == "finish":
        await harness.add(new_task)
    else:
        with pytest.raises(StoreUnavailable):
            await harness.add(new_task)
    await asyncio.sleep(5)

    assert "" == store.lost_reply
    log = await harness.list_attempts(new_task.task)
    assert outcomes == [attempt.outcome for attempt in log]
    assert len(outcomes) == len(target.requests)
    assert Status.SUCCEEDED is (await harness.get_task(new_task.task)).status
    await harness.engine.stop(1)


class SlowReleaseStore(LostReplyStore):
    """A store that releases unknown leases one second after the call."""

    async def release_unknown_leases(
        self, terms: LeaseTerms, known_ids: Collection[str], partition: int | None = None
    ) -> int:
        """Wait, and release."""
        await asyncio.sleep(1)
        return await super().release_unknown_leases(terms, known_ids)


async def test_task_added_during_the_release_of_unknown_leases_keeps_its_lease() -> None:
    """Leases that begin while unknown leases are released are not taken for unknown ones."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(10)
        return OK

    loop = asyncio.get_running_loop()
    store = SlowReleaseStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    target = FakeTarget(respond_slowly)
    harness = EngineHarness(target, store=store)
    await harness.engine.start()
    store.lost_reply = "add"
    with pytest.raises(StoreUnavailable):
        await harness.add(harness.new_task())
    await asyncio.sleep(0.6)  # the scheduler runs every half second
    (task,) = await harness.add(harness.new_task())
    await asyncio.sleep(30)

    assert 2 == len(target.requests)
    finished = await harness.get_task(task)
    assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
    await harness.engine.stop(1)


class SlowReplyStore(LostReplyStore):
    """A store that replies two seconds after it has released leases."""

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        """Release leases, and reply two seconds later."""
        statuses = await super().release(releases)
        await asyncio.sleep(2)
        return statuses


async def test_lost_lease_of_a_task_that_is_being_released_is_released() -> None:
    """A lease is unknown if its claim was lost while an earlier release of the task was written."""
    loop = asyncio.get_running_loop()
    store = SlowReplyStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(FakeTarget(OK), store=store)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(delay_ms=900))
    store.lost_reply = "claim"
    harness.engine.worker.release_lane(task.lane)
    await asyncio.sleep(5)  # the lease would expire after 70 s

    assert "" == store.lost_reply
    assert Status.SUCCEEDED is (await harness.get_task(task)).status
    await harness.engine.stop(1)


async def test_breaker_of_a_lane_that_another_process_unparks_is_closed() -> None:
    """A process that has probed a lane starts other tasks once another process unparks it."""

    async def respond_slowly(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(20)
        return OK

    target = FakeTarget(respond_slowly)
    harness = EngineHarness(target)
    store = harness.store
    await store.add([harness.new_task() for _ in range(20)])
    lane = "default/http:a.example:80"
    # The other process: it parks the lane, and later one of its probes succeeds.
    await store.park(lane, await store.ping(), probes=3, consecutive_opens=1)
    await harness.engine.start()
    await asyncio.sleep(5)
    assert 3 == len(target.requests)
    assert BreakerState.HALF_OPEN is harness.lanes[lane].breaker.state
    await store.unpark(lane)
    await asyncio.sleep(5)

    assert BreakerState.CLOSED is harness.lanes[lane].breaker.state
    assert len(target.requests) > 3
    await harness.engine.stop(1)


async def test_next_probe_is_claimed_when_a_probe_ends_without_an_attempt() -> None:
    """Tasks that end without an attempt do not delay the probe of a half-open lane."""
    target = FakeTarget(OK)
    harness = EngineHarness(target)
    store = harness.store
    expired = [harness.new_task(overrides={"totalBudgetMs": 1_000}) for _ in range(20)]
    await store.add([*expired, harness.new_task()])
    await asyncio.sleep(2)
    lane = expired[0].task.lane
    await store.park(lane, await store.ping(), probes=1, consecutive_opens=1)
    await harness.engine.start()
    await asyncio.sleep(1)

    assert 1 == len(target.requests)
    await harness.engine.stop(1)
