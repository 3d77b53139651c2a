"""Lanes that are parked because their target cannot be attempted for a local reason."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest

from tarry.core.breaker import BreakerState
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.model import Status
from tarry.service.store import ClaimResult, LeaseTerms
from tests.service.engine.harness import BUSY, EPOCH_S, OK, EngineHarness, FakeTarget
from tests.service.stores.reference_store import ReferenceStore

LANE = "default/http:a.example:80"
BLOCKED = DeliveryResult(fault=Fault.BLOCKED, error="add --allow-target a.example")
NO_ANSWER = DeliveryResult(fault=Fault.DNS, error="no DNS server has answered", pause_s=5.0)
PROXY_REFUSAL = DeliveryResult(fault=Fault.INTERNAL, error="status 407", pause_s=10.0)


class CountingStore(ReferenceStore):
    """A store that counts its calls of `park` and `claim`."""

    park_count = claim_count = 0

    async def claim(self, *args: Any, **options: Any) -> ClaimResult:
        """Count the call, and lease tasks."""
        self.claim_count += 1
        return await super().claim(*args, **options)

    async def park(self, lane: str, until: int, *, probes: int, consecutive_opens: int) -> None:
        """Count the call, and park the lane."""
        self.park_count += 1
        await super().park(lane, until, probes=probes, consecutive_opens=consecutive_opens)


class ChangingTarget(FakeTarget):
    """A target with one response for each host, which the test changes."""

    def __init__(self, result: DeliveryResult) -> None:
        super().__init__(self._respond)
        self.result = result

    async def _respond(self, request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(0.001)
        return self.result if "//a.example" in request.url else OK


async def test_unanswered_lookup_charges_neither_attempt_nor_breaker() -> None:
    """Tasks wait in the store, and one of them is tried after each pause."""
    loop = asyncio.get_running_loop()
    store = CountingStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    target = ChangingTarget(NO_ANSWER)
    harness = EngineHarness(target, store=store)
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(200)])
    await asyncio.sleep(1)
    sent_count = len(target.requests)
    await asyncio.sleep(60)

    assert len(target.requests) - sent_count <= 12
    assert store.park_count <= 13
    for task in tasks:
        waiting = await harness.get_task(task)
        assert (Status.PENDING, 0) == (waiting.status, waiting.attempts)
        assert not await harness.list_attempts(task)
    breaker = harness.lanes[LANE].breaker
    assert (0, 0, 0) == breaker.counts(harness.context.clock.now_s())
    assert BreakerState.CLOSED is breaker.state
    assert {} == harness.context.health.failing
    stats = harness.engine.local_stats(LANE)
    assert stats is not None
    assert "no DNS server has answered" == stats.wait_reason
    assert {"dns"} == {each.reason for each in harness.published if each.kind == "deferred"}
    assert "parked" not in harness.event_kinds()  # the event of an open breaker

    (other,) = await harness.add(harness.new_task("http://b.example:80/"))
    await asyncio.sleep(0.1)
    assert Status.SUCCEEDED is (await harness.get_task(other)).status

    target.result = OK
    await asyncio.sleep(7)
    for task in tasks:
        finished = await harness.get_task(task)
        assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
    lane = await store.get_lane(LANE)
    assert lane is not None
    assert lane.parked_until is None
    assert harness.lanes[LANE].wait_reason is None
    assert LANE not in harness.lanes.parked
    await harness.engine.stop(1)


async def test_refusal_by_the_proxy_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An error is logged when the lane begins to wait; no attempt is counted."""
    with caplog.at_level(logging.ERROR, "tarry.service"):
        target = ChangingTarget(PROXY_REFUSAL)
        harness = EngineHarness(target)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task())
        await asyncio.sleep(60)
        waiting = await harness.get_task(task)
        assert (Status.PENDING, 0) == (waiting.status, waiting.attempts)
        assert {} == harness.context.health.failing
        target.result = OK
        await asyncio.sleep(20)
        assert Status.SUCCEEDED is (await harness.get_task(task)).status
        await harness.engine.stop(1)
    assert [f"lane parked for a local reason, lane={LANE}: status 407"] == caplog.messages


async def test_any_response_ends_the_wait() -> None:
    """A response that is a failure shows that the target can be attempted, too."""
    target = ChangingTarget(NO_ANSWER)
    harness = EngineHarness(target)
    await harness.engine.start()
    await harness.add(harness.new_task())
    await asyncio.sleep(1)
    lane = await harness.store.get_lane(LANE)
    assert lane is not None
    assert lane.parked_until is not None
    target.result = BUSY
    await asyncio.sleep(6)
    lane = await harness.store.get_lane(LANE)
    assert lane is not None
    assert lane.parked_until is None
    await harness.engine.stop(1)


