"""What every store must do: what a claim gives, and what it says about it."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import Decision, Status, Task
from tarry.service.store import FinishStatus, TaskFilter
from tests.service.stores.bench import (
    HORIZON,
    HOUR,
    LANE,
    LEASE,
    NOON,
    OTHER,
    SECOND,
    Bench,
    conforms,
    numbers,
    succeed,
    task,
    wait,
)


@conforms
async def a_claim_leases_what_is_due_within_the_horizon(bench: Bench) -> None:
    """Up to the horizon and no further, with the store's now, to the end that the lease says."""
    times = (NOON, NOON + 1, NOON + HORIZON, NOON + HORIZON + 1)
    await bench.add(*(task(number, next_attempt_at=at) for number, at in enumerate(times)))

    claimed = await bench.claim()

    assert (NOON, [0, 1, 2], {}) == (claimed.now, numbers(claimed.tasks), claimed.probing)
    for number, held in enumerate(claimed.tasks):
        assert (Status.IN_FLIGHT, "worker") == (held.status, held.worker)
        assert times[number] + LEASE.length == held.wake_at
        assert (0, times[number]) == (held.attempts, held.next_attempt_at)
        assert held == await bench.get(number)
    assert {Status.PENDING: 1, Status.IN_FLIGHT: 3} == await bench.counts()


@conforms
async def a_lease_counts_from_now_when_the_task_is_late(bench: Bench) -> None:
    """A task that has been due for long is leased for the whole length."""
    await bench.add(task(1))
    bench.clock.advance(HOUR)

    [held] = (await bench.claim()).tasks

    assert (NOON, NOON + HOUR + LEASE.length) == (held.next_attempt_at, held.wake_at)


@conforms
async def a_claim_changes_the_version(bench: Bench) -> None:
    """The version of a leased task is one higher than before."""
    [added] = await bench.add(task(1))

    [held] = (await bench.claim()).tasks

    assert added.task.version + 1 == held.version


@conforms
async def the_earliest_come_first(bench: Bench) -> None:
    """Tasks are told in the order of their time, and under a limit the earliest of a lane go."""
    for number, delay in enumerate((30, 10, 20, 10)):
        await bench.add(task(number, next_attempt_at=NOON + delay))

    first = await bench.claim(limit=2)
    rest = await bench.claim()

    assert [1, 3] == numbers(first.tasks)
    assert [2, 0] == numbers(rest.tasks)


@conforms
async def times_are_told_in_order_across_lanes(bench: Bench) -> None:
    """However many lanes gave them, tasks come earliest first."""
    for number in range(12):
        at = NOON + 7 * number % 11
        await bench.add(task(number, "abc"[number % 3], next_attempt_at=at))

    tasks = (await bench.claim()).tasks

    times = [held.next_attempt_at for held in tasks]
    assert (12, sorted(times)) == (len(tasks), times)


@conforms
async def a_task_is_leased_once(bench: Bench) -> None:
    """What one worker holds no other gets, also after a crash of the store."""
    await bench.add(task(1), task(2))
    assert 2 == len((await bench.claim()).tasks)

    assert [] == (await bench.claim(OTHER)).tasks
    await bench.reopen()
    assert [] == (await bench.claim(OTHER)).tasks
    bench.clock.advance(LEASE.length - 1)
    assert [] == (await bench.claim(OTHER)).tasks


@conforms
async def limits_are_kept(bench: Bench) -> None:
    """No more than the limit in all, and no more than `per_lane` of a lane."""
    await bench.add(*(task(number, "ab"[number % 2]) for number in range(20)))

    assert 3 == len((await bench.claim(limit=3)).tasks)
    bench.clock.advance(1)
    tasks = (await bench.claim(per_lane=2)).tasks

    assert 2 == sum(held.lane == LANE for held in tasks) == len(tasks) - 2
    assert [] == (await bench.claim(limit=0)).tasks
    assert 13 == len((await bench.claim()).tasks)


