"""What is swept away, in steps, and what is left of it: bodies to delete."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tarry.service.model import Status
from tarry.service.store import SweepResult
from tarry.service.stores.sqlite.queries import DAY_MS
from tarry.service.stores.sqlite.task_rows import attempt_row_id
from tarry.service.stores.sqlite.transitions import recover_leases

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import Retention
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

_OUT_OF_TIME = """
SELECT seq, tenant, lane, policy, status FROM state
WHERE status = ? AND finished_at IS NOT NULL AND finished_at <= ?
    AND tenant NOT IN (SELECT value FROM json_each(?)) ORDER BY finished_at LIMIT ?
"""
_REPLAYING = """
SELECT tenant FROM replay INDEXED BY replay_running WHERE running = 1 ORDER BY next_at, id LIMIT ?
"""
_MOST_REPLAYING = 1_000
_OLD_MINUTES = """
DELETE FROM series WHERE (tenant, minute, outcome) IN (
    SELECT tenant, minute, outcome FROM series WHERE minute < ? LIMIT ?)
"""
_OLD_REPLAYS = """
DELETE FROM replay WHERE id IN (
    SELECT id FROM replay WHERE created_at <= ?1 AND running = 0 AND next_at <= ?1
    ORDER BY created_at, id LIMIT ?2)
"""


def sweep(tx: Transaction, retention: Retention, limit: int) -> SweepResult:
    """Remove up to `limit` terminal tasks whose time is up; leases of the dead end, too."""
    more = recover_leases(tx, limit)
    ends = {
        Status.SUCCEEDED: retention.succeeded,
        Status.CANCELLED: retention.succeeded,
        Status.EXHAUSTED: retention.dead,
    }
    gone: list[tuple[int, int, int, int, int]] = []
    replaying = {name for (name,) in tx.execute(_REPLAYING, (_MOST_REPLAYING,))}
    kept = json.dumps([tx.names.tenant_id(name) for name in replaying])
    for status, length in ends.items():
        spared = kept if status is Status.EXHAUSTED else "[]"
        asked = (status, tx.now - length, spared, limit + 1 - len(gone))
        gone += tx.execute(_OUT_OF_TIME, asked).fetchall()
    for row in gone[:limit]:
        delete_task(tx, *row)
    minutes = tx.execute(_OLD_MINUTES, (tx.now - DAY_MS, limit)).rowcount
    replays = tx.execute(_OLD_REPLAYS, (tx.now - retention.dead, limit)).rowcount
    more = more or len(gone) > limit or max(minutes, replays) == limit > 0
    return SweepResult(min(len(gone), limit), more)


def delete_task(
    tx: Transaction, seq: int, tenant: int, lane: int, policy: int, status: int
) -> None:
    """Remove a terminal task and its log; a body that it owned is an orphan."""
    execute = tx.execute
    execute(
        "DELETE FROM attempt WHERE id > ? AND id < ?",
        (attempt_row_id(seq, 0), attempt_row_id(seq + 1, 0)),
    )
    execute("DELETE FROM state WHERE seq = ?", (seq,))
    [(ref,)] = execute("SELECT body_ref FROM task WHERE seq = ?", (seq,))
    execute("DELETE FROM task WHERE seq = ?", (seq,))
    if ref is not None:
        execute("INSERT OR IGNORE INTO orphan VALUES (?)", (ref,))
    tx.count_transition(tenant, tx.lane(lane), policy, status, None)


def orphans(tx: ReadTransaction, limit: int) -> list[str]:
    """Return the bodies of tasks that are gone."""
    return [ref for (ref,) in tx.execute("SELECT ref FROM orphan LIMIT ?", (limit,))]


def forget_orphans(tx: Transaction, refs: Sequence[str]) -> None:
    """Forget orphans that were deleted."""
    tx.executemany("DELETE FROM orphan WHERE ref = ?", [(ref,) for ref in refs])


def ping(tx: Transaction) -> int:
    """Write and read something."""
    tx.execute("UPDATE meta SET value = ? WHERE name = 'pinged'", (tx.now,))
    return tx.now
