"""What every store must do: what people ask of tasks, each tenant of its own."""

from __future__ import annotations

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status, Task
from tarry.service.store import CancelStatus, FinishStatus, RetryNowStatus, TaskFilter
from tests.service.stores.harness import (
    HOUR_MS,
    LANE,
    LEASE,
    OTHER_LEASE,
    START_MS,
    StoreHarness,
    conformance_case,
    dead_result,
    retry_result,
    success_result,
    task,
    task_id,
    task_numbers,
)

UNKNOWN = [task_id(999), "nope", "", "a" * 5000, "' OR 1=1 --", "\x00", "%", "kä"]


@conformance_case
async def the_ping_tells_the_time(harness: StoreHarness) -> None:
    """A ping returns the store's now."""
    assert START_MS == await harness.store.ping()
    harness.clock.advance(7)
    assert START_MS + 7 == await harness.store.ping()


@conformance_case
async def an_unknown_id_is_not_there(harness: StoreHarness) -> None:
    """Whatever it looks like, an id without a task is None or nothing, never an error."""
    await harness.add(task(1))
    for unknown in UNKNOWN:
        assert await harness.store.get_task("acme", unknown) is None
        assert [] == await harness.store.list_attempts("acme", unknown)
        assert await harness.store.cancel("acme", unknown) is None
        assert await harness.store.retry_now("acme", unknown) is None
    assert {Status.PENDING: 1} == await harness.counts()


@conformance_case
async def another_tenants_task_is_not_there(harness: StoreHarness) -> None:
    """No call by tenant sees or changes what is another's."""
    dead = await harness.dead(1)
    [waits] = await harness.add(task(2, next_attempt_at=START_MS + HOUR_MS))
    store = harness.store

    for number in (1, 2):
        assert await store.get_task("beta", task_id(number)) is None
        assert [] == await store.list_attempts("beta", task_id(number))
        assert await store.cancel("beta", task_id(number)) is None
        assert await store.retry_now("beta", task_id(number)) is None
    assert [] == (await store.list_tasks("beta", TaskFilter())).items
    assert [] == (await store.list_tasks("beta", TaskFilter(lane=LANE))).items
    assert 0 == await store.purge("beta", TaskFilter(), 10)
    assert {} == await harness.counts("beta")
    assert [] == await store.series("beta", since=0)

    assert (dead, waits.task) == (await harness.get(1), await harness.get(2))


# --- cancel ---------------------------------------------------------------------------------------


@conformance_case
async def a_waiting_task_is_cancelled_at_once(harness: StoreHarness) -> None:
    """It is terminal, and no claim gives it."""
    [added] = await harness.add(task(1))
    harness.clock.advance(5)

    assert CancelStatus.CANCELLED is await harness.store.cancel("acme", task_id(1))

    ended = await harness.get(1)
    assert (Status.CANCELLED, START_MS + 5) == (ended.status, ended.finished_at)
    assert added.task.version + 1 == ended.version
    await harness.reopen()
    assert [] == (await harness.claim()).tasks
    assert {Status.CANCELLED: 1} == await harness.counts()
    assert 0 == (await harness.lane()).pending


@conformance_case
async def a_task_in_flight_is_asked_to_end(harness: StoreHarness) -> None:
    """Its version stays, so that its attempt can be finished; asking again is the same."""
    held = await harness.leased(1)

    for _ in range(2):
        assert CancelStatus.REQUESTED is await harness.store.cancel("acme", held.id)

    asked = await harness.get(1)
    assert (Status.IN_FLIGHT, True, held.version) == (asked.status, asked.cancelling, asked.version)
    assert [FinishStatus.CANCELLED] == await harness.store.finish([dead_result(held)])


@conformance_case
async def a_lease_ahead_of_its_time_is_asked_to_end(harness: StoreHarness) -> None:
    """Its holder starts without asking, so the cancel is only requested; of a late one too."""
    ahead = await harness.leased(1, next_attempt_at=START_MS + 500)
    assert CancelStatus.REQUESTED is await harness.store.cancel("acme", ahead.id)
    harness.clock.advance(HOUR_MS)
    assert CancelStatus.REQUESTED is await harness.store.cancel("acme", ahead.id)


