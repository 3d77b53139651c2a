"""What people ask for: tasks, their logs, and numbers."""

# ruff: noqa: S608 - statements are put together from constants

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.service.model import Status
from tarry.service.store import Counters, Page, SeriesPoint
from tarry.service.stores.sqlite.task_rows import (
    SELECT_TASK,
    attempt_row_id,
    decode_attempt,
    decode_task,
    pack_id,
)
from tarry.service.stores.sqlite.transaction import MINUTE_MS

if TYPE_CHECKING:
    from tarry.service.model import AttemptRecord, Task
    from tarry.service.store import TaskFilter
    from tarry.service.stores.sqlite.transaction import ReadTransaction

MAX_SCANNED_ROWS = 2000
"""Rows that one page of a filtered list looks at."""
DAY_MS = 86_400_000
_NEWEST = 1 << 62
_CURSOR = re.compile(r"[0-9]{1,18}", re.ASCII)

_TENANT = "SELECT id FROM tenant WHERE name = ?"
_GET = SELECT_TASK + f"WHERE s.seq = (SELECT seq FROM task WHERE id = ?) AND s.tenant = ({_TENANT})"
_BY_SEQ = SELECT_TASK + "WHERE s.seq = ?"
_ATTEMPTS = "SELECT log FROM attempt WHERE id > ? AND id < ? ORDER BY id LIMIT ?"
_LIVE = """
SELECT seq, status, lane, policy, reason FROM state
WHERE tenant = ?1 AND finished_at IS NULL AND seq < ?2 ORDER BY seq DESC LIMIT ?3
"""
_ENDED = """
SELECT seq, status, lane, policy, reason FROM state
WHERE tenant = ?1 AND status = {} AND finished_at IS NOT NULL AND seq < ?2
ORDER BY seq DESC LIMIT ?3
"""
_ENDINGS = [_ENDED.format(int(status)) for status in Status if status.is_terminal]
_ALL = (
    " UNION ALL ".join(f"SELECT * FROM ({part})" for part in (_LIVE, *_ENDINGS))
    + " ORDER BY 1 DESC LIMIT ?3"
)
_COUNTS = "pending, in_flight, succeeded, exhausted, cancelled, superseded"
_SUMS = ", ".join(f"ifnull(sum({name}), 0)" for name in _COUNTS.split(", "))
_SERIES = """
SELECT minute, outcome, count FROM series WHERE tenant = ? AND minute >= ? ORDER BY minute
"""


def get_task(tx: ReadTransaction, tenant: str, task_id: str) -> Task | None:
    """Return a task."""
    row = tx.execute(_GET, (pack_id(task_id), tenant)).fetchone()
    return None if row is None else decode_task(row)


def list_attempts(
    tx: ReadTransaction, tenant: str, task_id: str, after: int, limit: int
) -> list[AttemptRecord]:
    """Return a task's attempt log, from the attempt that follows number `after`."""
    row = tx.execute(
        f"SELECT seq FROM task WHERE id = ? AND tenant = ({_TENANT})", (pack_id(task_id), tenant)
    ).fetchone()
    if row is None:
        return []
    span = (attempt_row_id(row[0], after), attempt_row_id(row[0] + 1, 0))
    return [decode_attempt(log) for (log,) in tx.execute(_ATTEMPTS, (*span, limit))]


def list_tasks(
    tx: ReadTransaction, tenant: str, query: TaskFilter, cursor: str | None, limit: int
) -> Page[Task]:
    """List tasks, newest first; the cursor is the row that the last page ended with."""
    before = _NEWEST if cursor is None else parse_cursor(cursor)
    wanted = resolve_names(tx, tenant, query.lane, query.policy_id)
    if wanted is None:
        return Page([], None)
    whose, lane, policy = wanted
    if query.status is None:
        statement = _ALL
    else:
        statement = _ENDED.format(int(query.status)) if query.status.is_terminal else _LIVE
    live_tasks = query.status is not None and not query.status.is_terminal
    rarely = live_tasks or lane is not None or policy is not None or query.reason is not None
    most = max(MAX_SCANNED_ROWS, limit + 1) if rarely else limit + 1
    items: list[Task] = []
    looked_at, last = 0, before
    for seq, status, lane_id, policy_id, reason in tx.execute(statement, (whose, before, most)):
        if len(items) == limit:
            return Page(items, str(last))
        looked_at, last = looked_at + 1, seq
        if (
            (query.status is None or query.status == status)
            and (lane is None or lane == lane_id)
            and (policy is None or policy == policy_id)
            and (query.reason is None or query.reason == reason)
        ):
            items.append(decode_task(tx.execute(_BY_SEQ, (seq,)).fetchone()))
    return Page(items, str(last) if looked_at == most else None)


def parse_cursor(cursor: str) -> int:
    """Return the row that a cursor names."""
    if not _CURSOR.fullmatch(cursor):
        raise ConfigurationError("cursor", "must be one that a page has given", cursor)
    return int(cursor)


def resolve_names(
    tx: ReadTransaction, tenant: str, lane: str | None, policy: str | None
) -> tuple[int, int | None, int | None] | None:
    """Return the numbers of names that are asked for; None: nothing can have one of them."""
    numbers: list[Any] = []
    for name, statement in (
        ((tenant,), _TENANT),
        (None if lane is None else (lane,), "SELECT id FROM lane WHERE name = ?"),
        (
            None if policy is None else (tenant, policy),
            f"SELECT id FROM used WHERE tenant = ({_TENANT}) AND policy = ?",
        ),
    ):
        row = (None,) if name is None else tx.execute(statement, name).fetchone()
        if row is None:
            return None
        numbers.append(row[0])
    return numbers[0], numbers[1], numbers[2]


def counters(tx: ReadTransaction, tenant: str | None) -> Counters:
    """Return the counts of a tenant's tasks, or of all."""
    if tenant is None:
        row = tx.execute(f"SELECT {_SUMS} FROM tenant").fetchone()
    else:
        row = tx.execute(f"SELECT {_SUMS} FROM tenant WHERE name = ?", (tenant,)).fetchone()
    return Counters({status: row[status] for status in Status}, row[5])


def series(tx: ReadTransaction, tenant: str | None, since: int) -> list[SeriesPoint]:
    """Return what happened in each minute from then on."""
    whose = 0
    if tenant is not None:
        row = tx.execute(_TENANT, (tenant,)).fetchone()
        if row is None:
            return []
        whose = row[0]
    since = max(since - since % MINUTE_MS, tx.now - DAY_MS)
    points: list[SeriesPoint] = []
    for minute, outcome, count in tx.execute(_SERIES, (whose, since)):
        if not points or points[-1].minute != minute:
            points.append(SeriesPoint(minute, {}))
        points[-1].outcomes[outcome] = count
    return points
