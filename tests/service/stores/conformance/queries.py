"""Conformance: queries, cancel and retry now."""

from __future__ import annotations

from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status, Task
from tarry.service.store import (
    MAX_PAGE_BYTES,
    CancelStatus,
    FinishStatus,
    Release,
    RetryNowStatus,
    StoredTaskFilter,
)
from tests.service.stores.harness import (
    DAY_MS,
    HOUR_MS,
    LANE,
    LEASE,
    OTHER_LEASE,
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

UNKNOWN_IDS = [task_id(999), "unknown", "", "a" * 5000, "' OR 1=1 --", "\x00", "%", "kä"]


@conformance_case
async def ping_returns_the_stores_time(harness: StoreHarness) -> None:
    """A ping returns the store's time."""
    assert START_MS == await harness.store.ping()
    harness.clock.advance(7)
    assert START_MS + 7 == await harness.store.ping()


@conformance_case
async def one_of_several_stores_leads(harness: StoreHarness) -> None:
    """The first store leads until it is closed; then another one leads."""
    first = harness.store
    assert await first.try_lead()
    second = await harness.reopen()
    if second is not first:  # data in memory has one store
        assert [False, True] == [await store.try_lead() for store in (second, first)]
        await first.close()
    assert await second.try_lead()


@conformance_case
async def an_unknown_id_is_none(harness: StoreHarness) -> None:
    """Unknown and malformed ids return None or an empty list, and raise no error."""
    await harness.add(task(1))
    for unknown in UNKNOWN_IDS:
        assert await harness.store.get_task("acme", unknown) is None
        assert [] == await harness.store.list_attempts("acme", unknown)
        assert await harness.store.cancel("acme", unknown) is None
        assert await harness.store.retry_now("acme", unknown) is None
    assert {Status.PENDING: 1} == await harness.counts()


@conformance_case
async def tasks_of_another_tenant_are_invisible(harness: StoreHarness) -> None:
    """No call for one tenant reads or changes the tasks of another."""
    dead = await harness.add_dead_letter(1)
    [pending] = await harness.add(task(2, next_attempt_at=START_MS + HOUR_MS))
    store = harness.store

    for number in (1, 2):
        assert await store.get_task("beta", task_id(number)) is None
        assert [] == await store.list_attempts("beta", task_id(number))
        assert await store.cancel("beta", task_id(number)) is None
        assert await store.retry_now("beta", task_id(number)) is None
    assert [] == (await store.list_tasks("beta", StoredTaskFilter())).items
    assert [] == (await store.list_tasks("beta", StoredTaskFilter(lane=LANE))).items
    assert 0 == await store.delete_dead_letters("beta", [dead.id])
    assert {} == await store.last_attempts("beta", [dead.id])
    assert {} == await harness.counts("beta")
    assert [] == await store.attempts_per_minute("beta", since=0)

    assert (dead, pending.task) == (await harness.get_task(1), await harness.get_task(2))


# --- cancel ---------------------------------------------------------------------------------------


@conformance_case
async def a_pending_task_is_cancelled_at_once(harness: StoreHarness) -> None:
    """A PENDING task is CANCELLED at once, and is not claimed."""
    [added] = await harness.add(task(1))
    harness.clock.advance(5)

    assert CancelStatus.CANCELLED is await harness.store.cancel("acme", task_id(1))

    finished = await harness.get_task(1)
    assert (Status.CANCELLED, START_MS + 5) == (finished.status, finished.finished_at)
    assert added.task.version + 1 == finished.version
    await harness.reopen()
    assert [] == (await harness.claim()).tasks
    assert {Status.CANCELLED: 1} == await harness.counts()
    assert 0 == (await harness.get_lane()).pending


@conformance_case
async def cancelling_an_in_flight_task_is_a_request(harness: StoreHarness) -> None:
    """A cancel request keeps the version of the task, so that its result is accepted."""
    leased = await harness.lease_new_task(1)

    for _ in range(2):
        assert CancelStatus.REQUESTED is await harness.store.cancel("acme", leased.id)

    current = await harness.get_task(1)
    assert (Status.IN_FLIGHT, True, leased.version) == (
        current.status,
        current.cancelling,
        current.version,
    )
    assert [FinishStatus.CANCELLED] == await harness.store.finish([exhausted_result(leased)])


@conformance_case
async def cancelling_a_lease_before_its_due_time_is_a_request(harness: StoreHarness) -> None:
    """A task that is leased before its due time can only be cancelled by its worker."""
    early_lease = await harness.lease_new_task(1, next_attempt_at=START_MS + 500)
    assert CancelStatus.REQUESTED is await harness.store.cancel("acme", early_lease.id)
    harness.clock.advance(HOUR_MS)
    assert CancelStatus.REQUESTED is await harness.store.cancel("acme", early_lease.id)


@conformance_case
async def a_finished_task_cannot_be_cancelled(harness: StoreHarness) -> None:
    """Cancelling a finished task changes nothing, also if it was cancelled before."""
    await harness.add_dead_letter(1)
    leased = await harness.lease_new_task(2)
    await harness.store.finish([success_result(leased)])
    await harness.add(task(3))
    await harness.store.cancel("acme", task_id(3))
    before = [await harness.get_task(number) for number in (1, 2, 3)]
    harness.clock.advance(5)

    for number in (1, 2, 3):
        assert CancelStatus.FINISHED is await harness.store.cancel("acme", task_id(number))

    assert before == [await harness.get_task(number) for number in (1, 2, 3)]


# --- retry now ------------------------------------------------------------------------------------


@conformance_case
async def retry_now_makes_a_pending_task_due(harness: StoreHarness) -> None:
    """`retry_now` makes a PENDING task due now; the task keeps its attempts."""
    leased = await harness.lease_new_task(1)
    await harness.store.finish([retry_result(leased, START_MS + HOUR_MS, previous_delay=2.5)])
    harness.clock.advance(5)

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", leased.id)

    due = await harness.get_task(1)
    assert (START_MS + 5, START_MS + 5, START_MS) == (
        due.next_attempt_at,
        due.wake_at,
        due.first_due_at,
    )
    assert (1, 0, 2.5, 0) == (
        due.attempts,
        due.attempts_before_replay,
        due.previous_delay,
        due.replays,
    )
    assert [1] == task_numbers((await harness.claim()).tasks)
    harness.clock.advance(HOUR_MS)
    assert [1] == task_numbers((await harness.claim(OTHER_LEASE)).tasks)
    assert {Status.IN_FLIGHT: 1} == await harness.counts()


@conformance_case
async def retry_now_keeps_an_earlier_due_time(harness: StoreHarness) -> None:
    """`retry_now` does not change a due time in the past."""
    await harness.add(task(1))
    harness.clock.advance(HOUR_MS)

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(1))
    assert START_MS == (await harness.get_task(1)).next_attempt_at


