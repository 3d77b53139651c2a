"""What every store must do: attempts that end, and leases that are handed back."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import AttemptRecord, Decision, Status
from tarry.service.store import AddStatus, CancelStatus, FinishStatus, TaskResult
from tests.service.stores.bench import (
    HORIZON,
    HOUR,
    LEASE,
    NOON,
    OTHER,
    SECOND,
    Bench,
    conforms,
    numbers,
    stop,
    succeed,
    task,
    task_id,
    wait,
)


@conforms
async def a_failed_attempt_waits_for_the_next(bench: Bench) -> None:
    """The task is PENDING until its time, holds no lease, and knows what the core has to know."""
    held = await bench.leased(1)
    result = wait(held, NOON + HOUR, previous_delay=0.1 + 0.2, restarted=1)

    assert [FinishStatus.DONE] == await bench.store.finish([result])

    expected = replace(
        held,
        status=Status.PENDING,
        attempts=1,
        version=held.version + 1,
        worker=None,
        next_attempt_at=NOON + HOUR,
        wake_at=NOON + HOUR,
        previous_delay=0.1 + 0.2,
        restarted=1,
        last_kind="transient",
    )
    assert expected == await bench.get(1)
    await bench.reopen()
    assert expected == await bench.get(1)
    assert [] == (await bench.claim()).tasks
    bench.clock.now = NOON + HOUR - HORIZON
    assert [1] == numbers((await bench.claim()).tasks)


@conforms
async def a_success_ends_a_task(bench: Bench) -> None:
    """SUCCEEDED at the store's now, out of the queue, counted."""
    held = await bench.leased(1)
    bench.clock.advance(70)

    assert [FinishStatus.DONE] == await bench.store.finish([succeed(held)])

    ended = await bench.get(1)
    assert (Status.SUCCEEDED, NOON + 70, None, 1) == (
        ended.status,
        ended.finished_at,
        ended.worker,
        ended.attempts,
    )
    assert {Status.SUCCEEDED: 1} == await bench.counts()
    lane = await bench.lane()
    assert (0, 0, 0) == (lane.pending, lane.in_flight, lane.dead)
    bench.clock.advance(HOUR)
    assert [] == (await bench.claim()).tasks


@conforms
async def an_exhausted_task_is_a_dead_letter(bench: Bench) -> None:
    """EXHAUSTED with its reason, out of the queue, counted as dead in its lane."""
    ended = await bench.dead(1, "budget")

    assert (Status.EXHAUSTED, "budget", NOON) == (ended.status, ended.reason, ended.finished_at)
    assert {Status.EXHAUSTED: 1} == await bench.counts()
    lane = await bench.lane()
    assert (0, 0, 1) == (lane.pending, lane.in_flight, lane.dead)
    bench.clock.advance(HOUR)
    assert [] == (await bench.claim()).tasks


@conforms
async def without_an_attempt_none_is_counted(bench: Bench) -> None:
    """A task is deferred, or ended before an attempt that cannot fit, without a row in the log."""
    held = await bench.leased(1)
    deferral = TaskResult(
        task=held,
        attempt=None,
        status=Status.PENDING,
        next_attempt_at=NOON + 50,
        previous_delay=1.5,
    )
    assert [FinishStatus.DONE] == await bench.store.finish([deferral])
    [held] = (await bench.claim()).tasks
    assert (0, 1.5, NOON + 50) == (held.attempts, held.previous_delay, held.next_attempt_at)

    end = TaskResult(task=held, attempt=None, status=Status.EXHAUSTED, reason="budget")
    assert [FinishStatus.DONE] == await bench.store.finish([end])

    ended = await bench.get(1)
    assert (Status.EXHAUSTED, "budget", 0) == (ended.status, ended.reason, ended.attempts)
    assert [] == await bench.store.list_attempts("acme", held.id)
    assert [] == await bench.store.series(None, since=0)


@conforms
async def the_log_keeps_every_field(bench: Bench) -> None:
    """A row of the attempt log comes back as it was written, decision and all."""
    held = await bench.leased(1)
    full = AttemptRecord(
        number=1,
        scheduled_at=NOON,
        started_at=NOON + 2,
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
        excerpt="{" + "x" * 2000,
        worker="worker",
    )
    bare = AttemptRecord(
        number=2,
        scheduled_at=NOON + 5,
        started_at=NOON + 6,
        status="UNAVAILABLE",
        outcome="transient",
    )
    first = wait(held, NOON + 5)
    first.attempt = full
    await bench.store.finish([first])
    [held] = (await bench.claim()).tasks
    second = stop(held)
    second.attempt = bare
    await bench.store.finish([second])
    await bench.reopen()

    assert [full, bare] == await bench.store.list_attempts("acme", held.id)


