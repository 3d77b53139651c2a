"""Conformance: parked, half-open and paused lanes, and lists of lanes."""

from __future__ import annotations

import math

import pytest

from tarry.service.store import (
    BUDGET_DECAY_MS,
    MAX_DUE_LANES,
    ConfiguredLimits,
    FinishStatus,
    LaneLimits,
    LaneWriteStatus,
    LeaseTerms,
    NewTask,
)
from tarry.wire.tasks import BreakerSettings, BudgetSettings, DownstreamLimits
from tests.service.stores.harness import (
    HOUR_MS,
    LANE,
    LEASE,
    MINUTE_MS,
    OTHER_LEASE,
    SECOND_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    retry_result,
    success_result,
    task,
    task_numbers,
)

THIRD_LEASE = LeaseTerms("third", 30 * SECOND_MS, SECOND_MS)
BETA = "beta/https:a.example:443"


@conformance_case
async def a_parked_lane_is_not_claimed(harness: StoreHarness) -> None:
    """Tasks of a parked lane are not claimed, and `next_at` is not after its parking."""
    added = await harness.add(task(1), task(2, "b"))
    await harness.store.park(LANE, START_MS + MINUTE_MS, probes=1, consecutive_opens=1)

    assert [2] == task_numbers((await harness.claim()).tasks)
    await harness.store.finish([success_result(await harness.get_task(2))])
    harness.clock.now = START_MS + MINUTE_MS - 1
    claimed = await harness.claim()

    assert [] == claimed.tasks
    assert claimed.next_at is not None
    assert harness.clock.now < claimed.next_at <= START_MS + MINUTE_MS
    assert added[0].task == await harness.get_task(1)
    harness.clock.advance(1)
    assert [1] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def leases_of_a_half_open_lane_are_limited_to_its_probes(harness: StoreHarness) -> None:
    """A half-open lane has at most `probes` leases; each finished probe allows another."""
    await harness.add(*(task(number) for number in range(6)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=2, consecutive_opens=3)
    harness.clock.advance(SECOND_MS)

    claimed = await harness.claim()
    assert ([0, 1], {LANE: 3}) == (task_numbers(claimed.tasks), claimed.consecutive_opens_by_lane)
    full = await harness.claim()
    assert ([], {}) == (full.tasks, full.consecutive_opens_by_lane)
    assert full.next_at is None or full.next_at > harness.clock.now
    await harness.store.finish([success_result(claimed.tasks[0])])
    next_claim = await harness.claim()

    assert ([2], {LANE: 3}) == (
        task_numbers(next_claim.tasks),
        next_claim.consecutive_opens_by_lane,
    )


@conformance_case
async def attempts_started_before_parking_count_as_probes(harness: StoreHarness) -> None:
    """Tasks that were leased before the parking count as probes until they finish."""
    await harness.add(*(task(number) for number in range(5)))
    leased = (await harness.claim(limit=3)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=2, consecutive_opens=1)
    harness.clock.advance(SECOND_MS)
    assert [] == (await harness.claim()).tasks

    await harness.store.finish([success_result(leased_task) for leased_task in leased[:2]])

    assert [3] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def expired_probes_do_not_block_the_lane(harness: StoreHarness) -> None:
    """Expired leases do not count as probes, and their tasks are claimed again."""
    await harness.add(*(task(number) for number in range(4)))
    leased = (await harness.claim(limit=2)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, consecutive_opens=1)
    harness.clock.now = leased[0].wake_at

    claimed = await harness.claim(OTHER_LEASE)

    assert (1, {LANE: 1}) == (len(claimed.tasks), claimed.consecutive_opens_by_lane)
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    harness.clock.advance(OTHER_LEASE.length_ms)
    claimed = await harness.claim(THIRD_LEASE)
    assert 1 == len(claimed.tasks)


@conformance_case
async def a_late_result_allows_no_additional_probe(harness: StoreHarness) -> None:
    """An expired lease does not count as a probe, so its result does not allow another."""
    await harness.add(*(task(number) for number in range(4)))
    [late] = (await harness.claim(limit=1)).tasks
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, consecutive_opens=1)
    harness.clock.now = late.wake_at
    assert [1] == task_numbers((await harness.claim(OTHER_LEASE)).tasks)

    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(late)])

    assert [] == (await harness.claim(OTHER_LEASE)).tasks


