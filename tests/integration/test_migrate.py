"""Moving the tasks of a service between engines, with real servers."""

from __future__ import annotations

import asyncio
from itertools import count, pairwise
from pathlib import Path

import pytest

from tarry.service.app import make_store
from tarry.service.store import Store, StoredTaskFilter
from tarry.service.stores.postgres import PostgresTaskStore
from tarry.service.stores.redis import RedisTaskStore
from tarry.service.stores.sqlite import SqliteTaskStore
from tarry.service.transfer import NamedStore, move_records
from tests.cli.harness import create_store, run_command
from tests.integration.postgres_store import new_schema_url
from tests.service.stores.conformance.transfer import contents, fill
from tests.service.stores.harness import ManualClock, StoreHarness

_numbers = count()


def new_redis_url(redis_url: str) -> str:
    """Return the URL of a store that no other test uses, on a server with a Unix socket."""
    path = redis_url.removeprefix("unix://")
    return f"redis+unix://{path}?prefix=migrate-{next(_numbers)}&partitions=3"


def ignore_progress(_finished: int, _total: int | None, _description: str) -> None:
    """Do nothing."""


async def move_along(stores: list[Store], clock: ManualClock) -> None:
    """Fill the first store, move its records from store to store, and compare the contents."""
    harness = StoreHarness(lambda _clock: stores[0], clock)
    await harness.reopen()
    await fill(harness)
    expected = await contents(stores[0])
    for number, (source, target) in enumerate(pairwise(stores)):
        await target.open()
        result = await move_records(
            NamedStore(source, f"store:{number}"),
            NamedStore(target, f"store:{number + 1}"),
            ignore_progress,
        )
        assert 12 == result.counts["tasks"]
        assert expected == await contents(target)
        await source.close()
    await stores[-1].close()


def test_a_move_through_all_engines_keeps_all_contents(
    tmp_path: Path, postgres_dsn: str, redis_url: str
) -> None:
    """The contents stay the same in SQLite, PostgreSQL, Redis, PostgreSQL and SQLite."""
    clock = ManualClock()
    stores: list[Store] = [
        SqliteTaskStore(tmp_path / "a.db", clock=clock),
        PostgresTaskStore(new_schema_url(postgres_dsn), clock=clock),
        RedisTaskStore(new_redis_url(redis_url), clock=clock),
        PostgresTaskStore(new_schema_url(postgres_dsn), clock=clock),
        SqliteTaskStore(tmp_path / "b.db", clock=clock),
    ]
    asyncio.run(move_along(stores, clock))


@pytest.mark.parametrize("engine", ["postgres", "redis"])
def test_the_command_moves_to_a_server_and_back(
    engine: str, tmp_path: Path, postgres_dsn: str, redis_url: str
) -> None:
    """The command takes the URLs of the setting `store`; the source is marked in each engine."""
    server = new_schema_url(postgres_dsn) if engine == "postgres" else new_redis_url(redis_url)
    file, new_file = tmp_path / "a.db", tmp_path / "b.db"

    async def fill_file() -> None:
        harness = StoreHarness(lambda _clock: SqliteTaskStore(file))
        await harness.reopen()
        await harness.add_dead_letter(1)
        await harness.store.close()

    asyncio.run(fill_file())

    first = run_command("migrate", "--from", file, "--to", server, "--json")
    second = run_command("migrate", "--from", server, "--to", new_file, "--json")

    assert (0, 0) == (first.code, second.code), first.err + second.err
    assert first.json["counts"] == second.json["counts"]
    assert 1 == second.json["counts"]["tasks EXHAUSTED"]
    refused = run_command("keys", "list", "--store", server)
    assert 2 == refused.code
    assert f"were moved to sqlite:{new_file}: serve that store" in refused.err

    async def count_dead_letters() -> int:
        store = make_store(str(new_file))
        await store.open()
        page = await store.list_attempts_of_tasks("acme", StoredTaskFilter())
        await store.close()
        return len(page.items)

    assert 1 == asyncio.run(count_dead_letters())


def test_the_password_of_a_store_is_not_printed(tmp_path: Path, postgres_dsn: str) -> None:
    """All outputs of the command name a store without the password in its URL."""
    url = new_schema_url(postgres_dsn).replace("postgres@", "postgres:hidden@", 1)
    file = tmp_path / "a.db"
    create_store(url)

    moved = run_command("migrate", "--from", url, "--to", file)
    undone = run_command("migrate", "--from", url, "--undo")
    moved_again = run_command("migrate", "--from", url, "--to", file, "--json")
    undone_again = run_command("migrate", "--from", url, "--undo", "--json")
    refused = run_command("migrate", "--from", url, "--undo")

    assert [0, 0, 0, 0, 2] == [
        run.code for run in (moved, undone, moved_again, undone_again, refused)
    ], moved.err + undone.err + moved_again.err
    for run in (moved, undone, moved_again, undone_again, refused):
        assert "hidden" not in run.out + run.err
