"""What every store must do: what people ask of tasks, each tenant of its own."""

from __future__ import annotations

from tarry.service.model import Status
from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus, TaskFilter
from tests.service.stores.bench import (
    HOUR,
    LANE,
    NOON,
    OTHER,
    Bench,
    conforms,
    numbers,
    stop,
    succeed,
    task,
    task_id,
    wait,
)

UNKNOWN = [task_id(999), "nope", "", "a" * 5000, "' OR 1=1 --", "\x00", "%", "kä"]


@conforms
async def the_ping_tells_the_time(bench: Bench) -> None:
    """A ping returns the store's now."""
    assert NOON == await bench.store.ping()
    bench.clock.advance(7)
    assert NOON + 7 == await bench.store.ping()


@conforms
async def an_unknown_id_is_not_there(bench: Bench) -> None:
    """Whatever it looks like, an id without a task is None or nothing, never an error."""
    await bench.add(task(1))
    for unknown in UNKNOWN:
        assert await bench.store.get_task("acme", unknown) is None
        assert [] == await bench.store.list_attempts("acme", unknown)
        assert await bench.store.cancel("acme", unknown) is None
        assert await bench.store.retry_now("acme", unknown) is None
    assert {Status.PENDING: 1} == await bench.counts()


@conforms
async def another_tenants_task_is_not_there(bench: Bench) -> None:
    """No call by tenant sees or changes what is another's."""
    dead = await bench.dead(1)
    [waits] = await bench.add(task(2, next_attempt_at=NOON + HOUR))
    store = bench.store

    for number in (1, 2):
        assert await store.get_task("beta", task_id(number)) is None
        assert [] == await store.list_attempts("beta", task_id(number))
        assert await store.cancel("beta", task_id(number)) is None
        assert await store.retry_now("beta", task_id(number)) is None
    assert [] == (await store.list_tasks("beta", TaskFilter())).items
    assert [] == (await store.list_tasks("beta", TaskFilter(lane=LANE))).items
    assert 0 == await store.purge("beta", TaskFilter(), 10)
    assert {} == await bench.counts("beta")
    assert [] == await store.series("beta", since=0)

    assert (dead, waits.task) == (await bench.get(1), await bench.get(2))


# --- cancel ---------------------------------------------------------------------------------------


@conforms
async def a_waiting_task_is_cancelled_at_once(bench: Bench) -> None:
    """It is terminal, and no claim gives it."""
    [added] = await bench.add(task(1))
    bench.clock.advance(5)

    assert CancelStatus.CANCELLED is await bench.store.cancel("acme", task_id(1))

    ended = await bench.get(1)
    assert (Status.CANCELLED, NOON + 5) == (ended.status, ended.finished_at)
    assert added.task.version + 1 == ended.version
    await bench.reopen()
    assert [] == (await bench.claim()).tasks
    assert {Status.CANCELLED: 1} == await bench.counts()
    assert 0 == (await bench.lane()).pending


@conforms
async def a_task_in_flight_is_asked_to_end(bench: Bench) -> None:
    """Its version stays, so that its attempt can be finished; asking again is the same."""
    held = await bench.leased(1)

    for _ in range(2):
        assert CancelStatus.REQUESTED is await bench.store.cancel("acme", held.id)

    asked = await bench.get(1)
    assert (Status.IN_FLIGHT, True, held.version) == (asked.status, asked.cancelling, asked.version)
    assert [FinishStatus.CANCELLED] == await bench.store.finish([stop(held)])


@conforms
async def a_lease_ahead_of_its_time_is_asked_to_end(bench: Bench) -> None:
    """Its holder starts without asking, so the cancel is only requested; of a late one too."""
    ahead = await bench.leased(1, next_attempt_at=NOON + 500)
    assert CancelStatus.REQUESTED is await bench.store.cancel("acme", ahead.id)
    bench.clock.advance(HOUR)
    assert CancelStatus.REQUESTED is await bench.store.cancel("acme", ahead.id)