@conformance_case
async def retry_now_replays_a_dead_letter(harness: StoreHarness) -> None:
    """A replayed task keeps its log; its attempt count, backoff and total budget start again."""
    leased = await harness.lease_new_task(1)
    await harness.store.finish([exhausted_result(leased, previous_delay=1.0, backoff_offset=2)])
    harness.clock.advance(HOUR_MS)
    now = harness.clock.now

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", leased.id)

    replayed = await harness.get_task(1)
    assert (Status.PENDING, None, None) == (replayed.status, replayed.reason, replayed.finished_at)
    assert (1, 1, 1) == (replayed.attempts, replayed.attempts_before_replay, replayed.replays)
    assert (None, 0, None) == (
        replayed.previous_delay,
        replayed.backoff_offset,
        replayed.last_outcome_kind,
    )
    assert (now, now, now) == (replayed.next_attempt_at, replayed.first_due_at, replayed.wake_at)
    assert (leased.key, leased.packed_content, START_MS) == (
        replayed.key,
        replayed.packed_content,
        replayed.created_at,
    )
    lane = await harness.get_lane()
    assert (1, 0, 0) == (lane.pending, lane.in_flight, lane.exhausted)
    [leased] = (await harness.claim()).tasks
    await harness.store.finish([success_result(leased)])
    assert [1, 2] == [
        attempt.attempt_number for attempt in await harness.store.list_attempts("acme", leased.id)
    ]


