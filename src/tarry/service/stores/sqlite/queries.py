"""What people ask for: tasks, their logs, and numbers."""

# ruff: noqa: S608 - statements are put together from constants

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.service.model import Status
from tarry.service.store import Counters, Page, SeriesPoint
from tarry.service.stores.sqlite.task_rows import TASK, attempt_of, found, log_key, task_of
from tarry.service.stores.sqlite.transaction import MINUTE

if TYPE_CHECKING:
    from tarry.service.model import AttemptRecord, Task
    from tarry.service.store import TaskFilter
    from tarry.service.stores.sqlite.transaction import View

SCANNED = 2000
"""Rows that one page of a filtered list looks at."""
DAY = 86_400_000
_NEWEST = 1 << 62
_CURSOR = re.compile(r"[0-9]{1,18}", re.ASCII)

_TENANT = "SELECT id FROM tenant WHERE name = ?"
_GET = TASK + f"WHERE s.seq = (SELECT seq FROM task WHERE id = ?) AND s.tenant = ({_TENANT})"
_BY_SEQ = TASK + "WHERE s.seq = ?"
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


def get(view: View, tenant: str, task_id: str) -> Task | None:
    """Return a task."""
    row = view.execute(_GET, (found(task_id), tenant)).fetchone()
    return None if row is None else task_of(row)


def attempts(view: View, tenant: str, task_id: str, after: int, limit: int) -> list[AttemptRecord]:
    """Return a task's attempt log, from the attempt that follows number `after`."""
    row = view.execute(
        f"SELECT seq FROM task WHERE id = ? AND tenant = ({_TENANT})", (found(task_id), tenant)
    ).fetchone()
    if row is None:
        return []
    span = (log_key(row[0], after), log_key(row[0] + 1, 0))
    return [attempt_of(log) for (log,) in view.execute(_ATTEMPTS, (*span, limit))]


def listed(
    view: View, tenant: str, query: TaskFilter, cursor: str | None, limit: int
) -> Page[Task]:
    """List tasks, newest first; the cursor is the row that the last page ended with."""
    before = _NEWEST if cursor is None else place(cursor)
    wanted = wanted_by(view, tenant, query.lane, query.policy_id)
    if wanted is None:
        return Page([], None)
    whose, lane, policy = wanted
    if query.status is None:
        statement = _ALL
    else:
        statement = _ENDED.format(int(query.status)) if query.status.is_terminal else _LIVE
    live = query.status is not None and not query.status.is_terminal
    rarely = live or lane is not None or policy is not None or query.reason is not None
    most = max(SCANNED, limit + 1) if rarely else limit + 1
    items: list[Task] = []
    looked_at, last = 0, before
    for seq, status, lane_id, policy_id, reason in view.execute(statement, (whose, before, most)):
        if len(items) == limit:
            return Page(items, str(last))
        looked_at, last = looked_at + 1, seq
        if (
            (query.status is None or query.status == status)
            and (lane is None or lane == lane_id)
            and (policy is None or policy == policy_id)
            and (query.reason is None or query.reason == reason)
        ):
            items.append(task_of(view.execute(_BY_SEQ, (seq,)).fetchone()))
    return Page(items, str(last) if looked_at == most else None)


def place(cursor: str) -> int:
    """Return the row that a cursor names."""
    if not _CURSOR.fullmatch(cursor):
        raise ConfigurationError("cursor", "must be one that a page has given", cursor)
    return int(cursor)


def wanted_by(
    view: View, tenant: str, lane: str | None, policy: str | None
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
        row = (None,) if name is None else view.execute(statement, name).fetchone()
        if row is None:
            return None
        numbers.append(row[0])
    return numbers[0], numbers[1], numbers[2]


def counters(view: View, tenant: str | None) -> Counters:
    """Return the counts of a tenant's tasks, or of all."""
    if tenant is None:
        row = view.execute(f"SELECT {_SUMS} FROM tenant").fetchone()
    else:
        row = view.execute(f"SELECT {_SUMS} FROM tenant WHERE name = ?", (tenant,)).fetchone()
    return Counters({status: row[status] for status in Status}, row[5])


def series(view: View, tenant: str | None, since: int) -> list[SeriesPoint]:
    """Return what happened in each minute from then on."""
    whose = 0
    if tenant is not None:
        row = view.execute(_TENANT, (tenant,)).fetchone()
        if row is None:
            return []
        whose = row[0]
    since = max(since - since % MINUTE, view.now - DAY)
    points: list[SeriesPoint] = []
    for minute, outcome, count in view.execute(_SERIES, (whose, since)):
        if not points or points[-1].minute != minute:
            points.append(SeriesPoint(minute, {}))
        points[-1].outcomes[outcome] = count
    return points
