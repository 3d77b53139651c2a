"""The store in PostgreSQL: partitions by day."""

from __future__ import annotations

from tarry.service.store import NewTask, Retention
from tarry.service.stores.postgres import PostgresTaskStore
from tests.integration.postgres_store import new_schema_url, open_store
from tests.service.stores.harness import (
    DAY_MS,
    LEASE,
    START_MS,
    ManualClock,
    exhausted_result,
    success_result,
    task,
)

RETENTION = Retention(succeeded_ms=7 * DAY_MS, exhausted_ms=30 * DAY_MS)
FIRST_DAY = START_MS // DAY_MS


async def count_rows(store: PostgresTaskStore, table: str) -> int:
    """Return the number of rows of a table."""
    return int(await store.database.fetch_value("SELECT count(*) FROM tarry." + table))  # noqa: S608 - a test


async def list_days(store: PostgresTaskStore) -> list[int]:
    """Return the days that have partitions, counted from the first day of the test."""
    rows = await store.database.fetch(
        "SELECT relname FROM pg_inherits JOIN pg_class AS c ON c.oid = inhrelid "
        "WHERE inhparent = 'tarry.attempt'::regclass AND relname <> 'attempt_default'"
    )
    return sorted(int(row[0].removeprefix("attempt_day")) - FIRST_DAY for row in rows)


async def test_a_partition_is_dropped_after_its_tasks(postgres_dsn: str) -> None:
    """Rows of a day are dropped with its partition; a dead letter of that day is moved before."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        clock = store.database.clock
        assert isinstance(clock, ManualClock)
        assert list(range(8)) == await list_days(store)
        new = [NewTask(task(number), lease_on_add=True) for number in range(1, 4)]
        leased = [result.task for result in await store.add(new, LEASE)]
        await store.finish([success_result(leased[0]), success_result(leased[1])])
        await store.finish([exhausted_result(leased[2])])
        assert 0 == await count_rows(store, "content_default")

        clock.advance(9 * DAY_MS)
        assert 2 == (await store.sweep(RETENTION, 100)).removed_task_count

        assert 0 not in await list_days(store)
        assert 1 == await count_rows(store, "content")
        assert 1 == await count_rows(store, "attempt")
        dead_letter = await store.get_task("acme", leased[2].id)
        assert dead_letter is not None
        assert leased[2].packed_content == dead_letter.packed_content
        assert 1 == len(await store.list_attempts("acme", leased[2].id))

        clock.advance(30 * DAY_MS)
        assert 1 == (await store.sweep(RETENTION, 100)).removed_task_count
        assert 0 == await count_rows(store, "content")
        assert 0 == await count_rows(store, "attempt")


async def test_tasks_without_a_partition_are_stored(postgres_dsn: str) -> None:
    """A day that has no partition uses the default partition, also when others are created."""
    async with open_store(new_schema_url(postgres_dsn)) as store:
        clock = store.database.clock
        assert isinstance(clock, ManualClock)
        clock.advance(20 * DAY_MS)
        await store.add([NewTask(task(1))])

        assert 1 == await count_rows(store, "content_default")
        await store.sweep(RETENTION, 100)
        assert 20 not in await list_days(store)
        assert 21 in await list_days(store)
        found = await store.get_task("acme", task(1).id)
        assert found is not None
        assert found.created_at == clock.now
