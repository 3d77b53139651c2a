"""Maintenance: rate, order, quotas and failures of replays; bodies; rates of lanes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine.context import BODY_STORE, EngineLimits
from tarry.service.engine.maintenance import replay_step_size
from tarry.service.model import AttemptRecord, LatencyWindow, ReplayRecord, Status
from tarry.service.payloads import BodyStoreUnavailable
from tarry.service.records.lane_activity import latency_bucket, read_lane_activity
from tarry.service.store import LaneLimits, StoredTaskFilter
from tests.service.engine.harness import BUSY, EPOCH_S, OK, EngineHarness, FakeTarget
from tests.service.stores.reference_store import ReferenceStore

BAD_REQUEST = DeliveryResult(status=400, duration_ms=1.0)


async def add_dead_letters(
    harness: EngineHarness, target: FakeTarget, count: int, tenant: str = "default"
) -> None:
    """Add dead letters; afterwards the target returns 200."""
    target.responses = [BAD_REQUEST]
    await harness.add(*(harness.new_task(tenant=tenant) for _ in range(count)))
    await asyncio.sleep(5)
    target.responses = [OK]
    target.times.clear()


@pytest.mark.parametrize(("rate", "count"), [(0.5, 5), (1.5, 12), (30.0, 240), (400.0, 1200)])
async def test_replay_keeps_its_rate(rate: float, count: int) -> None:
    """A replay makes tasks due at its rate from its first to its last step."""
    target = FakeTarget()
    harness = EngineHarness(target)
    await harness.engine.start()
    await add_dead_letters(harness, target, count)

    await harness.store.start_replay(ReplayRecord(id="r", tenant="default", rate=rate))
    await asyncio.sleep(count / rate + 5)

    assert count == len(target.times)
    started_at = target.times[0]
    step_size = replay_step_size(rate)
    for number, time in enumerate(target.times):
        assert number <= (time - started_at + 1.1) * rate + step_size
    duration = target.times[-1] - started_at
    assert (count - step_size) / rate - 1.1 <= duration <= count / rate + 1.1
    await harness.engine.stop(0)


def test_replay_step_is_a_tenth_of_a_second() -> None:
    """A step has the tasks of a tenth of a second, at least 1 and at most 200."""
    assert [1, 1, 2, 100, 200, 200] == [
        replay_step_size(rate) for rate in (0.001, 10.0, 11.0, 1000.0, 5000.0, 0.0)
    ]


async def test_many_slow_replays_do_not_delay_another() -> None:
    """220 slow replays of one tenant do not delay the replay of another tenant."""
    target = FakeTarget()
    harness = EngineHarness(target)
    await harness.engine.start()
    await add_dead_letters(harness, target, 250, "busy")
    await add_dead_letters(harness, target, 10, "other")
    for number in range(110):
        await harness.store.start_replay(ReplayRecord(id=f"a{number}", tenant="busy", rate=0.0001))
    await harness.store.start_replay(ReplayRecord(id="b", tenant="other", rate=2.0))
    for number in range(110):
        await harness.store.start_replay(ReplayRecord(id=f"c{number}", tenant="busy", rate=0.0001))
    await asyncio.sleep(10)

    replay = await harness.store.get_replay("other", "b")
    assert replay is not None
    assert ("done", 10) == (replay.status, replay.replayed)
    await harness.engine.stop(0)


async def test_replay_is_done_when_its_tasks_have_finished() -> None:
    """A replay waits for the attempts of its tasks, and counts their final statuses."""
    target = FakeTarget()
    harness = EngineHarness(target)
    await harness.engine.start()
    await add_dead_letters(harness, target, 3)
    target.responses = [BUSY, OK, BAD_REQUEST]  # the first task is retried
    await harness.store.start_replay(ReplayRecord(id="r", tenant="default", rate=2.0))
    await asyncio.sleep(0.1)

    running = await harness.store.get_replay("default", "r")
    await asyncio.sleep(60)
    done = await harness.store.get_replay("default", "r")

    assert running is not None
    assert "running" == running.status
    assert done is not None
    assert ("done", 3, 0) == (done.status, done.replayed, done.unfinished)
    assert {"SUCCEEDED": 1, "EXHAUSTED": 2} == done.finished
    await harness.engine.stop(0)


async def test_replays_of_a_tenant_share_its_rate() -> None:
    """Two replays and the new tasks of a tenant together keep the tenant's rate."""
    target = FakeTarget()
    limits = EngineLimits(tenant_tasks_per_s=10.0, tenant_burst=20.0)
    harness = EngineHarness(target, limits=limits)
    await harness.engine.start()
    await add_dead_letters(harness, target, 200)
    for replay_id, rate in (("a", 0.0), ("b", 500.0)):
        await harness.store.start_replay(ReplayRecord(id=replay_id, tenant="default", rate=rate))
    await asyncio.sleep(10)

    assert 100 <= len(target.times) <= 10 * 10 + 20
    limiter = harness.engine.rate_limiter
    assert limiter is not None
    assert limiter.take_up_to("default", 20) <= 1  # the replays take the tokens
    assert 0 == limiter.take("other", 1)
    await asyncio.sleep(15)
    assert 200 == len(target.times)
    await harness.engine.stop(0)


