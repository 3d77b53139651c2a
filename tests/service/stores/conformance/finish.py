"""Conformance: results of attempts."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import AttemptRecord, DecisionRecord, Status
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
    """After a failed attempt, a task is PENDING, and has the state for the next decision."""
    leased = await harness.lease_new_task(1)
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
    assert expected == await harness.get_task(1)
    await harness.reopen()
    assert expected == await harness.get_task(1)
    assert [] == (await harness.claim()).tasks
    harness.clock.now = START_MS + HOUR_MS - HORIZON_MS
    assert [1] == task_numbers((await harness.claim()).tasks)


@conformance_case
async def a_success_ends_a_task(harness: StoreHarness) -> None:
    """A task that SUCCEEDED has the store's time as its end, and is not claimed again."""
    leased = await harness.lease_new_task(1)
    harness.clock.advance(70)

    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(leased)])

    finished = await harness.get_task(1)
    assert (Status.SUCCEEDED, START_MS + 70, None, 1) == (
        finished.status,
        finished.finished_at,
        finished.worker,
        finished.attempts,
    )
    assert {Status.SUCCEEDED: 1} == await harness.counts()
    lane = await harness.get_lane()
    assert (0, 0, 0) == (lane.pending, lane.in_flight, lane.exhausted)
    harness.clock.advance(HOUR_MS)
    assert [] == (await harness.claim()).tasks


@conformance_case
async def an_exhausted_task_is_a_dead_letter(harness: StoreHarness) -> None:
    """An EXHAUSTED task has its reason, and is counted as a dead letter of its lane."""
    finished = await harness.add_dead_letter(1, "budget")

    assert (Status.EXHAUSTED, "budget", START_MS) == (
        finished.status,
        finished.reason,
        finished.finished_at,
    )
    assert {Status.EXHAUSTED: 1} == await harness.counts()
    lane = await harness.get_lane()
    assert (0, 0, 1) == (lane.pending, lane.in_flight, lane.exhausted)
    harness.clock.advance(HOUR_MS)
    assert [] == (await harness.claim()).tasks


@conformance_case
async def a_result_without_an_attempt_logs_nothing(harness: StoreHarness) -> None:
    """A task can be deferred or finished without an attempt in the log."""
    leased = await harness.lease_new_task(1)
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

    exhausted = TaskResult(task=leased, attempt=None, status=Status.EXHAUSTED, reason="budget")
    assert [FinishStatus.APPLIED] == await harness.store.finish([exhausted])

    finished = await harness.get_task(1)
    assert (Status.EXHAUSTED, "budget", 0) == (finished.status, finished.reason, finished.attempts)
    assert [] == await harness.store.list_attempts("acme", leased.id)
    assert [] == await harness.store.attempts_per_minute(None, since=0)


@conformance_case
async def the_attempt_log_keeps_every_field(harness: StoreHarness) -> None:
    """An attempt is read from the log exactly as it was written."""
    leased = await harness.lease_new_task(1)
    full = AttemptRecord(
        attempt_number=1,
        scheduled_at=START_MS,
        started_at=START_MS + 2,
        duration_ms=12.3456789,
        dns_ms=0.1,
        connect_ms=0.2,
        tls_ms=0.3,
        first_byte_ms=11.0,
        remote_address="192.0.2.1:443",
        response_status=503,
        error_message="overloaded: ä\n",
        error_class="busy",
        outcome="overloaded",
        decision=DecisionRecord(
            action="wait",
            reason="hint",
            delay_ms=1500.5,
            ceiling_ms=200.0,
            hint_ms=1500.0,
            hint_source="retry-after",
            policy_version=2,
            budget=495.0,
            breaker="closed",
        ),
        response_excerpt="{" + "x" * 2000,
        worker="worker",
    )
    minimal = AttemptRecord(
        attempt_number=2,
        scheduled_at=START_MS + 5,
        started_at=START_MS + 6,
        response_status="UNAVAILABLE",
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
async def a_lease_can_be_renewed_for_the_next_attempt(harness: StoreHarness) -> None:
    """A result with `renewed_lease` keeps the task leased to its worker."""
    leased = await harness.lease_new_task(1)
    harness.clock.advance(10)
    due = harness.clock.now + 500

    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [retry_result(leased, due, renewed_lease=LEASE)]
    )

    renewed = replace(
        leased,
        attempts=1,
        version=leased.version + 1,
        next_attempt_at=due,
        wake_at=due + LEASE.length_ms,
        last_outcome_kind="transient",
    )
    assert renewed == await harness.get_task(1)
    assert {Status.IN_FLIGHT: 1} == await harness.counts()
    assert 1 == (await harness.get_lane()).in_flight
    harness.clock.now = due
    assert [] == (await harness.claim(OTHER_LEASE)).tasks
    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(renewed)])
    assert [1, 2] == [
        attempt.attempt_number for attempt in await harness.store.list_attempts("acme", leased.id)
    ]