@conformance_case
async def retry_now_does_not_change_in_flight_and_finished_tasks(harness: StoreHarness) -> None:
    """`retry_now` does not change tasks that are IN_FLIGHT or SUCCEEDED."""
    await harness.add(task(1), task(2), task(3, next_attempt_at=START_MS + 500))
    first, _, _ = (await harness.claim()).tasks
    await harness.store.finish([success_result(first)])
    before = [await harness.get_task(number) for number in (1, 2, 3)]

    results = [await harness.store.retry_now("acme", task_id(number)) for number in (1, 2, 3)]

    assert [
        RetryNowStatus.SUCCEEDED,
        RetryNowStatus.IN_FLIGHT,
        RetryNowStatus.IN_FLIGHT,
    ] == results
    assert before == [await harness.get_task(number) for number in (1, 2, 3)]


@conformance_case
async def retry_now_replays_a_cancelled_task(harness: StoreHarness) -> None:
    """A cancelled task that is retried is PENDING again, and its next result is not cancelled."""
    leased = await harness.lease_new_task(1)
    await harness.store.cancel("acme", leased.id)
    await harness.store.finish([exhausted_result(leased)])
    harness.clock.advance(HOUR_MS)

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", leased.id)

    replayed = await harness.get_task(1)
    assert (Status.PENDING, False, None) == (
        replayed.status,
        replayed.cancelling,
        replayed.finished_at,
    )
    assert (1, 1, 1) == (replayed.attempts, replayed.attempts_before_replay, replayed.replays)
    [leased] = (await harness.claim()).tasks
    retry_at = harness.clock.now + HOUR_MS
    assert [FinishStatus.APPLIED] == await harness.store.finish([retry_result(leased, retry_at)])
    assert {Status.PENDING: 1} == await harness.counts()


@conformance_case
async def retry_now_does_not_unpark_a_lane(harness: StoreHarness) -> None:
    """`retry_now` makes a task of a parked lane due, but the task is not claimed."""
    await harness.add(task(1, next_attempt_at=START_MS + HOUR_MS))
    await harness.store.park(LANE, START_MS + 5000, probes=1, consecutive_opens=1)

    assert RetryNowStatus.DUE is await harness.store.retry_now("acme", task_id(1))
    assert [] == (await harness.claim()).tasks


async def list_all(
    harness: StoreHarness, query: StoredTaskFilter, limit: int, tenant: str = "acme"
) -> list[Task]:
    """Return the tasks of all pages."""
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
    """Pages of any size have no gaps and no duplicates, and only tasks of the tenant."""
    for number in range(10):
        await harness.add(task(number), task(100 + number, tenant="beta"))
        harness.clock.advance(number % 2)

    for limit in (1, 3, 10, 100):
        assert list(range(9, -1, -1)) == task_numbers(
            await list_all(harness, StoredTaskFilter(), limit)
        )
    assert list(range(109, 99, -1)) == task_numbers(
        await list_all(harness, StoredTaskFilter(), 4, "beta")
    )
    assert [] == await list_all(harness, StoredTaskFilter(), 10, "unknown")


@conformance_case
async def a_list_is_stable_while_tasks_are_added(harness: StoreHarness) -> None:
    """Tasks that exist when the first page is read are listed exactly once."""
    await harness.add(*(task(number) for number in range(9)))
    page = await harness.store.list_tasks("acme", StoredTaskFilter(), limit=3)
    found = task_numbers(page.items)
    new_number = 20
    while page.cursor is not None:
        await harness.add(task(new_number))
        new_number += 1
        harness.clock.advance(1)
        await harness.claim(limit=1)
        await harness.reopen()
        page = await harness.store.list_tasks(
            "acme", StoredTaskFilter(), cursor=page.cursor, limit=3
        )
        found += task_numbers(page.items)

    assert list(range(8, -1, -1)) == found


@conformance_case
async def pages_of_large_tasks_are_short(harness: StoreHarness) -> None:
    """A page ends with the task that reaches the limit in bytes, and the next page continues."""
    content = bytes(MAX_PAGE_BYTES // 4)
    for number in range(10):
        await harness.add(task(number, packed_content=content))
    for query in (
        StoredTaskFilter(),
        StoredTaskFilter(status=Status.PENDING),
        StoredTaskFilter(lane=LANE),
    ):
        pages = [await harness.store.list_tasks("acme", query, limit=1000)]
        while pages[-1].cursor is not None:
            pages.append(
                await harness.store.list_tasks("acme", query, cursor=pages[-1].cursor, limit=1000)
            )
        assert [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]] == [task_numbers(page.items) for page in pages]