@conformance_case
async def opens_are_returned_only_for_lanes_with_leased_tasks(harness: StoreHarness) -> None:
    """`consecutive_opens_by_lane` has only lanes of claimed tasks."""
    await harness.add(task(1, next_attempt_at=START_MS + HOUR_MS), task(2, "b"))
    await harness.store.park(LANE, START_MS, probes=1, consecutive_opens=1)

    claimed = await harness.claim()

    assert ([2], {}) == (task_numbers(claimed.tasks), claimed.consecutive_opens_by_lane)


@conformance_case
async def parking_again_replaces_the_first_parking(harness: StoreHarness) -> None:
    """A second parking replaces the time, the probes and the number of openings."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, consecutive_opens=1)
    harness.clock.advance(SECOND_MS)
    [probe] = (await harness.claim()).tasks
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=3, consecutive_opens=2)
    await harness.store.finish([retry_result(probe, START_MS + 2 * SECOND_MS)])

    harness.clock.advance(MINUTE_MS)
    assert [] == (await harness.claim()).tasks
    await harness.reopen()
    harness.clock.now = START_MS + HOUR_MS
    claimed = await harness.claim()

    assert (3, {LANE: 2}) == (len(claimed.tasks), claimed.consecutive_opens_by_lane)


@conformance_case
async def unparking_keeps_a_lane_paused(harness: StoreHarness) -> None:
    """Unparking a lane resets its parking and number of openings, but not its pause."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, consecutive_opens=4)
    await harness.store.pause(LANE)

    await harness.store.unpark(LANE)
    await harness.store.unpark("acme/https:unknown:443")

    lane = await harness.get_lane()
    assert (None, 0, 0, True) == (
        lane.parked_until,
        lane.probes,
        lane.consecutive_opens,
        lane.paused,
    )
    assert [] == (await harness.claim()).tasks
    await harness.store.resume(LANE)
    assert 5 == len((await harness.claim()).tasks)


@conformance_case
async def a_resumed_lane_is_active(harness: StoreHarness) -> None:
    """Resuming a lane also ends its parking, and resets the number of openings."""
    await harness.add(*(task(number) for number in range(5)))
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, consecutive_opens=4)

    await harness.store.resume(LANE)

    lane = await harness.get_lane()
    assert (None, 0, 0, False) == (
        lane.parked_until,
        lane.probes,
        lane.consecutive_opens,
        lane.paused,
    )
    claimed = await harness.claim()
    assert (5, {}) == (len(claimed.tasks), claimed.consecutive_opens_by_lane)


@conformance_case
async def a_paused_lane_is_not_claimed(harness: StoreHarness) -> None:
    """Neither due nor abandoned tasks are claimed until the lane is resumed."""
    await harness.add(task(1), task(2))
    await harness.claim(limit=1)
    await harness.store.pause(LANE)
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=5, consecutive_opens=1)
    harness.clock.advance(HOUR_MS)
    await harness.reopen()

    claimed = await harness.claim()

    assert [] == claimed.tasks
    assert claimed.next_at is None or claimed.next_at > harness.clock.now
    await harness.store.resume(LANE)
    assert 2 == len((await harness.claim(OTHER_LEASE)).tasks)


@conformance_case
async def results_are_stored_in_parked_and_paused_lanes(harness: StoreHarness) -> None:
    """A lease stays valid when its lane is parked or paused."""
    await harness.add(task(1), task(2))
    first, second = (await harness.claim()).tasks
    await harness.store.park(LANE, START_MS + HOUR_MS, probes=1, consecutive_opens=1)
    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [retry_result(first, START_MS + SECOND_MS)]
    )
    await harness.store.pause(LANE)
    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(second)])


