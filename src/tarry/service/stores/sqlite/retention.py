"""Retention: delete expired terminal tasks, replays and points of the time series, in steps."""

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

_EXPIRED_TASKS = """
SELECT seq, tenant, lane, policy, status FROM state
WHERE status = ? AND finished_at IS NOT NULL AND finished_at <= ?
    AND tenant NOT IN (SELECT value FROM json_each(?)) ORDER BY finished_at LIMIT ?
"""
_TENANTS_WITH_REPLAYS = """
SELECT tenant FROM replay INDEXED BY replay_running WHERE running = 1 ORDER BY next_at, id LIMIT ?
"""
_MAX_TENANTS_WITH_REPLAYS = 1_000
_DELETE_OLD_SERIES = """
DELETE FROM series WHERE (tenant, minute, outcome) IN (
    SELECT tenant, minute, outcome FROM series WHERE minute < ? LIMIT ?)
"""
_DELETE_OLD_REPLAYS = """
DELETE FROM replay WHERE id IN (
    SELECT id FROM replay WHERE created_at <= ?1 AND running = 0 AND next_at <= ?1
    ORDER BY created_at, id LIMIT ?2)
"""


def sweep(tx: Transaction, retention: Retention, limit: int) -> SweepResult:
    """Delete up to `limit` each of expired tasks, replays and points of the time series.

    Also ends up to `limit` leases of dead worker processes.
    """
    has_more_leases = recover_leases(tx, limit)
    retention_ms = {
        Status.SUCCEEDED: retention.succeeded,
        Status.CANCELLED: retention.succeeded,
        Status.EXHAUSTED: retention.dead,
    }
    # Dead letters of a tenant with a running replay stay: the replay has counted them already.
    tenants = {name for (name,) in tx.execute(_TENANTS_WITH_REPLAYS, (_MAX_TENANTS_WITH_REPLAYS,))}
    tenants_with_replays = json.dumps([tx.names.tenant_id(name) for name in tenants])
    expired: list[tuple[int, int, int, int, int]] = []
    for status, max_age_ms in retention_ms.items():
        spared_tenants = tenants_with_replays if status is Status.EXHAUSTED else "[]"
        parameters = (status, tx.now - max_age_ms, spared_tenants, limit + 1 - len(expired))
        expired += tx.execute(_EXPIRED_TASKS, parameters).fetchall()
    for row in expired[:limit]:
        delete_task(tx, *row)
    points = tx.execute(_DELETE_OLD_SERIES, (tx.now - DAY_MS, limit)).rowcount
    replays = tx.execute(_DELETE_OLD_REPLAYS, (tx.now - retention.dead, limit)).rowcount
    has_more = has_more_leases or len(expired) > limit or max(points, replays) == limit > 0
    return SweepResult(min(len(expired), limit), has_more)


def delete_task(
    tx: Transaction, seq: int, tenant: int, lane: int, policy: int, status: int
) -> None:
    """Delete a terminal task and its attempt log; a body in object storage becomes an orphan."""
    execute = tx.execute
    attempts = (attempt_row_id(seq, 0), attempt_row_id(seq + 1, 0))
    execute("DELETE FROM attempt WHERE id > ? AND id < ?", attempts)
    execute("DELETE FROM state WHERE seq = ?", (seq,))
    [(ref,)] = execute("SELECT body_ref FROM task WHERE seq = ?", (seq,))
    execute("DELETE FROM task WHERE seq = ?", (seq,))
    if ref is not None:
        execute("INSERT OR IGNORE INTO orphan VALUES (?)", (ref,))
    tx.count_transition(tenant, tx.lane(lane), policy, status, None)


def orphans(tx: ReadTransaction, limit: int) -> list[str]:
    """Return references to bodies whose task was deleted."""
    return [ref for (ref,) in tx.execute("SELECT ref FROM orphan LIMIT ?", (limit,))]


def forget_orphans(tx: Transaction, refs: Sequence[str]) -> None:
    """Forget references to bodies that have been deleted."""
    tx.executemany("DELETE FROM orphan WHERE ref = ?", [(ref,) for ref in refs])
