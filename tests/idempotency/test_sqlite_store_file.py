"""The file of the SQLite store: permissions, format and opening."""

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
from tarry.runtime.effects import effects
from tests.idempotency.conformance_harness import run_concurrently


async def test_concurrent_stores_create_the_file(tmp_path: Path) -> None:
    """Stores can create the same file concurrently, and one of their claims gets the key."""
    stores = [SqliteStore(tmp_path / "keys.db") for _ in range(8)]
    results = await run_concurrently(
        [
            partial(store.claim, "k", "print", str(number), 30.0)
            for number, store in enumerate(stores)
        ]
    )
    for store in stores:
        await store.close()

    assert 1 == results.count(None)


def file_modes(folder: Path) -> list[int]:
    """Return the permissions of each file in a folder."""
    return [path.stat().st_mode & 0o777 for path in folder.iterdir()]


def test_file_mode_and_pragmas(tmp_path: Path) -> None:
    """The file uses WAL with full sync and has an application id; only its owner may read it."""
    previous_umask = os.umask(0)

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        await store.sweep(1)
        assert store._executor is not None
        sync_level = store._executor.submit(
            lambda: store._connection.execute("PRAGMA synchronous").fetchone()  # type: ignore[union-attr]
        )
        assert (2,) == sync_level.result()
        assert [0o600] * 3 == file_modes(tmp_path)
        await store.close()

    try:
        asyncio.run(main())
    finally:
        os.umask(previous_umask)
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection:
        assert ("wal",) == connection.execute("PRAGMA journal_mode").fetchone()
        assert (1,) == connection.execute("PRAGMA user_version").fetchone()
        assert (0x74616964,) == connection.execute("PRAGMA application_id").fetchone()


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("PRAGMA user_version = 1", "is not a file of idempotency records"),
        ("PRAGMA application_id = 7", "is not a file of idempotency records"),
        ("CREATE TABLE orders (id)", "is not a file of idempotency records"),
        ("PRAGMA application_id = 1952541028; PRAGMA user_version = 7", "has schema version 7"),
    ],
)
def test_other_database_raises(tmp_path: Path, statement: str, message: str) -> None:
    """The database of another application, or of a newer tarry, raises and is not changed."""
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection:
        connection.executescript(statement)
    content = (tmp_path / "keys.db").read_bytes()

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db")
        with pytest.raises(ConfigurationError, match=message):
            await store.sweep(1)
        await store.close()

    asyncio.run(main())
    assert content == (tmp_path / "keys.db").read_bytes()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (5, "path must be the path of a file, got 5"),
        (None, "path must be the path of a file, got None"),
        ("/no/such/folder/keys.db", "create /no/such/folder first"),
    ],
)
def test_invalid_path_raises(path: Any, message: str) -> None:
    """An invalid path raises when the store is created."""
    with pytest.raises(ConfigurationError, match=message):
        SqliteStore(path)


@pytest.mark.parametrize("path", ["postgres//u:s3cret@h/db", "rediss:u:s3cret@h", "//:s3cret@h/x"])
def test_url_of_a_server_is_not_a_path(path: str) -> None:
    """The error names the stores on a server, and does not show the password."""
    with pytest.raises(ConfigurationError, match="use PostgresStore or RedisStore") as raised:
        SqliteStore(path)
    assert "s3cret" not in str(raised.value)


async def test_file_that_cannot_be_opened_raises_each_time(tmp_path: Path) -> None:
    """Each call raises as long as the file cannot be opened; the next call succeeds."""
    (tmp_path / "keys.db").mkdir()

    store = SqliteStore(tmp_path / "keys.db")
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            await store.sweep(1)
    (tmp_path / "keys.db").rmdir()
    assert 0 == await store.sweep(1)
    await store.close()


def test_in_memory_database_creates_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path ":memory:" opens a database in memory."""
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        store = SqliteStore(":memory:")
        assert await store.claim("k", "print", "owner", 30.0) is None
        await store.close()

    asyncio.run(main())
    assert [] == list(tmp_path.iterdir())


def test_opening_a_locked_file_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a new file that another connection has locked is retried after a wait."""
    other_connection = sqlite3.connect(tmp_path / "keys.db", check_same_thread=False)
    other_connection.execute("BEGIN EXCLUSIVE")
    waits: list[float] = []

    def unlock(seconds: float, _cancel: object) -> None:
        waits.append(seconds)
        other_connection.close()

    monkeypatch.setattr(effects, "blocking_sleep", unlock)

    async def main() -> None:
        store = SqliteStore(tmp_path / "keys.db", busy_timeout=0.01)
        assert 0 == await store.sweep(1)
        await store.close()

    asyncio.run(main())
    assert 1 == len(waits)


def test_unused_store_creates_no_file(tmp_path: Path) -> None:
    """A store that is closed without a call has not created its file."""
    asyncio.run(SqliteStore(tmp_path / "keys.db").close())

    assert [] == list(tmp_path.iterdir())
