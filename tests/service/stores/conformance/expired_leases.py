"""Conformance: expired leases, and results that arrive after them."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import LOST, AttemptRecord, Status
from tarry.service.store import AttemptsOfMinute, CancelStatus, FinishStatus, Release
from tests.service.stores.harness import (
    HOUR_MS,
    LEASE,
    OTHER_LEASE,
    START_MS,
    StoreHarness,
    conformance_case,
    retry_result,
    success_result,
    task,
    task_numbers,
)


@conformance_case
async def an_abandoned_task_is_claimed_again(harness: StoreHarness) -> None:
    """The attempt of an expired lease is logged as lost, and the task is leased again."""
    old = await harness.lease_new_task(1, next_attempt_at=START_MS + 500)
    harness.clock.now = old.wake_at

    claimed = await harness.claim(OTHER_LEASE)

    [new] = claimed.tasks
    assert (1, 0) == (claimed.lost_attempts, (await harness.claim()).lost_attempts)
    expected = replace(
        old,
        attempts=1,
        lost_attempts=1,
        worker="other",
        version=old.version + 1,
        next_attempt_at=old.wake_at,
        wake_at=old.wake_at + OTHER_LEASE.length_ms,
    )
    assert expected == new == await harness.get_task(1)
    lost = AttemptRecord(
        attempt_number=1,
        scheduled_at=START_MS + 500,
        started_at=START_MS + 500,
        outcome=LOST,
        worker="worker",
    )
    assert [lost] == await harness.store.list_attempts("acme", old.id)
    assert {Status.IN_FLIGHT: 1} == await harness.counts()
    assert 1 == (await harness.get_lane()).in_flight


@conformance_case
async def an_expired_lease_of_the_claiming_worker_is_renewed(harness: StoreHarness) -> None:
    """The worker is alive, so no attempt is lost: its result and its release are still applied."""
    tasks = [await harness.lease_new_task(number) for number in (1, 2)]
    harness.clock.advance(HOUR_MS)

    claimed = await harness.claim()

    renewed = [replace(old, wake_at=START_MS + HOUR_MS + LEASE.length_ms) for old in tasks]
    assert (renewed, [], 0) == (claimed.renewed_tasks, claimed.tasks, claimed.lost_attempts)
    assert renewed == [await harness.get_task(number) for number in (1, 2)]
    assert [] == (await harness.claim()).renewed_tasks
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(tasks[0])])
    assert [FinishStatus.APPLIED] == await harness.store.release([Release(tasks[1])])
    assert [tasks[1].id] == [task.id for task in (await harness.claim(OTHER_LEASE)).tasks]
    assert {Status.SUCCEEDED: 1, Status.IN_FLIGHT: 1} == await harness.counts()


@conformance_case
async def renewed_leases_count_towards_the_limit(harness: StoreHarness) -> None:
    """A claim renews no more leases than it may lease tasks, and continues with the next claim."""
    for number in (1, 2, 3):
        await harness.lease_new_task(number)
    harness.clock.advance(HOUR_MS)
    await harness.add(task(4))

    first = await harness.claim(limit=2)
    second = await harness.claim(limit=2)

    assert ([1, 2], []) == (task_numbers(first.renewed_tasks), first.tasks)
    assert ([3], [4]) == (task_numbers(second.renewed_tasks), task_numbers(second.tasks))


@conformance_case
async def a_lease_is_valid_until_its_end(harness: StoreHarness) -> None:
    """A lease that ends within the claim's horizon has not expired."""
    old = await harness.lease_new_task(1)
    harness.clock.now = old.wake_at - 1

    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    assert [] == await harness.store.list_attempts("acme", old.id)


@conformance_case
async def the_result_of_a_lost_lease_is_superseded(harness: StoreHarness) -> None:
    """Once another worker has claimed a task, the first can neither finish nor release it."""
    old = await harness.lease_new_task(1)
    harness.clock.now = old.wake_at
    [new] = (await harness.claim(OTHER_LEASE)).tasks

    assert [FinishStatus.SUPERSEDED] == await harness.store.finish([success_result(old)])
    await harness.store.release([Release(old)])

    assert new == await harness.get_task(1)
    assert 1 == len(await harness.store.list_attempts("acme", old.id))
    assert 1 == (await harness.store.counters()).superseded_count
    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(new)])
    assert [1, 2] == [
        attempt.attempt_number for attempt in await harness.store.list_attempts("acme", old.id)
    ]


@conformance_case
async def every_abandoned_attempt_is_logged(harness: StoreHarness) -> None:
    """Lost attempts are numbered consecutively, also across crashes of the store."""
    leased = await harness.lease_new_task(1)
    for number in range(3):
        harness.clock.advance(LEASE.length_ms)
        await harness.reopen()
        [leased] = (await harness.claim(replace(LEASE, worker=f"worker {number}"))).tasks

    assert 3 == leased.attempts
    attempts = await harness.store.list_attempts("acme", leased.id)
    assert [(1, LOST), (2, LOST), (3, LOST)] == [
        (attempt.attempt_number, attempt.outcome) for attempt in attempts
    ]
    assert {"lost": 3} == _sum_outcomes(await harness.store.attempts_per_minute(None, since=0))


def _sum_outcomes(minutes: list[AttemptsOfMinute]) -> dict[str, int]:
    total: dict[str, int] = {}
    for minute in minutes:
        for outcome, count in minute.counts_by_outcome.items():
            total[outcome] = total.get(outcome, 0) + count
    return total


@conformance_case
async def a_cancel_request_applies_when_the_lease_expires(harness: StoreHarness) -> None:
    """An abandoned task with a cancel request is CANCELLED, not leased again."""
    old = await harness.lease_new_task(1)
    assert CancelStatus.REQUESTED is await harness.store.cancel("acme", old.id)
    harness.clock.now = old.wake_at

    claimed = await harness.claim(OTHER_LEASE)

    assert [] == claimed.tasks
    finished = await harness.get_task(1)
    assert (Status.CANCELLED, 1, old.wake_at) == (
        finished.status,
        finished.attempts,
        finished.finished_at,
    )
    assert [LOST] == [
        attempt.outcome for attempt in await harness.store.list_attempts("acme", old.id)
    ]
    assert {Status.CANCELLED: 1} == await harness.counts()
    assert [FinishStatus.SUPERSEDED] == await harness.store.finish([success_result(old)])


@conformance_case
async def a_lost_attempt_keeps_the_backoff_state(harness: StoreHarness) -> None:
    """A lost attempt does not change the previous delay and the last outcome."""
    leased = await harness.lease_new_task(1)
    result = retry_result(leased, START_MS + 10, previous_delay=0.1 + 0.2, backoff_offset=2)
    await harness.store.finish([result])
    await harness.claim()
    harness.clock.advance(HOUR_MS)

    [new] = (await harness.claim(OTHER_LEASE)).tasks

    assert (2, 0.1 + 0.2, 2) == (new.attempts, new.previous_delay, new.backoff_offset)
    assert ("transient", 1) == (new.last_outcome_kind, new.lost_attempts)


@conformance_case
async def an_abandoned_task_is_due_since_its_lease_ended(harness: StoreHarness) -> None:
    """The due time of an abandoned task is the end of its lease, however late the claim is."""
    old = await harness.lease_new_task(1)
    harness.clock.advance(HOUR_MS)

    [new] = (await harness.claim(OTHER_LEASE)).tasks

    assert (old.wake_at, START_MS + HOUR_MS + OTHER_LEASE.length_ms) == (
        new.next_attempt_at,
        new.wake_at,
    )
    assert START_MS == new.first_due_at