@conforms
async def a_kept_lease_goes_on(bench: Bench) -> None:
    """The task stays with its worker for a time within the horizon, its version one higher."""
    held = await bench.leased(1)
    bench.clock.advance(10)
    due = bench.clock.now + 500

    assert [FinishStatus.DONE] == await bench.store.finish([wait(held, due, keep=LEASE)])

    kept = replace(
        held,
        attempts=1,
        version=held.version + 1,
        next_attempt_at=due,
        wake_at=due + LEASE.length,
        last_kind="transient",
    )
    assert kept == await bench.get(1)
    assert {Status.IN_FLIGHT: 1} == await bench.counts()
    assert 1 == (await bench.lane()).in_flight
    bench.clock.now = due
    assert [] == (await bench.claim(OTHER)).tasks
    assert [FinishStatus.DONE] == await bench.store.finish([succeed(kept)])
    assert [1, 2] == [row.number for row in await bench.store.list_attempts("acme", held.id)]


@conforms
async def a_kept_lease_ends_too(bench: Bench) -> None:
    """A worker that dies with a kept lease loses it like any other."""
    held = await bench.leased(1)
    await bench.store.finish([wait(held, NOON + 500, keep=LEASE)])
    bench.clock.now = NOON + 500 + LEASE.length

    [new] = (await bench.claim(OTHER)).tasks

    assert (2, "other") == (new.attempts, new.worker)
    assert ["transient", "lost"] == [
        row.outcome for row in await bench.store.list_attempts("acme", held.id)
    ]


@conforms
async def a_lease_is_not_kept_at_the_end(bench: Bench) -> None:
    """A terminal task holds no lease, whatever was asked."""
    held = await bench.leased(1)

    await bench.store.finish([succeed(held, keep=LEASE)])

    ended = await bench.get(1)
    assert (Status.SUCCEEDED, None) == (ended.status, ended.worker)


@conforms
async def being_late_alone_does_no_harm(bench: Bench) -> None:
    """A lease that ran out is its holder's to finish until another claims the task."""
    held = await bench.leased(1)
    bench.clock.advance(HOUR)

    assert [FinishStatus.DONE] == await bench.store.finish([succeed(held)])
    assert Status.SUCCEEDED is (await bench.get(1)).status


@conforms
async def a_finish_again_changes_nothing(bench: Bench) -> None:
    """After a lost answer the same batch again is superseded, also after a crash."""
    await bench.add(task(1), task(2), task(3), task(4))
    held = (await bench.claim()).tasks
    batch = [
        succeed(held[0]),
        stop(held[1]),
        wait(held[2], NOON + SECOND, keep=LEASE),
        wait(held[3], NOON + HOUR, callback=task(9)),
    ]
    assert [FinishStatus.DONE] * 4 == await bench.store.finish(batch)
    before = [await bench.get(number) for number in (1, 2, 3, 4, 9)]
    bench.clock.advance(5)
    await bench.reopen()

    assert [FinishStatus.SUPERSEDED] * 4 == await bench.store.finish(batch)

    assert before == [await bench.get(number) for number in (1, 2, 3, 4, 9)]
    assert [1] * 4 == [len(await bench.store.list_attempts("acme", one.id)) for one in held]
    assert {
        Status.PENDING: 2,
        Status.IN_FLIGHT: 1,
        Status.SUCCEEDED: 1,
        Status.EXHAUSTED: 1,
    } == await bench.counts()
    [point] = await bench.store.series(None, since=NOON)
    assert {"success": 1, "transient": 3} == point.outcomes


@conforms
async def a_batch_is_answered_one_by_one(bench: Bench) -> None:
    """Each result has its own answer, in order; twice the same task is once and superseded."""
    await bench.add(task(1), task(2))
    one, two = (await bench.claim()).tasks
    stranger = replace(one, id=task_id(77))

    answers = await bench.store.finish(
        [succeed(stranger), succeed(one), stop(one), wait(two, NOON + HOUR)]
    )

    assert [
        FinishStatus.SUPERSEDED,
        FinishStatus.DONE,
        FinishStatus.SUPERSEDED,
        FinishStatus.DONE,
    ] == answers
    assert Status.SUCCEEDED is (await bench.get(1)).status
    assert 2 == (await bench.store.counters("acme")).superseded
    assert (2, 0) == (
        (await bench.store.counters()).superseded,
        (await bench.store.counters("beta")).superseded,
    )
    assert [] == await bench.store.finish([])


