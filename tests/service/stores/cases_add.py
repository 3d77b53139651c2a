"""What every store must do: tasks that are added."""

from __future__ import annotations

from msgspec.structs import replace

from tarry.service.model import Status
from tarry.service.store import AddStatus, FinishStatus, NewTask, TaskFilter
from tests.service.stores.bench import (
    HORIZON,
    LANE,
    LEASE,
    NOON,
    OTHER,
    SECOND,
    Bench,
    conforms,
    numbers,
    stop,
    task,
    task_id,
)


@conforms
async def a_task_is_kept_as_it_was_given(bench: Bench) -> None:
    """What the caller asked for comes back to the byte, times set by the store's clock."""
    given = task(
        key="kä ' \" % \\ " + "k" * 200,
        fingerprint=bytes(range(256)),
        content=bytes(range(256)) * 64,
        body_ref="bodies/1",
        policy_id="webhook",
        policy_version=3,
        next_attempt_at=NOON + 5000,
    )

    [added] = await bench.add(given)

    expected = replace(
        given,
        created_at=NOON,
        started_at=NOON + 5000,
        wake_at=NOON + 5000,
        version=added.task.version,
    )
    assert (AddStatus.ADDED, expected, False) == (added.status, added.task, added.leased)
    assert expected == await bench.get(1)
    await bench.reopen()
    assert expected == await bench.get(1)


@conforms
async def a_delay_counts_from_the_moment_of_adding(bench: Bench) -> None:
    """`delay` is added to the store's now, and wins over a time of the task's own."""
    given = task(next_attempt_at=NOON + 99)

    [added] = await bench.store.add([NewTask(given, delay=2000)])

    times = (added.task.next_attempt_at, added.task.started_at, added.task.wake_at)
    assert (NOON + 2000,) * 3 == times


@conforms
async def a_time_that_has_passed_is_now(bench: Bench) -> None:
    """A task without a time, or with an old one, is due at once."""
    added = await bench.add(task(1), task(2, next_attempt_at=NOON - 5))

    assert [NOON, NOON] == [answer.task.next_attempt_at for answer in added]
    assert [NOON, NOON] == [answer.task.started_at for answer in added]


@conforms
async def a_new_task_begins_afresh(bench: Bench) -> None:
    """State that a task carries when it is added is not looked at."""
    stale = task(
        status=Status.EXHAUSTED,
        reason="attempts",
        attempts=4,
        forgiven=2,
        previous_delay=1.5,
        restarted=1,
        last_kind="transient",
        worker="ghost",
        wake_at=NOON + 99,
        cancelling=True,
        replays=3,
        created_at=5,
        started_at=5,
        finished_at=5,
    )

    [added] = await bench.add(stale)

    fresh = task(created_at=NOON, next_attempt_at=NOON, started_at=NOON, wake_at=NOON)
    assert replace(fresh, version=added.task.version) == added.task == await bench.get(1)
    assert {Status.PENDING: 1} == await bench.counts()


@conforms
async def the_same_key_is_the_same_task(bench: Bench) -> None:
    """A key again, with the same fingerprint, is the first task, in its state of now."""
    await bench.add(task(1, key="k", fingerprint=b"p"))
    held = (await bench.claim()).tasks[0]

    [again] = await bench.add(task(2, key="k", fingerprint=b"p", content=b"as good"))

    assert (AddStatus.EXISTING, held, False) == (again.status, again.task, again.leased)
    assert await bench.store.get_task("acme", task_id(2)) is None
    assert {Status.IN_FLIGHT: 1} == await bench.counts()


@conforms
async def the_same_key_with_another_fingerprint_is_a_conflict(bench: Bench) -> None:
    """A conflict names the task that is stored, and changes nothing."""
    [first] = await bench.add(task(1, key="k", fingerprint=b"p"))

    [again] = await bench.add(task(2, key="k", fingerprint=b"q"))

    assert (AddStatus.CONFLICT, first.task) == (again.status, again.task)
    assert first.task == await bench.get(1)
    assert {Status.PENDING: 1} == await bench.counts()


@conforms
async def keys_are_those_of_a_tenant(bench: Bench) -> None:
    """One tenant's key says nothing about another's, nor about one that looks alike."""
    keys = ["k", "K", "k ", "k%", "k_", "k'", "kä", "ka\u0308", ""]
    added = await bench.add(
        *(task(number, key=key) for number, key in enumerate(keys)),
        task(99, tenant="beta", key="k"),
    )

    assert [AddStatus.ADDED] * 10 == [answer.status for answer in added]


@conforms
async def a_batch_is_as_its_tasks_one_by_one(bench: Bench) -> None:
    """Twice in a batch is as in two: the first is added, the others are told of it, in order."""
    answers = await bench.add(
        task(1, key="k", fingerprint=b"p"),
        task(2, key="other"),
        task(3, key="k", fingerprint=b"p"),
        task(4, key="k", fingerprint=b"q"),
    )

    assert [
        (AddStatus.ADDED, task_id(1)),
        (AddStatus.ADDED, task_id(2)),
        (AddStatus.EXISTING, task_id(1)),
        (AddStatus.CONFLICT, task_id(1)),
    ] == [(answer.status, answer.task.id) for answer in answers]
    assert {Status.PENDING: 2} == await bench.counts()
    assert 2 == (await bench.lane()).pending