@conformance_case
async def an_empty_lane_can_be_paused_and_parked(harness: StoreHarness) -> None:
    """A lane can be paused or parked before its first task; unknown lanes can be resumed."""
    await harness.store.resume("acme/https:unknown:443")
    assert await harness.store.get_lane("acme/https:unknown:443") is None
    await harness.store.pause(LANE)
    await harness.store.park(BETA, START_MS + HOUR_MS, probes=1, consecutive_opens=1)
    assert ("acme", True) == ((await harness.get_lane()).tenant, (await harness.get_lane()).paused)
    assert "beta" == (await harness.get_lane(BETA)).tenant

    await harness.add(task(1), task(2, tenant="beta"))

    assert [] == (await harness.claim()).tasks


@conformance_case
async def a_lane_counts_its_tasks(harness: StoreHarness) -> None:
    """A lane has counts of PENDING, IN_FLIGHT and EXHAUSTED tasks, and `last_claim_at`."""
    await harness.add(*(task(number) for number in range(5)))
    lane = await harness.get_lane()
    assert (LANE, "acme", 5, 0, 0) == (
        lane.name,
        lane.tenant,
        lane.pending,
        lane.in_flight,
        lane.exhausted,
    )
    assert lane.last_claim_at is None
    harness.clock.advance(5)
    leased = (await harness.claim(limit=4)).tasks
    await harness.store.finish(
        [
            success_result(leased[0]),
            exhausted_result(leased[1]),
            retry_result(leased[2], START_MS + HOUR_MS),
        ]
    )

    lane = await harness.get_lane()

    assert (2, 1, 1, START_MS + 5) == (
        lane.pending,
        lane.in_flight,
        lane.exhausted,
        lane.last_claim_at,
    )
    await harness.reopen()
    assert lane == await harness.get_lane()


@conformance_case
async def a_lease_on_add_does_not_count_as_a_claim(harness: StoreHarness) -> None:
    """`last_claim_at` is None if tasks were only leased when they were added."""
    await harness.store.add([NewTask(task(1), lease_on_add=True)], LEASE)

    assert (await harness.get_lane()).last_claim_at is None


@conformance_case
async def lanes_are_listed_by_name(harness: StoreHarness) -> None:
    """Pages of lanes have no gaps and no duplicates, for one tenant or for all."""
    hosts = [f"h{number}" for number in range(7)]
    for number, host in enumerate(reversed(hosts)):
        await harness.add(task(number, host), task(100 + number, host, tenant="beta"))

    async def list_names(tenant: str | None, limit: int) -> list[str]:
        names: list[str] = []
        cursor = None
        for _ in range(40):
            page = await harness.store.list_lanes(tenant, cursor=cursor, limit=limit)
            assert len(page.items) <= limit
            names += [lane.name for lane in page.items]
            cursor = page.cursor
            if cursor is None:
                break
        assert cursor is None
        return names

    acme = [f"acme/https:{host}.example:443" for host in hosts]
    beta = [f"beta/https:{host}.example:443" for host in hosts]
    for limit in (1, 3, 7, 100):
        assert acme == await list_names("acme", limit)
        assert beta == await list_names("beta", limit)
        assert acme + beta == await list_names(None, limit)
    assert [] == await list_names("unknown", 100)


async def add_failed_tasks(harness: StoreHarness, numbers: range) -> None:
    """Add tasks whose first attempt has failed, and which are due again now."""
    await harness.add(*(task(number) for number in numbers))
    leased = (await harness.claim()).tasks
    await harness.store.finish([retry_result(each, START_MS) for each in leased])


