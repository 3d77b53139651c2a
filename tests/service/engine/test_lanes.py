"""Lanes of one process: limits, queues, removal of idle lanes."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarry.core.breaker import BreakerState
from tarry.service.delivery import DeliveryRequest, DeliveryResult, Fault
from tarry.service.engine import lanes as lanes_module
from tarry.service.engine.lanes import (
    Lanes,
    LeasedTask,
    LocalLane,
    build_breaker,
    build_downstream,
)
from tarry.service.model import Status, Task
from tarry.service.store import LaneLimits
from tests.service.engine.harness import (
    BUSY,
    OK,
    EngineHarness,
    FakeTarget,
    new_breaker,
)


def new_lanes(*names: str) -> Lanes:
    """Return lanes with these names, with at most ten leased tasks each."""
    lanes = Lanes(partial(build_downstream, max_in_flight=10), max_leased=10)
    for name in names:
        assert name == lanes[name].name
    return lanes


def new_lane() -> LocalLane:
    """Return a lane."""
    return LocalLane("tenant/http:a.example:80", build_downstream("a", max_in_flight=10))


def test_lane_is_slow_from_its_first_slow_attempt() -> None:
    """A lane whose attempts all take three seconds is slow after each of them."""
    lane = new_lane()
    for _ in range(5):
        lane.record_result(3000.0, timed_out=False)
        assert lane.is_slow


def test_lane_is_fast_if_few_attempts_are_slow() -> None:
    """The mean of the durations decides, so one attempt of three seconds does not."""
    lane = new_lane()
    lane.record_result(5.0, timed_out=False)
    lane.record_result(3000.0, timed_out=False)
    assert not lane.is_slow


def test_idle_healthy_lane_is_removed() -> None:
    """An unused lane is removed by the second `remove_idle`, and is created again when needed."""
    lanes = new_lanes("t/a", "t/b")
    first = lanes["t/a"]
    lanes.remove_idle()
    lanes.increment_leased(lanes["t/b"])
    lanes.decrement_leased(lanes["t/b"])
    lanes.remove_idle()
    assert lanes.get("t/a") is None
    assert lanes.get("t/b") is not None
    lanes.remove_idle()
    assert lanes.get("t/b") is None
    assert first is not lanes["t/a"]


def test_lane_with_state_is_kept() -> None:
    """Lanes that are parked or have a task, an attempt or a breaker that is not closed are kept."""
    lanes = new_lanes("t/leased", "t/running", "t/half-open", "t/forced", "t/parked", "t/idle")
    lanes.increment_leased(lanes["t/leased"])
    lanes["t/running"].running_count = 1
    lanes["t/half-open"].breaker.half_open(1)
    lanes["t/forced"].breaker.force("disabled")
    lanes.parked.add("t/parked")
    assert [0, 1, 0] == [lanes.remove_idle() for _ in range(3)]
    assert lanes.get("t/idle") is None
    assert BreakerState.HALF_OPEN is lanes["t/half-open"].breaker.state


def test_number_of_lanes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit, empty lanes are removed: first those whose breaker is closed, then others."""
    monkeypatch.setattr("tarry.service.engine.lanes.MAX_LANES", 4)
    lanes = new_lanes("t/1", "t/2", "t/3", "t/4")
    lanes.increment_leased(lanes["t/1"])
    for name in ("t/1", "t/2", "t/3"):
        lanes[name].breaker.half_open(1)
        lanes.parked.add(name)
    lanes["t/5"].breaker.half_open(1)
    assert lanes.get("t/4") is None
    assert "t/6" == lanes["t/6"].name
    assert ["t/1", "t/5", "t/6"] == sorted(lane.name for lane in lanes.tripped_and_busiest(9))
    assert {"t/1"} == lanes.parked


