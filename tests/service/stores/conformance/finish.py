"""Conformance: results of attempts."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import AttemptRecord, Decision, Status
from tarry.service.store import AddStatus, CancelStatus, FinishStatus, TaskResult
from tests.service.stores.harness import (
    HORIZON_MS,
    HOUR_MS,
    LEASE,
    OTHER_LEASE,
    SECOND_MS,
    START_MS,
    StoreHarness,
    conformance_case,
    exhausted_result,
    retry_result,
    success_result,
    task,
    task_id,
    task_numbers,
)


@conformance_case
async def a_failed_attempt_schedules_the_next(harness: StoreHarness) -> None:
    """The task is PENDING without a lease, and has the state for the next decision."""
    leased = await harness.leased(1)
    result = retry_result(leased, START_MS + HOUR_MS, previous_delay=0.1 + 0.2, backoff_offset=1)

    assert [FinishStatus.APPLIED] == await harness.store.finish([result])

    expected = replace(
        leased,
        status=Status.PENDING,
        attempts=1,
        version=leased.version + 1,
        worker=None,
        next_attempt_at=START_MS + HOUR_MS,
        wake_at=START_MS + HOUR_MS,
        previous_delay=0.1 + 0.2,
        backoff_offset=1,
        last_outcome_kind="transient",
    )
    assert expected == await harness.get(1)
    await harness.reopen()
    assert expected == await harness.get(1)
    assert [] == (await harness.claim()).tasks
    harness.clock.now = START_MS + HOUR_MS - HORIZON_MS
    assert [1] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def a_success_ends_a_task(harness: StoreHarness) -> None:
    """The task is SUCCEEDED at the store's time, is counted, and is not claimed again."""
    leased = await harness.leased(1)
    harness.clock.advance(70)

    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(leased)])

    ended = await harness.get(1)
    assert (Status.SUCCEEDED, START_MS + 70, None, 1) == (
        ended.status,
        ended.finished_at,
        ended.worker,
        ended.attempts,
    )
    assert {Status.SUCCEEDED: 1} == await harness.counts()
    lane = await harness.lane()
    assert (0, 0, 0) == (lane.pending, lane.in_flight, lane.exhausted)
    harness.clock.advance(HOUR_MS)
    assert [] == (await harness.claim()).tasks


@conformance_case
async def an_exhausted_task_is_a_dead_letter(harness: StoreHarness) -> None:
    """The task is EXHAUSTED with its reason, and counted as dead in its lane."""
    ended = await harness.add_dead_letter(1, "budget")

    assert (Status.EXHAUSTED, "budget", START_MS) == (ended.status, ended.reason, ended.finished_at)
    assert {Status.EXHAUSTED: 1} == await harness.counts()
    lane = await harness.lane()
    assert (0, 0, 1) == (lane.pending, lane.in_flight, lane.exhausted)
    harness.clock.advance(HOUR_MS)
    assert [] == (await harness.claim()).tasks


@conformance_case
async def a_result_without_an_attempt_logs_nothing(harness: StoreHarness) -> None:
    """A task can be deferred or ended without an attempt in the log."""
    leased = await harness.leased(1)
    deferral = TaskResult(
        task=leased,
        attempt=None,
        status=Status.PENDING,
        next_attempt_at=START_MS + 50,
        previous_delay=1.5,
    )
    assert [FinishStatus.APPLIED] == await harness.store.finish([deferral])
    [leased] = (await harness.claim()).tasks
    assert (0, 1.5, START_MS + 50) == (
        leased.attempts,
        leased.previous_delay,
        leased.next_attempt_at,
    )

    end = TaskResult(task=leased, attempt=None, status=Status.EXHAUSTED, reason="budget")
    assert [FinishStatus.APPLIED] == await harness.store.finish([end])

    ended = await harness.get(1)
    assert (Status.EXHAUSTED, "budget", 0) == (ended.status, ended.reason, ended.attempts)
    assert [] == await harness.store.list_attempts("acme", leased.id)