@conformance_case
async def a_renewed_lease_expires(harness: StoreHarness) -> None:
    """A renewed lease that expires is lost like any other lease."""
    leased = await harness.lease_new_task(1)
    await harness.store.finish([retry_result(leased, START_MS + 500, renewed_lease=LEASE)])
    harness.clock.now = START_MS + 500 + LEASE.length_ms

    [new] = (await harness.claim(OTHER_LEASE)).tasks

    assert (2, "other") == (new.attempts, new.worker)
    assert ["transient", "lost"] == [
        attempt.outcome for attempt in await harness.store.list_attempts("acme", leased.id)
    ]


@conformance_case
async def a_finished_task_keeps_no_lease(harness: StoreHarness) -> None:
    """`renewed_lease` is ignored for a finished status."""
    leased = await harness.lease_new_task(1)

    await harness.store.finish([success_result(leased, renewed_lease=LEASE)])

    finished = await harness.get_task(1)
    assert (Status.SUCCEEDED, None) == (finished.status, finished.worker)


@conformance_case
async def an_expired_lease_is_valid_until_it_is_claimed(harness: StoreHarness) -> None:
    """A result after the end of its lease is stored if the task was not claimed again."""
    leased = await harness.lease_new_task(1)
    harness.clock.advance(HOUR_MS)

    assert [FinishStatus.APPLIED] == await harness.store.finish([success_result(leased)])
    assert Status.SUCCEEDED is (await harness.get_task(1)).status


@conformance_case
async def finishing_again_is_superseded(harness: StoreHarness) -> None:
    """Results that are written twice are SUPERSEDED, also after a crash."""
    await harness.add(task(1), task(2), task(3), task(4))
    leased = (await harness.claim()).tasks
    batch = [
        success_result(leased[0]),
        exhausted_result(leased[1]),
        retry_result(leased[2], START_MS + SECOND_MS, renewed_lease=LEASE),
        retry_result(leased[3], START_MS + HOUR_MS, callback_task=task(9)),
    ]
    assert [FinishStatus.APPLIED] * 4 == await harness.store.finish(batch)
    before = [await harness.get_task(number) for number in (1, 2, 3, 4, 9)]
    harness.clock.advance(5)
    await harness.reopen()

    assert [FinishStatus.SUPERSEDED] * 4 == await harness.store.finish(batch)

    assert before == [await harness.get_task(number) for number in (1, 2, 3, 4, 9)]
    assert [1] * 4 == [len(await harness.store.list_attempts("acme", task.id)) for task in leased]
    assert {
        Status.PENDING: 2,
        Status.IN_FLIGHT: 1,
        Status.SUCCEEDED: 1,
        Status.EXHAUSTED: 1,
    } == await harness.counts()
    [minute] = await harness.store.attempts_per_minute(None, since=START_MS)
    assert {"success": 1, "transient": 3} == minute.counts_by_outcome


@conformance_case
async def each_result_has_its_own_status(harness: StoreHarness) -> None:
    """Statuses have the order of the results; a second result of a task is SUPERSEDED."""
    await harness.add(task(1), task(2))
    first, second = (await harness.claim()).tasks
    unknown = replace(first, id=task_id(77))

    statuses = await harness.store.finish(
        [
            success_result(unknown),
            success_result(first),
            exhausted_result(first),
            retry_result(second, START_MS + HOUR_MS),
        ]
    )

    assert [
        FinishStatus.SUPERSEDED,
        FinishStatus.APPLIED,
        FinishStatus.SUPERSEDED,
        FinishStatus.APPLIED,
    ] == statuses
    assert Status.SUCCEEDED is (await harness.get_task(1)).status
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
    assert added.task == await harness.get_task(1)