async def test_lane_keys_separate_customers_of_one_host() -> None:
    """The failures of one customer park its lane only; tasks of another are delivered meanwhile."""

    async def respond(request: DeliveryRequest) -> DeliveryResult:
        return BUSY if request.url.endswith("/customer-1") else OK

    harness = EngineHarness(FakeTarget(respond), build_breaker=lambda: new_breaker(min_calls=5))
    await harness.engine.start()

    async def add(customer: str) -> list[Task]:
        new_tasks = [
            harness.new_task(f"http://a.example:80/{customer}", lane_key=customer)
            for _ in range(10)
        ]
        return await harness.add(*new_tasks)

    await add("customer-1")
    await asyncio.sleep(2)
    tasks = await add("customer-2")
    await asyncio.sleep(1)

    parked = await harness.store.get_lane("default/http:a.example:80@customer-1")
    assert parked is not None
    assert parked.parked_until is not None
    assert {Status.SUCCEEDED} == {(await harness.get_task(task)).status for task in tasks}
    await harness.engine.stop(1)


async def test_lane_with_few_attempts_is_parked_after_three_timeouts() -> None:
    """A target that never responds is detected without the 20 attempts of the failure rate."""

    async def time_out(_request: DeliveryRequest) -> DeliveryResult:
        await asyncio.sleep(30)
        return DeliveryResult(fault=Fault.TIMEOUT, duration_ms=30_000.0)

    harness = EngineHarness(FakeTarget(time_out), build_breaker=build_breaker)
    await harness.engine.start()
    is_parked: list[bool] = []
    for _ in range(3):
        await harness.add(harness.new_task(overrides={"maxAttempts": 1}))
        await asyncio.sleep(60)
        is_parked.append("parked" in harness.event_kinds())

    assert [False, False, True] == is_parked
    await harness.engine.stop(1)


async def test_maintenance_removes_idle_lanes() -> None:
    """Maintenance removes the lanes of hosts that get no more tasks."""
    harness = EngineHarness(FakeTarget(OK))
    await harness.add(*(harness.new_task(f"http://h{number}.example:80/") for number in range(5)))
    await asyncio.sleep(1)
    lane_counts: list[int] = []
    for _ in range(4):
        await harness.engine.maintenance.run_once()
        lane_counts.append(len(harness.lanes.tripped_and_busiest(9)))
        await asyncio.sleep(200)
    assert [5, 5, 0, 0] == lane_counts


def queue_task(
    lane: LocalLane, *, attempts: int = 0, attempts_before_replay: int = 0, lost: int = 0
) -> LeasedTask:
    """Queue a due task with these attempt counts in a lane, and return it."""
    task = Task(
        id="", tenant="", lane="", key="", fingerprint=b"", packed_content=b"",
        attempts=attempts, attempts_before_replay=attempts_before_replay, lost_attempts=lost,
    )  # fmt: skip
    leased = LeasedTask(task, lane, None)
    lane.due_queue(task).append(leased)
    return leased


def test_every_third_attempt_is_a_retry() -> None:
    """After two tasks with their first attempt, one retry is sent, while there are both."""
    busy = new_lane()
    for _ in range(6):
        queue_task(busy)
        queue_task(busy, attempts=1)

    is_retry = [bool(leased.task.attempts) for leased in iter(busy.pop_due, None)]

    assert [False, False, True] * 3 + [True] * 3 == is_retry


def test_replays_and_lost_attempts_do_not_make_a_retry() -> None:
    """A replayed task whose only attempt since then was lost waits with the first attempts."""
    busy = new_lane()

    queue_task(busy, attempts=5, attempts_before_replay=4, lost=1)

    assert (1, None) == (len(busy.due_first_attempts), busy.due_retries)


def test_deferred_retries_are_spaced() -> None:
    """Retries deferred by an empty budget are 50 ms apart, from a second to a minute later."""
    lane = new_lane()

    first, second = lane.reserve_retry_time(10_000), lane.reserve_retry_time(10_000)
    last = max(lane.reserve_retry_time(10_000) for _ in range(5_000))
    later = lane.reserve_retry_time(100_000)

    assert (11_000, 11_050, 70_000, 101_000) == (first, second, last, later)


def test_lane_gets_no_leases_until_it_is_below_its_limit() -> None:
    """A lane with 12 leased tasks and a limit of 10 gets no more leases until 9 are left."""
    lanes = new_lanes("t/a")
    lanes["t/a"].record_result(5.0, timed_out=False)
    for _ in range(12):
        lanes.increment_leased(lanes["t/a"])

    capacities = []
    for _ in range(4):
        lanes.decrement_leased(lanes["t/a"])
        capacities.append(lanes.claim_limits()["t/a"])

    assert [0, 0, 1, 2] == capacities


