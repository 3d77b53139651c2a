"""The store in PostgreSQL: the tables stay consistent while processes change them together."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from tarry.service.model import Status, Task
from tarry.service.store import LeaseTerms, NewTask, Release, Retention, StoredTaskFilter
from tarry.service.stores.postgres import PostgresTaskStore
from tests.integration.postgres_store import new_schema_url
from tests.service.stores.comparison import TENANTS, snapshot
from tests.service.stores.harness import (
    exhausted_result,
    retry_result,
    success_result,
    task,
    task_id,
)

STORE_COUNT = 3
WORKER_COUNT = 9
OPERATION_COUNT = 40
"""Operations of each worker."""
LANES = [f"{tenant}/https:h{number}.example:443" for tenant in TENANTS for number in range(3)]
INCONSISTENCIES = {
    "a lane with a wrong number of tasks": """
        SELECT count(*) FROM tarry.lane AS l WHERE unused <> (tasks = 0)
            OR tasks <> (SELECT count(*) FROM tarry.live AS s WHERE s.lane = l.id)
                + (SELECT count(*) FROM tarry.finished AS s WHERE s.lane = l.id)
    """,
    "a tenant with a wrong number of lanes": """
        SELECT count(*) FROM tarry.tenant AS t
        WHERE lanes <> (SELECT count(*) FROM tarry.lane AS l WHERE l.tenant = t.id)
    """,
    "a policy with a wrong number of tasks": """
        SELECT count(*) FROM tarry.policy_use AS u
        WHERE live_tasks <> (SELECT count(*) FROM tarry.live AS s WHERE s.policy = u.id)
            OR tasks <> live_tasks
                + (SELECT count(*) FROM tarry.finished AS s WHERE s.policy = u.id)
    """,
    "a key without exactly one task": """
        SELECT count(*) FROM tarry.task_key AS k
        WHERE (SELECT count(*) FROM tarry.live AS s WHERE s.seq = k.seq)
            + (SELECT count(*) FROM tarry.finished AS s WHERE s.seq = k.seq) <> 1
    """,
    "a task without a key": """
        SELECT count(*) FROM (
            SELECT seq FROM tarry.live UNION ALL SELECT seq FROM tarry.finished) AS s
        WHERE NOT EXISTS (SELECT 1 FROM tarry.task_key AS k WHERE k.seq = s.seq)
    """,
    "a lane that is visited too late": """
        SELECT count(*) FROM tarry.lane AS l
        CROSS JOIN LATERAL (SELECT min(wake_at) FILTER (WHERE queue < 2) AS due,
                min(wake_at) FILTER (WHERE queue = 2) AS lease_end
            FROM tarry.live AS s WHERE s.lane = l.id) AS s
        WHERE coalesce(l.due_at > s.due, s.due IS NOT NULL)
            OR coalesce(l.lease_end_at > s.lease_end, s.lease_end IS NOT NULL)
    """,
}
"""Queries that count inconsistent rows; each must return 0."""


class Worker:
    """Makes random calls of a store, as one task of a process does."""

    def __init__(self, number: int, store: PostgresTaskStore, leased: list[Task]) -> None:
        self._random = random.Random(number)
        self._store = store
        self._leased = leased
        self._terms = LeaseTerms(f"worker {number}", 200, 100)
        self._last_number = number * 10_000
        self._operations: list[Callable[[], Awaitable[object]]] = [
            *[self.add, self.claim, self.finish] * 3,
            *(self.release, self.cancel, self.retry, self.park, self.pause, self.sweep, self.purge),
        ]

    async def run(self) -> None:
        """Make the calls."""
        for _ in range(OPERATION_COUNT):
            await self._random.choice(self._operations)()

    def pop_leased(self, limit: int) -> list[Task]:
        """Remove and return some leased tasks, perhaps one of them twice."""
        count = min(limit, len(self._leased))
        return [self._leased.pop(self._random.randrange(len(self._leased))) for _ in range(count)]

    def new_task(self) -> NewTask:
        """Return a task with one of a few keys, so that some replace a cancelled task."""
        self._last_number += 1
        draw = self._random.randrange
        host, tenant = f"h{draw(3)}", self._random.choice(TENANTS)
        new = task(self._last_number, host, tenant, key=f"key {draw(150)}")
        return NewTask(new, self._random.choice([0, 0, 50]), lease_on_add=draw(2) == 0)

    async def add(self) -> None:
        """Add tasks with quotas or without."""
        new = [self.new_task() for _ in range(self._random.randint(1, 6))]
        quota, lane_quota = self._random.choice([(None, None), (40, 3), (10_000, 100)])
        results = await self._store.add(new, self._terms, quota=quota, lane_quota=lane_quota)
        self._leased += [result.task for result in results if result.leased]

    async def claim(self) -> None:
        """Claim tasks of all lanes."""
        self._leased += (await self._store.claim(self._terms, limit=12, per_lane=6)).tasks

    async def finish(self) -> None:
        """Finish tasks; the leases of some have expired."""
        leased = self.pop_leased(6)
        makers = (success_result, exhausted_result, lambda found: retry_result(found, 0))
        await self._store.finish([self._random.choice(makers)(found) for found in leased])

    async def release(self) -> None:
        """Release tasks."""
        await self._store.release([Release(found) for found in self.pop_leased(4)])

    async def cancel(self) -> None:
        """Cancel a task."""
        number = self._random.randint(self._last_number - 10, self._last_number)
        await self._store.cancel(self._random.choice(TENANTS), task_id(number))

    async def retry(self) -> None:
        """Retry a task now."""
        number = self._random.randint(self._last_number - 10, self._last_number)
        await self._store.retry_now(self._random.choice(TENANTS), task_id(number), quota=1000)

    async def park(self) -> None:
        """Park or unpark a lane."""
        lane = self._random.choice(LANES)
        if self._random.randrange(2):
            await self._store.park(lane, 0, probes=2, consecutive_opens=1)
        else:
            await self._store.unpark(lane)

    async def pause(self) -> None:
        """Pause and resume a lane, and use its retry budget."""
        lane = self._random.choice(LANES)
        await self._store.pause(lane)
        await self._store.add_to_budgets(dict.fromkeys(LANES, 1.0))
        await self._store.resume(lane)

    async def sweep(self) -> None:
        """Remove finished tasks and unused lanes."""
        await self._store.sweep(Retention(0, self._random.choice([0, 500])), 20)

    async def purge(self) -> None:
        """Delete dead letters."""
        tenant = self._random.choice(TENANTS)
        query = StoredTaskFilter(status=Status.EXHAUSTED)
        page = await self._store.list_tasks(tenant, query, limit=3)
        await self._store.delete_dead_letters(tenant, [found.id for found in page.items])


async def finish_all(store: PostgresTaskStore) -> None:
    """Finish all tasks that are left; each must be found by a claim."""
    terms = LeaseTerms("last worker", 10_000, 1000)
    for lane in LANES:
        await store.resume(lane)
    while True:
        claimed = await store.claim(terms, limit=100, per_lane=100)
        await store.finish([success_result(found) for found in claimed.tasks])
        if claimed.next_at is None:
            return
        await asyncio.sleep(min(0.2, (claimed.next_at - claimed.now) / 1000))


async def test_the_tables_stay_consistent(postgres_dsn: str) -> None:
    """After random calls of several processes, counters match, and no task is lost or locked."""
    url = f"{new_schema_url(postgres_dsn)}&pool_size=3"

    async with AsyncExitStack() as stack:
        stores = [PostgresTaskStore(url) for _ in range(STORE_COUNT)]
        for store in stores:
            stack.push_async_callback(store.close)
            await store.open()
        leased: list[Task] = []
        workers = [
            Worker(number, stores[number % STORE_COUNT], leased)
            for number in range(1, WORKER_COUNT + 1)
        ]
        await asyncio.gather(*(worker.run() for worker in workers))

        await snapshot(stores[0])  # checks the counters
        found = {
            name: await stores[0].database.fetch_value(query)
            for name, query in INCONSISTENCIES.items()
        }
        assert dict.fromkeys(INCONSISTENCIES, 0) == found
        await finish_all(stores[0])
        counts = (await stores[0].counters()).task_counts
        assert (0, 0) == (counts[Status.PENDING], counts[Status.IN_FLIGHT])