@conformance_case
async def a_task_above_the_limit_of_a_page_is_listed(harness: StoreHarness) -> None:
    """A page has at least one task."""
    for number in range(3):
        await harness.add(task(number, packed_content=bytes(MAX_PAGE_BYTES + 1)))
    assert [2, 1, 0] == task_numbers(await list_all(harness, StoredTaskFilter(), 1000))


@conformance_case
async def filters_can_be_combined(harness: StoreHarness) -> None:
    """Tasks can be filtered by any combination of status, policy, lane and reason."""
    for number in range(24):
        fields = {"host": "ab"[number % 2], "policy_id": ("default", "webhook")[number // 2 % 2]}
        if number % 3 == 0:
            await harness.add_dead_letter(number, "attempts" if number % 4 else "budget", **fields)
        else:
            await harness.add(task(number, **fields, next_attempt_at=START_MS + HOUR_MS))
    all_tasks = await list_all(harness, StoredTaskFilter(), 100)
    assert 24 == len(all_tasks)
    queries = [
        StoredTaskFilter(status=status, policy_id=policy, lane=lane, reason=reason)
        for status in (None, Status.PENDING, Status.EXHAUSTED, Status.SUCCEEDED)
        for policy in (None, "webhook", "unknown")
        for lane in (None, LANE, "acme/https:unknown:443")
        for reason in (None, "budget", "unknown")
    ]

    for query in queries:
        expected = [
            found
            for found in all_tasks
            if query.status in {None, found.status}
            and query.policy_id in {None, found.policy_id}
            and query.lane in {None, found.lane}
            and query.reason in {None, found.reason}
        ]
        assert expected == await list_all(harness, query, 5)


@conformance_case
async def tasks_are_found_by_key_and_lane_prefix(harness: StoreHarness) -> None:
    """A key matches one task of the tenant; a prefix matches all lanes that start with it."""
    await harness.add(task(1, "a"), task(2, "ab"), task(3, "b"), task(4, "a", "beta", key="k"))
    await harness.add(task(5, "b", key="k"))

    async def list_numbers(**fields: Any) -> list[int]:
        return task_numbers(await list_all(harness, StoredTaskFilter(**fields), 10))

    assert [5] == await list_numbers(key="k")
    assert [] == await list_numbers(key="k", status=Status.CANCELLED)
    assert [] == await list_numbers(key="unknown")
    assert [2, 1] == await list_numbers(lane_prefix="acme/https:a")
    assert [1] == await list_numbers(lane_prefix="acme/https:a.example:443")
    assert [] == await list_numbers(lane_prefix="acme/https:a", lane="acme/https:b.example:443")
    assert [] == await list_numbers(lane_prefix="beta/")


@conformance_case
async def tasks_are_found_by_time(harness: StoreHarness) -> None:
    """The limits of a window are part of it; a window of `finished_at` has no unfinished task."""
    for number in range(5):
        await harness.add_dead_letter(2 * number)
        await harness.add(task(2 * number + 1, next_attempt_at=START_MS + 30 * DAY_MS))
        harness.clock.advance(HOUR_MS)

    async def list_numbers(**fields: Any) -> list[int]:
        return task_numbers(await list_all(harness, StoredTaskFilter(**fields), 2))

    first, last = START_MS + HOUR_MS, START_MS + 3 * HOUR_MS
    assert [7, 6, 5, 4, 3, 2] == await list_numbers(created_from=first, created_until=last)
    assert [9, 8, 7, 6] == await list_numbers(created_from=last)
    assert [5, 4, 3, 2] == await list_numbers(created_from=first, created_until=last - 1)
    assert [] == await list_numbers(created_from=last + 1, created_until=last + 2)
    assert [6, 4, 2] == await list_numbers(finished_from=first, finished_until=last)
    assert [2, 0] == await list_numbers(finished_until=last - HOUR_MS - 1)
    assert [8] == await list_numbers(finished_from=last + 1, created_until=last + DAY_MS)


@conformance_case
async def a_small_step_of_the_clock_hides_no_task(harness: StoreHarness) -> None:
    """A window of creation times is exact, although the clock was set back by a few seconds."""
    for number, offset in enumerate((0, 10_000, -5_000, -5_000, 20_000)):
        harness.clock.now += offset
        await harness.add(task(number))
    created_at = [(await harness.get_task(number)).created_at for number in range(5)]

    for start, end in ((START_MS, START_MS), (START_MS + 5_000, START_MS + 9_999)):
        expected = [n for n in (4, 3, 2, 1, 0) if start <= created_at[n] <= end]
        query = StoredTaskFilter(created_from=start, created_until=end)
        assert expected == task_numbers(await list_all(harness, query, 2))


@conformance_case
async def live_tasks_can_be_listed(harness: StoreHarness) -> None:
    """`is_live` matches PENDING and IN_FLIGHT tasks, and can be combined with a status."""
    await harness.lease_new_task(1)
    await harness.add_dead_letter(2)
    await harness.add(task(3), task(4))
    await harness.store.cancel("acme", task_id(4))

    live = StoredTaskFilter(is_live=True)
    assert [3, 1] == task_numbers(await list_all(harness, live, 1))
    pending = StoredTaskFilter(is_live=True, status=Status.PENDING)
    assert [3] == task_numbers(await list_all(harness, pending, 1))
    assert [] == await list_all(harness, StoredTaskFilter(is_live=True, status=Status.EXHAUSTED), 1)
    assert 2 == await harness.store.count_tasks("acme", live)


@conformance_case
async def tasks_can_be_listed_oldest_first(harness: StoreHarness) -> None:
    """Both orders have the same pages in reverse; the last page has no cursor."""
    for number in range(6):
        await harness.add_dead_letter(number, "attempts" if number % 2 else "budget")
    for query in (
        StoredTaskFilter(),
        StoredTaskFilter(reason="attempts"),
        StoredTaskFilter(status=Status.EXHAUSTED),
    ):
        expected = task_numbers(await list_all(harness, query, 100))[::-1]
        found: list[int] = []
        cursor = None
        for _ in range(len(expected) // 3):
            page = await harness.store.list_tasks(
                "acme", query, cursor=cursor, limit=3, oldest_first=True
            )
            found += task_numbers(page.items)
            cursor = page.cursor
        assert (expected, None) == (found, cursor)
        assert len(expected) == await harness.store.count_tasks("acme", query)


@conformance_case
async def functions_of_a_filter_select_tasks(harness: StoreHarness) -> None:
    """They are called with the last attempt and the content, for tasks that match other fields."""
    for number in range(1, 5):
        await harness.add_dead_letter(number, "attempts" if number % 2 else "budget")
    for number in range(5, 9):
        await harness.add(task(number, packed_content=b"odd" if number % 2 else b"even"))
    contents: list[bytes] = []

    def is_odd(content: bytes) -> bool:
        contents.append(content)
        return content == b"odd"

    odd = StoredTaskFilter(status=Status.PENDING, matches_content=is_odd)
    assert [7, 5] == task_numbers(await list_all(harness, odd, 1))
    assert {b"odd", b"even"} == set(contents)
    assert 2 == await harness.store.count_tasks("acme", odd)
    page = await harness.store.list_tasks("acme", odd, limit=1, oldest_first=True)
    assert [5] == task_numbers(page.items)
    attempted = StoredTaskFilter(
        reason="budget", matches_attempt=lambda attempt: attempt.attempt_number == 1
    )
    assert [4, 2] == task_numbers(await list_all(harness, attempted, 1))
    assert 0 == await harness.store.count_tasks(
        "acme", StoredTaskFilter(matches_attempt=lambda attempt: attempt.attempt_number == 2)
    )
    neither = StoredTaskFilter(matches_attempt=lambda _: True, matches_content=is_odd)
    assert [] == await list_all(harness, neither, 1)


@conformance_case
async def the_last_attempts_are_read_together(harness: StoreHarness) -> None:
    """The last attempt of each task is returned by id, also after a replay and a lost attempt."""
    leased = await harness.lease_new_task(1)
    await harness.store.finish([retry_result(leased, harness.clock.now, renewed_lease=LEASE)])
    await harness.store.finish([success_result(await harness.get_task(1))])
    await harness.lease_new_task(2)
    await harness.add_dead_letter(3)
    await harness.add(task(4, next_attempt_at=START_MS + 30 * DAY_MS))
    harness.clock.advance(HOUR_MS)
    await harness.claim(OTHER_LEASE)
    await harness.store.retry_now("acme", task_id(3))
    ids = [*map(task_id, (1, 2, 3, 4, 99)), "unknown"]

    attempts = await harness.store.last_attempts("acme", ids)

    assert {task_id(1): 2, task_id(2): 1, task_id(3): 1} == {
        found_id: attempt.attempt_number for found_id, attempt in attempts.items()
    }
    assert "lost" == attempts[task_id(2)].outcome


@conformance_case
async def attempts_of_many_tasks_have_pages(harness: StoreHarness) -> None:
    """Attempts are listed by task, newest task first, in pages of any size."""
    for number in range(1, 6):
        leased = await harness.lease_new_task(number, host="ab"[number % 2])
        for _ in range(number - 1):
            await harness.store.finish([retry_result(leased, START_MS, renewed_lease=LEASE)])
            leased = await harness.get_task(number)
        await harness.store.cancel("acme", leased.id)
        await harness.store.release([Release(leased)])
    await harness.add_dead_letter(7, tenant="beta")
    expected = [(number, n + 1) for number in range(5, 1, -1) for n in range(number - 1)]

    async def list_numbers(task_filter: StoredTaskFilter, limit: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        cursor = None
        for _ in range(50):
            page = await harness.store.list_attempts_of_tasks(
                "acme", task_filter, cursor=cursor, limit=limit
            )
            assert len(page.items) <= limit
            found += [(int(found_id[-12:], 16), log.attempt_number) for found_id, log in page.items]
            cursor = page.cursor
            if cursor is None:
                return found
        raise AssertionError("the list does not end")

    for limit in (1, 2, 3, 10, 100):
        assert expected == await list_numbers(StoredTaskFilter(), limit)
    in_lane = [(number, n) for number, n in expected if number % 2 == 0]
    assert in_lane == await list_numbers(StoredTaskFilter(lane=LANE), 2)
    assert [] == await list_numbers(StoredTaskFilter(status=Status.EXHAUSTED), 2)


@conformance_case
async def a_malformed_cursor_is_an_error(harness: StoreHarness) -> None:
    """A cursor that no page has returned raises an error that names the cursor."""
    await harness.add(task(1), task(2))
    for cursor in ("", "unknown", "-1", "1.5", "☃", "' OR 1=1", "9" * 500, "\x00"):
        with pytest.raises(ConfigurationError, match="cursor"):
            await harness.store.list_attempts_of_tasks("acme", StoredTaskFilter(), cursor=cursor)
        with pytest.raises(ConfigurationError, match="cursor"):
            await harness.store.list_tasks("acme", StoredTaskFilter(), cursor=cursor)


@conformance_case
async def the_attempt_log_has_pages(harness: StoreHarness) -> None:
    """A page of attempts starts after a given number, and has a limit."""
    leased = await harness.lease_new_task(1)
    for _ in range(6):
        await harness.store.finish([retry_result(leased, harness.clock.now, renewed_lease=LEASE)])
        leased = await harness.get_task(1)

    async def list_numbers(after: int, limit: int) -> list[int]:
        attempts = await harness.store.list_attempts("acme", leased.id, after=after, limit=limit)
        return [attempt.attempt_number for attempt in attempts]

    assert [1, 2, 3, 4, 5, 6] == await list_numbers(0, 100)
    assert [1, 2] == await list_numbers(0, 2)
    assert [3, 4] == await list_numbers(2, 2)
    assert [6] == await list_numbers(5, 10)
    assert [] == await list_numbers(6, 10)


@conformance_case
async def pages_of_large_attempts_are_short(harness: StoreHarness) -> None:
    """A page of attempts ends with the attempt that reaches the limit in bytes."""
    leased = await harness.lease_new_task(1)
    for _ in range(3):
        result = retry_result(leased, harness.clock.now, renewed_lease=LEASE)
        assert result.attempt is not None
        result.attempt.response_excerpt = "x" * (MAX_PAGE_BYTES // 2)
        await harness.store.finish([result])
        leased = await harness.get_task(1)

    pages = [
        await harness.store.list_attempts("acme", leased.id, after=after, limit=1000)
        for after in (0, 2)
    ]

    assert [[1, 2], [3]] == [[attempt.attempt_number for attempt in page] for page in pages]