@conforms
async def skipped_lanes_give_nothing(bench: Bench) -> None:
    """Lanes in `skip` are left alone, and do not call for the next claim."""
    await bench.add(task(1, "a"), task(2, "b"), task(3, "b", next_attempt_at=NOON + HOUR))

    claimed = await bench.claim(skip={LANE, "acme/https:unknown:443"})
    assert [2] == numbers(claimed.tasks)
    claimed = await bench.claim(skip=[LANE])
    assert claimed.next_at is not None
    assert NOON < claimed.next_at <= NOON + HOUR - HORIZON

    assert [1] == numbers((await bench.claim()).tasks)


@conforms
async def next_at_leads_to_the_next_task(bench: Bench) -> None:
    """Who claims whenever `next_at` says gets each task in time, in few claims."""
    await bench.add(*(task(number, next_attempt_at=NOON + number * HOUR) for number in range(1, 5)))
    claims = 0
    got: list[Task] = []
    while len(got) < 4:
        claimed = await bench.claim()
        claims += 1
        got += claimed.tasks
        for held in claimed.tasks:
            assert bench.clock.now <= held.next_attempt_at
            await bench.store.finish([succeed(held)])
        if not claimed.tasks:
            assert claimed.next_at is not None
            assert claimed.next_at > bench.clock.now
            bench.clock.now = claimed.next_at

    assert claims <= 16
    assert (await bench.claim()).next_at is None


@conforms
async def next_at_is_no_later_than_what_is_left(bench: Bench) -> None:
    """When a limit left something behind, the next claim may be made at once."""
    await bench.add(task(1), task(2), task(3))

    for limit, per_lane in ((1, 1000), (1000, 1)):
        claimed = await bench.claim(limit=limit, per_lane=per_lane)
        assert 1 == len(claimed.tasks)
        assert claimed.next_at is not None
        assert claimed.next_at <= claimed.now


@conforms
async def next_at_knows_the_end_of_a_lease(bench: Bench) -> None:
    """While a task is in flight, the end of its lease is when it may be claimed again."""
    held = await bench.leased(1)

    next_at = (await bench.claim()).next_at

    assert next_at is not None
    assert NOON < next_at <= held.wake_at


@conforms
async def nothing_waits_in_an_empty_store(bench: Bench) -> None:
    """A claim of nothing has no tasks and no next time."""
    claimed = await bench.claim()

    assert (NOON, [], {}, None) == (
        claimed.now,
        claimed.tasks,
        claimed.probing,
        claimed.next_at,
    )


@conforms
async def what_is_handed_out_is_a_copy(bench: Bench) -> None:
    """Who changes what he gave or was given changes nothing in the store."""
    given = task(1)
    [added] = await bench.add(given)
    given.status = added.task.status = Status.CANCELLED
    [held] = (await bench.claim()).tasks
    lease = replace(held)
    held.version += 5
    assert lease == await bench.get(1)
    (await bench.get(1)).worker = "thief"
    (await bench.add(task(1)))[0].task.worker = "thief"
    (await bench.store.list_tasks("acme", TaskFilter())).items[0].worker = "thief"
    assert lease == await bench.get(1)

    result = wait(lease, NOON + SECOND)
    assert result.attempt is not None
    result.attempt.decision = Decision(action="wait")
    assert [FinishStatus.DONE] == await bench.store.finish([result])
    for _ in range(2):
        [logged] = await bench.store.list_attempts("acme", lease.id)
        assert logged.decision is not None
        assert (1, "transient", "wait") == (logged.number, logged.outcome, logged.decision.action)
        for row in (result.attempt, logged):
            assert row.decision is not None
            row.number, row.decision.action = 77, "forged"

    (await bench.lane()).paused = True
    (await bench.store.list_lanes(None)).items[0].paused = True
    assert not (await bench.lane()).paused
