"""Dead letters: count, replay, purge. Each call reads a bounded number of rows."""

# ruff: noqa: S608 - statements are built from constants

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import next_replay_step_at
from tarry.service.stores.sqlite.queries import MAX_SCANNED_ROWS, parse_cursor, resolve_names
from tarry.service.stores.sqlite.retention import delete_task
from tarry.service.stores.sqlite.task_rows import encode
from tarry.service.stores.sqlite.transaction import EXHAUSTED
from tarry.service.stores.sqlite.transitions import revive_dead_letter

if TYPE_CHECKING:
    from tarry.service.store import TaskFilter
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

_MAX_LISTED_REPLAYS = 100
_DEAD_LETTERS = f"""
SELECT seq, lane, policy, reason, finished_at FROM state
WHERE tenant = ? AND status = {EXHAUSTED} AND finished_at IS NOT NULL AND seq > ?
ORDER BY seq LIMIT ?
"""
_INSERT_REPLAY = """
INSERT INTO replay (id, tenant, created_at, next_at, running, job) VALUES (?, ?, ?, ?, 1, ?)
ON CONFLICT DO NOTHING
"""
_UPDATE_REPLAY = "UPDATE replay SET running = ?, next_at = ?, job = ? WHERE id = ?"
_NEWEST_FIRST = "ORDER BY created_at DESC, id DESC LIMIT ?"
_REPLAYS = f"SELECT job FROM replay {_NEWEST_FIRST}"
_REPLAYS_OF_TENANT = f"SELECT job FROM replay WHERE tenant = ? {_NEWEST_FIRST}"
_RUNNING = "SELECT job FROM replay INDEXED BY replay_running WHERE running = 1"
_BY_DUE_TIME = "ORDER BY next_at, id LIMIT ?"
_RUNNING_REPLAYS = f"{_RUNNING} {_BY_DUE_TIME}"
_RUNNING_REPLAYS_OF_TENANT = f"{_RUNNING} AND tenant = ? {_BY_DUE_TIME}"

_decode_replay = msgspec.msgpack.Decoder(ReplayRecord).decode


class DeadLetterPage(msgspec.Struct):
    """The dead letters that match a filter, among a bounded number of rows."""

    rows: list[tuple[int, int, int, int]]
    """Row id, tenant, lane and policy of each dead letter."""
    cursor: int | None
    """Row id after which the next page begins; None if this is the last page."""


def find_dead_letters(
    tx: ReadTransaction, filter_: ReplayRecord, after: int, limit: int
) -> DeadLetterPage:
    """Return up to `limit` dead letters that a replay would revive, oldest task first.

    `filter_` is the replay, or a record with the same filter fields. `after` is a row id.
    """
    ids = resolve_names(tx, filter_.tenant, filter_.lane, filter_.policy_id)
    if ids is None:
        return DeadLetterPage([], None)
    tenant, lane, policy = ids
    matched: list[tuple[int, int, int, int]] = []
    scanned, last_seq = 0, after
    rows = tx.execute(_DEAD_LETTERS, (tenant, after, MAX_SCANNED_ROWS))
    for seq, lane_id, policy_id, reason, finished_at in rows:
        if len(matched) == limit:
            return DeadLetterPage(matched, last_seq)
        scanned, last_seq = scanned + 1, seq
        if (
            (lane is None or lane == lane_id)
            and (policy is None or policy == policy_id)
            and (filter_.reason is None or filter_.reason == reason)
            and (not filter_.before or finished_at <= filter_.before)
        ):
            matched.append((seq, tenant, lane_id, policy_id))
    return DeadLetterPage(matched, last_seq if scanned == MAX_SCANNED_ROWS else None)


def count_dead_letters(
    tx: ReadTransaction, filter_: ReplayRecord, after: int
) -> tuple[int, int | None]:
    """Count matching dead letters among the next rows; return the count and the cursor."""
    page = find_dead_letters(tx, filter_, after, MAX_SCANNED_ROWS)
    return len(page.rows), page.cursor