async def test_wait_continues_and_ends_after_a_restart() -> None:
    """A new process reads from the store that the lane waits for a local reason."""
    target = ChangingTarget(NO_ANSWER)
    harness = EngineHarness(target)
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(50)])
    await asyncio.sleep(1)
    await harness.engine.stop(1)

    sent_count = len(target.requests)
    lease = LeaseTerms("other", 70_000, 1_000)
    restarted = EngineHarness(target, store=harness.store, seed=2, lease=lease)
    await restarted.engine.start()
    await asyncio.sleep(3)
    assert sent_count == len(target.requests)
    target.result = OK
    await asyncio.sleep(5)
    for task in tasks:
        assert Status.SUCCEEDED is (await restarted.get_task(task)).status
    assert BreakerState.CLOSED is restarted.lanes[LANE].breaker.state
    lane = await harness.store.get_lane(LANE)
    assert lane is not None
    assert lane.parked_until is None
    await restarted.engine.stop(1)


async def test_wait_of_a_half_open_lane_keeps_the_state_of_the_breaker() -> None:
    """A probe that could not be made neither opens nor closes the breaker."""
    target = ChangingTarget(BUSY)
    harness = EngineHarness(target)
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(50)])
    await asyncio.sleep(20)
    breaker = harness.lanes[LANE].breaker
    assert (BreakerState.OPEN, 1) == (breaker.state, breaker.consecutive_opens)
    target.result = NO_ANSWER
    await asyncio.sleep(60)
    assert (BreakerState.HALF_OPEN, 1) == (breaker.state, breaker.consecutive_opens)
    lane = await harness.store.get_lane(LANE)
    assert lane is not None
    assert 1 == lane.consecutive_opens

    target.result = OK
    await asyncio.sleep(60)
    assert BreakerState.CLOSED is breaker.state
    for task in tasks:
        assert Status.SUCCEEDED is (await harness.get_task(task)).status
    await harness.engine.stop(1)


async def test_tasks_wait_while_their_target_is_not_allowed() -> None:
    """With `blocked_pause_s`, the target is tried after each pause, and no attempt is counted."""
    target = ChangingTarget(BLOCKED)
    harness = EngineHarness(target, blocked_pause_s=60.0)
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(5)])
    await asyncio.sleep(600)
    assert len(target.requests) <= 5 + 10
    for task in tasks:
        waiting = await harness.get_task(task)
        assert (Status.PENDING, 0) == (waiting.status, waiting.attempts)
    breaker = harness.lanes[LANE].breaker
    assert (0, 0, 0) == breaker.counts(harness.context.clock.now_s())
    stats = harness.engine.local_stats(LANE)
    assert stats is not None
    assert "add --allow-target a.example" == stats.wait_reason
    assert {"blocked"} == {each.reason for each in harness.published if each.kind == "deferred"}

    target.result = OK
    await asyncio.sleep(61)
    for task in tasks:
        finished = await harness.get_task(task)
        assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
    await harness.engine.stop(1)


async def test_task_that_waits_for_its_target_ends_with_its_total_budget() -> None:
    """The task becomes a dead letter without an attempt."""
    harness = EngineHarness(ChangingTarget(BLOCKED), blocked_pause_s=60.0)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(overrides={"totalBudgetMs": 90_000}))
    await asyncio.sleep(150)
    finished = await harness.get_task(task)
    assert (Status.EXHAUSTED, "total-budget") == (finished.status, finished.reason)
    assert 0 == finished.attempts
    await harness.engine.stop(1)