@conformance_case
async def a_terminal_task_stays(harness: StoreHarness) -> None:
    """What has ended cannot be cancelled, nor cancelled again."""
    await harness.dead(1)
    held = await harness.leased(2)
    await harness.store.finish([success_result(held)])
    await harness.add(task(3))
    await harness.store.cancel("acme", task_id(3))
    before = [await harness.get(number) for number in (1, 2, 3)]
    harness.clock.advance(5)

    for number in (1, 2, 3):
        assert CancelStatus.TERMINAL is await harness.store.cancel("acme", task_id(number))

    assert before == [await harness.get(number) for number in (1, 2, 3)]


# --- retry now ------------------------------------------------------------------------------------


@conformance_case
async def a_waiting_task_is_made_due(harness: StoreHarness) -> None:
    """Its time is now, it keeps its history, and it is claimed once."""
    held = await harness.leased(1)
    await harness.store.finish([retry_result(held, START_MS + HOUR_MS, previous_delay=2.5)])
    harness.clock.advance(5)

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", held.id)

    due = await harness.get(1)
    assert (START_MS + 5, START_MS + 5, START_MS) == (
        due.next_attempt_at,
        due.wake_at,
        due.started_at,
    )
    assert (1, 0, 2.5, 0) == (due.attempts, due.forgiven, due.previous_delay, due.replays)
    assert [1] == task_numbers((await harness.claim()).tasks)
    harness.clock.advance(HOUR_MS)
    assert [1] == task_numbers((await harness.claim(OTHER_LEASE)).tasks)
    assert {Status.IN_FLIGHT: 1} == await harness.counts()


@conformance_case
async def a_task_that_is_due_keeps_its_time(harness: StoreHarness) -> None:
    """A task that is late does not become younger by being asked for."""
    await harness.add(task(1))
    harness.clock.advance(HOUR_MS)

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(1))
    assert START_MS == (await harness.get(1)).next_attempt_at


@conformance_case
async def a_dead_letter_begins_anew(harness: StoreHarness) -> None:
    """Its attempts are forgiven but counted, its budget starts now, and its log goes on."""
    held = await harness.leased(1)
    await harness.store.finish([dead_result(held, previous_delay=1.0, restarted=2)])
    harness.clock.advance(HOUR_MS)
    now = harness.clock.now

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", held.id)

    anew = await harness.get(1)
    assert (Status.PENDING, None, None) == (anew.status, anew.reason, anew.finished_at)
    assert (1, 1, 1) == (anew.attempts, anew.forgiven, anew.replays)
    assert (None, 0, None) == (anew.previous_delay, anew.restarted, anew.last_kind)
    assert (now, now, now) == (anew.next_attempt_at, anew.started_at, anew.wake_at)
    assert (held.key, held.content, START_MS) == (anew.key, anew.content, anew.created_at)
    lane = await harness.lane()
    assert (1, 0, 0) == (lane.pending, lane.in_flight, lane.dead)
    [held] = (await harness.claim()).tasks
    await harness.store.finish([success_result(held)])
    assert [1, 2] == [row.number for row in await harness.store.list_attempts("acme", held.id)]


@conformance_case
async def what_runs_or_has_ended_is_left_alone(harness: StoreHarness) -> None:
    """A task in flight runs already; one that succeeded or was cancelled is finished."""
    await harness.add(task(1), task(2), task(3, next_attempt_at=START_MS + 500))
    one, _, _ = (await harness.claim()).tasks
    await harness.store.finish([success_result(one)])
    await harness.add(task(4))
    await harness.store.cancel("acme", task_id(4))
    before = [await harness.get(number) for number in (1, 2, 3, 4)]

    answers = [await harness.store.retry_now("acme", task_id(number)) for number in (1, 2, 3, 4)]

    assert [
        RetryNowStatus.FINISHED,
        RetryNowStatus.RUNNING,
        RetryNowStatus.RUNNING,
        RetryNowStatus.FINISHED,
    ] == answers
    assert before == [await harness.get(number) for number in (1, 2, 3, 4)]


@conformance_case
async def a_parked_lane_holds_a_retried_task(harness: StoreHarness) -> None:
    """To retry now is no way around a breaker."""
    await harness.add(task(1, next_attempt_at=START_MS + HOUR_MS))
    await harness.store.park(LANE, START_MS + 5000, probes=1, opened=1)

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(1))
    assert [] == (await harness.claim()).tasks