def test_retries_are_no_evidence_while_first_attempts_are_made() -> None:
    """The limiter ignores retries within a second of a first attempt, and all probes."""
    lane = new_lane()
    assert not lane.should_limiter_ignore(5_000, is_retry=True)
    assert not lane.should_limiter_ignore(10_000, is_retry=False)
    assert lane.should_limiter_ignore(10_999, is_retry=True)
    assert not lane.should_limiter_ignore(11_000, is_retry=True)
    lane.breaker.half_open(1)
    assert lane.should_limiter_ignore(20_000, is_retry=False)


def test_retries_are_evidence_while_all_first_attempts_fail() -> None:
    """After ten failed first attempts in a row, the limiter counts retries, too."""
    lane = new_lane()
    assert not lane.should_limiter_ignore(10_000, is_retry=False)
    for _ in range(10):
        assert lane.should_limiter_ignore(10_001, is_retry=True)
        lane.record_result(5.0, timed_out=False, is_refused=True)
    assert not lane.should_limiter_ignore(10_001, is_retry=True)
    lane.record_result(5.0, timed_out=False, is_refused=False)
    assert lane.should_limiter_ignore(10_001, is_retry=True)


def test_leases_are_limited_by_the_rate() -> None:
    """A lane leases as many tasks as it can start in two seconds."""
    lanes = new_lanes("t/a")
    lanes["t/a"].record_result(5.0, timed_out=False)
    assert {} == lanes.claim_limits()
    lanes["t/a"].downstream.limiter.restore(rate=1.5, limit=8)
    capacities = []
    for _ in range(4):
        lanes.increment_leased(lanes["t/a"])
        capacities.append(lanes.claim_limits()["t/a"])

    assert [3, 2, 1, 0] == capacities
    lanes["t/a"].downstream.limiter.restore(rate=0.5, limit=8)
    assert -2 == lanes.lease_capacity(lanes["t/a"])
    assert {"t/a": 0} == lanes.claim_limits()


def test_only_lanes_with_few_free_leases_limit_a_claim() -> None:
    """A lane without leases, or with more free leases than a claim can take, has no limit."""
    lanes = Lanes(partial(build_downstream, max_in_flight=10), max_leased=200)
    lane = lanes["t/a"]
    lane.record_result(5.0, timed_out=False)
    capacities = []
    for change in (lanes.increment_leased, lanes.decrement_leased):
        for _ in range(150):
            change(lane)
        capacities.append(lanes.claim_limits())

    assert [{"t/a": 50}, {}] == capacities


def test_lane_with_fewer_free_leases_than_a_claim_takes_limits_it() -> None:
    """A claim takes up to 128 tasks of a lane, so a lane with 127 free leases limits the claim."""
    lanes = Lanes(partial(build_downstream, max_in_flight=10), max_leased=300)
    lane = lanes["t/a"]
    lane.record_result(5.0, timed_out=False)
    lanes.increment_leased(lane, 172)
    assert {} == lanes.claim_limits()
    lanes.increment_leased(lane)
    assert {"t/a": 127} == lanes.claim_limits()


class LanesWithoutShortcut(Lanes):
    """Lanes that check the limit of a lane after each change of its leases."""

    def decrement_leased(self, lane: LocalLane) -> None:
        """Stop counting a task, and check the limit of its lane."""
        super().decrement_leased(lane)
        self._update_limited(lane)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["lease", "lease", "end", "end", "slow", "fast", "rate", "start"]),
            st.sampled_from([1, 5, 70, 150]),
        ),
        max_size=60,
    )
)
def test_claim_limits_are_up_to_date(steps: list[tuple[str, str, int]]) -> None:
    """The same lanes limit a claim as if their limits were checked after each change."""
    build = partial(build_downstream, max_in_flight=10)
    all_lanes = Lanes(build, max_leased=200), LanesWithoutShortcut(build, max_leased=200)
    for name, action, count in steps:
        for lanes in all_lanes:
            lane = lanes[f"t/{name}"]
            if action == "lease":
                lanes.increment_leased(lane, count)
            elif action == "end":
                for _ in range(min(count, lane.leased_count)):
                    lanes.decrement_leased(lane)
            elif action == "rate":
                lane.downstream.limiter.restore(rate=float(count), limit=8)
            elif action == "start":
                lane.running_count = count
            else:
                lane.is_slow = action == "slow"
        assert all_lanes[1].claim_limits() == all_lanes[0].claim_limits()


