"""Lanes that are parked because their target cannot be attempted for a local reason."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tarry.core.breaker import BreakerState
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.model import Status
from tarry.service.store import LeaseTerms
from tests.service.engine.harness import BUSY, EPOCH_S, OK, EngineHarness, FakeTarget, run
from tests.service.stores.reference_store import ReferenceStore

LANE = "default/http:a.example:80"
BLOCKED = DeliveryResult(fault=Fault.BLOCKED, error="add --allow-target a.example")
NO_ANSWER = DeliveryResult(fault=Fault.DNS, error="no DNS server has answered", pause_s=5.0)
PROXY_REFUSAL = DeliveryResult(fault=Fault.INTERNAL, error="status 407", pause_s=10.0)


class CountingStore(ReferenceStore):
    """A store that counts its calls of `park`."""

    park_count = 0

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


def test_unanswered_lookup_charges_neither_attempt_nor_breaker() -> None:
    """Tasks wait in the store, and one of them is tried after each pause."""

    async def main() -> None:
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

    run(main)


def test_refusal_by_the_proxy_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An error is logged when the lane begins to wait; no attempt is counted."""

    async def main() -> None:
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

    with caplog.at_level(logging.ERROR, "tarry.service"):
        run(main)
    assert [f"lane parked for a local reason, lane={LANE}: status 407"] == caplog.messages


def test_any_response_ends_the_wait() -> None:
    """A response that is a failure shows that the target can be attempted, too."""

    async def main() -> None:
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

    run(main)


def test_wait_continues_and_ends_after_a_restart() -> None:
    """A new process reads from the store that the lane waits for a local reason."""

    async def main() -> None:
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

    run(main)


def test_wait_of_a_half_open_lane_keeps_the_state_of_the_breaker() -> None:
    """A probe that could not be made neither opens nor closes the breaker."""

    async def main() -> None:
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

    run(main)


def test_tasks_wait_while_their_target_is_not_allowed() -> None:
    """With `blocked_pause_s`, the target is tried after each pause, and no attempt is counted."""

    async def main() -> None:
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

    run(main)


def test_task_that_waits_for_its_target_ends_with_its_total_budget() -> None:
    """The task becomes a dead letter without an attempt."""

    async def main() -> None:
        harness = EngineHarness(ChangingTarget(BLOCKED), blocked_pause_s=60.0)
        await harness.engine.start()
        (task,) = await harness.add(harness.new_task(overrides={"totalBudgetMs": 90_000}))
        await asyncio.sleep(150)
        finished = await harness.get_task(task)
        assert (Status.EXHAUSTED, "total-budget") == (finished.status, finished.reason)
        assert 0 == finished.attempts
        await harness.engine.stop(1)

    run(main)
