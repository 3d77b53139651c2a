"""Tasks are added: many at once, and each as if it came alone."""

# ruff: noqa: S608 - statements are put together from constants

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from tarry.errors import ConfigurationError
from tarry.service.store import AddResult, AddStatus
from tarry.service.stores.sqlite.multirow import (
    NULL_NUMBER,
    NULL_TEXT,
    NULLABLE_NUMBER,
    NULLABLE_TEXT,
    MultiRowStatement,
)
from tarry.service.stores.sqlite.task_rows import (
    SELECT_TASK,
    decode_task,
    pack_valid_ids,
    unpack_id,
)
from tarry.service.stores.sqlite.transaction import IN_FLIGHT, PENDING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from tarry.service.model import Task
    from tarry.service.store import Lease, NewTask
    from tarry.service.stores.sqlite.transaction import LaneRow, Transaction

_BY_KEY = SELECT_TASK + "WHERE s.seq = (SELECT seq FROM task WHERE tenant = ? AND key = ?)"
_ADD_TASKS = MultiRowStatement(
    """
INSERT INTO task (id, tenant, key, created_at, policy_version, fingerprint, body_ref, content)
VALUES {rows}
ON CONFLICT DO NOTHING
""",
    f"(?, ?, ?, ?, {NULLABLE_NUMBER}, ?, {NULLABLE_TEXT}, ?)",
)
_ADD_STATES = MultiRowStatement(
    """
INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at, started_at, worker)
VALUES {rows}
""",
    f"(?, ?, ?, ?, ?, ?, ?, ?, {NULLABLE_NUMBER})",
)


Begun: TypeAlias = tuple[int, int, int, bool]
"""What a caller does not know of a task that was added: when that was, when its first attempt is
due, when it wants attention, and whether it is leased to him."""


class _Place(Struct, gc=False):
    """Where tasks of one lane and policy go, and how many went there."""

    tenant: int
    lane: LaneRow
    policy: int
    is_open: bool
    waiting: int = 0
    leased: int = 0


def to_add_results(
    tasks: Sequence[NewTask], lease: Lease | None, answers: Sequence[Begun | AddResult]
) -> list[AddResult]:
    """Return the answers of `add` as the port has them."""
    return [
        one
        if isinstance(one, AddResult)
        else AddResult(AddStatus.ADDED, _stored(new.task, lease, one), one[3])
        for new, one in zip(tasks, answers, strict=True)
    ]


def _stored(task: Task, lease: Lease | None, begun: Begun) -> Task:
    created_at, due, wake_at, leased = begun
    worker = lease.worker if leased and lease is not None else None
    return task.begun(created_at, due, wake_at=wake_at, worker=worker)


def add(
    tx: Transaction, tasks: Sequence[NewTask], lease: Lease | None, quota: int | None
) -> list[Begun | AddResult]:
    """Add tasks, each in its own right: one by one where a quota may not do for all."""
    if quota is None or _fits(tx, tasks, quota):
        return add_without_quota(tx, tasks, lease)
    return [_add_within(tx, new, lease, quota) for new in tasks]


def _fits(tx: Transaction, tasks: Sequence[NewTask], quota: int) -> bool:
    """Whether each tenant has room for as many tasks, even if all were its own."""
    room = quota - len(tasks)
    tenants = dict.fromkeys(new.task.tenant for new in tasks)
    return all(tx.live_tasks(tx.names.tenant_id(tenant)) <= room for tenant in tenants)


def _add_within(
    tx: Transaction, new: NewTask, lease: Lease | None, quota: int
) -> Begun | AddResult:
    tenant = tx.names.tenant_id(new.task.tenant)
    if tx.live_tasks(tenant) >= quota:
        return _existing(tx, tenant, new.task) or AddResult(AddStatus.FULL, new.task)
    [added] = add_without_quota(tx, [new], lease)
    return added


def add_without_quota(
    tx: Transaction, tasks: Sequence[NewTask], lease: Lease | None
) -> list[Begun | AddResult]:
    """Add tasks whose number no quota bounds."""
    tenants = [tx.names.tenant_id(new.task.tenant) for new in tasks]
    seqs = _insert(tx, tasks, tenants)
    added = _begin(tx, tasks, tenants, seqs, lease)
    return [
        answer or _same(tx, tenant, new.task)
        for answer, tenant, new in zip(added, tenants, tasks, strict=True)
    ]


