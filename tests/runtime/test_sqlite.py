"""Write transactions on SQLite files that several processes use."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from itertools import chain, count, repeat
from pathlib import Path

import pytest

from tarry.runtime.clocks import environment
from tarry.runtime.sqlite import begin_write


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection that waits for no lock."""
    return sqlite3.connect(path, isolation_level=None, timeout=0)


@pytest.fixture
def connections(tmp_path: Path) -> Iterator[tuple[sqlite3.Connection, sqlite3.Connection]]:
    """Two connections to a file; the second one has begun a write transaction."""
    path = tmp_path / "file.db"
    with closing(connect(path)) as connection, closing(connect(path)) as other:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE counter (value)")
        other.execute("BEGIN IMMEDIATE")
        yield connection, other


@pytest.mark.parametrize(("waited_s", "pause_s"), [(0.0, 0.0002), (0.2, 0.002)])
def test_the_lock_is_tried_again_after_short_pauses(
    connections: tuple[sqlite3.Connection, sqlite3.Connection],
    monkeypatch: pytest.MonkeyPatch,
    waited_s: float,
    pause_s: float,
) -> None:
    """The write lock is tried again after 0.2 ms, and after 2 ms once it was held for long."""
    connection, other = connections
    pauses: list[float] = []
    times = chain([0.0], repeat(waited_s))

    def sleep(seconds: float, _token: object) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.execute("COMMIT")

    monkeypatch.setattr(environment, "now", lambda: next(times))
    monkeypatch.setattr(environment, "blocking_sleep", sleep)
    begin_write(connection, timeout_s=5.0)

    assert connection.in_transaction
    assert [pause_s] * 3 == pauses
    assert [(5000,)] == connection.execute("PRAGMA busy_timeout").fetchall()


def test_the_wait_for_the_lock_ends(
    connections: tuple[sqlite3.Connection, sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the lock is not released in time, the error of SQLite is raised."""
    connection, _ = connections
    monkeypatch.setattr(environment, "now", count().__next__)
    monkeypatch.setattr(environment, "blocking_sleep", lambda _seconds, _token: None)
    with pytest.raises(sqlite3.OperationalError, match="locked") as caught:
        begin_write(connection, timeout_s=5.0)

    assert sqlite3.SQLITE_BUSY == caught.value.sqlite_errorcode
    assert 6 == environment.now()  # after the start and the times 1 to 5
    assert not connection.in_transaction
    assert [(5000,)] == connection.execute("PRAGMA busy_timeout").fetchall()


def test_another_error_is_not_retried(tmp_path: Path) -> None:
    """An error that is not about a lock is raised at once."""
    with closing(connect(tmp_path / "file.db")) as connection:
        connection.execute("BEGIN")
        with pytest.raises(sqlite3.OperationalError, match="within a transaction"):
            begin_write(connection, timeout_s=5.0)