async def test_replays_keep_the_quota_of_unfinished_tasks() -> None:
    """A replay makes no more tasks due than the tenant may have unfinished."""

    async def hang(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(20.0)
        return OK

    target = FakeTarget()
    harness = EngineHarness(target, limits=EngineLimits(max_tenant_unfinished_tasks=5))
    await harness.engine.start()
    for _ in range(3):
        await add_dead_letters(harness, target, 4)
    target.responses = [hang]
    await harness.store.start_replay(ReplayRecord(id="a", tenant="default"))
    await asyncio.sleep(10)
    dead = StoredTaskFilter(status=Status.EXHAUSTED)
    assert 7 == len((await harness.store.list_tasks("default", dead)).items)

    await asyncio.sleep(60)
    assert [] == (await harness.store.list_tasks("default", dead)).items
    await harness.engine.stop(0)


class FailingReplayStore(ReferenceStore):
    """A store that fails for the replay `a`."""

    async def replay_step(
        self, replay_id: str, *arguments: Any, quota: int | None = None
    ) -> ReplayRecord | None:
        """Fail for the replay `a`."""
        if replay_id == "a":
            raise OverflowError
        return await super().replay_step(replay_id, *arguments, quota=quota)


async def test_failing_replay_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    """A failing replay is logged; other replays and the rest of maintenance continue."""
    loop = asyncio.get_running_loop()
    target = FakeTarget()
    harness = EngineHarness(
        target, store=FailingReplayStore(lambda: int((EPOCH_S + loop.time()) * 1000))
    )
    await harness.engine.start()
    await add_dead_letters(harness, target, 3)
    for replay_id in "ab":
        await harness.store.start_replay(ReplayRecord(id=replay_id, tenant="default"))
    await asyncio.sleep(5)

    replay = await harness.store.get_replay("default", "b")
    assert replay is not None
    assert ("done", 3) == (replay.status, replay.replayed)
    await harness.engine.stop(0)
    assert "replay step failed, replay=a" in caplog.text
    assert "maintenance failed" not in caplog.text


async def test_failing_body_store_is_not_a_failing_store(caplog: pytest.LogCaptureFixture) -> None:
    """A body that cannot be deleted is deleted when the body store has recovered."""
    deletions: list[list[str]] = []

    with caplog.at_level(logging.WARNING, "tarry.service"):
        is_failing = True

        async def delete_bodies(refs: list[str]) -> None:
            deletions.append(refs)
            if is_failing:
                raise BodyStoreUnavailable("wrong secret")

        async def check() -> None:
            if is_failing:
                raise BodyStoreUnavailable("wrong secret")

        loop = asyncio.get_running_loop()
        store = ReferenceStore(lambda: int((EPOCH_S + loop.time()) * 1000))
        store.state.orphaned_bodies["body"] = None
        harness = EngineHarness(
            FakeTarget(), store=store, delete_bodies=delete_bodies, check_body_store=check
        )
        await harness.engine.start()
        await asyncio.sleep(20)
        assert {"bodies": "wrong secret"} == harness.context.health.failing
        assert [["body"]] == deletions  # no further deletion before a check succeeds

        is_failing = False
        await asyncio.sleep(10)
        assert {} == harness.context.health.failing
        assert [["body"]] * 2 == deletions
        await harness.engine.stop(0)
    assert ["bodies is failing: wrong secret", "bodies has recovered"] == [
        record.message for record in caplog.records
    ]


async def test_latencies_of_all_processes_are_stored() -> None:
    """Durations of attempts are stored every 30 s and at the stop; a reset removes them."""
    slow = DeliveryResult(status=503, duration_ms=1_000.0)
    first = EngineHarness(FakeTarget(OK, OK, slow, OK))
    second = EngineHarness(FakeTarget(), store=first.store, seed=2, role="api")
    await first.engine.start()
    (task, *_) = await first.add(*(first.new_task() for _ in range(3)))
    await asyncio.sleep(4)

    async def read(harness: EngineHarness) -> list[LatencyWindow]:
        found = await harness.engine.read_activity([task.lane, "default/none"])
        return [window for activity in found.values() for window in activity.windows]

    [window] = await read(first)
    assert {str(latency_bucket(1.0)): 3, str(latency_bucket(1_000.0)): 1} == window.counts
    assert [] == await read(second)
    await asyncio.sleep(30)
    assert [window] == await read(first) == await read(second)

    await first.add(first.new_task())
    await asyncio.sleep(1)
    await first.engine.stop(1)
    [window] = await read(second)
    assert 5 == sum(window.counts.values())
    await first.engine.reset(task.lane)
    assert [] == await read(first) == await read(second)


async def test_latencies_of_many_lanes_are_stored() -> None:
    """The durations of attempts in more lanes than one call stores are all stored."""
    harness = EngineHarness(FakeTarget())
    tasks = await harness.add(
        *(harness.new_task(url=f"http://h{number}.example/") for number in range(600))
    )
    attempt = AttemptRecord(
        attempt_number=1, scheduled_at=0, started_at=0, duration_ms=0.0, outcome="success"
    )
    for task in tasks:
        harness.metrics.record_attempt(attempt, "default", task.lane)
    await harness.engine.maintenance.store_latencies()

    stored = await read_lane_activity(harness.store, [task.lane for task in tasks])
    assert {task.lane for task in tasks} == set(stored)
    assert {} == harness.metrics.take_latencies()
    await harness.engine.stop(1)


async def test_rates_are_stored_while_the_body_store_fails() -> None:
    """The rates of lanes are stored every 5 s, also while bodies cannot be deleted."""

    async def check() -> None:
        raise BodyStoreUnavailable("wrong secret")

    harness = EngineHarness(FakeTarget(), check_body_store=check)
    harness.context.health.mark_failing(BODY_STORE, "wrong secret")
    (task,) = await harness.add(harness.new_task())
    harness.lanes[task.lane].downstream.limiter.restore(rate=30.0, limit=4)
    await harness.engine.start()
    await asyncio.sleep(6)

    assert [LaneLimits(task.lane, 30.0, 4)] == await harness.store.list_lane_limits(10)
    await harness.engine.stop(0)
