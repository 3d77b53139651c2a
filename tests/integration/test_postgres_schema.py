"""Upgrades of the tables in PostgreSQL, and processes of different versions on one store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status, WorkerRecord
from tarry.service.records.api_keys import find_api_key
from tarry.service.records.workers import list_workers, record_worker
from tarry.service.store import LeaseTerms, NewTask, Retention, StoreLost
from tarry.service.stores.postgres import PostgresTaskStore, database, schema
from tests.integration.postgres import connected
from tests.integration.postgres_store import new_schema_url, open_store, run_on_store
from tests.service.stores.harness import DAY_MS, success_result, task

asyncpg = import_module("asyncpg")

LEASE = LeaseTerms("worker", 30_000, 1000)
ADD_COLUMNS = """
ALTER TABLE tarry.live ADD COLUMN added integer NOT NULL DEFAULT 7;
ALTER TABLE tarry.finished ADD COLUMN added integer NOT NULL DEFAULT 7;
ALTER TABLE tarry.content ADD COLUMN added integer NOT NULL DEFAULT 7;
ALTER TABLE tarry.lane ADD COLUMN added integer;
ALTER TABLE tarry.record ADD COLUMN added integer;
"""
"""What a migration of a later version may do."""
WAIT_FOR_LOCK = """
DO $$ BEGIN
    WHILE NOT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted) LOOP
        PERFORM pg_sleep(0.01);
    END LOOP;
END $$
"""
CREATE_META = "CREATE TABLE tarry.meta (name text PRIMARY KEY, value bigint NOT NULL)"
LOCK_MIGRATIONS = f"SELECT pg_advisory_xact_lock({schema._MIGRATION_LOCK}, hashtext($1))"
WAIT_FOR_BOTH = """
DO $$ BEGIN
    WHILE (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted) < 2 LOOP
        PERFORM pg_sleep(0.01);
    END LOOP;
END $$
"""


async def open_and_close(url: str) -> None:
    """Open a store, which upgrades its tables."""
    store = PostgresTaskStore(url)
    try:
        await store.open()
    finally:
        await store.close()


async def test_a_newer_schema_is_rejected(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tarry does not start on tables that are not compatible; the error names both versions."""
    url, newest = new_schema_url(postgres_dsn), schema.newest_version()

    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ADD_COLUMNS))
        newer.setattr(schema, "COMPATIBLE_VERSION", newest + 1)
        await open_and_close(url)
    message = (
        f"have version {newest + 1}, but this tarry supports up to version {newest}: "
        "use the newer tarry that wrote them"
    )
    with pytest.raises(ConfigurationError, match=message):
        await open_and_close(url)


async def test_an_older_process_continues_after_an_upgrade(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is open while a newer version upgrades the tables can still use them."""
    url = new_schema_url(postgres_dsn)

    async with open_store(url) as store:
        await store.add([NewTask(task(1))])
        with monkeypatch.context() as newer:
            newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ADD_COLUMNS))
            await open_and_close(url)
        await store.add([NewTask(task(2))])
        leased = (await store.claim(LEASE, limit=2, per_lane=2)).tasks
        await store.finish([success_result(each) for each in leased])
        await record_worker(store, WorkerRecord(name="worker", host="host", pid=1))
        assert 1 == len(await list_workers(store))
        await store.sweep(Retention(DAY_MS, DAY_MS), 10)
        assert 2 == (await store.counters()).task_counts[Status.SUCCEEDED]


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
async def test_a_process_that_waited_for_the_lock_finds_the_tables(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    """A process creates no tables if another has created them while it waited for the lock.

    PostgreSQL keeps names that it has not found in a cache. A migration with many tables usually
    makes the server clear it, so this one has a single table.
    """
    monkeypatch.setattr(schema, "MIGRATIONS", (CREATE_META,))
    tables = schema.Schema(database.parse_url(new_schema_url(postgres_dsn)).schema)

    settings = {"default_transaction_isolation": isolation}
    async with (
        connected(postgres_dsn) as holder,
        connected(postgres_dsn, **settings) as first,
        connected(postgres_dsn, **settings) as second,
    ):
        async with holder.transaction():
            await holder.execute(LOCK_MIGRATIONS, tables.name)
            upgrades = [asyncio.create_task(tables.upgrade(each)) for each in (first, second)]
            await holder.execute(WAIT_FOR_BOTH)
        await asyncio.gather(*upgrades)


def test_processes_that_start_together_create_the_tables_once(postgres_dsn: str) -> None:
    """All of several processes that start on an empty database can use it."""

    async def start_together() -> None:
        url = new_schema_url(postgres_dsn)
        opened = [database.Database(url) for _ in range(6)]
        await asyncio.gather(*(each.open() for each in opened))
        for each in opened:
            assert 0 == await each.fetch_value("SELECT count(*) FROM tarry.live")
            await each.close()

    for _ in range(8):
        asyncio.run(start_together())


async def test_a_migration_may_take_longer_than_a_call(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout of calls does not interrupt the upgrade of large tables."""
    monkeypatch.setattr(database, "CALL_TIMEOUT_S", 2.0)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "SELECT pg_sleep(2.5)"))

    opened = database.Database(new_schema_url(postgres_dsn))
    await opened.open()
    await opened.close()


