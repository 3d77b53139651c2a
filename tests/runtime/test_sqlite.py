"""Write transactions on SQLite files that several processes use."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

import tarry.testing
from tarry.runtime import sqlite
from tarry.runtime.sqlite import begin_write

Connections = tuple[sqlite3.Connection, sqlite3.Connection]


def busy_timeout_ms(connection: sqlite3.Connection) -> int:
    """Return the time for which SQLite itself waits for a lock."""
    return int(connection.execute("PRAGMA busy_timeout").fetchone()[0])


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[Connections]:
    """Two connections to a file; the second one has begun a write transaction."""
    path = tmp_path / "file.db"
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as connection,
        closing(sqlite3.connect(path, isolation_level=None)) as lock_holder,
    ):
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE counter (value)")
        lock_holder.execute("BEGIN IMMEDIATE")
        yield connection, lock_holder


def test_the_lock_is_tried_again_after_short_pauses(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write lock is tried every 0.2 ms, and SQLite itself does not wait meanwhile."""
    connection, lock_holder = connections
    pauses: list[float] = []
    timeouts_ms: list[int] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        timeouts_ms.append(busy_timeout_ms(connection))
        if len(pauses) == 3:
            lock_holder.execute("COMMIT")

    monkeypatch.setattr(sqlite, "system_now", lambda: 0.0)
    monkeypatch.setattr(sqlite, "system_sleep", sleep)
    begin_write(connection, timeout_s=2.0)

    assert connection.in_transaction
    assert [0.0002] * 3 == pauses
    assert [0] * 3 == timeouts_ms
    assert 2000 == busy_timeout_ms(connection)


def test_the_wait_for_the_lock_ends(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the lock is not released in time, the error of SQLite is raised."""
    connection, _ = connections
    clock = count()
    monkeypatch.setattr(sqlite, "system_now", lambda: float(next(clock)))
    monkeypatch.setattr(sqlite, "system_sleep", lambda _seconds: None)
    with pytest.raises(sqlite3.OperationalError, match="locked") as caught:
        begin_write(connection, timeout_s=5.0)

    assert sqlite3.SQLITE_BUSY == caught.value.sqlite_errorcode
    assert 6 == next(clock)  # the start read 0, and the failed tries read 1 to 5
    assert not connection.in_transaction
    assert 5000 == busy_timeout_ms(connection)


def test_a_virtual_clock_does_not_shorten_the_wait(
    connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process does not follow the clock of `tarry.testing`, so the wait is real."""
    connection, lock_holder = connections
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        lock_holder.execute("COMMIT")

    monkeypatch.setattr(sqlite, "system_sleep", sleep)
    with tarry.testing.VirtualClock() as clock:
        begin_write(connection, timeout_s=5.0)

    assert 1 == len(pauses)
    assert 0.0 == clock.elapsed


def test_another_error_is_not_retried(tmp_path: Path) -> None:
    """An error that is not about a lock is raised at once."""
    with closing(sqlite3.connect(tmp_path / "file.db", isolation_level=None)) as connection:
        connection.execute("BEGIN")
        with pytest.raises(sqlite3.OperationalError, match="within a transaction"):
            begin_write(connection, timeout_s=5.0)