async def test_a_process_leaves_blocked_lanes_to_processes_that_allow_their_targets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tasks are delivered at once, although another process does not allow their target."""
    with caplog.at_level(logging.WARNING, "tarry.service"):
        blocking, allowing = ChangingTarget(BLOCKED), ChangingTarget(OK)
        first = EngineHarness(blocking, blocked_pause_s=60.0)
        await first.engine.start()
        waiting = await first.add(*[first.new_task() for _ in range(50)])
        await asyncio.sleep(10)
        assert "add --allow-target a.example" == first.engine.blocked_reason(LANE)
        lane = await first.store.get_lane(LANE)
        assert lane is not None
        assert (None, 50) == (lane.parked_until, lane.pending)

        lease = LeaseTerms("other", 70_000, 1_000)
        second = EngineHarness(allowing, store=first.store, seed=2, lease=lease)
        await second.engine.start()
        await asyncio.sleep(2)
        # Tasks that the blocking process adds are also left to the other one.
        waiting += await first.add(*[first.new_task() for _ in range(50)])
        await asyncio.sleep(2)
        for task in waiting:
            finished = await first.get_task(task)
            assert (Status.SUCCEEDED, 1) == (finished.status, finished.attempts)
        await asyncio.sleep(10)
        assert first.engine.blocked_reason(LANE) is None
        await second.engine.stop(1)
        await first.engine.stop(1)
    expected = f"lane waits, its target is not allowed, lane={LANE}: add --allow-target a.example"
    assert [expected] == caplog.messages


async def test_other_lanes_are_served_while_the_target_of_one_is_not_allowed() -> None:
    """A lane that waits does not delay other lanes of its tenant."""
    harness = EngineHarness(ChangingTarget(BLOCKED), blocked_pause_s=60.0)
    await harness.engine.start()
    await harness.add(*[harness.new_task() for _ in range(1000)])
    await asyncio.sleep(10)
    others = await harness.add(*[harness.new_task("http://b.example:80/") for _ in range(50)])
    await asyncio.sleep(1)
    for task in others:
        assert Status.SUCCEEDED is (await harness.get_task(task)).status
    await harness.engine.stop(1)


async def test_a_blocked_lane_causes_no_claims() -> None:
    """While it waits, attempts of other lanes that end are no reason to claim again."""
    loop = asyncio.get_running_loop()
    counts = []
    for urls in ([], ["http://a.example:80/"]):
        store = CountingStore(lambda: int((EPOCH_S + loop.time()) * 1000))
        harness = EngineHarness(ChangingTarget(BLOCKED), store=store, blocked_pause_s=60.0)
        await harness.engine.start()
        await harness.add(*map(harness.new_task, urls))
        await asyncio.sleep(5)
        store.claim_count = 0
        for _ in range(200):
            await harness.add(harness.new_task("http://b.example:80/"))
            await asyncio.sleep(0.05)
        counts.append(store.claim_count)
        await harness.engine.stop(1)
    without, with_blocked_lane = counts
    assert with_blocked_lane <= without + 2


class ClaimCountingStore(ReferenceStore):
    """A store that keeps the number of lanes with a limit of each claim."""

    def __init__(self, now: Callable[[], int]) -> None:
        super().__init__(now)
        self.limited_counts: list[int] = []

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        """Count the lanes, and claim."""
        self.limited_counts.append(len(lane_limits))
        return await super().claim(
            terms, limit=limit, per_lane=per_lane, lane_limits=lane_limits, skip=skip
        )


async def test_a_tenant_cannot_slow_down_claims_with_blocked_lanes() -> None:
    """A claim passes over a bounded number of lanes; the others are parked, and end their wait."""
    loop = asyncio.get_running_loop()
    store = ClaimCountingStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    target = ChangingTarget(BLOCKED)
    harness = EngineHarness(target, store=store, blocked_pause_s=60.0)
    await harness.engine.start()
    tasks = [harness.new_task(tenant="a", lane_key=f"k{number}") for number in range(700)]
    tasks += [harness.new_task(tenant="b", lane_key=f"k{number}") for number in range(30)]
    added = await harness.add(*tasks)
    await asyncio.sleep(200)
    assert 130 == max(store.limited_counts)
    # Those of the other tenant are not parked for processes that allow their target.
    parked = [
        task
        for task in added
        if (lane := await store.get_lane(task.lane)) is not None and lane.parked_until is not None
    ]
    assert {"a"} == {task.tenant for task in parked}
    assert len(target.requests) <= 730 * 5

    target.result = OK
    await asyncio.sleep(62)
    for task in added:
        assert Status.SUCCEEDED is (await harness.get_task(task)).status
    await asyncio.sleep(1)
    assert 0 == store.limited_counts[-1]
    await harness.engine.stop(1)


async def test_blocked_lanes_without_tasks_are_forgotten() -> None:
    """Otherwise, each claim would pass over lanes of cancelled tasks for ever."""
    loop = asyncio.get_running_loop()
    store = ClaimCountingStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    harness = EngineHarness(ChangingTarget(BLOCKED), store=store, blocked_pause_s=60.0)
    await harness.engine.start()
    (task,) = await harness.add(harness.new_task(overrides={"totalBudgetMs": 90_000}))
    (waiting,) = await harness.add(harness.new_task(lane_key="other"))
    await asyncio.sleep(1000)
    assert Status.EXHAUSTED is (await harness.get_task(task)).status
    assert [waiting.lane] == list(harness.lanes)
    assert 1 == store.limited_counts[-1]
    await harness.engine.stop(1)


async def test_a_resumed_lane_is_tried_at_once() -> None:
    """An operator who has allowed the target need not wait for the end of the pause."""
    target = ChangingTarget(BLOCKED)
    harness = EngineHarness(target, blocked_pause_s=3600.0)
    await harness.engine.start()
    tasks = await harness.add(*[harness.new_task() for _ in range(50)])
    await asyncio.sleep(10)
    target.result = OK
    await harness.engine.resume(LANE)
    await asyncio.sleep(2)
    for task in tasks:
        assert Status.SUCCEEDED is (await harness.get_task(task)).status
    await harness.engine.stop(1)


async def test_paused_lane_without_tasks_waits_for_nothing() -> None:
    """A lane has a reason to wait only while it has tasks."""
    harness = EngineHarness(FakeTarget(OK))
    lane = harness.new_task().task.lane
    await harness.engine.pause(lane)

    empty = await harness.store.get_lane(lane)
    await harness.add(harness.new_task())
    with_task = await harness.store.get_lane(lane)

    assert empty is not None
    assert with_task is not None
    assert (None, "pause") == (
        harness.engine.waiting_for(empty),
        harness.engine.waiting_for(with_task),
    )
