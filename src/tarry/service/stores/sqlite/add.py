"""Tasks are added: many at once, and each as if it came alone."""

# ruff: noqa: S608 - statements are put together from constants

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from tarry.errors import ConfigurationError
from tarry.service.store import AddResult, AddStatus
from tarry.service.stores.sqlite.multirow import NO_NUMBER, NO_TEXT, NUMBER, TEXT, Bulk
from tarry.service.stores.sqlite.task_rows import TASK, packed, task_of, unpacked
from tarry.service.stores.sqlite.transaction import IN_FLIGHT, PENDING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from tarry.service.model import Task
    from tarry.service.store import Lease, NewTask
    from tarry.service.stores.sqlite.transaction import LaneRow, Ledger

_BY_KEY = TASK + "WHERE s.seq = (SELECT seq FROM task WHERE tenant = ? AND key = ?)"
_ADD_TASKS = Bulk(
    """
INSERT INTO task (id, tenant, key, created_at, policy_version, fingerprint, body_ref, content)
VALUES {rows}
ON CONFLICT DO NOTHING
""",
    f"(?, ?, ?, ?, {NUMBER}, ?, {TEXT}, ?)",
)
_ADD_STATES = Bulk(
    """
INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at, started_at, worker)
VALUES {rows}
""",
    f"(?, ?, ?, ?, ?, ?, ?, ?, {NUMBER})",
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


def told(
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
    ledger: Ledger, tasks: Sequence[NewTask], lease: Lease | None, quota: int | None
) -> list[Begun | AddResult]:
    """Add tasks, each in its own right: one by one where a quota may not do for all."""
    if quota is None or _fits(ledger, tasks, quota):
        return add_all(ledger, tasks, lease)
    return [_add_within(ledger, new, lease, quota) for new in tasks]


def _fits(ledger: Ledger, tasks: Sequence[NewTask], quota: int) -> bool:
    """Whether each tenant has room for as many tasks, even if all were its own."""
    room = quota - len(tasks)
    tenants = dict.fromkeys(new.task.tenant for new in tasks)
    return all(ledger.live(ledger.names.tenant(tenant)) <= room for tenant in tenants)


def _add_within(ledger: Ledger, new: NewTask, lease: Lease | None, quota: int) -> Begun | AddResult:
    tenant = ledger.names.tenant(new.task.tenant)
    if ledger.live(tenant) >= quota:
        return _existing(ledger, tenant, new.task) or AddResult(AddStatus.FULL, new.task)
    [added] = add_all(ledger, [new], lease)
    return added


def add_all(
    ledger: Ledger, tasks: Sequence[NewTask], lease: Lease | None
) -> list[Begun | AddResult]:
    """Add tasks whose number no quota bounds."""
    tenants = [ledger.names.tenant(new.task.tenant) for new in tasks]
    seqs = _insert(ledger, tasks, tenants)
    added = _begin(ledger, tasks, tenants, seqs, lease)
    return [
        answer or _same(ledger, tenant, new.task)
        for answer, tenant, new in zip(added, tenants, tasks, strict=True)
    ]


def _insert(ledger: Ledger, tasks: Sequence[NewTask], tenants: Sequence[int]) -> list[int | None]:
    """Insert tasks; return the number of each, None where its key or its id was there."""
    now = ledger.now
    keys = packed([new.task.id for new in tasks])
    values: list[Any] = []
    for new, key, tenant in zip(tasks, keys, tenants, strict=True):
        task = new.task
        version, ref = task.policy_version, task.body_ref
        values += (
            key,
            tenant,
            task.key,
            now,
            NO_NUMBER if version is None else version,
            bytearray(task.fingerprint),
            NO_TEXT if ref is None else ref,
            bytearray(task.content),
        )
    seqs: list[int | None] = []
    for size, cursor in _ADD_TASKS.parts(ledger.execute, values):
        seqs += _numbers(ledger, tasks[len(seqs) : len(seqs) + size], cursor)
    return seqs


def _numbers(
    ledger: Ledger, part: Sequence[NewTask], cursor: sqlite3.Cursor
) -> Sequence[int | None]:
    """Return the numbers of those that were inserted: SQLite counts on from the highest."""
    if not cursor.rowcount:
        return [None] * len(part)
    end = (cursor.lastrowid or 0) + 1
    begin = end - cursor.rowcount
    if end - begin == len(part):
        return range(begin, end)
    rows = ledger.execute("SELECT id, seq FROM task WHERE seq >= ?", (begin,)).fetchall()
    inserted = {unpacked(key): seq for key, seq in rows}
    return [inserted.pop(new.task.id, None) for new in part]  # twice the same: the first it was


def _begin(
    ledger: Ledger,
    tasks: Sequence[NewTask],
    tenants: Sequence[int],
    seqs: Sequence[int | None],
    lease: Lease | None,
) -> list[Begun | None]:
    """Give tasks that were inserted their first state; the others are None."""
    now = ledger.now
    places: dict[tuple[str, str, str], _Place] = {}
    lanes = dict.fromkeys([new.task.lane for new, seq in zip(tasks, seqs, strict=True) if seq])
    ledger.load([ledger.names.lane(lane) for lane in lanes])
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
            place = places[key] = _place(ledger, tenant, task)
        lane = place.lane
        due = max(now, task.next_attempt_at if new.delay is None else now + new.delay)
        held = lease if new.direct and place.is_open else None
        worker: int | str
        if held is not None and due <= now + held.horizon:
            status, wake_at, worker = IN_FLIGHT, due + held.length, ledger.names.worker(held.worker)
            lane.leased(wake_at)
            place.leased += 1
        else:
            held, status, wake_at, worker = None, PENDING, due, NO_NUMBER
            lane.due(wake_at)
            place.waiting += 1
        values += (seq, tenant, lane.id, place.policy, status, wake_at, due, due, worker)
        added.append((now, due, wake_at, held is not None))
    _ADD_STATES.run(ledger.execute, values)
    for place in places.values():
        ledger.move(place.tenant, place.lane, place.policy, None, PENDING, place.waiting)
        ledger.move(place.tenant, place.lane, place.policy, None, IN_FLIGHT, place.leased)
    return added


def _place(ledger: Ledger, tenant: int, task: Task) -> _Place:
    names = ledger.names
    lane = ledger.lane(names.lane(task.lane))
    policy = names.policy(task.tenant, task.policy_id)
    return _Place(tenant, lane, policy, lane.parked_until is None and not lane.paused)


def _same(ledger: Ledger, tenant: int, task: Task) -> AddResult:
    """Return the task that stood in the way of a new one."""
    existing = _existing(ledger, tenant, task)
    if existing is None:
        rule = f"must be a new one: {task.id} is the id of a task with another key"
        raise ConfigurationError("id", rule)
    return existing


def _existing(ledger: Ledger, tenant: int, task: Task) -> AddResult | None:
    row = ledger.execute(_BY_KEY, (tenant, task.key)).fetchone()
    if row is None:
        return None
    stored = task_of(row)
    same = stored.fingerprint == task.fingerprint
    return AddResult(AddStatus.EXISTING if same else AddStatus.CONFLICT, stored)
