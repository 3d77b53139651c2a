"""Conformance: leases that are released before an attempt."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import Status
from tarry.service.store import FinishStatus, NewTask, Release
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    MINUTE_MS,
    OTHER_LEASE,
    START_MS,
    StoreHarness,
    conformance_case,
    next_attempt,
    retry_result,
    success_result,
    task,
    task_id,
    task_numbers,
)


@conformance_case
async def a_released_task_keeps_its_due_time(harness: StoreHarness) -> None:
    """A released task keeps its due time, counts no attempt, and can be claimed again."""
    leased = await harness.lease_new_task(1, next_attempt_at=START_MS + 500)

    assert [FinishStatus.APPLIED] == await harness.store.release([Release(leased)])

    released = await harness.get_task(1)
    assert (Status.PENDING, None, 0, START_MS + 500, START_MS + 500) == (
        released.status,
        released.worker,
        released.attempts,
        released.next_attempt_at,
        released.wake_at,
    )
    assert [] == await harness.store.list_attempts("acme", leased.id)
    assert {Status.PENDING: 1} == await harness.counts()
    assert [1] == task_numbers((await harness.claim(OTHER_LEASE)).tasks)
    assert [FinishStatus.SUPERSEDED] == await harness.store.finish([success_result(leased)])


@conformance_case
async def a_deferred_task_keeps_its_due_time(harness: StoreHarness) -> None:
    """A task that is deferred again and again is late since it was first due, on all paths."""
    leased = await harness.lease_new_task(1)
    for number in range(1, 4):
        until = START_MS + number * MINUTE_MS
        assert [FinishStatus.APPLIED] == await harness.store.release([Release(leased, until)])
        await harness.reopen()
        deferred = await harness.get_task(1)
        assert (Status.PENDING, START_MS, until) == (
            deferred.status,
            deferred.next_attempt_at,
            deferred.wake_at,
        )
        harness.clock.now = until - LEASE.horizon_ms - 1
        assert [] == (await harness.claim()).tasks
        assert [] == (await harness.store.counters()).due_lanes
        harness.clock.advance(1)
        [leased] = (await harness.claim()).tasks
        assert (START_MS, until + LEASE.length_ms) == (leased.next_attempt_at, leased.wake_at)
    await harness.store.finish([retry_result(leased, START_MS + HOUR_MS)])
    retried = await harness.get_task(1)
    assert START_MS + HOUR_MS == retried.next_attempt_at == retried.wake_at


@conformance_case
async def a_deferral_ends_when_the_task_is_retried_now(harness: StoreHarness) -> None:
    """The task can be leased at once, and keeps its due time."""
    leased = await harness.lease_new_task(1)
    await harness.store.release([Release(leased, START_MS + HOUR_MS)])
    harness.clock.advance(MINUTE_MS)
    await harness.store.retry_now("acme", leased.id)
    [leased] = (await harness.claim()).tasks
    assert START_MS == leased.next_attempt_at


@conformance_case
async def a_release_can_only_delay_a_task(harness: StoreHarness) -> None:
    """A later time in a release delays the task; an earlier time is ignored."""
    await harness.add(
        task(1, next_attempt_at=START_MS + 500), task(2, next_attempt_at=START_MS + 500)
    )
    first, second = (await harness.claim()).tasks

    await harness.store.release([Release(first, START_MS + HOUR_MS), Release(second, START_MS)])

    deferred, released = await harness.get_task(1), await harness.get_task(2)
    assert (START_MS + 500, START_MS + HOUR_MS) == (deferred.next_attempt_at, deferred.wake_at)
    assert START_MS + 500 == released.next_attempt_at == released.wake_at
    assert [2] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def a_batch_may_have_an_earlier_lease_of_the_same_task(harness: StoreHarness) -> None:
    """Of two leases of one task in a batch, the valid one is released, and only once."""
    earlier = await harness.lease_new_task(1)
    await harness.store.release([Release(earlier)])
    [valid] = (await harness.claim()).tasks

    statuses = await harness.store.release([Release(earlier), Release(valid), Release(valid)])
    applied, superseded = FinishStatus.APPLIED, FinishStatus.SUPERSEDED
    assert [superseded, applied, superseded] == statuses
    assert Status.PENDING == (await harness.get_task(1)).status


@conformance_case
async def only_a_valid_lease_is_released(harness: StoreHarness) -> None:
    """A release of a finished, released, outdated or unknown lease changes nothing."""
    await harness.add(task(1), task(2), task(3))
    first, second, third = (await harness.claim()).tasks
    await harness.store.finish(
        [success_result(first), retry_result(second, START_MS + 500, renewed_lease=LEASE)]
    )
    await harness.store.release([Release(third, START_MS + HOUR_MS)])
    before = [await harness.get_task(number) for number in (1, 2, 3)]

    unknown = replace(first, id=task_id(77))
    leases = (first, second, third, unknown)
    statuses = await harness.store.release([Release(lease) for lease in leases])
    assert [FinishStatus.SUPERSEDED] * 4 == statuses
    assert [] == await harness.store.release([])

    assert before == [await harness.get_task(number) for number in (1, 2, 3)]
    assert 0 == (await harness.store.counters()).superseded_count


@conformance_case
async def a_cancel_request_applies_when_the_lease_is_released(harness: StoreHarness) -> None:
    """A released task with a cancel request is CANCELLED without an attempt."""
    leased = await harness.lease_new_task(1)
    await harness.store.cancel("acme", leased.id)

    assert [FinishStatus.CANCELLED] == await harness.store.release([Release(leased)])

    finished = await harness.get_task(1)
    assert (Status.CANCELLED, 0, START_MS) == (
        finished.status,
        finished.attempts,
        finished.finished_at,
    )
    assert {Status.CANCELLED: 1} == await harness.counts()


@conformance_case
async def a_lease_on_add_is_a_normal_lease(harness: StoreHarness) -> None:
    """A lease on add can be released, renewed, finished and lost like any other lease."""
    batch = [NewTask(task(number), lease_on_add=True) for number in range(1, 5)]
    first, second, third, fourth = [result.task for result in await harness.store.add(batch, LEASE)]
    await harness.store.release([Release(first)])
    await harness.store.finish(
        [retry_result(second, START_MS + 100, renewed_lease=LEASE), success_result(third)]
    )
    harness.clock.now = fourth.wake_at

    tasks = (await harness.claim(OTHER_LEASE)).tasks

    assert [1, 4] == task_numbers(tasks)
    assert [0, 1] == [leased.attempts for leased in tasks]
    assert next_attempt(tasks[1]).attempt_number == 2


@conformance_case
async def unknown_leases_of_a_worker_are_released(harness: StoreHarness) -> None:
    """Leases of tasks that the worker does not know end; the tasks keep their due times."""
    batch = [
        NewTask(task(number, next_attempt_at=START_MS + 500), lease_on_add=True)
        for number in (1, 2, 3)
    ]
    added = [result.task for result in await harness.store.add(batch, LEASE)]
    other = NewTask(task(4), lease_on_add=True)
    [other_added] = await harness.store.add([other], OTHER_LEASE)
    known_ids = [added[1].id, task_id(77)]

    assert 2 == await harness.store.release_unknown_leases(LEASE, known_ids)

    for number in (1, 3):
        released = await harness.get_task(number)
        assert (Status.PENDING, None, 0, START_MS + 500) == (
            released.status,
            released.worker,
            released.attempts,
            released.next_attempt_at,
        )
        assert [] == await harness.store.list_attempts("acme", released.id)
    assert added[1] == await harness.get_task(2)
    assert other_added.task == await harness.get_task(4)
    assert {Status.PENDING: 2, Status.IN_FLIGHT: 2} == await harness.counts()
    assert 0 == await harness.store.release_unknown_leases(LEASE, known_ids)
    assert [1, 3] == task_numbers((await harness.claim(LEASE)).tasks)
    assert [FinishStatus.SUPERSEDED] == await harness.store.finish([success_result(added[0])])


@conformance_case
async def an_unknown_lease_that_has_expired_is_not_lost(harness: StoreHarness) -> None:
    """No attempt of the task was started, so none is logged as lost."""
    leased = await harness.lease_new_task(1)
    harness.clock.now = leased.wake_at + 1

    assert 1 == await harness.store.release_unknown_leases(LEASE, [])

    [claimed] = (await harness.claim()).tasks
    assert (0, 0, leased.next_attempt_at) == (
        claimed.attempts,
        claimed.lost_attempts,
        claimed.next_attempt_at,
    )


@conformance_case
async def a_cancel_request_applies_when_an_unknown_lease_is_released(
    harness: StoreHarness,
) -> None:
    """A task with a cancel request is CANCELLED when its unknown lease is released."""
    leased = await harness.lease_new_task(1)
    await harness.store.cancel("acme", leased.id)

    assert 1 == await harness.store.release_unknown_leases(LEASE, [])

    assert Status.CANCELLED is (await harness.get_task(1)).status
    assert {Status.CANCELLED: 1} == await harness.counts()


@conformance_case
async def an_unknown_lease_keeps_its_deferral(harness: StoreHarness) -> None:
    """A deferred task whose lease is unknown cannot start, and is not late, before it ends."""
    until = START_MS + MINUTE_MS
    leased = await harness.lease_new_task(1)
    await harness.store.release([Release(leased, until)])
    harness.clock.now = until - LEASE.horizon_ms
    await harness.claim()

    assert 1 == await harness.store.release_unknown_leases(LEASE, [])

    released = await harness.get_task(1)
    assert (Status.PENDING, START_MS, until) == (
        released.status,
        released.next_attempt_at,
        released.wake_at,
    )
    assert [] == (await harness.store.counters()).due_lanes
    [claimed] = (await harness.claim()).tasks
    assert (START_MS, until + LEASE.length_ms) == (claimed.next_attempt_at, claimed.wake_at)


@conformance_case
async def an_unknown_lease_of_a_late_task_has_no_deferral(harness: StoreHarness) -> None:
    """A task that was leased after its due time is due since then when the lease is released."""
    await harness.add(task(1))
    harness.clock.advance(MINUTE_MS)
    await harness.claim()
    harness.clock.advance(1)

    assert 1 == await harness.store.release_unknown_leases(LEASE, [])

    released = await harness.get_task(1)
    assert START_MS == released.next_attempt_at == released.wake_at
