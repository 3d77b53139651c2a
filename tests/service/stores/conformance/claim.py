"""Conformance: claims of due tasks."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import DecisionRecord, Status, Task
from tarry.service.store import FinishStatus, StoredTaskFilter
from tests.service.stores.harness import (
    HORIZON_MS,
    HOUR_MS,
    LANE,
    LEASE,
    OTHER_LEASE,
    SECOND_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    retry_result,
    success_result,
    task,
    task_numbers,
)


@conformance_case
async def a_claim_leases_tasks_due_within_the_horizon(harness: StoreHarness) -> None:
    """Tasks due within the horizon are leased until `length_ms` after their due time."""
    times = (START_MS, START_MS + 1, START_MS + HORIZON_MS, START_MS + HORIZON_MS + 1)
    await harness.add(*(task(number, next_attempt_at=at) for number, at in enumerate(times)))

    claimed = await harness.claim()

    assert (START_MS, [0, 1, 2], {}) == (
        claimed.now,
        task_numbers(claimed.tasks),
        claimed.consecutive_opens_by_lane,
    )
    for number, leased in enumerate(claimed.tasks):
        assert (Status.IN_FLIGHT, "worker") == (leased.status, leased.worker)
        assert times[number] + LEASE.length_ms == leased.wake_at
        assert (0, times[number]) == (leased.attempts, leased.next_attempt_at)
        assert leased == await harness.get_task(number)
    assert {Status.PENDING: 1, Status.IN_FLIGHT: 3} == await harness.counts()


@conformance_case
async def a_lease_of_a_late_task_counts_from_now(harness: StoreHarness) -> None:
    """A task that was due an hour ago is leased for `length_ms` from now."""
    await harness.add(task(1))
    harness.clock.advance(HOUR_MS)

    [leased] = (await harness.claim()).tasks

    assert (START_MS, START_MS + HOUR_MS + LEASE.length_ms) == (
        leased.next_attempt_at,
        leased.wake_at,
    )


@conformance_case
async def a_claim_changes_the_version(harness: StoreHarness) -> None:
    """The version of a leased task is one higher than before."""
    [added] = await harness.add(task(1))

    [leased] = (await harness.claim()).tasks

    assert added.task.version + 1 == leased.version


@conformance_case
async def claimed_tasks_are_sorted_by_due_time(harness: StoreHarness) -> None:
    """Claimed tasks are sorted by due time, and a limit selects the earliest."""
    for number, delay in enumerate((30, 10, 20, 10)):
        await harness.add(task(number, next_attempt_at=START_MS + delay))

    first = await harness.claim(limit=2)
    rest = await harness.claim()

    assert [1, 3] == task_numbers(first.tasks)
    assert [2, 0] == task_numbers(rest.tasks)


@conformance_case
async def claimed_tasks_are_sorted_across_lanes(harness: StoreHarness) -> None:
    """Claimed tasks of several lanes are sorted by due time."""
    for number in range(12):
        at = START_MS + 7 * number % 11
        await harness.add(task(number, "abc"[number % 3], next_attempt_at=at))

    tasks = (await harness.claim()).tasks

    times = [leased.next_attempt_at for leased in tasks]
    assert (12, sorted(times)) == (len(tasks), times)


@conformance_case
async def a_task_is_leased_once(harness: StoreHarness) -> None:
    """A leased task is not claimed by another worker, also after a crash of the store."""
    await harness.add(task(1), task(2))
    assert 2 == len((await harness.claim()).tasks)

    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    await harness.reopen()
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    harness.clock.advance(LEASE.length_ms - 1)
    assert [] == (await harness.claim(OTHER_LEASE)).tasks


@conformance_case
async def a_claim_respects_its_limits(harness: StoreHarness) -> None:
    """A claim returns at most `limit` tasks, and at most `per_lane` of each lane."""
    await harness.add(*(task(number, "ab"[number % 2]) for number in range(20)))

    assert 3 == len((await harness.claim(limit=3)).tasks)
    harness.clock.advance(1)
    tasks = (await harness.claim(per_lane=2)).tasks

    assert 2 == sum(leased.lane == LANE for leased in tasks) == len(tasks) - 2
    assert [] == (await harness.claim(limit=0)).tasks
    assert 13 == len((await harness.claim()).tasks)


@conformance_case
async def lanes_have_limits(harness: StoreHarness) -> None:
    """At most the limit of a lane in `lane_limits` is leased, but no more than `per_lane`."""
    await harness.add(*(task(number, "ab"[number % 2]) for number in range(20)))

    claimed = await harness.claim(lane_limits={LANE: 3})
    assert 3 == sum(leased.lane == LANE for leased in claimed.tasks) == len(claimed.tasks) - 10
    assert claimed.next_at == START_MS
    assert 2 == len((await harness.claim(per_lane=2, lane_limits={LANE: 3})).tasks)

    assert 5 == len((await harness.claim()).tasks)


@conformance_case
async def lanes_with_a_limit_of_0_are_skipped(harness: StoreHarness) -> None:
    """No task of a lane with a limit of 0 is leased, and `next_at` ignores the lane."""
    await harness.add(task(1, "a"), task(2, "b"), task(3, "b", next_attempt_at=START_MS + HOUR_MS))

    claimed = await harness.claim(lane_limits={LANE: 0, "acme/https:unknown:443": 0})
    assert [2] == task_numbers(claimed.tasks)
    claimed = await harness.claim(lane_limits={LANE: 0})
    assert claimed.next_at is not None
    assert START_MS < claimed.next_at <= START_MS + HOUR_MS - HORIZON_MS

    assert [1] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def many_lanes_with_a_limit_of_0_hide_no_task(harness: StoreHarness) -> None:
    """A task is leased although tasks of many lanes with a limit of 0 are due before it."""
    limited = [task(number, f"limited{number}") for number in range(1, 201)]
    await harness.add(*limited)
    harness.clock.advance(1)
    await harness.add(task(201))
    lane_limits = dict.fromkeys((new.lane for new in limited), 0)

    claimed = await harness.claim(limit=1, lane_limits=lane_limits)
    assert [201] == task_numbers(claimed.tasks)
    claimed = await harness.claim(limit=1, lane_limits=lane_limits)
    assert [] == claimed.tasks
    assert claimed.next_at is None or claimed.next_at > harness.clock.now


@conformance_case
async def tenants_with_a_limit_of_0_are_skipped(harness: StoreHarness) -> None:
    """No task of a tenant with a limit of 0 is leased, and `next_at` ignores the tenant."""
    await harness.add(task(1, "a"), task(2, "b"), task(3, tenant="other"))

    claimed = await harness.claim(lane_limits={"acme": 0, "unknown": 0})
    assert [3] == task_numbers(claimed.tasks)
    claimed = await harness.claim(lane_limits={"acme": 0})
    assert claimed.next_at is None or claimed.next_at > START_MS

    assert [1, 2] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def claiming_at_next_at_finds_every_task(harness: StoreHarness) -> None:
    """Claims at `next_at` return every task before it is due; 16 claims suffice for 4 tasks."""
    await harness.add(
        *(task(number, next_attempt_at=START_MS + number * HOUR_MS) for number in range(1, 5))
    )
    claim_count = 0
    claimed_tasks: list[Task] = []
    while len(claimed_tasks) < 4:
        claimed = await harness.claim()
        claim_count += 1
        claimed_tasks += claimed.tasks
        for leased in claimed.tasks:
            assert harness.clock.now <= leased.next_attempt_at
            await harness.store.finish([success_result(leased)])
        if not claimed.tasks:
            assert claimed.next_at is not None
            assert claimed.next_at > harness.clock.now
            harness.clock.now = claimed.next_at

    assert claim_count <= 16
    assert (await harness.claim()).next_at is None


@conformance_case
async def next_at_is_now_if_more_tasks_are_claimable(harness: StoreHarness) -> None:
    """If a limit has prevented the claim of more tasks, `next_at` is now."""
    await harness.add(task(1), task(2), task(3))

    for limit, per_lane in ((1, 1000), (1000, 1)):
        claimed = await harness.claim(limit=limit, per_lane=per_lane)
        assert 1 == len(claimed.tasks)
        assert claimed.next_at is not None
        assert claimed.next_at <= claimed.now


@conformance_case
async def next_at_is_not_after_the_end_of_a_lease(harness: StoreHarness) -> None:
    """While a task is IN_FLIGHT, `next_at` is not after the end of its lease."""
    leased = await harness.lease_new_task(1)

    next_at = (await harness.claim()).next_at

    assert next_at is not None
    assert START_MS < next_at <= leased.wake_at


@conformance_case
async def a_claim_of_an_empty_store_is_empty(harness: StoreHarness) -> None:
    """A claim of an empty store has no tasks and no `next_at`."""
    claimed = await harness.claim()

    assert (START_MS, [], {}, None) == (
        claimed.now,
        claimed.tasks,
        claimed.consecutive_opens_by_lane,
        claimed.next_at,
    )


@conformance_case
async def returned_values_are_copies(harness: StoreHarness) -> None:
    """A change of an argument or a result after a call does not change the store."""
    new_task = task(1)
    [added] = await harness.add(new_task)
    new_task.status = added.task.status = Status.CANCELLED
    [leased] = (await harness.claim()).tasks
    expected = replace(leased)
    leased.version += 5
    assert expected == await harness.get_task(1)
    (await harness.get_task(1)).worker = "changed"
    (await harness.add(task(1)))[0].task.worker = "changed"
    (await harness.store.list_tasks("acme", StoredTaskFilter())).items[0].worker = "changed"
    assert expected == await harness.get_task(1)

    result = retry_result(expected, START_MS + SECOND_MS)
    assert result.attempt is not None
    result.attempt.decision = DecisionRecord(action="wait")
    assert [FinishStatus.APPLIED] == await harness.store.finish([result])
    for _ in range(2):
        [logged] = await harness.store.list_attempts("acme", expected.id)
        assert logged.decision is not None
        assert (1, "transient", "wait") == (
            logged.attempt_number,
            logged.outcome,
            logged.decision.action,
        )
        for attempt in (result.attempt, logged):
            assert attempt.decision is not None
            attempt.attempt_number, attempt.decision.action = 77, "changed"

    (await harness.get_lane()).paused = True
    (await harness.store.list_lanes(None)).items[0].paused = True
    assert not (await harness.get_lane()).paused