@conforms
async def what_waits_cannot_be_finished(bench: Bench) -> None:
    """A task that nobody holds is finished by nobody."""
    [added] = await bench.add(task(1))

    assert [FinishStatus.SUPERSEDED] == await bench.store.finish([succeed(added.task)])
    assert added.task == await bench.get(1)


@conforms
async def a_cancelled_attempt_is_the_last(bench: Bench) -> None:
    """The attempt is logged and counts, no other follows, and a kept lease is not kept."""
    await bench.add(task(1), task(2), task(3))
    held = (await bench.claim()).tasks
    for one in held:
        assert CancelStatus.REQUESTED is await bench.store.cancel("acme", one.id)
    bench.clock.advance(5)
    deferral = TaskResult(
        task=held[2], attempt=None, status=Status.PENDING, next_attempt_at=NOON + 50
    )

    answers = await bench.store.finish(
        [
            wait(held[0], NOON + SECOND, keep=LEASE, callback=task(8)),
            stop(held[1], callback=task(9)),
            deferral,
        ]
    )

    assert [FinishStatus.CANCELLED] * 3 == answers
    for number, attempts in ((1, 1), (2, 1), (3, 0)):
        ended = await bench.get(number)
        assert (Status.CANCELLED, None, None, NOON + 5) == (
            ended.status,
            ended.reason,
            ended.worker,
            ended.finished_at,
        )
        assert attempts == ended.attempts
        assert attempts == len(await bench.store.list_attempts("acme", ended.id))
    assert {Status.CANCELLED: 3} == await bench.counts()
    bench.clock.advance(HOUR)
    assert [] == (await bench.claim()).tasks


@conforms
async def a_success_that_was_to_be_cancelled_is_a_success(bench: Bench) -> None:
    """What the target accepted cannot be taken back: it SUCCEEDED, and its callback is added."""
    held = await bench.leased(1)
    await bench.store.cancel("acme", held.id)

    assert [FinishStatus.DONE] == await bench.store.finish([succeed(held, callback=task(9))])

    assert Status.SUCCEEDED is (await bench.get(1)).status
    assert Status.PENDING is (await bench.get(9)).status


@conforms
async def a_callback_is_added_in_the_same_step(bench: Bench) -> None:
    """It is a task like any other, due at once or at its time, and no quota holds it back."""
    held = await bench.leased(1)
    bench.clock.advance(5)

    await bench.store.finish([succeed(held, callback=task(9, "hook", body_ref="b"))])

    callback = await bench.get(9)
    times = (callback.created_at, callback.next_attempt_at, callback.started_at, callback.wake_at)
    assert (Status.PENDING, "b", (NOON + 5,) * 4) == (callback.status, callback.body_ref, times)
    assert {Status.SUCCEEDED: 1, Status.PENDING: 1} == await bench.counts()
    assert 1 == (await bench.lane(callback.lane)).pending
    assert [9] == numbers((await bench.claim()).tasks)
    [again] = await bench.add(task(9))
    assert AddStatus.EXISTING is again.status


@conforms
async def a_callback_whose_key_is_there_is_not_added_twice(bench: Bench) -> None:
    """The task that has the key stays as it is, and the finish is done."""
    [first] = await bench.add(task(9, next_attempt_at=NOON + HOUR))
    held = await bench.leased(1)

    callback = task(10, key="key 9")
    assert [FinishStatus.DONE] == await bench.store.finish([succeed(held, callback=callback)])

    assert first.task == await bench.get(9)
    assert await bench.store.get_task("acme", task_id(10)) is None


@conforms
async def a_superseded_finish_adds_no_callback(bench: Bench) -> None:
    """Who lost the lease tells nobody."""
    held = await bench.leased(1)
    bench.clock.advance(HOUR)
    await bench.claim(OTHER)

    result = succeed(held, callback=task(9))
    assert [FinishStatus.SUPERSEDED] == await bench.store.finish([result])
    assert await bench.store.get_task("acme", task_id(9)) is None
