"""Query plans of the store in PostgreSQL: the cost of a call does not grow with what is stored.

The statements run inside functions, so their plans are observed by the statistics of PostgreSQL.
"""

from __future__ import annotations

import pytest

from tarry.service.model import Status, Task
from tarry.service.store import NewTask, Release, Retention, StoredTaskFilter
from tarry.service.stores.postgres import PostgresTaskStore
from tests.integration.postgres import connected
from tests.integration.postgres_store import new_schema_url, open_store
from tests.service.stores.harness import (
    DAY_MS,
    HOUR_MS,
    LEASE,
    OTHER_LEASE,
    ManualClock,
    exhausted_result,
    retry_result,
    success_result,
    task,
)

_FLUSH = "SELECT pg_stat_force_next_flush()"
_SEQUENTIAL_SCANS = """
SELECT relname, seq_scan FROM pg_stat_user_tables
WHERE relid IN ('tarry.live'::regclass, 'tarry.finished'::regclass, 'tarry.task_key'::regclass,
        'tarry.content_default'::regclass, 'tarry.attempt_default'::regclass,
        'tarry.lane'::regclass, 'tarry.tenant'::regclass, 'tarry.policy_use'::regclass)
"""
_ROWS_READ = """
SELECT sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint FROM pg_stat_user_tables
WHERE schemaname = (SELECT nspname FROM pg_class AS c JOIN pg_namespace AS n
    ON n.oid = c.relnamespace WHERE c.oid = 'tarry.live'::regclass)
"""


_ENTRIES_READ = """
SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelid = 'tarry.live_queue'::regclass
"""


async def sequential_scans(store: PostgresTaskStore) -> dict[str, int]:
    """Return the number of sequential scans of the tables that grow, by table."""
    await store.database.fetch(_FLUSH)
    return dict(await store.database.fetch(_SEQUENTIAL_SCANS))


async def rows_read(store: PostgresTaskStore) -> int:
    """Return how many rows of tables this store's only connection has read so far."""
    await store.database.fetch(_FLUSH)
    return int(await store.database.fetch_value(_ROWS_READ))


async def write_tasks(store: PostgresTaskStore, first_number: int) -> list[Task]:
    """Call the operations that change tasks, for ten tasks; return leased tasks."""
    clock = store.database.clock
    assert isinstance(clock, ManualClock)
    numbers = range(first_number, first_number + 10)
    new = [NewTask(task(n, f"h{n % 3}"), lease_on_add=n % 2 == 0) for n in numbers]
    await store.add(new, LEASE, quota=1_000_000, lane_quota=1000)
    leased = (await store.claim(LEASE, limit=5, per_lane=2)).tasks
    results = [
        success_result(leased[0]),
        exhausted_result(leased[1]),
        retry_result(leased[2], clock.now + 5, renewed_lease=LEASE),
        retry_result(leased[3], clock.now + HOUR_MS),
    ]
    await store.finish(results)
    await store.release([Release(leased[4])])
    await store.retry_now("acme", leased[1].id)
    await store.cancel("acme", leased[4].id)
    return leased


async def read_tasks(store: PostgresTaskStore, leased: list[Task]) -> None:
    """Call the operations that read tasks, and the retention."""
    await store.add([NewTask(leased[0])])
    await store.get_task("acme", leased[0].id)
    await store.list_attempts("acme", leased[0].id)
    await store.last_attempts("acme", [leased[0].id, leased[1].id])
    await store.list_tasks("acme", StoredTaskFilter(status=Status.SUCCEEDED), limit=5)
    await store.list_tasks("acme", StoredTaskFilter(), limit=5)
    await store.sweep(Retention(DAY_MS, DAY_MS), 10)


async def test_no_hot_statement_scans_a_table(postgres_dsn: str) -> None:
    """Adding, claiming and finishing use indexes, although the tables have no statistics."""
    async with open_store(f"{new_schema_url(postgres_dsn)}&pool_size=1") as store:
        before = await sequential_scans(store)  # by the creation of tables
        for first_number in range(0, 100, 10):
            await write_tasks(store, first_number)

        assert before == await sequential_scans(store)


@pytest.mark.parametrize("has_statistics", [True, False], ids=["analyzed", "not analyzed"])
async def test_the_cost_does_not_grow_with_waiting_tasks(
    postgres_dsn: str, has_statistics: bool
) -> None:
    """With 3,000 waiting tasks, calls read about as many rows as with 30."""
    async with open_store(f"{new_schema_url(postgres_dsn)}&pool_size=1") as store:
        clock = store.database.clock
        assert isinstance(clock, ManualClock)
        costs: list[int] = []
        for first_number, waiting in ((0, 30), (10_000, 3_000)):
            due = clock.now + HOUR_MS
            numbers = range(first_number, first_number + waiting)
            await store.add([NewTask(task(n, f"h{n % 3}", next_attempt_at=due)) for n in numbers])
            await store.add([NewTask(task(n + 5_000, f"h{n % 3}")) for n in numbers])
            await store.claim(OTHER_LEASE, limit=1, per_lane=1)
            if has_statistics:
                await store.database.fetch("ANALYZE")
            before = await rows_read(store)
            leased = await write_tasks(store, first_number + 9_000)
            if has_statistics:
                await read_tasks(store, leased)
            costs.append(await rows_read(store) - before)

        assert costs[1] < 1.5 * costs[0] + 200


