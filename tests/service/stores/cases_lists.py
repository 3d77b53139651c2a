"""What every store must do: lists of tasks and attempts, in pages."""

from __future__ import annotations

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status, Task
from tarry.service.store import TaskFilter
from tests.service.stores.bench import (
    HOUR,
    LANE,
    LEASE,
    NOON,
    Bench,
    conforms,
    numbers,
    task,
    task_id,
    wait,
)

UNKNOWN = [task_id(999), "nope", "", "a" * 5000, "' OR 1=1 --", "\x00", "%", "kä"]


async def listed(bench: Bench, query: TaskFilter, limit: int, tenant: str = "acme") -> list[Task]:
    """List all pages."""
    found: list[Task] = []
    cursor = None
    for _ in range(200):
        page = await bench.store.list_tasks(tenant, query, cursor=cursor, limit=limit)
        assert len(page.items) <= limit
        found += page.items
        cursor = page.cursor
        if cursor is None:
            return found
    raise AssertionError("the list does not end")


@conforms
async def tasks_are_listed_newest_first(bench: Bench) -> None:
    """In pages of any size, without gaps or repeats, and only those of the tenant."""
    for number in range(10):
        await bench.add(task(number), task(100 + number, tenant="beta"))
        bench.clock.advance(number % 2)

    for limit in (1, 3, 10, 100):
        assert list(range(9, -1, -1)) == numbers(await listed(bench, TaskFilter(), limit))
    assert list(range(109, 99, -1)) == numbers(await listed(bench, TaskFilter(), 4, "beta"))
    assert [] == await listed(bench, TaskFilter(), 10, "nobody")


@conforms
async def a_list_holds_still_while_tasks_are_added(bench: Bench) -> None:
    """What was there when paging began comes exactly once, whatever is added or changes state."""
    await bench.add(*(task(number) for number in range(9)))
    page = await bench.store.list_tasks("acme", TaskFilter(), limit=3)
    found = numbers(page.items)
    added = 20
    while page.cursor is not None:
        await bench.add(task(added))
        added += 1
        bench.clock.advance(1)
        await bench.claim(limit=1)
        await bench.reopen()
        page = await bench.store.list_tasks("acme", TaskFilter(), cursor=page.cursor, limit=3)
        found += numbers(page.items)

    assert list(range(8, -1, -1)) == found


@conforms
async def filters_and_their_combinations(bench: Bench) -> None:
    """Status, policy, lane and reason, each alone and together."""
    for number in range(24):
        fields = {"host": "ab"[number % 2], "policy_id": ("default", "webhook")[number // 2 % 2]}
        if number % 3 == 0:
            await bench.dead(number, "attempts" if number % 4 else "budget", **fields)
        else:
            await bench.add(task(number, **fields, next_attempt_at=NOON + HOUR))
    everything = await listed(bench, TaskFilter(), 100)
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
        assert expected == await listed(bench, query, 5)


@conforms
async def a_malformed_cursor_is_an_error(bench: Bench) -> None:
    """What no page has given is refused, and said to be the cursor."""
    await bench.add(task(1), task(2))
    for cursor in ("", "nope", "-1", "1.5", "☃", "' OR 1=1", "9" * 500, "\x00"):
        with pytest.raises(ConfigurationError, match="cursor"):
            await bench.store.list_tasks("acme", TaskFilter(), cursor=cursor)


@conforms
async def the_attempt_log_has_pages(bench: Bench) -> None:
    """From the attempt after a number, up to a limit, in order."""
    held = await bench.leased(1)
    for _ in range(6):
        await bench.store.finish([wait(held, bench.clock.now, keep=LEASE)])
        held = await bench.get(1)

    async def page(after: int, limit: int) -> list[int]:
        rows = await bench.store.list_attempts("acme", held.id, after=after, limit=limit)
        return [row.number for row in rows]

    assert [1, 2, 3, 4, 5, 6] == await page(0, 100)
    assert [1, 2] == await page(0, 2)
    assert [3, 4] == await page(2, 2)
    assert [6] == await page(5, 10)
    assert [] == await page(6, 10)
