"""Tasks are added: many at once, and each as if it came alone."""

# ruff: noqa: S608 - statements are put together from constants

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError
from tarry.service.model import Status, Task
from tarry.service.store import Added, Addition
from tarry.service.stores.sqlite.bulk import Bulk
from tarry.service.stores.sqlite.names import packed
from tarry.service.stores.sqlite.rows import TASK, task_of

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from tarry.service.store import Lease, New
    from tarry.service.stores.sqlite.ledger import Ledger

    Row = tuple[Any, ...]

_BY_KEY = TASK + "WHERE s.seq = (SELECT seq FROM task WHERE tenant = ? AND key = ?)"
_ADD_TASKS = Bulk(
    """
INSERT INTO task (id, tenant, key, created_at, policy_version, fingerprint, body_ref, content)
VALUES {rows}
ON CONFLICT DO NOTHING
""",
    "(?, ?, ?, ?, ?, ?, ?, ?)",
)
_ADD_STATES = Bulk(
    """
INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at, started_at, worker)
VALUES {rows}
""",
    "(?, ?, ?, ?, ?, ?, ?, ?, ?)",
)


def add(
    ledger: Ledger, tasks: Sequence[New], lease: Lease | None, quota: int | None
) -> list[Added]:
    """Add tasks, each in its own right: one by one where a quota may not do for all."""
    if quota is None or _fits(ledger, tasks, quota):
        return add_all(ledger, tasks, lease)
    return [_add_within(ledger, new, lease, quota) for new in tasks]


def _fits(ledger: Ledger, tasks: Sequence[New], quota: int) -> bool:
    """Whether each tenant has room for as many tasks, even if all were its own."""
    room = quota - len(tasks)
    tenants = dict.fromkeys(new.task.tenant for new in tasks)
    return all(ledger.live(ledger.names.tenant(tenant)) <= room for tenant in tenants)


def _add_within(ledger: Ledger, new: New, lease: Lease | None, quota: int) -> Added:
    tenant = ledger.names.tenant(new.task.tenant)
    if ledger.live(tenant) >= quota:
        return _existing(ledger, tenant, new.task) or Added(Addition.FULL, new.task)
    [added] = add_all(ledger, [new], lease)
    return added


def add_all(ledger: Ledger, tasks: Sequence[New], lease: Lease | None) -> list[Added]:
    """Add tasks whose number no quota bounds."""
    rows: list[Row] = []
    for new in tasks:
        task = new.task
        tenant = ledger.names.tenant(task.tenant)
        content = (task.policy_version, task.fingerprint, task.body_ref, task.content)
        rows.append((packed(task.id), tenant, task.key, ledger.now, *content))
    added: list[Added | None] = []
    states: list[Row] = []
    for new, row, seq in zip(tasks, rows, _insert(ledger, rows), strict=True):
        added.append(None if seq is None else _begin(ledger, new, lease, seq, row[1], states))
    _ADD_STATES.run(ledger, states)
    return [
        answer or _same(ledger, row[1], new.task)
        for answer, row, new in zip(added, rows, tasks, strict=True)
    ]


def _insert(ledger: Ledger, rows: list[Row]) -> list[int | None]:
    """Insert tasks; return the number of each, None where its key or its id was there."""
    seqs: list[int | None] = []
    for part, cursor in _ADD_TASKS.parts(ledger, rows):
        seqs += _numbers(ledger, part, cursor)
    return seqs


def _numbers(ledger: Ledger, part: Sequence[Row], cursor: sqlite3.Cursor) -> Sequence[int | None]:
    """Return the numbers of those that were inserted: SQLite counts on from the highest."""
    if not cursor.rowcount:
        return [None] * len(part)
    end = (cursor.lastrowid or 0) + 1
    begin = end - cursor.rowcount
    if end - begin == len(part):
        return range(begin, end)
    inserted = dict(ledger.execute("SELECT id, seq FROM task WHERE seq >= ?", (begin,)).fetchall())
    return [inserted.pop(row[0], None) for row in part]  # twice the same: the first it was


def _begin(
    ledger: Ledger, new: New, lease: Lease | None, seq: int, tenant: int, states: list[Row]
) -> Added:
    """Give a task that was inserted its first state."""
    task, now, names = new.task, ledger.now, ledger.names
    lane = ledger.lane(names.lane(task.lane))
    policy = names.policy(task.tenant, task.policy_id)
    due = max(now, task.next_attempt_at if new.delay is None else now + new.delay)
    is_open = lane.parked_until is None and not lane.paused
    held = lease if new.direct and is_open else None
    if held is not None and due <= now + held.horizon:
        status, wake_at, worker = Status.IN_FLIGHT, due + held.length, names.worker(held.worker)
        lane.leased(wake_at)
    else:
        held, status, wake_at, worker = None, Status.PENDING, due, None
        lane.due(wake_at)
    ledger.move(tenant, lane, policy, None, status)
    states.append((seq, tenant, lane.id, policy, int(status), wake_at, due, due, worker))
    stored = Task(
        id=task.id,
        tenant=task.tenant,
        lane=task.lane,
        key=task.key,
        fingerprint=task.fingerprint,
        content=task.content,
        body_ref=task.body_ref,
        policy_id=task.policy_id,
        policy_version=task.policy_version,
        created_at=now,
        next_attempt_at=due,
        started_at=due,
        status=status,
        worker=None if held is None else held.worker,
        wake_at=wake_at,
    )
    return Added(Addition.ADDED, stored, held is not None)


def _same(ledger: Ledger, tenant: int, task: Task) -> Added:
    """Return the task that stood in the way of a new one."""
    existing = _existing(ledger, tenant, task)
    if existing is None:
        msg = f"id must be a new one: {task.id} is the id of a task with another key"
        raise ConfigurationError(msg)
    return existing


def _existing(ledger: Ledger, tenant: int, task: Task) -> Added | None:
    row = ledger.execute(_BY_KEY, (tenant, task.key)).fetchone()
    if row is None:
        return None
    stored = task_of(row)
    same = stored.fingerprint == task.fingerprint
    return Added(Addition.EXISTING if same else Addition.CONFLICT, stored)