@conformance_case
async def the_attempt_log_keeps_every_field(harness: StoreHarness) -> None:
    """An attempt is read from the log exactly as it was written."""
    leased = await harness.leased(1)
    full = AttemptRecord(
        number=1,
        scheduled_at=START_MS,
        started_at=START_MS + 2,
        duration_ms=12.3456789,
        dns_ms=0.1,
        connect_ms=0.2,
        tls_ms=0.3,
        first_byte_ms=11.0,
        remote="192.0.2.1:443",
        status=503,
        error="no room: ä\n",
        error_class="busy",
        outcome="overloaded",
        decision=Decision(
            action="retry_result",
            reason="hint",
            delay_ms=1500.5,
            ceiling_ms=200.0,
            hint_ms=1500.0,
            hint_source="retry-after",
            policy_version=2,
            budget=495.0,
            breaker="closed",
        ),
        excerpt="{" + "x" * 2000,
        worker="worker",
    )
    minimal = AttemptRecord(
        number=2,
        scheduled_at=START_MS + 5,
        started_at=START_MS + 6,
        status="UNAVAILABLE",
        outcome="transient",
    )
    first = retry_result(leased, START_MS + 5)
    first.attempt = full
    await harness.store.finish([first])
    [leased] = (await harness.claim()).tasks
    second = exhausted_result(leased)
    second.attempt = minimal
    await harness.store.finish([second])
    await harness.reopen()

    assert [full, minimal] == await harness.store.list_attempts("acme", leased.id)


@conformance_case
async def a_lease_can_be_kept_for_the_next_attempt(harness: StoreHarness) -> None:
    """The task stays with its worker, and its version is one higher."""
    leased = await harness.leased(1)
    harness.clock.advance(10)
    due = harness.clock.now + 500

    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [retry_result(leased, due, renewed_lease=LEASE)]
    )

    kept = replace(
        leased,
        attempts=1,
        version=leased.version + 1,
        next_attempt_at=due,
        wake_at=due + LEASE.length_ms,
        last_outcome_kind="transient",
    )
    assert kept == await harness.get(1)
    assert {Status.IN_FLIGHT: 1} == await harness.counts()
    assert 1 == (await harness.lane()).in_flight
    harness.clock.now = due
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(kept)])
    assert [1, 2] == [row.number for row in await harness.store.list_attempts("acme", leased.id)]


@conformance_case
async def a_renewed_lease_expires(harness: StoreHarness) -> None:
    """A worker that dies with a renewed lease loses it like any other lease."""
    leased = await harness.leased(1)
    await harness.store.finish([retry_result(leased, START_MS + 500, renewed_lease=LEASE)])
    harness.clock.now = START_MS + 500 + LEASE.length_ms

    [new] = (await harness.claim(OTHER_LEASE)).tasks

    assert (2, "other") == (new.attempts, new.worker)
    assert ["transient", "lost"] == [
        row.outcome for row in await harness.store.list_attempts("acme", leased.id)
    ]


@conformance_case
async def a_finished_task_keeps_no_lease(harness: StoreHarness) -> None:
    """`renewed_lease` is ignored for a finished status."""
    leased = await harness.leased(1)

    await harness.store.finish([success_result(leased, renewed_lease=LEASE)])

    ended = await harness.get(1)
    assert (Status.SUCCEEDED, None) == (ended.status, ended.worker)


@conformance_case
async def an_expired_lease_is_valid_until_it_is_claimed(harness: StoreHarness) -> None:
    """A late result is stored if no other worker has claimed the task."""
    leased = await harness.leased(1)
    harness.clock.advance(HOUR_MS)

    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(leased)])
    assert Status.SUCCEEDED is (await harness.get(1)).status


@conformance_case
async def finishing_again_is_superseded(harness: StoreHarness) -> None:
    """The same results again are SUPERSEDED, also after a crash."""
    await harness.add(task(1), task(2), task(3), task(4))
    leased = (await harness.claim()).tasks
    batch = [
        success_result(leased[0]),
        exhausted_result(leased[1]),
        retry_result(leased[2], START_MS + SECOND_MS, renewed_lease=LEASE),
        retry_result(leased[3], START_MS + HOUR_MS, callback_task=task(9)),
    ]
    assert [FinishStatus.APPLIED] * 4 == await harness.store.finish(batch)
    before = [await harness.get(number) for number in (1, 2, 3, 4, 9)]
    harness.clock.advance(5)
    await harness.reopen()

    assert [FinishStatus.SUPERSEDED] * 4 == await harness.store.finish(batch)

    assert before == [await harness.get(number) for number in (1, 2, 3, 4, 9)]
    assert [1] * 4 == [len(await harness.store.list_attempts("acme", one.id)) for one in leased]
    assert {
        Status.PENDING: 2,
        Status.IN_FLIGHT: 1,
        Status.SUCCEEDED: 1,
        Status.EXHAUSTED: 1,
    } == await harness.counts()