def test_a_failed_migration_is_rolled_back(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed migration changes nothing, and the tables can be used by the older version."""
    url = new_schema_url(postgres_dsn)

    async def fill(store: PostgresTaskStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(url, fill)
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, f"{ADD_COLUMNS} nonsense"))
        with pytest.raises(asyncpg.PostgresSyntaxError):
            asyncio.run(open_and_close(url))

    async def check(store: PostgresTaskStore) -> None:
        assert 1 == (await store.counters()).task_counts[Status.PENDING]

    run_on_store(url, check)


async def test_a_migration_does_not_deadlock_with_calls(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration gives up its locks if it waits for a transaction that may wait for them."""
    url = new_schema_url(postgres_dsn)

    async with open_store(url) as store:
        async with connected(postgres_dsn) as other:
            transaction = other.transaction()
            await transaction.start()
            await other.fetch(store.database.sql("TABLE tarry.lane"))
            with monkeypatch.context() as newer:
                newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ADD_COLUMNS))
                upgrade = asyncio.create_task(open_and_close(url))
                await store.database.fetch(WAIT_FOR_LOCK)
                await other.execute("SET LOCAL deadlock_timeout = '30s'")  # the other is aborted
                await other.fetch(store.database.sql("TABLE tarry.live"))
                await transaction.commit()
                await upgrade
        version = "SELECT value FROM tarry.meta WHERE name = 'schema_version'"
        assert schema.newest_version() + 1 == await store.database.fetch_value(version)


async def test_an_old_schema_is_rejected(postgres_dsn: str) -> None:
    """Tables of a version that was never released cannot be used; the error says what to do."""
    url, oldest = new_schema_url(postgres_dsn), schema.newest_version()

    async with open_store(url) as store:
        await store.database.fetch(
            "UPDATE tarry.meta SET value = $1 WHERE name LIKE '%_version'", oldest - 1
        )
        message = f"have version {oldest - 1}, but this tarry supports versions from {oldest} only"
        with pytest.raises(ConfigurationError, match=message):
            await open_and_close(url)


@pytest.mark.parametrize("loss", ["DROP SCHEMA {} CASCADE", "TRUNCATE {}.meta"])
async def test_tables_that_were_recreated_are_noticed(postgres_dsn: str, loss: str) -> None:
    """A process finds that its tables were replaced or emptied, and does not use them.

    It works again after a restart, or when the rows of the table have been restored.
    """
    url = new_schema_url(postgres_dsn)
    old, new = PostgresTaskStore(url), PostgresTaskStore(url)
    await old.open()
    await old.ping()
    name = old.database.schema.name
    async with connected(postgres_dsn) as connection:
        rows = await connection.fetch(f'SELECT name, value FROM "{name}".meta')  # noqa: S608
        await connection.execute(loss.format(f'"{name}"'))
    if "DROP" in loss:
        await new.open()
        await new.close()
    message = f"tables in schema {name} were emptied or recreated"
    worker = WorkerRecord(name="worker", host="host", pid=1, role="all")
    calls: list[Callable[[], Awaitable[object]]] = [
        old.ping,
        lambda: old.add([NewTask(task(1))]),
        lambda: find_api_key(old, b"digest"),
        lambda: record_worker(old, worker),
    ]
    for call in calls:
        with pytest.raises(StoreLost, match=message):
            await call()
    if "DROP" in loss:
        await old.close()
        await old.open()
        assert 0 == (await old.counters()).task_counts[Status.PENDING]
    else:
        async with connected(postgres_dsn) as connection:
            insert = f'INSERT INTO "{name}".meta VALUES ($1, $2)'  # noqa: S608
            await connection.executemany(insert, [tuple(row) for row in rows])
    await old.ping()
    await old.add([NewTask(task(1))])
    await old.close()
