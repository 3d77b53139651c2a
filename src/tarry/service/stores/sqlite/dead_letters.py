"""Dead letters: counted, brought back, purged. Each call looks at a bounded number of rows."""

# ruff: noqa: S608 - statements are put together from constants

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service.model import ReplayRecord, Status
from tarry.service.store import next_step
from tarry.service.stores.sqlite.queries import MAX_SCANNED_ROWS, parse_cursor, resolve_names
from tarry.service.stores.sqlite.retention import delete_task
from tarry.service.stores.sqlite.task_rows import encode
from tarry.service.stores.sqlite.transitions import revive_dead_letter

if TYPE_CHECKING:
    from tarry.service.store import TaskFilter
    from tarry.service.stores.sqlite.transaction import ReadTransaction, Transaction

_MOST = 100
_DEAD = int(Status.EXHAUSTED)
_LETTERS = """
SELECT seq, lane, policy, reason, finished_at FROM state
WHERE tenant = ? AND status = 3 AND finished_at IS NOT NULL AND seq > ? ORDER BY seq LIMIT ?
"""
_INSERT = """
INSERT INTO replay (id, tenant, created_at, next_at, running, job) VALUES (?, ?, ?, ?, 1, ?)
ON CONFLICT DO NOTHING
"""
_UPDATE = "UPDATE replay SET running = ?, next_at = ?, job = ? WHERE id = ?"
_LATEST = "ORDER BY created_at DESC, id DESC LIMIT ?"
_JOBS = f"SELECT job FROM replay {_LATEST}"
_JOBS_OF = f"SELECT job FROM replay WHERE tenant = ? {_LATEST}"
_RUNNING = "SELECT job FROM replay INDEXED BY replay_running WHERE running = 1"
_DUE_FIRST = "ORDER BY next_at, id LIMIT ?"
_RUNNING_JOBS = f"{_RUNNING} {_DUE_FIRST}"
_RUNNING_OF = f"{_RUNNING} AND tenant = ? {_DUE_FIRST}"

_job_of = msgspec.msgpack.Decoder(ReplayRecord).decode


class DeadLetterPage(msgspec.Struct):
    """Letters that match, among those that were looked at; `cursor` goes on from there."""

    rows: list[tuple[int, int, int, int]]
    """Of each the numbers of its row, tenant, lane and policy."""
    cursor: int | None


def find_dead_letters(
    tx: ReadTransaction, filter_: ReplayRecord, after: int, limit: int
) -> DeadLetterPage:
    """Return up to `limit` letters that a job would bring back, oldest first."""
    wanted = resolve_names(tx, filter_.tenant, filter_.lane, filter_.policy_id)
    if wanted is None:
        return DeadLetterPage([], None)
    tenant, lane, policy = wanted
    matched: list[tuple[int, int, int, int]] = []
    looked_at, last = 0, after
    rows = tx.execute(_LETTERS, (tenant, after, MAX_SCANNED_ROWS))
    for seq, lane_id, policy_id, reason, finished_at in rows:
        if len(matched) == limit:
            return DeadLetterPage(matched, last)
        looked_at, last = looked_at + 1, seq
        if (
            (lane is None or lane == lane_id)
            and (policy is None or policy == policy_id)
            and (filter_.reason is None or filter_.reason == reason)
            and (not filter_.before or finished_at <= filter_.before)
        ):
            matched.append((seq, tenant, lane_id, policy_id))
    return DeadLetterPage(matched, last if looked_at == MAX_SCANNED_ROWS else None)


def count_dead_letters(
    tx: ReadTransaction, filter_: ReplayRecord, after: int
) -> tuple[int, int | None]:
    """Count the letters among some thousand; where to go on, None at the end."""
    page = find_dead_letters(tx, filter_, after, MAX_SCANNED_ROWS)
    return len(page.rows), page.cursor


def purge(
    tx: Transaction, tenant: str, query: TaskFilter, after: int, limit: int
) -> tuple[int, int | None]:
    """Remove up to `limit` letters among some thousand; where to go on, None at the end."""
    if query.status not in {None, Status.EXHAUSTED}:
        return 0, None
    filter_ = ReplayRecord(
        id="", tenant=tenant, lane=query.lane, policy_id=query.policy_id, reason=query.reason
    )
    page = find_dead_letters(tx, filter_, after, limit)
    for seq, whose, lane, policy in page.rows:
        delete_task(tx, seq, whose, lane, policy, _DEAD)
    return len(page.rows), page.cursor


def start_replay(tx: Transaction, replay: ReplayRecord) -> ReplayRecord:
    """Keep a job; the same id again is the same job."""
    made = msgspec.structs.replace(
        replay,
        created_at=tx.now,
        next_at=tx.now,
        replayed=0,
        cursor=None,
        status="running",
        finished_at=None,
    )
    tx.execute(_INSERT, (replay.id, replay.tenant, made.created_at, made.next_at, encode(made)))
    return find_replay(tx, replay.id) or made


def get_replay(tx: ReadTransaction, tenant: str, replay_id: str) -> ReplayRecord | None:
    """Return a job of a tenant."""
    found = find_replay(tx, replay_id)
    return found if found is not None and found.tenant == tenant else None


def find_replay(tx: ReadTransaction, replay_id: str) -> ReplayRecord | None:
    """Return a job, whosever it is."""
    row = tx.execute("SELECT job FROM replay WHERE id = ?", (replay_id,)).fetchone()
    return None if row is None else _job_of(row[0])


def list_replays(tx: ReadTransaction, *, running: bool, tenant: str | None) -> list[ReplayRecord]:
    """Return jobs: the latest, or of those that run the ones that are due first."""
    if tenant is None:
        rows = tx.execute(_RUNNING_JOBS if running else _JOBS, (_MOST,))
    else:
        rows = tx.execute(_RUNNING_OF if running else _JOBS_OF, (tenant, _MOST))
    return [_job_of(row[0]) for row in rows]


def replay_step(tx: Transaction, replay_id: str, limit: int) -> ReplayRecord | None:
    """Bring back up to `limit` letters if the job is due, and set when it is due again."""
    found = find_replay(tx, replay_id)
    if found is None or found.status != "running" or found.next_at > tx.now:
        return found
    page = find_dead_letters(
        tx, found, 0 if found.cursor is None else parse_cursor(found.cursor), limit
    )
    for letter in page.rows:
        revive_dead_letter(tx, *letter)
    found.replayed += len(page.rows)
    found.next_at = next_step(found, len(page.rows), tx.now)
    if page.cursor is not None:
        found.cursor = str(page.cursor)
    elif len(page.rows) < limit:
        found.status, found.finished_at = "done", tx.now
    else:
        found.cursor = str(page.rows[-1][0])
    _keep(tx, found)
    return found


def cancel_replay(tx: Transaction, tenant: str, replay_id: str) -> ReplayRecord | None:
    """End a job; what it brought back stays."""
    found = get_replay(tx, tenant, replay_id)
    if found is not None and found.status == "running":
        found.status, found.finished_at = "cancelled", tx.now
        _keep(tx, found)
    return found


def _keep(tx: Transaction, replay: ReplayRecord) -> None:
    at = replay.finished_at or replay.next_at  # a sweep looks when it has ended
    tx.execute(_UPDATE, (replay.status == "running", at, encode(replay), replay.id))