def purge(
    tx: Transaction, tenant: str, query: TaskFilter, after: int, limit: int
) -> tuple[int, int | None]:
    """Delete matching dead letters among the next rows; return their number and the cursor."""
    if query.status not in {None, Status.EXHAUSTED}:
        return 0, None
    filter_ = ReplayRecord(
        id="", tenant=tenant, lane=query.lane, policy_id=query.policy_id, reason=query.reason
    )
    page = find_dead_letters(tx, filter_, after, limit)
    for seq, tenant_id, lane, policy in page.rows:
        delete_task(tx, seq, tenant_id, lane, policy, EXHAUSTED)
    return len(page.rows), page.cursor


def start_replay(tx: Transaction, replay: ReplayRecord) -> ReplayRecord:
    """Store a replay and return it; return a stored replay with the same id unchanged."""
    new = msgspec.structs.replace(
        replay,
        created_at=tx.now,
        next_at=tx.now,
        replayed=0,
        cursor=None,
        status="running",
        finished_at=None,
    )
    parameters = (replay.id, replay.tenant, new.created_at, new.next_at, encode(new))
    tx.execute(_INSERT_REPLAY, parameters)
    return find_replay(tx, replay.id) or new


def get_replay(tx: ReadTransaction, tenant: str, replay_id: str) -> ReplayRecord | None:
    """Return a replay of a tenant."""
    replay = find_replay(tx, replay_id)
    return replay if replay is not None and replay.tenant == tenant else None


def find_replay(tx: ReadTransaction, replay_id: str) -> ReplayRecord | None:
    """Return a replay of any tenant."""
    row = tx.execute("SELECT job FROM replay WHERE id = ?", (replay_id,)).fetchone()
    return None if row is None else _decode_replay(row[0])


def list_replays(tx: ReadTransaction, *, running: bool, tenant: str | None) -> list[ReplayRecord]:
    """List all replays, newest first, or only running replays by their due time."""
    if tenant is None:
        statement = _RUNNING_REPLAYS if running else _REPLAYS
        rows = tx.execute(statement, (_MAX_LISTED_REPLAYS,))
    else:
        statement = _RUNNING_REPLAYS_OF_TENANT if running else _REPLAYS_OF_TENANT
        rows = tx.execute(statement, (tenant, _MAX_LISTED_REPLAYS))
    return [_decode_replay(row[0]) for row in rows]


def replay_step(tx: Transaction, replay_id: str, limit: int) -> ReplayRecord | None:
    """Revive up to `limit` dead letters if the replay is due, and set when it is due again."""
    replay = find_replay(tx, replay_id)
    if replay is None or replay.status != "running" or replay.next_at > tx.now:
        return replay
    after = 0 if replay.cursor is None else parse_cursor(replay.cursor)
    page = find_dead_letters(tx, replay, after, limit)
    for row in page.rows:
        revive_dead_letter(tx, *row)
    replay.replayed += len(page.rows)
    replay.next_at = next_replay_step_at(replay, len(page.rows), tx.now)
    if page.cursor is not None:
        replay.cursor = str(page.cursor)
    elif len(page.rows) < limit:
        replay.status, replay.finished_at = "done", tx.now
    else:
        replay.cursor = str(page.rows[-1][0])
    _update_replay(tx, replay)
    return replay


def cancel_replay(tx: Transaction, tenant: str, replay_id: str) -> ReplayRecord | None:
    """Stop a replay; dead letters that it has revived stay revived."""
    replay = get_replay(tx, tenant, replay_id)
    if replay is not None and replay.status == "running":
        replay.status, replay.finished_at = "cancelled", tx.now
        _update_replay(tx, replay)
    return replay


def _update_replay(tx: Transaction, replay: ReplayRecord) -> None:
    # For a replay that has ended, the column `next_at` is the time of its end, for retention.
    next_at = replay.finished_at or replay.next_at
    tx.execute(_UPDATE_REPLAY, (replay.status == "running", next_at, encode(replay), replay.id))
