"""Partitions of `content` and `attempt`: one for each day on which tasks were added.

Partitions are created some days ahead. If that fails, tasks are stored in the default partition,
and nothing else changes. A partition is dropped when no task of its day is left. If a few are left
(dead letters, or tasks with a distant retry) after others have passed their retention time, those
few are moved to the default partition first.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from tarry.errors import StoreUnavailable
from tarry.service.stores.postgres.constants import SEQ_DAY_BITS

if TYPE_CHECKING:
    from tarry.service.stores.postgres.database import Database, Transaction

DAY_MS = 86_400_000
_DAYS_AHEAD = 7
_MAX_MOVED_TASKS = 2_000
"""Maximum number of tasks to move before a partition is dropped: claims wait meanwhile."""
_MAX_DROPPED_DAYS = 2  # in one call
_PARTITION_LOCK = 0x7461_0006
"""The advisory lock of the process that changes partitions."""
_TABLES = ("content", "attempt")
_NAME = re.compile(r"content_day([0-9]+)")
_CHECK_VIOLATION = "23514"
_LIST_PARTITIONS = """
SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
WHERE i.inhparent = 'tarry.content'::regclass
"""
_COUNT_TASKS = """
SELECT count(*) FROM (
    SELECT 1 FROM tarry.task_key WHERE seq >= $1 AND seq < $2 LIMIT $3) AS remaining
"""
_logger = logging.getLogger("tarry.service")


async def create_partitions(database: Database, now: int) -> None:
    """Create the partitions of today and the next days, unless they exist."""
    today = now // DAY_MS
    missing = set(range(today, today + _DAYS_AHEAD + 1)) - await _list_days(database)
    for day in sorted(missing):
        try:
            await database.transact(lambda tx, day=day: _create(tx, day))  # type: ignore[misc]
        except StoreUnavailable as error:
            _logger.info("partition of day %d not created: %s", day, error)
            return
        except Exception as error:
            # Tasks of this day are in the default partition already, and stay there.
            if getattr(error, "sqlstate", None) != _CHECK_VIOLATION:
                raise


async def drop_partitions(database: Database, now: int, retention_ms: int) -> None:
    """Drop partitions whose tasks are deleted; `retention_ms` applies to succeeded tasks."""
    today = now // DAY_MS
    last_expired_day = (now - retention_ms) // DAY_MS - 1
    dropped = 0
    for day in sorted(await _list_days(database)):
        if day >= today - 1 or dropped == _MAX_DROPPED_DAYS:
            return
        allowed = _MAX_MOVED_TASKS if day <= last_expired_day else 0
        if await database.fetch_value(_COUNT_TASKS, *_seq_range(day), allowed + 1) > allowed:
            continue
        try:
            await database.transact(
                lambda tx, day=day, allowed=allowed: _drop(tx, day, allowed)  # type: ignore[misc]
            )
        except StoreUnavailable as error:
            _logger.info("partition of day %d not dropped: %s", day, error)
            return
        dropped += 1


async def _list_days(database: Database) -> set[int]:
    rows: list[Any] = await database.fetch(_LIST_PARTITIONS)
    return {int(match[1]) for row in rows if (match := _NAME.fullmatch(row[0]))}


def _seq_range(day: int) -> tuple[int, int]:
    return day << SEQ_DAY_BITS, (day + 1) << SEQ_DAY_BITS


async def _lock(tx: Transaction) -> bool:
    """Lock the changes of partitions; return False if another process has the lock.

    The timeout keeps other statements from waiting behind this transaction, if it has to wait for a
    long query. It applies to this transaction only.
    """
    await tx.fetch("SET LOCAL lock_timeout = '300ms'")
    return bool(
        await tx.fetch_value(
            "SELECT pg_try_advisory_xact_lock($1, hashtext('tarry.content'))", _PARTITION_LOCK
        )
    )


async def _create(tx: Transaction, day: int) -> None:
    if await _lock(tx):
        first, end = _seq_range(day)
        for table in _TABLES:
            await tx.fetch(
                f"CREATE TABLE IF NOT EXISTS tarry.{table}_day{day} "
                f"PARTITION OF tarry.{table} FOR VALUES FROM ({first}) TO ({end})"
            )


async def _drop(tx: Transaction, day: int, max_tasks: int) -> None:
    if not await _lock(tx):
        return
    for table in _TABLES:
        await tx.fetch(f"ALTER TABLE tarry.{table} DETACH PARTITION tarry.{table}_day{day}")
    if await tx.fetch_value(_COUNT_TASKS, *_seq_range(day), max_tasks + 1) > max_tasks:
        raise StoreUnavailable("tasks were replayed meanwhile")  # rolls back the DETACH
    for table in _TABLES:
        await tx.fetch(
            f"INSERT INTO tarry.{table} SELECT old.* FROM tarry.task_key AS k "
            f"JOIN tarry.{table}_day{day} AS old ON old.seq = k.seq "
            "WHERE k.seq >= $1 AND k.seq < $2",
            *_seq_range(day),
        )
        await tx.fetch(f"DROP TABLE tarry.{table}_day{day}")