def _insert(tx: Transaction, tasks: Sequence[NewTask], tenants: Sequence[int]) -> list[int | None]:
    """Insert tasks; return the number of each, None where its key or its id was there."""
    now = tx.now
    keys = pack_valid_ids([new.task.id for new in tasks])
    values: list[Any] = []
    for new, key, tenant in zip(tasks, keys, tenants, strict=True):
        task = new.task
        version, ref = task.policy_version, task.body_ref
        values += (
            key,
            tenant,
            task.key,
            now,
            NULL_NUMBER if version is None else version,
            bytearray(task.fingerprint),
            NULL_TEXT if ref is None else ref,
            bytearray(task.content),
        )
    seqs: list[int | None] = []
    for size, cursor in _ADD_TASKS.parts(tx.execute, values):
        seqs += _numbers(tx, tasks[len(seqs) : len(seqs) + size], cursor)
    return seqs


def _numbers(
    tx: Transaction, part: Sequence[NewTask], cursor: sqlite3.Cursor
) -> Sequence[int | None]:
    """Return the numbers of those that were inserted: SQLite counts on from the highest."""
    if not cursor.rowcount:
        return [None] * len(part)
    end = (cursor.lastrowid or 0) + 1
    begin = end - cursor.rowcount
    if end - begin == len(part):
        return range(begin, end)
    rows = tx.execute("SELECT id, seq FROM task WHERE seq >= ?", (begin,)).fetchall()
    inserted = {unpack_id(key): seq for key, seq in rows}
    return [inserted.pop(new.task.id, None) for new in part]  # twice the same: the first it was


def _begin(
    tx: Transaction,
    tasks: Sequence[NewTask],
    tenants: Sequence[int],
    seqs: Sequence[int | None],
    lease: Lease | None,
) -> list[Begun | None]:
    """Give tasks that were inserted their first state; the others are None."""
    now = tx.now
    places: dict[tuple[str, str, str], _Place] = {}
    lanes = dict.fromkeys([new.task.lane for new, seq in zip(tasks, seqs, strict=True) if seq])
    tx.load_lanes([tx.names.lane_id(lane) for lane in lanes])
    values: list[Any] = []
    added: list[Begun | None] = []
    for new, tenant, seq in zip(tasks, tenants, seqs, strict=True):
        if seq is None:
            added.append(None)
            continue
        task = new.task
        key = (task.tenant, task.lane, task.policy_id)
        place = places.get(key)
        if place is None:
            place = places[key] = _place(tx, tenant, task)
        lane = place.lane
        due = max(now, task.next_attempt_at if new.delay is None else now + new.delay)
        held = lease if new.direct and place.is_open else None
        worker: int | str
        if held is not None and due <= now + held.horizon:
            status, wake_at, worker = IN_FLIGHT, due + held.length, tx.names.worker_id(held.worker)
            lane.leased(wake_at)
            place.leased += 1
        else:
            held, status, wake_at, worker = None, PENDING, due, NULL_NUMBER
            lane.due(wake_at)
            place.waiting += 1
        values += (seq, tenant, lane.id, place.policy, status, wake_at, due, due, worker)
        added.append((now, due, wake_at, held is not None))
    _ADD_STATES.run(tx.execute, values)
    for place in places.values():
        tx.count_transition(place.tenant, place.lane, place.policy, None, PENDING, place.waiting)
        tx.count_transition(place.tenant, place.lane, place.policy, None, IN_FLIGHT, place.leased)
    return added


def _place(tx: Transaction, tenant: int, task: Task) -> _Place:
    names = tx.names
    lane = tx.lane(names.lane_id(task.lane))
    policy = names.policy_id(task.tenant, task.policy_id)
    return _Place(tenant, lane, policy, lane.parked_until is None and not lane.paused)


def _same(tx: Transaction, tenant: int, task: Task) -> AddResult:
    """Return the task that stood in the way of a new one."""
    existing = _existing(tx, tenant, task)
    if existing is None:
        rule = f"must be a new one: {task.id} is the id of a task with another key"
        raise ConfigurationError("id", rule)
    return existing


def _existing(tx: Transaction, tenant: int, task: Task) -> AddResult | None:
    row = tx.execute(_BY_KEY, (tenant, task.key)).fetchone()
    if row is None:
        return None
    stored = decode_task(row)
    same = stored.fingerprint == task.fingerprint
    return AddResult(AddStatus.EXISTING if same else AddStatus.CONFLICT, stored)
