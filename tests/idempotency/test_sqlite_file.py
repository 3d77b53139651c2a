"""The file of the store in SQLite: who may read it, whose it is, and how it is opened."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tarry.errors import ConfigurationError
from tarry.idempotency import SqliteStore
from tarry.runtime.clocks import system
from tests.idempotency.bench import together


def test_new_file_is_opened_by_many_at_once(tmp_path: Path) -> None:
    """Several stores that make one file at the same moment do not get into each other's way."""

    async def main() -> None:
        stores = [SqliteStore(tmp_path / "keys.db") for _ in range(8)]
        answers = await together(
            [
                partial(store.claim, "k", "print", str(number), 30.0)
                for number, store in enumerate(stores)
            ]
        )
        for store in stores:
            await store.close()

        assert 1 == answers.count(None)

    asyncio.run(main())


def modes_of(folder: Path) -> list[int]:
    """The rights to each file of a folder."""
    return [path.stat().st_mode & 0o777 for path in folder.iterdir()]


def test_file_is_durable_shared_and_private(tmp_path: Path) -> None:
    """WAL mode, marked as ours, each commit waits for the disk; only its owner may read it."""
    before = os.umask(0)

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        await store.sweep(1)
        assert store._executor is not None
        level = store._executor.submit(
            lambda: store._connection.execute("PRAGMA synchronous").fetchone()  # type: ignore[union-attr]
        )
        assert (2,) == level.result()
        assert [0o600] * 3 == modes_of(tmp_path)
        await store.close()

    try:
        asyncio.run(main())
    finally:
        os.umask(before)
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection:
        assert ("wal",) == connection.execute("PRAGMA journal_mode").fetchone()
        assert (1,) == connection.execute("PRAGMA user_version").fetchone()
        assert (0x74616964,) == connection.execute("PRAGMA application_id").fetchone()


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("PRAGMA user_version = 1", "is not a file of idempotency records"),
        ("PRAGMA application_id = 7", "is not a file of idempotency records"),
        ("CREATE TABLE orders (id)", "is not a file of idempotency records"),
        ("PRAGMA application_id = 1952541028; PRAGMA user_version = 7", "has schema version 7"),
    ],
)
def test_file_of_somebody_else_is_refused(tmp_path: Path, statement: str, words: str) -> None:
    """A database of the application's, or of a newer tarry, is left as it is."""
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection:
        connection.executescript(statement)
    content = (tmp_path / "keys.db").read_bytes()

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        with pytest.raises(ConfigurationError, match=words):
            await store.sweep(1)
        await store.close()

    asyncio.run(main())
    assert content == (tmp_path / "keys.db").read_bytes()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (5, "path must name a file, got 5"),
        (None, "path must name a file, got None"),
        ("/no/such/folder/keys.db", "create /no/such/folder first"),
    ],
)
def test_mistakes_are_told_when_the_store_is_made(path: Any, words: str) -> None:
    """Not by every request later."""
    with pytest.raises(ConfigurationError, match=words):
        SqliteStore(path)


def test_a_file_that_cannot_be_opened_is_an_error_each_time(tmp_path: Path) -> None:
    """What is in the way is told by each call, and the first call after it is gone succeeds."""
    (tmp_path / "keys.db").mkdir()

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        for _ in range(2):
            with pytest.raises(OSError, match="directory"):
                await store.sweep(1)
        (tmp_path / "keys.db").rmdir()
        assert 0 == await store.sweep(1)
        await store.close()

    asyncio.run(main())


def test_records_in_memory_make_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own name for a database in memory is understood."""
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        store = SqliteStore(":memory:")
        assert await store.claim("k", "print", "owner", 30.0) is None
        await store.close()

    asyncio.run(main())
    assert [] == list(tmp_path.iterdir())


def test_a_busy_file_is_opened_a_little_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file that another process holds is tried again: its timeout does not help then."""
    other = sqlite3.connect(tmp_path / "keys.db", check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    waits: list[float] = []

    def wait(seconds: float, _cancel: object) -> None:
        waits.append(seconds)
        other.close()

    monkeypatch.setattr(system, "sleep", wait)

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db", busy_timeout=0.01)
        assert 0 == await store.sweep(1)
        await store.close()

    asyncio.run(main())
    assert 1 == len(waits)


def test_a_store_that_was_never_used_can_be_closed(tmp_path: Path) -> None:
    """The file is made at the first call and not before."""
    asyncio.run(SqliteStore(tmp_path / "keys.db").close())

    assert [] == list(tmp_path.iterdir())