UNKNOWN = [task_id(999), "nope", "", "a" * 5000, "' OR 1=1 --", "\x00", "%", "kä"]


async def listed(
    harness: StoreHarness, query: TaskFilter, limit: int, tenant: str = "acme"
) -> list[Task]:
    """List all pages."""
    found: list[Task] = []
    cursor = None
    for _ in range(200):
        page = await harness.store.list_tasks(tenant, query, cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the list does not end")


@conformance_case
async def tasks_are_listed_newest_first(harness: StoreHarness) -> None:
    """In pages of any size, without gaps or repeats, and only those of the tenant."""
    for number in range(10):
        await harness.add(task(number), task(100 + number, tenant="beta"))
        harness.clock.advance(number % 2)

    for limit in (1, 3, 10, 100):
        assert list(range(9, -1, -1)) == task_numbers(await listed(harness, TaskFilter(), limit))
    assert list(range(109, 99, -1)) == task_numbers(await listed(harness, TaskFilter(), 4, "beta"))
    assert [] == await listed(harness, TaskFilter(), 10, "nobody")


@conformance_case
async def a_list_holds_still_while_tasks_are_added(harness: StoreHarness) -> None:
    """What was there when paging began comes exactly once, whatever is added or changes state."""
    await harness.add(*(task(number) for number in range(9)))
    page = await harness.store.list_tasks("acme", TaskFilter(), limit=3)
    found = task_numbers(page.items)
    added = 20
    while page.cursor is not None:
        await harness.add(task(added))
        added += 1
        harness.clock.advance(1)
        await harness.claim(limit=1)
        await harness.reopen()
        page = await harness.store.list_tasks("acme", TaskFilter(), cursor=page.cursor, limit=3)
        found += task_numbers(page.items)

    assert list(range(8, -1, -1)) == found


@conformance_case
async def filters_and_their_combinations(harness: StoreHarness) -> None:
    """Status, policy, lane and reason, each alone and together."""
    for number in range(24):
        fields = {"host": "ab"[number % 2], "policy_id": ("default", "webhook")[number // 2 % 2]}
        if number % 3 == 0:
            await harness.dead(number, "attempts" if number % 4 else "budget", **fields)
        else:
            await harness.add(task(number, **fields, next_attempt_at=START_MS + HOUR_MS))
    everything = await listed(harness, TaskFilter(), 100)
    assert 24 == len(everything)
    queries = [
        TaskFilter(status=status, policy_id=policy, lane=lane, reason=reason)
        for status in (None, Status.PENDING, Status.EXHAUSTED, Status.SUCCEEDED)
        for policy in (None, "webhook", "unknown")
        for lane in (None, LANE, "acme/https:unknown:443")
        for reason in (None, "budget", "unknown")
    ]

    for query in queries:
        expected = [
            one
            for one in everything
            if query.status in {None, one.status}
            and query.policy_id in {None, one.policy_id}
            and query.lane in {None, one.lane}
            and query.reason in {None, one.reason}
        ]
        assert expected == await listed(harness, query, 5)


@conformance_case
async def a_malformed_cursor_is_an_error(harness: StoreHarness) -> None:
    """What no page has given is refused, and said to be the cursor."""
    await harness.add(task(1), task(2))
    for cursor in ("", "nope", "-1", "1.5", "☃", "' OR 1=1", "9" * 500, "\x00"):
        with pytest.raises(ConfigurationError, match="cursor"):
            await harness.store.list_tasks("acme", TaskFilter(), cursor=cursor)


@conformance_case
async def the_attempt_log_has_pages(harness: StoreHarness) -> None:
    """From the attempt after a number, up to a limit, in order."""
    held = await harness.leased(1)
    for _ in range(6):
        await harness.store.finish([retry_result(held, harness.clock.now, keep=LEASE)])
        held = await harness.get(1)

    async def page(after: int, limit: int) -> list[int]:
        rows = await harness.store.list_attempts("acme", held.id, after=after, limit=limit)
        return [row.number for row in rows]

    assert [1, 2, 3, 4, 5, 6] == await page(0, 100)
    assert [1, 2] == await page(0, 2)
    assert [3, 4] == await page(2, 2)
    assert [6] == await page(5, 10)
    assert [] == await page(6, 10)