@conforms
async def adding_again_changes_nothing(bench: Bench) -> None:
    """After a lost answer the same batch again comes to the same state, also after a crash."""
    batch = [NewTask(task(1), direct=True), NewTask(task(2), delay=500)]
    first = await bench.store.add(batch, LEASE)
    bench.clock.advance(7)
    await bench.reopen()

    again = await bench.store.add(batch, LEASE)

    assert [AddStatus.EXISTING] * 2 == [answer.status for answer in again]
    assert [answer.task for answer in first] == [answer.task for answer in again]
    assert {Status.PENDING: 1, Status.IN_FLIGHT: 1} == await bench.counts()


@conforms
async def a_key_is_taken_while_its_task_is_kept(bench: Bench) -> None:
    """A terminal task still holds its key; when the task is removed the key is free."""
    await bench.dead(1, key="k")
    [kept] = await bench.add(task(2, key="k", fingerprint=b"print 1"))
    assert (AddStatus.EXISTING, Status.EXHAUSTED) == (kept.status, kept.task.status)

    assert 1 == await bench.store.purge("acme", TaskFilter(), 10)

    [free] = await bench.add(task(2, key="k"))
    assert AddStatus.ADDED is free.status


@conforms
async def a_quota_bounds_the_live_tasks_of_each_tenant(bench: Bench) -> None:
    """What exceeds the quota is FULL, told in order; another tenant has its own."""
    answers = await bench.add(task(1), task(2), task(3), task(4, tenant="beta"), task(5), quota=2)

    assert [
        AddStatus.ADDED,
        AddStatus.ADDED,
        AddStatus.FULL,
        AddStatus.ADDED,
        AddStatus.FULL,
    ] == [answer.status for answer in answers]
    assert task_id(3) == answers[2].task.id
    assert await bench.store.get_task("acme", task_id(3)) is None
    assert {Status.PENDING: 2} == await bench.counts("acme")


@conforms
async def a_quota_counts_what_is_live(bench: Bench) -> None:
    """A task in flight counts, a terminal one does not; a key that is there is told first."""
    held = await bench.leased(1)
    assert AddStatus.FULL is (await bench.add(task(2), quota=1))[0].status
    assert AddStatus.EXISTING is (await bench.add(task(1), quota=1))[0].status
    conflict = task(1, fingerprint=b"other")
    assert AddStatus.CONFLICT is (await bench.add(conflict, quota=1))[0].status

    assert [FinishStatus.DONE] == await bench.store.finish([stop(held)])

    assert AddStatus.ADDED is (await bench.add(task(2), quota=1))[0].status
    assert AddStatus.FULL is (await bench.add(task(3), quota=0))[0].status
    assert AddStatus.ADDED is (await bench.add(task(3)))[0].status


@conforms
async def a_direct_task_is_leased_to_who_adds_it(bench: Bench) -> None:
    """Due within the horizon it comes leased, until the lease's end, and no other gets it."""
    [now, soon] = await bench.store.add(
        [NewTask(task(1), direct=True), NewTask(task(2), delay=HORIZON, direct=True)], LEASE
    )

    for answer, due in ((now, NOON), (soon, NOON + HORIZON)):
        assert (AddStatus.ADDED, True) == (answer.status, answer.leased)
        assert Status.IN_FLIGHT is answer.task.status
        assert "worker" == answer.task.worker
        assert (due, due + LEASE.length) == (answer.task.next_attempt_at, answer.task.wake_at)
    assert now.task == await bench.get(1)
    assert [] == (await bench.claim(OTHER)).tasks
    assert {Status.IN_FLIGHT: 2} == await bench.counts()
    assert [FinishStatus.DONE] == await bench.store.finish([stop(now.task)])


@conforms
async def a_direct_task_beyond_the_horizon_waits(bench: Bench) -> None:
    """A task that is due later, that was not to be direct, or that has no lease is PENDING."""
    later, plain = await bench.store.add(
        [NewTask(task(1), delay=HORIZON + 1, direct=True), NewTask(task(2))], LEASE
    )
    [without] = await bench.store.add([NewTask(task(3), direct=True)])

    for answer in (later, plain, without):
        assert (AddStatus.ADDED, False) == (answer.status, answer.leased)
        assert (Status.PENDING, None) == (answer.task.status, answer.task.worker)
    assert [2, 3] == numbers((await bench.claim()).tasks)


@conforms
async def a_lane_that_is_not_open_gives_no_direct_lease(bench: Bench) -> None:
    """Paused, parked and half-open lanes keep a direct task waiting; a resumed one does not."""

    async def leased(number: int) -> bool:
        [answer] = await bench.store.add([NewTask(task(number), direct=True)], LEASE)
        assert AddStatus.ADDED is answer.status
        return answer.leased

    await bench.store.park(LANE, NOON + SECOND, probes=5, opened=1)
    assert not await leased(1)
    bench.clock.advance(SECOND)
    assert not await leased(2)
    await bench.store.resume(LANE)
    assert await leased(3)
    await bench.store.pause(LANE)
    assert not await leased(4)


@conforms
async def an_existing_task_is_not_leased_again(bench: Bench) -> None:
    """A direct task whose key is there is not leased, though it waits and is due."""
    await bench.add(task(1))

    [again] = await bench.store.add([NewTask(task(1), direct=True)], LEASE)

    assert (AddStatus.EXISTING, False) == (again.status, again.leased)
    assert Status.PENDING is again.task.status


@conforms
async def nothing_to_add_is_nothing(bench: Bench) -> None:
    """An empty batch has an empty answer."""
    assert [] == await bench.store.add([], LEASE, quota=1)