@conforms
async def a_terminal_task_stays(bench: Bench) -> None:
    """What has ended cannot be cancelled, nor cancelled again."""
    await bench.dead(1)
    held = await bench.leased(2)
    await bench.store.finish([succeed(held)])
    await bench.add(task(3))
    await bench.store.cancel("acme", task_id(3))
    before = [await bench.get(number) for number in (1, 2, 3)]
    bench.clock.advance(5)

    for number in (1, 2, 3):
        assert CancelStatus.TERMINAL is await bench.store.cancel("acme", task_id(number))

    assert before == [await bench.get(number) for number in (1, 2, 3)]


# --- retry now ------------------------------------------------------------------------------------


@conforms
async def a_waiting_task_is_made_due(bench: Bench) -> None:
    """Its time is now, it keeps its history, and it is claimed once."""
    held = await bench.leased(1)
    await bench.store.finish([wait(held, NOON + HOUR, previous_delay=2.5)])
    bench.clock.advance(5)

    assert RetryNowStatus.DUE is await bench.store.retry_now("acme", held.id)

    due = await bench.get(1)
    assert (NOON + 5, NOON + 5, NOON) == (due.next_attempt_at, due.wake_at, due.started_at)
    assert (1, 0, 2.5, 0) == (due.attempts, due.forgiven, due.previous_delay, due.replays)
    assert [1] == numbers((await bench.claim()).tasks)
    bench.clock.advance(HOUR)
    assert [1] == numbers((await bench.claim(OTHER)).tasks)
    assert {Status.IN_FLIGHT: 1} == await bench.counts()


@conforms
async def a_task_that_is_due_keeps_its_time(bench: Bench) -> None:
    """A task that is late does not become younger by being asked for."""
    await bench.add(task(1))
    bench.clock.advance(HOUR)

    assert RetryNowStatus.DUE is await bench.store.retry_now("acme", task_id(1))
    assert NOON == (await bench.get(1)).next_attempt_at


@conforms
async def a_dead_letter_begins_anew(bench: Bench) -> None:
    """Its attempts are forgiven but counted, its budget starts now, and its log goes on."""
    held = await bench.leased(1)
    await bench.store.finish([stop(held, previous_delay=1.0, restarted=2)])
    bench.clock.advance(HOUR)
    now = bench.clock.now

    assert RetryNowStatus.DUE is await bench.store.retry_now("acme", held.id)

    anew = await bench.get(1)
    assert (Status.PENDING, None, None) == (anew.status, anew.reason, anew.finished_at)
    assert (1, 1, 1) == (anew.attempts, anew.forgiven, anew.replays)
    assert (None, 0, None) == (anew.previous_delay, anew.restarted, anew.last_kind)
    assert (now, now, now) == (anew.next_attempt_at, anew.started_at, anew.wake_at)
    assert (held.key, held.content, NOON) == (anew.key, anew.content, anew.created_at)
    lane = await bench.lane()
    assert (1, 0, 0) == (lane.pending, lane.in_flight, lane.dead)
    [held] = (await bench.claim()).tasks
    await bench.store.finish([succeed(held)])
    assert [1, 2] == [row.number for row in await bench.store.list_attempts("acme", held.id)]


@conforms
async def what_runs_or_has_ended_is_left_alone(bench: Bench) -> None:
    """A task in flight runs already; one that succeeded or was cancelled is finished."""
    await bench.add(task(1), task(2), task(3, next_attempt_at=NOON + 500))
    one, _, _ = (await bench.claim()).tasks
    await bench.store.finish([succeed(one)])
    await bench.add(task(4))
    await bench.store.cancel("acme", task_id(4))
    before = [await bench.get(number) for number in (1, 2, 3, 4)]

    answers = [await bench.store.retry_now("acme", task_id(number)) for number in (1, 2, 3, 4)]

    assert [
        RetryNowStatus.FINISHED,
        RetryNowStatus.RUNNING,
        RetryNowStatus.RUNNING,
        RetryNowStatus.FINISHED,
    ] == answers
    assert before == [await bench.get(number) for number in (1, 2, 3, 4)]


@conforms
async def a_parked_lane_holds_a_retried_task(bench: Bench) -> None:
    """To retry now is no way around a breaker."""
    await bench.add(task(1, next_attempt_at=NOON + HOUR))
    await bench.store.park(LANE, NOON + 5000, probes=1, opened=1)

    assert RetryNowStatus.DUE is await bench.store.retry_now("acme", task_id(1))
    assert [] == (await bench.claim()).tasks