@conformance_case
async def a_third_of_the_probes_are_first_attempts(harness: StoreHarness) -> None:
    """Of three probes of a half-open lane, one is a new task, and two are due retries."""
    await add_failed_tasks(harness, range(40))
    await harness.add(*(task(number) for number in range(40, 46)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=3, consecutive_opens=1)
    harness.clock.advance(SECOND_MS)

    assert [0, 1, 40] == sorted(task_numbers((await harness.claim()).tasks))


@conformance_case
async def single_probes_are_first_attempts_and_retries_in_turn(harness: StoreHarness) -> None:
    """If a lane has one probe at a time, it is a new task in one of three milliseconds."""
    await add_failed_tasks(harness, range(40))
    await harness.add(*(task(number) for number in range(40, 46)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=1, consecutive_opens=1)
    harness.clock.advance(SECOND_MS)
    probed: list[int] = []
    for _ in range(6):
        [probe] = (await harness.claim()).tasks
        probed += task_numbers([probe])
        await harness.store.finish([retry_result(probe, harness.clock.now + HOUR_MS)])
        harness.clock.advance(1)

    assert [0, 40, 1, 2, 41, 3] == probed


@conformance_case
async def a_retry_that_is_not_due_is_no_probe_while_new_tasks_wait(harness: StoreHarness) -> None:
    """Retries within the horizon of a claim are probes only if there are no new tasks."""
    await harness.add(task(0))
    [leased] = (await harness.claim()).tasks
    await harness.store.finish([retry_result(leased, START_MS + SECOND_MS + 1)])
    await harness.add(*(task(number) for number in range(40, 43)))
    await harness.store.park(LANE, START_MS + SECOND_MS, probes=3, consecutive_opens=1)
    harness.clock.advance(SECOND_MS)
    probes = (await harness.claim()).tasks

    assert [40, 41, 42] == task_numbers(probes)
    await harness.store.finish([success_result(probe) for probe in probes])
    assert [0] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def a_failed_probe_is_not_repeated_while_other_tasks_are_due(harness: StoreHarness) -> None:
    """Of the failed tasks of a half-open lane, the task that was probed last comes last."""
    await add_failed_tasks(harness, range(2))
    probed: list[int] = []
    for _ in range(4):
        until = harness.clock.now + SECOND_MS
        await harness.store.park(LANE, until, probes=1, consecutive_opens=1)
        harness.clock.now = until
        [probe] = (await harness.claim()).tasks
        probed += task_numbers([probe])
        await harness.store.finish([retry_result(probe, START_MS)])
        await harness.reopen()

    assert [0, 1, 0, 1] == probed


@conformance_case
async def a_third_of_a_claim_are_retries(harness: StoreHarness) -> None:
    """If both are due, two tasks without a failed attempt are leased for each task with one."""
    await add_failed_tasks(harness, range(20))
    await harness.add(*(task(number) for number in range(20, 40)))
    harness.clock.now = START_MS - START_MS % 3 + 3

    assert [0, 1, *range(20, 24)] == task_numbers((await harness.claim(limit=6)).tasks)
    claimed = [task_numbers((await harness.claim(limit=1)).tasks)]
    for _ in range(2):
        harness.clock.advance(1)
        claimed.append(task_numbers((await harness.claim(limit=1)).tasks))
    assert [[24], [25], [2]] == claimed
    rest = task_numbers((await harness.claim()).tasks)
    assert sorted([*range(3, 20), *range(26, 40)]) == sorted(rest)


@conformance_case
async def limits_of_lanes_are_kept(harness: StoreHarness) -> None:
    """The last limits of each existing lane are returned, if its rate is limited."""
    other, missing = BETA.replace("beta", "acme2"), "acme/https:missing.example:443"
    await harness.add(task(1))
    await harness.store.pause(BETA)
    await harness.store.pause(other)
    first = [LaneLimits(LANE, 12.5, 8), LaneLimits(BETA, 3.0, 4), LaneLimits(missing, 1.0, 1)]
    await harness.store.record_lane_limits([*first, LaneLimits(other, None, 128)])
    assert first[:2] == await harness.store.list_lane_limits(10)

    await harness.store.record_lane_limits([LaneLimits(LANE, None, 16), LaneLimits(BETA, 250.0, 9)])
    await harness.claim()
    await harness.store.resume(BETA)
    await harness.reopen()

    assert [LaneLimits(BETA, 250.0, 9)] == await harness.store.list_lane_limits(10)
    await harness.store.record_lane_limits([LaneLimits(LANE, 1.5, 2)])
    assert [LaneLimits(LANE, 1.5, 2)] == await harness.store.list_lane_limits(1)


@conformance_case
async def limits_of_lanes_that_were_used_last_come_first(harness: StoreHarness) -> None:
    """A lane is used by a claim and by a change of its retry budget; then the order is by name."""
    hosts = "abcd"
    await harness.add(*(task(number, host) for number, host in enumerate(hosts)))
    lanes = [f"acme/https:{host}.example:443" for host in hosts]
    await harness.store.record_lane_limits([LaneLimits(lane, 1.0, 2) for lane in lanes])

    async def list_hosts(limit: int) -> str:
        limits = await harness.store.list_lane_limits(limit)
        return "".join(hosts[lanes.index(each.lane)] for each in limits)

    assert "abcd" == await list_hosts(9)
    await harness.store.add_to_budgets({lanes[1]: 1.0})
    harness.clock.advance(1)
    lane_limits = {lane: 0 for lane in lanes if lane != lanes[2]}
    await harness.store.claim(LEASE, limit=9, per_lane=9, lane_limits=lane_limits)
    assert "cbad" == await list_hosts(9)
    harness.clock.advance(1)
    await harness.store.add_to_budgets({lanes[3]: 1.0})
    assert "dc" == await list_hosts(2)


# --- counters -------------------------------------------------------------------------------------


@conformance_case
async def lanes_with_due_tasks_are_reported(harness: StoreHarness) -> None:
    """Of each lane with PENDING tasks that are due, the earliest due time is reported."""

    async def due_lanes(tenant: str | None = None) -> dict[str, int]:
        found = (await harness.store.counters(tenant)).due_lanes
        assert sorted(found, key=lambda each: (each.due_at, each.lane)) == found
        return {each.lane: each.due_at for each in found}

    lane_b = "acme/https:b.example:443"
    assert {} == await due_lanes()
    await harness.add(
        task(1, next_attempt_at=START_MS + HOUR_MS),
        task(2, "b", next_attempt_at=START_MS + MINUTE_MS),
        task(3, tenant="beta", next_attempt_at=START_MS + 2 * MINUTE_MS),
    )
    assert {} == await due_lanes()
    harness.clock.now = START_MS + MINUTE_MS
    assert {lane_b: START_MS + MINUTE_MS} == await due_lanes()
    assert {} == await due_lanes("beta")

    harness.clock.advance(MINUTE_MS)
    assert {BETA: START_MS + 2 * MINUTE_MS} == await due_lanes("beta")
    leased = (await harness.claim()).tasks
    assert [2, 3] == task_numbers(leased)
    assert {} == await due_lanes()
    retry_at = harness.clock.now + SECOND_MS
    await harness.store.finish([retry_result(leased[0], retry_at)])
    harness.clock.now = START_MS + HOUR_MS
    assert {lane_b: retry_at, LANE: START_MS + HOUR_MS} == await due_lanes()


@conformance_case
async def due_tasks_of_parked_and_paused_lanes_have_the_reason(harness: StoreHarness) -> None:
    """Lanes that are paused, parked or half-open are reported with what they wait for."""
    hosts = ("a", "b", "c", "d")
    lanes = [f"acme/https:{host}.example:443" for host in hosts]
    for number, host in enumerate(hosts):
        await harness.add(task(number, host, next_attempt_at=START_MS + number))
    harness.clock.advance(SECOND_MS)
    store = harness.store
    await store.park(lanes[0], START_MS + MINUTE_MS, probes=1, consecutive_opens=1)
    await store.park(lanes[1], START_MS + MINUTE_MS, probes=1, consecutive_opens=0)
    await store.pause(lanes[2])
    expected = list(zip(lanes, ["breaker", "local-failure", "pause", None], strict=True))
    for now in (START_MS + SECOND_MS, START_MS + HOUR_MS):  # half-open after a minute
        harness.clock.now = now
        due_lanes = (await store.counters()).due_lanes
        assert expected == [(each.lane, each.waiting_for) for each in due_lanes]
        assert [START_MS + number for number in range(4)] == [each.due_at for each in due_lanes]
    await store.unpark(lanes[0])
    assert (await store.counters()).due_lanes[0].waiting_for is None


@conformance_case
async def due_lanes_are_bounded_for_each_reason(harness: StoreHarness) -> None:
    """Lanes that wait for one reason do not hide those that wait for another."""
    for number in range(MAX_DUE_LANES + 1):
        await harness.add(task(number, f"h{number:03}"))
        await harness.store.pause(f"acme/https:h{number:03}.example:443")
    await harness.add(task(200, "z", next_attempt_at=START_MS + SECOND_MS))
    harness.clock.advance(SECOND_MS)
    due_lanes = (await harness.store.counters()).due_lanes
    names = [f"acme/https:h{number:03}.example:443" for number in range(MAX_DUE_LANES)]
    assert [*names, "acme/https:z.example:443"] == [each.lane for each in due_lanes]


@conformance_case
async def the_busiest_lanes_are_those_with_the_most_pending_tasks(harness: StoreHarness) -> None:
    """Up to 100 lanes with tasks are reported: those with the most PENDING tasks, then by name."""
    for number in range(105):
        await harness.add(task(number, f"h{number:03}"))
    await harness.add(task(200, "h103"), task(201, "h104"), task(202, "h104"))
    await harness.store.pause("acme/https:unused.example:443")
    await harness.add(task(300, tenant="beta"))
    lanes = (await harness.store.counters("acme")).busiest_lanes

    assert 100 == len(lanes)
    assert [("h104", 3), ("h103", 2), ("h000", 1), ("h001", 1)] == [
        (lane.name.removeprefix("acme/https:").partition(".")[0], lane.pending)
        for lane in lanes[:4]
    ]
    [beta_lane] = (await harness.store.counters("beta")).busiest_lanes
    assert await harness.get_lane(BETA) == beta_lane
    assert 100 == len((await harness.store.counters()).busiest_lanes)


@conformance_case
async def limits_that_operators_set_are_returned_when_they_change(harness: StoreHarness) -> None:
    """Limits can be set before the first task, survive a restart, and are removed with None."""
    store, unknown = harness.store, ConfiguredLimits(version=-1)
    empty = await store.load_limits(unknown)
    assert empty is not None
    assert {} == empty.by_lane
    assert await store.load_limits(empty) is None
    first = DownstreamLimits(
        rate_per_second=0.5, concurrency=3, breaker=BreakerSettings(enabled=False, probes=2)
    )
    second = DownstreamLimits(budget=BudgetSettings(ratio=0.25))
    for lane_name, limits in ((BETA, first), (LANE, second)):
        status = await store.set_limits(lane_name, limits, max_limited=9)
        assert LaneWriteStatus.CHANGED is status
    await harness.add(task(1))
    await harness.claim()
    await harness.reopen()
    store = harness.store

    loaded = await store.load_limits(empty)
    assert loaded is not None
    assert ({BETA: first, LANE: second}, True) == (loaded.by_lane, loaded.version > empty.version)
    assert await store.load_limits(loaded) is None
    lane = await store.get_lane(BETA)
    assert lane is not None
    assert ("beta", 0) == (lane.tenant, lane.pending)

    for lane_name in (BETA, "acme/https:unknown:443"):
        status = await store.set_limits(lane_name, None, max_limited=0, lane_quota=0)
        assert LaneWriteStatus.CHANGED is status
    assert await store.get_lane("acme/https:unknown:443") is None
    changed = await store.load_limits(loaded)
    assert changed is not None
    assert {LANE: second} == changed.by_lane


@conformance_case
async def a_tenant_can_set_the_limits_of_few_lanes(harness: StoreHarness) -> None:
    """Beyond `max_limited`, nothing is changed; limits of the tenant's lanes can be replaced."""
    store, limits = harness.store, DownstreamLimits(concurrency=1)
    names = [f"acme/https:{number}.example:443" for number in range(3)]
    for name in names[:2]:
        await store.set_limits(name, limits, max_limited=2)
    before = await store.load_limits(ConfiguredLimits(version=-1))
    assert before is not None

    status = await store.set_limits(names[2], limits, max_limited=2)
    assert LaneWriteStatus.TOO_MANY_LIMITED is status
    assert await store.load_limits(before) is None
    assert await store.get_lane(names[2]) is None
    for name in (names[1], BETA):
        status = await store.set_limits(name, DownstreamLimits(concurrency=2), max_limited=2)
        assert LaneWriteStatus.CHANGED is status


@conformance_case
async def operators_cannot_create_lanes_above_the_quota(harness: StoreHarness) -> None:
    """A new lane cannot be paused or get limits; the quota does not apply to existing lanes."""
    store, limits = harness.store, DownstreamLimits(concurrency=1)
    paused, limited, new = (f"acme/https:{host}.example:443" for host in "bcd")
    changed, too_many = LaneWriteStatus.CHANGED, LaneWriteStatus.TOO_MANY_LANES
    await harness.add(task(1))
    assert changed is await store.pause(paused, lane_quota=2)
    assert too_many is await store.pause(limited, lane_quota=2)
    assert changed is await store.set_limits(limited, limits, max_limited=9, lane_quota=3)
    before = await store.load_limits(ConfiguredLimits(version=-1))

    assert too_many is await store.pause(new, lane_quota=3)
    assert too_many is await store.set_limits(new, limits, max_limited=9, lane_quota=3)

    assert await store.get_lane(new) is None
    assert before == await store.load_limits(ConfiguredLimits(version=-1))
    for lane in (LANE, paused, limited):
        assert changed is await store.pause(lane, lane_quota=3)
        assert changed is await store.set_limits(lane, limits, max_limited=9, lane_quota=3)
    assert changed is await store.pause(BETA, lane_quota=1)


@conformance_case
async def values_of_retry_budgets_decay(harness: StoreHarness) -> None:
    """The changes of all processes add up; a value decays to 1/e in ten seconds."""
    store, missing = harness.store, "acme/https:missing.example:443"
    await harness.add(task(1))
    assert {LANE: -8.0} == await store.add_to_budgets({LANE: -8.0, missing: 1.0})
    assert {LANE: -10.0} == await store.add_to_budgets({LANE: -2.0})
    assert await store.get_lane(missing) is None

    await harness.reopen()
    harness.clock.advance(BUDGET_DECAY_MS)
    await harness.claim()
    values = await harness.store.add_to_budgets({LANE: 1.5})
    assert {LANE: pytest.approx(-10 / math.e + 1.5)} == values
    harness.clock.advance(100 * BUDGET_DECAY_MS)
    assert {LANE: pytest.approx(0.0)} == await harness.store.add_to_budgets({LANE: 0.0})


@conformance_case
async def values_of_retry_budgets_decay_in_steps_of_any_length(harness: StoreHarness) -> None:
    """Many short decays have the effect of one long decay, above and below zero."""
    below, above, elapsed = LANE, BETA, 0
    await harness.add(task(1), task(2, "a", "beta"))
    await harness.store.add_to_budgets({below: -110.0, above: 97.25})
    for step in (1000, 15_000, 700, 333, 9_999, 10_001, *[1] * 30, *[17] * 30, *[1000] * 10):
        harness.clock.advance(step)
        elapsed += step
        remaining = math.exp(-elapsed / BUDGET_DECAY_MS)
        values = await harness.store.add_to_budgets({below: 0.0, above: 0.0})
        assert {below: -110 * remaining, above: 97.25 * remaining} == pytest.approx(values)


@conformance_case
async def frequent_changes_of_retry_budgets_add_up(harness: StoreHarness) -> None:
    """With a change each second, each change decays from its own time on."""
    await harness.add(task(1))
    value, changes = 0.0, (-31.0, 0.2, 0.0, -1.0, 12.4, -0.8)
    for number in range(24):
        value = value * math.exp(-1000 / BUDGET_DECAY_MS) + changes[number % len(changes)]
        harness.clock.advance(1000)
        stored = await harness.store.add_to_budgets({LANE: changes[number % len(changes)]})
        assert {LANE: pytest.approx(value)} == stored


@conformance_case
async def a_clock_that_goes_back_does_not_raise_retry_budgets(harness: StoreHarness) -> None:
    """A value does not change while the clock is behind the time of its last change."""
    await harness.add(task(1))
    await harness.store.add_to_budgets({LANE: -8.5})
    harness.clock.advance(-2500)
    assert {LANE: -8.5} == await harness.store.add_to_budgets({LANE: 0.0})
