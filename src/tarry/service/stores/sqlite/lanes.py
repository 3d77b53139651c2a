"""Lanes: parking, pause, limits and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import LaneRecord
from tarry.service.store import (
    ConfiguredLimits,
    LaneLimits,
    LaneWriteStatus,
    RecordPage,
    decay_budget,
)
from tarry.service.stores.records import decode_limits
from tarry.service.stores.sqlite.operations import write_operation
from tarry.service.stores.sqlite.queries import LOCK_TOKENS, SELECT_LANE, decode_row
from tarry.service.stores.sqlite.records import count_processes
from tarry.service.stores.sqlite.transaction import WriteTransaction
from tarry.wire.tasks import DownstreamLimits

if TYPE_CHECKING:
    from tarry.service.stores.sqlite.transaction import ReadTransaction
    from tarry.service.stores.sqlite.worker_locks import WorkerLock

_LANE_LIMITS = """
SELECT name, rate, concurrency FROM lane INDEXED BY lane_limited
WHERE rate IS NOT NULL ORDER BY max(ifnull(last_claim_at, 0), budget_at) DESC, name LIMIT ?
"""
_LIMITS_VERSION = "SELECT value FROM meta WHERE name = 'limits_version'"
_CONFIGURED_LIMITS = """
SELECT name, limits FROM lane INDEXED BY lane_configured WHERE limits IS NOT NULL AND tenant > 0
"""
_PAUSED_LANES = "SELECT name FROM lane INDEXED BY lane_paused WHERE paused = 1 AND name > ''"
_INCREMENT_LIMITS_VERSION = "UPDATE meta SET value = value + 1 WHERE name = 'limits_version'"
_COUNT_CONFIGURED_LANES = """
SELECT count(*) FROM lane INDEXED BY lane_configured
WHERE tenant = ? AND limits IS NOT NULL AND name != ?
"""


@write_operation
def park(tx: WriteTransaction, lane: str, until: int, probes: int, consecutive_opens: int) -> None:
    """Keep claims from leasing tasks of a lane until this time, then allow `probes` at a time."""
    lane_row = tx.lane(tx.names.lane_id(lane))
    lane_row.parked_until, lane_row.probes = until, probes
    lane_row.consecutive_opens = consecutive_opens
    lane_row.put_to_sleep()


@write_operation
def pause(tx: WriteTransaction, lane: str, lane_quota: int | None = None) -> LaneWriteStatus:
    """Keep claims from leasing tasks of a lane until `resume`."""
    if _exceeds_quota(tx, lane, lane_quota):
        return LaneWriteStatus.TOO_MANY_LANES
    lane_row = tx.lane(tx.names.lane_id(lane))
    lane_row.paused = 1
    lane_row.put_to_sleep()
    tx.execute(_INCREMENT_LIMITS_VERSION)
    return LaneWriteStatus.CHANGED


def _exceeds_quota(tx: WriteTransaction, lane: str, lane_quota: int | None) -> bool:
    """Return whether the lane does not exist, and its tenant has `lane_quota` lanes."""
    if lane_quota is None or tx.names.find_lane(lane) is not None:
        return False
    return tx.count_lanes(tx.names.tenant_id(lane.partition("/")[0])) >= lane_quota


@write_operation
def unpark(tx: WriteTransaction, lane: str) -> None:
    """End the parking of a lane whose downstream has recovered; a paused lane stays paused."""
    for (lane_id,) in tx.execute("SELECT id FROM lane WHERE name = ?", (lane,)):
        lane_row = tx.lane(lane_id)
        lane_row.parked_until, lane_row.probes, lane_row.consecutive_opens = None, 0, 0
        lane_row.put_to_sleep()


@write_operation
def resume(tx: WriteTransaction, lane: str) -> None:
    """End the parking and the pause of a lane."""
    for (lane_id,) in tx.execute("SELECT id FROM lane WHERE name = ?", (lane,)):
        lane_row = tx.lane(lane_id)
        if lane_row.paused:
            lane_row.paused = 0
            tx.execute(_INCREMENT_LIMITS_VERSION)
    unpark(tx, lane)


@write_operation
def record_lane_limits(tx: WriteTransaction, limits: Sequence[LaneLimits]) -> None:
    """Store the limits of lanes."""
    rows = [(lane.rate, lane.concurrency, lane.lane) for lane in limits]
    tx.executemany("UPDATE lane SET rate = ?, concurrency = ? WHERE name = ?", rows)


@write_operation
def set_limits(
    tx: WriteTransaction,
    lane: str,
    limits: DownstreamLimits | None,
    max_limited: int,
    lane_quota: int | None = None,
) -> LaneWriteStatus:
    """Set the limits of a lane, or remove them (None); see `Store.set_limits`."""
    text = None
    if limits is not None:
        tenant_id = tx.names.tenant_id(lane.partition("/")[0])
        if tx.execute(_COUNT_CONFIGURED_LANES, (tenant_id, lane)).fetchone()[0] >= max_limited:
            return LaneWriteStatus.TOO_MANY_LIMITED
        if _exceeds_quota(tx, lane, lane_quota):
            return LaneWriteStatus.TOO_MANY_LANES
        tx.names.lane_id(lane)  # creates the lane if it is missing
        text = msgspec.json.encode(limits).decode()
    tx.execute("UPDATE lane SET limits = ? WHERE name = ?", (text, lane))
    tx.execute(_INCREMENT_LIMITS_VERSION)
    return LaneWriteStatus.CHANGED


@write_operation
def add_to_budgets(tx: WriteTransaction, changes: dict[str, float]) -> dict[str, float]:
    """Add to the values of retry budgets, and return the new values."""
    values: dict[str, float] = {}
    for lane, change in changes.items():
        row = tx.execute("SELECT budget, budget_at FROM lane WHERE name = ?", (lane,)).fetchone()
        if row is not None:
            values[lane] = decay_budget(row[0], tx.now - row[1]) + change
            parameters = (values[lane], tx.now, lane)
            tx.execute("UPDATE lane SET budget = ?, budget_at = ? WHERE name = ?", parameters)
    return values


def get_lane(tx: ReadTransaction, name: str) -> LaneRecord | None:
    """Return a lane, or None if it does not exist."""
    row = tx.execute(f"{SELECT_LANE} WHERE l.name = ?", (name,)).fetchone()
    return None if row is None else decode_row(row, LaneRecord)


def list_lane_limits(tx: ReadTransaction, limit: int) -> list[LaneLimits]:
    """Return the limits of up to `limit` lanes whose rate is limited, last used lanes first."""
    return [LaneLimits(*row) for row in tx.execute(_LANE_LIMITS, (limit,)).fetchall()]


def load_limits(
    tx: ReadTransaction, known: ConfiguredLimits, worker_lock: WorkerLock | None
) -> ConfiguredLimits | None:
    """Return the limits and pauses of lanes; None if nothing has changed since `known`."""
    version = tx.execute(_LIMITS_VERSION).fetchone()[0]
    process_count = _count_processes(tx, worker_lock)
    if (version, process_count) == (known.version, known.process_count):
        return None
    rows = tx.execute(_CONFIGURED_LIMITS).fetchall()
    limits = {name: decode_limits(text) for name, text in rows}
    paused_lanes = frozenset(name for (name,) in tx.execute(_PAUSED_LANES))
    return ConfiguredLimits(version, process_count, limits, paused_lanes)


def _count_processes(tx: ReadTransaction, worker_lock: WorkerLock | None) -> int:
    """Return the number of processes that lease tasks, at least 1."""
    if worker_lock is None or worker_lock.token is None:  # files cannot be locked
        return max(1, count_processes(tx))
    tokens = {token for (token,) in tx.execute(LOCK_TOKENS)}  # each process has one lock
    # The rows of a dead process remain while one of its tasks is IN_FLIGHT in a paused lane.
    return max(1, len(tokens) - len(worker_lock.find_dead_locks(tokens)))


def list_lanes(
    tx: ReadTransaction, tenant: str | None, cursor: str | None = None, limit: int = 100
) -> RecordPage[LaneRecord]:
    """List lanes, sorted by name; the cursor is the last name of the previous page."""
    where = "WHERE l.name > ?1"
    if tenant is not None:
        where += " AND l.tenant = (SELECT id FROM tenant WHERE name = ?3)"
    statement = f"{SELECT_LANE} {where} ORDER BY l.name LIMIT ?2"
    tenant_parameter = () if tenant is None else (tenant,)
    rows = tx.execute(statement, (cursor or "", limit + 1, *tenant_parameter)).fetchall()
    lanes = [decode_row(row, LaneRecord) for row in rows[:limit]]
    return RecordPage(lanes, lanes[-1].name if len(rows) > limit and lanes else None)