@conformance_case
async def a_cancel_request_prevents_the_next_attempt(harness: StoreHarness) -> None:
    """The result of a task with a cancel request is logged, and the task is CANCELLED."""
    await harness.add(task(1), task(2), task(3))
    leased = (await harness.claim()).tasks
    for leased_task in leased:
        assert CancelStatus.REQUESTED is await harness.store.cancel("acme", leased_task.id)
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
        finished = await harness.get_task(number)
        assert (Status.CANCELLED, None, None, START_MS + 5) == (
            finished.status,
            finished.reason,
            finished.worker,
            finished.finished_at,
        )
        assert attempts == finished.attempts
        assert attempts == len(await harness.store.list_attempts("acme", finished.id))
    assert {Status.CANCELLED: 3} == await harness.counts()
    harness.clock.advance(HOUR_MS)
    assert [] == (await harness.claim()).tasks


@conformance_case
async def a_success_has_precedence_over_a_cancel_request(harness: StoreHarness) -> None:
    """A task with a cancel request is SUCCEEDED if its attempt succeeds."""
    leased = await harness.lease_new_task(1)
    await harness.store.cancel("acme", leased.id)

    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [success_result(leased, callback_task=task(9))]
    )

    assert Status.SUCCEEDED is (await harness.get_task(1)).status
    assert Status.PENDING is (await harness.get_task(9)).status


@conformance_case
async def a_callback_is_added_with_the_result(harness: StoreHarness) -> None:
    """A callback is a normal task that is due at once."""
    leased = await harness.lease_new_task(1)
    harness.clock.advance(5)

    await harness.store.finish(
        [success_result(leased, callback_task=task(9, "hook", owned_body_ref="b"))]
    )

    callback = await harness.get_task(9)
    times = (callback.created_at, callback.next_attempt_at, callback.first_due_at, callback.wake_at)
    assert (Status.PENDING, "b", (START_MS + 5,) * 4) == (
        callback.status,
        callback.owned_body_ref,
        times,
    )
    assert {Status.SUCCEEDED: 1, Status.PENDING: 1} == await harness.counts()
    assert 1 == (await harness.get_lane(callback.lane)).pending
    assert [9] == task_numbers((await harness.claim()).tasks)
    [repeated] = await harness.add(task(9))
    assert AddStatus.EXISTING is repeated.status


@conformance_case
async def a_callback_with_an_existing_key_is_not_added(harness: StoreHarness) -> None:
    """A callback whose key exists is ignored, and the result is APPLIED."""
    [first] = await harness.add(task(9, next_attempt_at=START_MS + HOUR_MS))
    leased = await harness.lease_new_task(1)

    callback = task(10, key="key 9")
    assert [FinishStatus.APPLIED] == await harness.store.finish(
        [success_result(leased, callback_task=callback)]
    )

    assert first.task == await harness.get_task(9)
    assert await harness.store.get_task("acme", task_id(10)) is None


@conformance_case
async def a_superseded_result_adds_no_callback(harness: StoreHarness) -> None:
    """A SUPERSEDED result adds no callback, and no lane for it."""
    leased = await harness.lease_new_task(1)
    harness.clock.advance(HOUR_MS)
    [leased_again] = (await harness.claim(OTHER_LEASE)).tasks
    callback = task(9, "callback")
    late_result = success_result(leased, callback_task=callback)
    result = success_result(leased_again)
    repeated_result = success_result(leased_again, callback_task=callback)

    superseded = FinishStatus.SUPERSEDED
    assert [superseded] == await harness.store.finish([late_result])
    statuses = await harness.store.finish([result, repeated_result, late_result])

    assert [FinishStatus.APPLIED, superseded, superseded] == statuses
    assert await harness.store.get_task("acme", task_id(9)) is None
    assert await harness.store.get_lane(callback.lane) is None