def test_slow_lanes_lease_fewer_tasks_the_more_are_leased() -> None:
    """Slow lanes together lease about half of all, and each can lease one more than it attempts."""
    lanes = Lanes(partial(build_downstream, max_in_flight=10), max_leased=400)
    lane = lanes["t/0"]
    assert 50 == lanes.lease_capacity(lane)
    for number in range(100):
        while lanes.lease_capacity(lanes[f"t/{number}"]) > 0:
            lanes.increment_leased(lanes[f"t/{number}"])
    leased = sum(each.leased_count for each in lanes.values())
    assert 200 < leased < 300
    lanes["t/new"].running_count = 3
    assert 4 == lanes.lease_capacity(lanes["t/new"])


def test_claim_may_exceed_a_high_limit_a_little() -> None:
    """At a high rate, a claim leases more than one task, even if only one has ended."""
    lanes = Lanes(partial(build_downstream, max_in_flight=10), max_leased=200)
    lanes["t/a"].record_result(5.0, timed_out=False)
    for _ in range(199):
        lanes.increment_leased(lanes["t/a"])
    assert {"t/a": 25} == lanes.claim_limits()

    lanes.increment_leased(lanes["t/a"])

    assert {"t/a": 0} == lanes.claim_limits()


def test_changed_rates_are_stored() -> None:
    """A rate is stored again when it differs by a fifth, or when the limit has been removed."""
    lanes = new_lanes("t/a", "t/b")
    limiter = lanes["t/a"].downstream.limiter
    assert [] == lanes.list_changed_limits()

    changed = []
    for rate in (100.0, 119.0, 120.0, 97.0, 96.0):
        limiter.restore(rate=rate, limit=8)
        limits = lanes.list_changed_limits()
        lanes.mark_stored([*limits, LaneLimits("t/unknown", 1.0, 1)])
        changed += [(each.lane, each.rate) for each in limits]
    lanes["t/a"].downstream = lanes.build_downstream("t/a")
    (removed,) = lanes.list_changed_limits()

    assert [("t/a", 100.0), ("t/a", 120.0), ("t/a", 96.0)] == changed
    assert LaneLimits("t/a", None, 8) == removed


def test_a_new_lane_has_the_limits_of_the_removed_one() -> None:
    """The limits of a lane are kept when the lane is removed from memory."""
    lanes = new_lanes("t/b")
    lanes.restore_limits([LaneLimits("t/a", 30.0, 4)])
    lanes["t/b"].downstream.limiter.restore(rate=7.0, limit=3)
    assert [LaneLimits("t/b", 7.0, 3)] == lanes.list_changed_limits()
    for _ in range(2):
        assert LaneLimits("t/a", 30.0, 4) == lanes["t/a"].limits
        for _ in range(3):
            lanes.remove_idle()
        assert {} == lanes
    assert LaneLimits("t/b", 7.0, 3) == lanes["t/b"].limits


def test_limits_of_lanes_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of removed lanes are bounded; those that were not used for longest are dropped."""
    monkeypatch.setattr(lanes_module, "MAX_LANES", 2)
    lanes = new_lanes("t/c")
    lanes.restore_limits([LaneLimits("t/a", 1.0, 4), LaneLimits("t/b", 2.0, 4)])
    lanes["t/c"].downstream.limiter.restore(rate=3.0, limit=4)
    for _ in range(2):
        lanes.remove_idle()

    assert [3.0, 1.0, None] == [lanes[name].limits.rate for name in ("t/c", "t/a", "t/b")]