async def test_a_claim_reads_few_rows_for_each_task(postgres_dsn: str) -> None:
    """A claim of 100 tasks out of 2,000 does not read other tasks of the tenant."""
    async with open_store(f"{new_schema_url(postgres_dsn)}&pool_size=1") as store:
        for first_number in range(0, 2_000, 200):
            numbers = range(first_number, first_number + 200)
            await store.add([NewTask(task(n, f"h{n % 10}")) for n in numbers])
        before = await rows_read(store)

        claimed = await store.claim(LEASE, limit=100, per_lane=100)

        assert 100 == len(claimed.tasks)
        assert await rows_read(store) - before < 20 * 100


_VERSIONS_READ = """
SELECT sum(s.heap_blks_hit + s.heap_blks_read + s.idx_blks_hit + s.idx_blks_read + i.entries)
FROM pg_statio_user_tables AS s CROSS JOIN LATERAL (
    SELECT sum(i.idx_tup_read) AS entries FROM pg_stat_user_indexes AS i WHERE i.relid = s.relid
) AS i
WHERE s.schemaname = $1
    AND s.relname IN ('lane', 'tenant', 'policy_use', 'lane_name', 'tenant_name')
"""


@pytest.mark.parametrize("is_analyzed", [True, False], ids=["analyzed", "not analyzed"])
async def test_a_long_transaction_does_not_make_calls_read_old_versions_of_lanes(
    postgres_dsn: str, is_analyzed: bool
) -> None:
    """Each call updates its lanes and tenant, but reads only the newest versions of these rows."""
    async with open_store(f"{new_schema_url(postgres_dsn)}&pool_size=1") as store:
        clock = store.database.clock
        assert isinstance(clock, ManualClock)
        due = clock.now + DAY_MS
        await store.add([NewTask(task(n, f"h{n}", next_attempt_at=due)) for n in range(2)])
        schema = store.database.schema.name
        costs: list[int] = []

        async def pass_tasks(first_number: int) -> None:
            for number in range(first_number, first_number + 50, 5):
                clock.advance(10)
                new = [NewTask(task(number + n, f"h{n % 2}")) for n in range(5)]
                await store.add(new, quota=1_000_000, lane_quota=1000)
                leased = (await store.claim(LEASE, limit=5, per_lane=5)).tasks
                await store.finish([success_result(found) for found in leased])
                await store.claim(LEASE, limit=5, per_lane=5)

        async with connected(postgres_dsn) as other:
            transaction = other.transaction(isolation="repeatable_read")
            await transaction.start()
            await other.fetch(store.database.sql("TABLE tarry.live"))
            for round_number in range(15):
                if is_analyzed:
                    await store.database.fetch("ANALYZE tarry.lane, tarry.tenant, tarry.policy_use")
                await store.database.fetch(_FLUSH)
                before = await store.database.fetch_value(_VERSIONS_READ, schema)
                await pass_tasks(100 + 50 * round_number)
                await store.database.fetch(_FLUSH)
                after = await store.database.fetch_value(_VERSIONS_READ, schema)
                costs.append(int(after - before))
            await transaction.rollback()

        assert max(costs[-3:]) < 1.5 * max(costs[1:4])


async def test_a_long_transaction_does_not_make_claims_slower(postgres_dsn: str) -> None:
    """Entries of finished tasks, which cannot be removed from the index, are not read again."""
    async with open_store(f"{new_schema_url(postgres_dsn)}&pool_size=1") as store:
        clock = store.database.clock
        assert isinstance(clock, ManualClock)
        entries: list[int] = []
        async with connected(postgres_dsn) as other:
            transaction = other.transaction(isolation="repeatable_read")
            await transaction.start()
            await other.fetch(store.database.sql("TABLE tarry.live"))
            for number in range(60):
                await store.database.fetch(_FLUSH)
                entries.append(await store.database.fetch_value(_ENTRIES_READ))
                clock.advance(10)
                await store.add([NewTask(task(10 * number + n)) for n in range(10)])
                leased = (await store.claim(LEASE, limit=10, per_lane=10)).tasks
                await store.finish([success_result(found) for found in leased])
            await transaction.rollback()

        first, last = entries[11] - entries[1], entries[-1] - entries[-11]
        assert last < 1.5 * first