@conformance_case
async def each_result_has_its_own_status(harness: StoreHarness) -> None:
    """Statuses keep the order; of two results of one task the second is SUPERSEDED."""
    await harness.add(task(1), task(2))
    one, two = (await harness.claim()).tasks
    unknown = replace(one, id=task_id(77))

    statuses = await harness.store.finish(
        [
            success_result(unknown),
            success_result(one),
            exhausted_result(one),
            retry_result(two, START_MS + HOUR_MS),
        ]
    )

    assert [
        FinishStatus.SUPERSEDED,
        FinishStatus.APPLIED,
        FinishStatus.SUPERSEDED,
        FinishStatus.APPLIED,
    ] == statuses
    assert Status.SUCCEEDED is (await harness.get(1)).status
    assert 2 == (await harness.store.counters("acme")).superseded_count
    assert (2, 0) == (
        (await harness.store.counters()).superseded_count,
        (await harness.store.counters("beta")).superseded_count,
    )
    assert [] == await harness.store.finish([])


@conformance_case
async def a_pending_task_cannot_be_finished(harness: StoreHarness) -> None:
    """The result of a task that is not leased is SUPERSEDED."""
    [added] = await harness.add(task(1))

    assert [FinishStatus.SUPERSEDED] == await harness.store.finish([success_result(added.task)])
    assert added.task == await harness.get(1)


@conformance_case
async def a_task_being_cancelled_gets_no_further_attempt(harness: StoreHarness) -> None:
    """The attempt is logged and counted, and the lease is not kept."""
    await harness.add(task(1), task(2), task(3))
    leased = (await harness.claim()).tasks
    for one in leased:
        assert CancelStatus.REQUESTED is await harness.store.cancel("acme", one.id)
    harness.clock.advance(5)
    deferral = TaskResult(
        task=leased[2], attempt=None, status=Status.PENDING, next_attempt_at=START_MS + 50
    )

    statuses = await harness.store.finish(
        [
            retry_result(
                leased[0], START_MS + SECOND_MS, renewed_lease=LEASE, callback_task=task(8)
            ),
            exhausted_result(leased[1], callback_task=task(9)),
            deferral,
        ]
    )

    assert [FinishStatus.CANCELLED] * 3 == statuses
    for number, attempts in ((1, 1), (2, 1), (3, 0)):
        ended = await harness.get(number)
        assert (Status.CANCELLED, None, None, START_MS + 5) == (
            ended.status,
            ended.reason,
            ended.worker,
            ended.finished_at,
        )
        assert attempts == ended.attempts
        assert attempts == len(await harness.store.list_attempts("acme", ended.id))
    assert {Status.CANCELLED: 3} == await harness.counts()
    harness.clock.advance(HOUR_MS)
    assert [] == (await harness.claim()).tasks


@conformance_case
async def a_success_wins_over_a_cancel_request(harness: StoreHarness) -> None:
    """The task SUCCEEDED, and its callback is added."""
    leased = await harness.leased(1)
    await harness.store.cancel("acme", leased.id)

    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [success_result(leased, callback_task=task(9))]
    )

    assert Status.SUCCEEDED is (await harness.get(1)).status
    assert Status.PENDING is (await harness.get(9)).status


@conformance_case
async def a_callback_is_added_with_the_result(harness: StoreHarness) -> None:
    """It is a normal task, due at once or at its own time, and no quota applies to it."""
    leased = await harness.leased(1)
    harness.clock.advance(5)

    await harness.store.finish(
        [success_result(leased, callback_task=task(9, "hook", owned_body_ref="b"))]
    )

    callback = await harness.get(9)
    times = (callback.created_at, callback.next_attempt_at, callback.first_due_at, callback.wake_at)
    assert (Status.PENDING, "b", (START_MS + 5,) * 4) == (
        callback.status,
        callback.owned_body_ref,
        times,
    )
    assert {Status.SUCCEEDED: 1, Status.PENDING: 1} == await harness.counts()
    assert 1 == (await harness.lane(callback.lane)).pending
    assert [9] == task_numbers((await harness.claim()).tasks)
    [again] = await harness.add(task(9))
    assert AddStatus.EXISTING is again.status


@conformance_case
async def a_callback_with_an_existing_key_is_not_added(harness: StoreHarness) -> None:
    """The stored task with that key is unchanged, and the result is APPLIED."""
    [first] = await harness.add(task(9, next_attempt_at=START_MS + HOUR_MS))
    leased = await harness.leased(1)

    callback = task(10, key="key 9")
    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [success_result(leased, callback_task=callback)]
    )

    assert first.task == await harness.get(9)
    assert await harness.store.get_task("acme", task_id(10)) is None


@conformance_case
async def a_superseded_result_adds_no_callback(harness: StoreHarness) -> None:
    """A worker that lost its lease adds no callback."""
    leased = await harness.leased(1)
    harness.clock.advance(HOUR_MS)
    await harness.claim(OTHER_LEASE)

    result = success_result(leased, callback_task=task(9))
    assert [FinishStatus.SUPERSEDED] == await harness.store.finish([result])
    assert await harness.store.get_task("acme", task_id(9)) is None
