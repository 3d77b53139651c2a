"""Copy the file of a SQLite store while other processes write to it."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.stores.sqlite import schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PAGES_PER_STEP = 1024  # 4 MiB: a step takes a few milliseconds
_BUSY_TIMEOUT_S = 5.0


def copy_database(source: Path, target: Path, on_progress: Callable[[int, int], None]) -> None:
    """Copy the database to `target`, an empty file; call `on_progress(copied, all)` with pages.

    The copy has the state of the moment at which the call begins. It is checked, synced to the
    disk, and needs no other file: its journal mode is not WAL.
    """
    try:
        with closing(_open_existing(source)) as reader, closing(sqlite3.connect(target)) as writer:
            # SQLite restarts a backup when another connection has changed the file between two
            # steps, so the backup would never end while the service writes. An open read
            # transaction keeps the state of its first read. In WAL mode it does not block writers:
            # only the WAL grows until the backup ends.
            reader.execute("BEGIN")
            version = schema.read_version(reader, source)
            if version == 0:
                raise ConfigurationError(f"{source} is empty. Is this the store of your service?")
            # A crash leaves a file that is never used, so no journal and no sync are needed.
            writer.execute("PRAGMA journal_mode = OFF")
            writer.execute("PRAGMA synchronous = OFF")
            reader.backup(
                writer,
                pages=_PAGES_PER_STEP,
                progress=lambda _status, remaining, total: on_progress(total - remaining, total),
                sleep=0.05,
            )
            reader.execute("COMMIT")  # before the check, so that the WAL can be truncated
            writer.execute("PRAGMA journal_mode = DELETE").fetchall()
            [(finding,)] = writer.execute("PRAGMA quick_check(1)").fetchall()
            if finding != "ok" or schema.read_version(writer, target) != version:
                raise StoreUnavailable(f"the copy of {source} is damaged: {finding}")
    except sqlite3.Error as error:
        raise StoreUnavailable(f"{source} cannot be copied: {error}") from error
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_task_count(path: Path) -> int:
    """Return the number of tasks in a database that no process uses."""
    columns = "pending + in_flight + succeeded + exhausted + cancelled"
    with closing(sqlite3.connect(path)) as connection:
        statement = f"SELECT ifnull(sum({columns}), 0) FROM tenant"
        return int(connection.execute(statement).fetchone()[0])


def iter_body_refs(path: Path) -> Iterator[str]:
    """Yield the references to bodies that the service has written, in an unused database."""
    with closing(sqlite3.connect(path)) as connection:
        statement = "SELECT owned_body_ref FROM task WHERE owned_body_ref IS NOT NULL"
        for (ref,) in connection.execute(statement):
            yield ref


def _open_existing(path: Path) -> sqlite3.Connection:
    """Open a file that exists. Unlike `database.connect`, this does not upgrade the schema."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,
    )
    try:
        connection.execute("PRAGMA query_only = ON")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.close()
        raise
    return connection
