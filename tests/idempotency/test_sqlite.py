"""The store in a SQLite file: the conformance cases on both loops, and the file itself."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from tarry.errors import ConfigurationError
from tarry.idempotency import SqliteStore, StoredResponse
from tests.idempotency.bench import together
from tests.idempotency.conformance import CASES, Bench, Case, name_of
from tests.idempotency.test_memory import Clock, Run, on_asyncio, on_trio

OK = StoredResponse(200, ((b"a", b"b"),), b"done")


@pytest.mark.parametrize("run", [on_asyncio, on_trio])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_conformance(case: Case, run: Run, tmp_path: Path) -> None:
    """The store does what every store must do."""

    async def main() -> None:
        clock = Clock()
        store, twin = (SqliteStore(tmp_path / "keys.db", clock=lambda: clock.now) for _ in "12")
        try:
            await case(Bench(store, twin, clock.advance))
        finally:
            await store.close()
            await twin.close()

    run(main)


def test_records_outlive_the_process(tmp_path: Path) -> None:
    """What was kept is there when the file is opened again."""

    async def main() -> None:
        first = SqliteStore(tmp_path / "keys.db")
        await first.claim("k", "print", "owner", 30.0)
        await first.finish("k", "owner", OK, 3600.0)
        await first.close()

        second = SqliteStore(str(tmp_path / "keys.db"))
        found = await second.claim("k", "print", "other", 30.0)
        await second.close()

        assert found is not None
        assert OK == found.record.response

    asyncio.run(main())


def test_time_is_the_wall_clock_of_the_machine(tmp_path: Path) -> None:
    """Without a clock the file has seconds since 1970, which mean the same to every process."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        before = time.time()
        await store.claim("k", "print", "owner", 30.0)
        found = await store.claim("k", "print", "other", 30.0)
        await store.close()

        assert found is not None
        # SQLite's clock ticks in milliseconds.
        assert before - 0.001 <= found.record.free_at - 30.0 <= found.now <= time.time() + 0.001

    asyncio.run(main())


def test_new_file_is_opened_by_many_at_once(tmp_path: Path) -> None:
    """Several stores that make one file at the same moment do not get into each other's way."""

    async def main() -> None:
        stores = [SqliteStore(tmp_path / "keys.db") for _ in range(8)]
        answers = await together(
            [
                lambda store=store: store.claim("k", "print", "owner", 30.0)  # type: ignore[misc]
                for store in stores
            ]
        )
        for store in stores:
            await store.close()

        assert 1 == answers.count(None)

    asyncio.run(main())


def test_file_is_durable_and_shared(tmp_path: Path) -> None:
    """The file is in WAL mode, has a version, and each commit waits for the disk."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        await store.sweep(1)
        level = store._thread.submit(
            lambda: store._connection.execute("PRAGMA synchronous").fetchone()  # type: ignore[union-attr]
        )
        assert (2,) == level.result()
        await store.close()

    asyncio.run(main())
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection:
        assert ("wal",) == connection.execute("PRAGMA journal_mode").fetchone()
        assert (1,) == connection.execute("PRAGMA user_version").fetchone()


def test_file_of_another_version_is_refused(tmp_path: Path) -> None:
    """A file that a newer tarry made, or somebody else, is left alone."""
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection:
        connection.execute("PRAGMA user_version = 7")

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        with pytest.raises(ConfigurationError, match="has version 7 of the schema"):
            await store.sweep(1)
        await store.close()

    asyncio.run(main())


def test_a_file_that_cannot_be_opened_is_an_error_each_time(tmp_path: Path) -> None:
    """A missing folder is told by each call, and the first call after it was made succeeds."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "folder" / "keys.db")
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError, match="unable to open"):
                await store.sweep(1)
        (tmp_path / "folder").mkdir()
        assert 0 == await store.sweep(1)
        await store.close()

    asyncio.run(main())


def test_a_writer_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    """A call does not wait for ever for another process, and works again once that is done."""

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db", busy_timeout=0.01)
        await store.sweep(1)
        with closing(sqlite3.connect(tmp_path / "keys.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                await store.claim("k", "print", "owner", 30.0)
        assert await store.claim("k", "print", "owner", 30.0) is None
        await store.close()

    asyncio.run(main())


def test_a_store_that_was_never_used_can_be_closed(tmp_path: Path) -> None:
    """The file is made at the first call and not before."""
    asyncio.run(SqliteStore(tmp_path / "keys.db").close())

    assert [] == list(tmp_path.iterdir())
