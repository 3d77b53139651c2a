"""Upgrades of the tables in PostgreSQL, and processes of different versions on one store."""

from __future__ import annotations

import asyncio
from importlib import import_module

import pytest

from tarry.errors import ConfigurationError
from tarry.service.model import Status, WorkerRecord
from tarry.service.store import LeaseTerms, NewTask, Retention
from tarry.service.stores.postgres import PostgresStore, database, schema
from tests.integration.postgres_store import new_schema_url, run_on_store
from tests.service.stores.harness import DAY_MS, success_result, task

asyncpg = import_module("asyncpg")

LEASE = LeaseTerms("worker", 30_000, 1000)
ADD_COLUMNS = """
ALTER TABLE tarry.live ADD COLUMN added integer NOT NULL DEFAULT 7;
ALTER TABLE tarry.finished ADD COLUMN added integer NOT NULL DEFAULT 7;
ALTER TABLE tarry.content ADD COLUMN added integer NOT NULL DEFAULT 7;
ALTER TABLE tarry.lane ADD COLUMN added integer;
ALTER TABLE tarry.worker ADD COLUMN added integer;
"""
"""What a migration of a later version may do."""


async def open_and_close(url: str) -> None:
    """Open a store, which upgrades its tables."""
    store = PostgresStore(url)
    try:
        await store.open()
    finally:
        await store.close()


def test_a_newer_schema_is_rejected(postgres_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tarry does not start on tables that are not compatible; the error names both versions."""
    url, newest = new_schema_url(postgres_dsn), len(schema.MIGRATIONS)

    async def main() -> None:
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

    asyncio.run(main())


def test_an_older_process_continues_after_an_upgrade(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is open while a newer version upgrades the tables can still use them."""
    url = new_schema_url(postgres_dsn)

    async def main(store: PostgresStore) -> None:
        await store.add([NewTask(task(1))])
        with monkeypatch.context() as newer:
            newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, ADD_COLUMNS))
            await open_and_close(url)
        await store.add([NewTask(task(2))])
        leased = (await store.claim(LEASE, limit=2, per_lane=2)).tasks
        await store.finish([success_result(each) for each in leased])
        await store.record_worker(WorkerRecord(name="worker", host="host", pid=1))
        assert 1 == len(await store.list_workers())
        await store.sweep(Retention(DAY_MS, DAY_MS), 10)
        assert 2 == (await store.counters()).task_counts[Status.SUCCEEDED]

    run_on_store(url, main)


def test_a_migration_may_take_longer_than_a_call(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout of calls does not interrupt the upgrade of large tables."""
    monkeypatch.setattr(database, "CALL_TIMEOUT_S", 2.0)
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, "SELECT pg_sleep(2.5)"))

    async def main() -> None:
        opened = database.Database(new_schema_url(postgres_dsn))
        await opened.open()
        await opened.close()

    asyncio.run(main())


def test_a_failed_migration_is_rolled_back(
    postgres_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed migration changes nothing, and the tables can be used by the older version."""
    url = new_schema_url(postgres_dsn)

    async def fill(store: PostgresStore) -> None:
        await store.add([NewTask(task(1))])

    run_on_store(url, fill)
    with monkeypatch.context() as newer:
        newer.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, f"{ADD_COLUMNS} nonsense"))
        with pytest.raises(asyncpg.PostgresSyntaxError):
            asyncio.run(open_and_close(url))

    async def check(store: PostgresStore) -> None:
        assert 1 == (await store.counters()).task_counts[Status.PENDING]

    run_on_store(url, check)
