"""What every store must do: what a claim gives, and what it says about it."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import Decision, Status, Task
from tarry.service.store import FinishStatus, TaskFilter
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
async def a_claim_leases_what_is_due_within_the_horizon(harness: StoreHarness) -> None:
    """Up to the horizon and no further, with the store's now, to the end that the lease says."""
    times = (START_MS, START_MS + 1, START_MS + HORIZON_MS, START_MS + HORIZON_MS + 1)
    await harness.add(*(task(number, next_attempt_at=at) for number, at in enumerate(times)))

    claimed = await harness.claim()

    assert (START_MS, [0, 1, 2], {}) == (claimed.now, task_numbers(claimed.tasks), claimed.probing)
    for number, held in enumerate(claimed.tasks):
        assert (Status.IN_FLIGHT, "worker") == (held.status, held.worker)
        assert times[number] + LEASE.length == held.wake_at
        assert (0, times[number]) == (held.attempts, held.next_attempt_at)
        assert held == await harness.get(number)
    assert {Status.PENDING: 1, Status.IN_FLIGHT: 3} == await harness.counts()


@conformance_case
async def a_lease_counts_from_now_when_the_task_is_late(harness: StoreHarness) -> None:
    """A task that has been due for long is leased for the whole length."""
    await harness.add(task(1))
    harness.clock.advance(HOUR_MS)

    [held] = (await harness.claim()).tasks

    assert (START_MS, START_MS + HOUR_MS + LEASE.length) == (held.next_attempt_at, held.wake_at)


@conformance_case
async def a_claim_changes_the_version(harness: StoreHarness) -> None:
    """The version of a leased task is one higher than before."""
    [added] = await harness.add(task(1))

    [held] = (await harness.claim()).tasks

    assert added.task.version + 1 == held.version


@conformance_case
async def the_earliest_come_first(harness: StoreHarness) -> None:
    """Tasks are told in the order of their time, and under a limit the earliest of a lane go."""
    for number, delay in enumerate((30, 10, 20, 10)):
        await harness.add(task(number, next_attempt_at=START_MS + delay))

    first = await harness.claim(limit=2)
    rest = await harness.claim()

    assert [1, 3] == task_numbers(first.tasks)
    assert [2, 0] == task_numbers(rest.tasks)


@conformance_case
async def times_are_told_in_order_across_lanes(harness: StoreHarness) -> None:
    """However many lanes gave them, tasks come earliest first."""
    for number in range(12):
        at = START_MS + 7 * number % 11
        await harness.add(task(number, "abc"[number % 3], next_attempt_at=at))

    tasks = (await harness.claim()).tasks

    times = [held.next_attempt_at for held in tasks]
    assert (12, sorted(times)) == (len(tasks), times)


@conformance_case
async def a_task_is_leased_once(harness: StoreHarness) -> None:
    """What one worker holds no other gets, also after a crash of the store."""
    await harness.add(task(1), task(2))
    assert 2 == len((await harness.claim()).tasks)

    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    await harness.reopen()
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    harness.clock.advance(LEASE.length - 1)
    assert [] == (await harness.claim(OTHER_LEASE)).tasks


@conformance_case
async def limits_are_kept(harness: StoreHarness) -> None:
    """No more than the limit in all, and no more than `per_lane` of a lane."""
    await harness.add(*(task(number, "ab"[number % 2]) for number in range(20)))

    assert 3 == len((await harness.claim(limit=3)).tasks)
    harness.clock.advance(1)
    tasks = (await harness.claim(per_lane=2)).tasks

    assert 2 == sum(held.lane == LANE for held in tasks) == len(tasks) - 2
    assert [] == (await harness.claim(limit=0)).tasks
    assert 13 == len((await harness.claim()).tasks)


@conformance_case
async def skipped_lanes_give_nothing(harness: StoreHarness) -> None:
    """Lanes in `skip` are left alone, and do not call for the next claim."""
    await harness.add(task(1, "a"), task(2, "b"), task(3, "b", next_attempt_at=START_MS + HOUR_MS))

    claimed = await harness.claim(skip={LANE, "acme/https:unknown:443"})
    assert [2] == task_numbers(claimed.tasks)
    claimed = await harness.claim(skip=[LANE])
    assert claimed.next_at is not None
    assert START_MS < claimed.next_at <= START_MS + HOUR_MS - HORIZON_MS

    assert [1] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def next_at_leads_to_the_next_task(harness: StoreHarness) -> None:
    """Who claims whenever `next_at` says gets each task in time, in few claims."""
    await harness.add(
        *(task(number, next_attempt_at=START_MS + number * HOUR_MS) for number in range(1, 5))
    )
    claims = 0
    got: list[Task] = []
    while len(got) < 4:
        claimed = await harness.claim()
        claims += 1
        got += claimed.tasks
        for held in claimed.tasks:
            assert harness.clock.now <= held.next_attempt_at
            await harness.store.finish([success_result(held)])
        if not claimed.tasks:
            assert claimed.next_at is not None
            assert claimed.next_at > harness.clock.now
            harness.clock.now = claimed.next_at

    assert claims <= 16
    assert (await harness.claim()).next_at is None


@conformance_case
async def next_at_is_no_later_than_what_is_left(harness: StoreHarness) -> None:
    """When a limit left something behind, the next claim may be made at once."""
    await harness.add(task(1), task(2), task(3))

    for limit, per_lane in ((1, 1000), (1000, 1)):
        claimed = await harness.claim(limit=limit, per_lane=per_lane)
        assert 1 == len(claimed.tasks)
        assert claimed.next_at is not None
        assert claimed.next_at <= claimed.now


@conformance_case
async def next_at_knows_the_end_of_a_lease(harness: StoreHarness) -> None:
    """While a task is in flight, the end of its lease is when it may be claimed again."""
    held = await harness.leased(1)

    next_at = (await harness.claim()).next_at

    assert next_at is not None
    assert START_MS < next_at <= held.wake_at


@conformance_case
async def nothing_waits_in_an_empty_store(harness: StoreHarness) -> None:
    """A claim of nothing has no tasks and no next time."""
    claimed = await harness.claim()

    assert (START_MS, [], {}, None) == (
        claimed.now,
        claimed.tasks,
        claimed.probing,
        claimed.next_at,
    )


@conformance_case
async def what_is_handed_out_is_a_copy(harness: StoreHarness) -> None:
    """Who changes what he gave or was given changes nothing in the store."""
    given = task(1)
    [added] = await harness.add(given)
    given.status = added.task.status = Status.CANCELLED
    [held] = (await harness.claim()).tasks
    lease = replace(held)
    held.version += 5
    assert lease == await harness.get(1)
    (await harness.get(1)).worker = "thief"
    (await harness.add(task(1)))[0].task.worker = "thief"
    (await harness.store.list_tasks("acme", TaskFilter())).items[0].worker = "thief"
    assert lease == await harness.get(1)

    result = retry_result(lease, START_MS + SECOND_MS)
    assert result.attempt is not None
    result.attempt.decision = Decision(action="retry_result")
    assert [FinishStatus.DONE] == await harness.store.finish([result])
    for _ in range(2):
        [logged] = await harness.store.list_attempts("acme", lease.id)
        assert logged.decision is not None
        assert (1, "transient", "retry_result") == (
            logged.number,
            logged.outcome,
            logged.decision.action,
        )
        for row in (result.attempt, logged):
            assert row.decision is not None
            row.number, row.decision.action = 77, "forged"

    (await harness.lane()).paused = True
    (await harness.store.list_lanes(None)).items[0].paused = True
    assert not (await harness.lane()).paused
