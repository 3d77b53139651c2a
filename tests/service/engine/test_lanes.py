"""What a process knows of a lane."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tarry.core.breaker import BreakerState
from tarry.service.delivery import DeliveryRequest, DeliveryResult
from tarry.service.engine.context import EngineLimits
from tarry.service.engine.lanes import Lanes, LaneState, LeasedTask, build_downstream
from tarry.service.model import Status, Task
from tests.service.engine.harness import (
    BUSY,
    EPOCH,
    OK,
    EngineHarness,
    FakeTarget,
    run,
)
from tests.service.stores.model_store import ModelStore


def lanes(*names: str) -> Lanes:
    """Return the lanes of a process that knows these names."""
    known = Lanes(partial(build_downstream, max_in_flight=10), max_leased=10)
    for name in names:
        assert name == known[name].name
    return known


def lane(running: int) -> LaneState:
    """Return a lane with attempts in flight."""
    state = LaneState("tenant/http:a.example:80", build_downstream("a", max_in_flight=10))
    state.running_count = running
    return state


def test_in_flight_limit_is_remembered_until_an_attempt_ends() -> None:
    """A lane at its limit is full until then."""
    full = lane(2)
    before = full.is_at_in_flight_limit
    full.on_limit_reached(1000)
    after = full.is_at_in_flight_limit
    full.running_count -= 1
    full.on_attempt_ended(1001)
    has_room = not full.is_at_in_flight_limit
    full.running_count += 1
    assert (False, True, True, True) == (before, after, has_room, full.is_at_in_flight_limit)


def test_in_flight_limit_is_forgotten_after_a_while() -> None:
    """It may have grown when a later attempt ends."""
    ramping = lane(2)
    ramping.on_limit_reached(1000)
    ramping.on_attempt_ended(1050)
    assert not ramping.is_at_in_flight_limit


def test_idle_lane_is_never_full() -> None:
    """No attempt would end there that could make it available again."""
    idle = lane(0)
    idle.on_limit_reached(1000)
    assert not idle.is_at_in_flight_limit


def test_idle_healthy_lane_is_forgotten() -> None:
    """It is removed by the second sweep without a task; a new one replaces it."""
    known = lanes("t/a", "t/b")
    first = known["t/a"]
    known.forget_idle()
    known.increment_leased(known["t/b"])
    known.decrement_leased(known["t/b"])
    known.forget_idle()
    assert known.get("t/a") is None
    assert known.get("t/b") is not None
    known.forget_idle()
    assert known.get("t/b") is None
    assert first is not known["t/a"]


def test_lane_with_state_is_kept() -> None:
    """One with a task, one with an attempt, one with an open breaker, one that is parked."""
    known = lanes("t/leased", "t/running", "t/open", "t/forced", "t/parked", "t/idle")
    known.increment_leased(known["t/leased"])
    known["t/running"].running_count = 1
    known["t/open"].breaker.half_open(1)
    known["t/forced"].breaker.force("disabled")
    known.parked.add("t/parked")
    assert [0, 1, 0] == [known.forget_idle() for _ in range(3)]
    assert known.get("t/idle") is None
    assert BreakerState.HALF_OPEN is known["t/open"].breaker.state


def test_number_of_lanes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Healthy empty lanes are evicted first, tripped ones if there are no others."""
    monkeypatch.setattr("tarry.service.engine.lanes._MAX_LANES", 4)
    known = lanes("t/1", "t/2", "t/3", "t/4")
    known.increment_leased(known["t/1"])
    for name in ("t/1", "t/2", "t/3"):
        known[name].breaker.half_open(1)
        known.parked.add(name)
    known["t/5"].breaker.half_open(1)
    assert known.get("t/4") is None
    assert "t/6" == known["t/6"].name
    assert ["t/1", "t/5", "t/6"] == sorted(lane.name for lane in known.most_notable(9))
    assert {"t/1"} == known.parked


def test_maintenance_forgets_idle_lanes() -> None:
    """A process that has called many hosts does not keep them all."""

    async def main() -> None:
        harness = EngineHarness(FakeTarget(OK))
        await harness.add(
            *(harness.new_task(f"http://h{number}.example:80/") for number in range(5))
        )
        await asyncio.sleep(1)
        left: list[int] = []
        for _ in range(4):
            await harness.engine.maintenance.run_once()
            left.append(len(harness.lanes.most_notable(9)))
            await asyncio.sleep(200)
        assert [5, 5, 0, 0] == left

    run(main)


def queue_task(
    of: LaneState, *, attempts: int = 0, attempts_before_replay: int = 0, lost: int = 0
) -> LeasedTask:
    """Queue a due task with this progress in its lane, and return it."""
    task = Task(
        id="", tenant="", lane="", key="", fingerprint=b"", packed_content=b"",
        attempts=attempts, attempts_before_replay=attempts_before_replay, lost_attempts=lost,
    )  # fmt: skip
    leased = LeasedTask(task, of, None)
    of.due_queue(task).append(leased)
    return leased


def test_every_third_attempt_is_a_retry() -> None:
    """This holds while there are first attempts too; then all are retries."""
    busy = lane(0)
    for _ in range(6):
        queue_task(busy)
        queue_task(busy, attempts=1)

    is_retry = [bool(leased.task.attempts) for leased in iter(busy.pop_due, None)]

    assert [False, False, True] * 3 + [True] * 3 == is_retry


def test_replayed_or_lost_task_counts_as_a_first_attempt() -> None:
    """It has no promised time, so it queues with the new tasks."""
    busy = lane(0)

    queue_task(busy, attempts=5, attempts_before_replay=4, lost=1)

    assert (1, 0) == (len(busy.due_first_attempts), len(busy.due_retries))


def test_deferred_retries_are_spaced() -> None:
    """They return no sooner than the budget may admit them, and within a minute."""
    poor = lane(0)

    first, second = poor.reserve_retry_time(10_000), poor.reserve_retry_time(10_000)
    last = max(poor.reserve_retry_time(10_000) for _ in range(5_000))
    later = poor.reserve_retry_time(100_000)

    assert (11_000, 11_050, 70_000, 101_000) == (first, second, last, later)


def test_lane_is_full_until_it_is_below_its_limit() -> None:
    """A task that leaves does not suffice if there were too many."""
    known = lanes("t/a")
    for _ in range(12):
        known.increment_leased(known["t/a"])

    full = []
    for _ in range(4):
        known.decrement_leased(known["t/a"])
        full.append("t/a" in known.fully_leased)

    assert [True, True, False, False] == full


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

        limits = EngineLimits(max_running_attempts=20, max_lane_running_attempts=10)
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
        harness = EngineHarness(target, limits=EngineLimits(max_lane_running_attempts=1))
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
