"""The store in PostgreSQL behind a real PgBouncer in transaction mode."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tarry.service.model import Status
from tarry.service.store import FinishStatus, LeaseTerms, NewTask
from tarry.service.stores.postgres import PostgresTaskStore
from tests.integration.postgres_store import new_schema_url
from tests.integration.servers import pgbouncer_server
from tests.integration.service import service, target
from tests.service.stores.harness import retry_result, success_result, task

POOL_SIZE = 2
STORE_COUNT, TASKS_PER_STORE = 3, 40


@pytest.fixture(scope="module")
def pgbouncer_dsn(postgres_dsn: str) -> Iterator[str]:
    """Run PgBouncer."""
    with pgbouncer_server(postgres_dsn, POOL_SIZE) as server:
        yield server.address


@pytest.mark.parametrize("options", ["", "&statement_cache=off&listen=off"])
async def test_stores_share_the_connections_of_a_pooler(pgbouncer_dsn: str, options: str) -> None:
    """More clients than connections add, claim and finish at the same time, without an error."""
    url = new_schema_url(pgbouncer_dsn) + options

    async def add_and_finish(store: PostgresTaskStore, number: int) -> None:
        first = number * TASKS_PER_STORE
        tasks = [task(n, f"h{n % 3}") for n in range(first, first + TASKS_PER_STORE)]
        await asyncio.gather(*(store.add([NewTask(each)]) for each in tasks))
        terms = LeaseTerms(f"worker {number}", 30_000, 1000)
        finished_count = 0
        while finished_count < TASKS_PER_STORE:
            claims = await asyncio.gather(
                *(store.claim(terms, limit=5, per_lane=5) for _ in range(4))
            )
            leased = [found for claim in claims for found in claim.tasks]
            results = [
                success_result(found) if found.attempts else retry_result(found, 0)
                for found in leased
            ]
            statuses = await asyncio.gather(*(store.finish([result]) for result in results))
            assert [[FinishStatus.APPLIED]] * len(results) == statuses
            finished_count += len(results)

    stores = [PostgresTaskStore(url) for _ in range(STORE_COUNT)]
    await asyncio.gather(*(store.open() for store in stores))
    try:
        assert all(store.database.is_pooled for store in stores)
        assert not any(store.database.can_listen for store in stores)
        await asyncio.gather(
            *(add_and_finish(store, number) for number, store in enumerate(stores))
        )
        counts = (await stores[0].counters()).task_counts
        assert STORE_COUNT * TASKS_PER_STORE == counts[Status.SUCCEEDED] + counts[Status.PENDING]
        clients = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        assert await stores[0].database.fetch_value(clients) <= POOL_SIZE
    finally:
        for store in stores:
            await store.close()


async def test_no_pooler_is_found_if_there_is_none(postgres_dsn: str) -> None:
    """A store that is connected to the server caches statements and listens."""
    store = PostgresTaskStore(new_schema_url(postgres_dsn))
    await store.open()
    assert not store.database.is_pooled
    assert store.database.can_listen
    await store.ping()
    prepared = "SELECT count(*) FROM pg_prepared_statements"
    assert await store.database.fetch_value(prepared) > 0
    await store.close()


def test_processes_behind_a_pooler_deliver_tasks(tmp_path: Path, pgbouncer_dsn: str) -> None:
    """A process accepts tasks and another one delivers them, without options in the URL."""
    folders = [tmp_path / role for role in ("api", "worker")]
    for folder in folders:
        folder.mkdir()
    url = new_schema_url(pgbouncer_dsn)
    with (
        target(lambda _path, number: 503 if number == 1 else 200) as receiver,
        service(folders[0], "--role", "api", store=url) as api,
        service(folders[1], "--role", "worker", store=url) as worker,
    ):
        policy = {"initialDelayMs": 50, "maxDelayMs": 100}
        tasks = [api.post(targetUrl=f"{receiver.url}/{n}", policy=policy) for n in range(10)]
        finished = [api.wait_until_finished(each["taskId"]) for each in tasks]
        assert {("SUCCEEDED", 2)} == {(each["status"], each["attemptNumber"]) for each in finished}
        assert 0 == worker.stop() == api.stop()
    for folder in folders:
        log = (folder / "log").read_text()
        assert "a connection pooler was found" in log
        assert "failing" not in log
