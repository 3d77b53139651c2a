"""Adding tasks: a few statements insert a batch, but each task of it has its own result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from msgspec import Struct

from tarry.errors import ConfigurationError
from tarry.service.store import AddResult, AddStatus
from tarry.service.stores.sqlite.queries import SELECT_TASK, decode_task, pack_ids, unpack_id
from tarry.service.stores.sqlite.transaction import (
    IN_FLIGHT,
    NULL_FOR_NUMBER,
    NULL_FOR_TEXT,
    NUMBER_OR_NULL,
    PENDING,
    TEXT_OR_NULL,
    MultiRowStatement,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from tarry.service.model import Task
    from tarry.service.store import LeaseTerms, NewTask
    from tarry.service.stores.sqlite.transaction import LaneRow, Transaction

_FIND_BY_KEY = SELECT_TASK + "WHERE s.seq = (SELECT seq FROM task WHERE tenant = ? AND key = ?)"
# A MultiRowStatement repeats the part in brackets for each row.
_INSERT_TASKS = MultiRowStatement(f"""
INSERT INTO task (id, tenant, key, created_at, policy_version, fingerprint, body_ref, content)
VALUES [?, ?, ?, ?, {NUMBER_OR_NULL}, ?, {TEXT_OR_NULL}, ?]
ON CONFLICT DO NOTHING
""")
_INSERT_STATES = MultiRowStatement(f"""
INSERT INTO state (seq, tenant, lane, policy, status, wake_at, next_attempt_at, started_at, worker)
VALUES [?, ?, ?, ?, ?, ?, ?, ?, {NUMBER_OR_NULL}]
""")


InitialState: TypeAlias = tuple[int, int, int, bool]
"""`created_at`, `next_attempt_at` and `wake_at` of an added task, and whether it is leased.

`wake_at` is the end of the lease, or `next_attempt_at` without a lease. The caller knows all other
fields, so the writer process returns only these: 7 KB instead of 400 KB for 270 tasks."""


class _LaneAndPolicy(Struct, gc=False):
    """The lane and policy that some tasks of a batch share, and how many tasks were added."""

    tenant: int
    lane: LaneRow
    policy: int
    can_lease: bool  # the lane is neither parked nor half-open nor paused
    pending_count: int = 0
    leased_count: int = 0


def to_add_results(
    tasks: Sequence[NewTask], terms: LeaseTerms | None, results: Sequence[InitialState | AddResult]
) -> list[AddResult]:
    """Convert the results of `add` below into those of `Store.add`."""
    worker = None if terms is None else terms.worker
    complete: list[AddResult] = []
    for new, result in zip(tasks, results, strict=True):
        if isinstance(result, AddResult):
            complete.append(result)
            continue
        created_at, due, wake_at, is_leased = result
        leased_to = worker if is_leased else None
        stored = new.task.as_stored(created_at, due, wake_at=wake_at, worker=leased_to)
        complete.append(AddResult(AddStatus.ADDED, stored, is_leased))
    return complete


def add(
    tx: Transaction, tasks: Sequence[NewTask], terms: LeaseTerms | None, quota: int | None
) -> list[InitialState | AddResult]:
    """Add tasks, and lease those with `lease_on_add`; see `Store.add`."""
    if quota is None:
        return add_without_quota(tx, tasks, terms)
    # Quick check: no tenant would exceed the quota even if all the tasks were its own.
    max_live = quota - len(tasks)
    tenants = dict.fromkeys(new.task.tenant for new in tasks)
    if all(tx.count_live_tasks(tx.names.tenant_id(tenant)) <= max_live for tenant in tenants):
        return add_without_quota(tx, tasks, terms)
    results: list[InitialState | AddResult] = []
    for new in tasks:
        tenant_id = tx.names.tenant_id(new.task.tenant)
        if tx.count_live_tasks(tenant_id) < quota:
            results += add_without_quota(tx, [new], terms)
        else:
            existing = _find_existing(tx, tenant_id, new.task)
            results.append(existing or AddResult(AddStatus.FULL, new.task))
    return results


def add_without_quota(
    tx: Transaction, tasks: Sequence[NewTask], terms: LeaseTerms | None
) -> list[InitialState | AddResult]:
    """Add tasks, however many live tasks their tenants have."""
    tenants = [tx.names.tenant_id(new.task.tenant) for new in tasks]
    seqs = _insert_tasks(tx, tasks, tenants)
    states = _insert_states(tx, tasks, tenants, seqs, terms)
    return [
        state or _find_existing(tx, tenant, new.task) or _reject_id(new.task)
        for state, tenant, new in zip(states, tenants, tasks, strict=True)
    ]


def _insert_tasks(
    tx: Transaction, tasks: Sequence[NewTask], tenants: Sequence[int]
) -> list[int | None]:
    """Insert rows into `task`; return the `seq` of each, or None if its key or id exists."""
    now = tx.now
    ids = pack_ids([new.task.id for new in tasks])
    if None in ids:
        malformed = tasks[ids.index(None)].task.id
        raise ConfigurationError("id", "must be a UUID in its usual form", malformed)
    parameters: list[Any] = []
    for new, packed_id, tenant in zip(tasks, ids, tenants, strict=True):
        task = new.task
        version = NULL_FOR_NUMBER if task.policy_version is None else task.policy_version
        ref = NULL_FOR_TEXT if task.owned_body_ref is None else task.owned_body_ref
        fingerprint, content = bytearray(task.fingerprint), bytearray(task.packed_content)
        parameters += (packed_id, tenant, task.key, now, version, fingerprint, ref, content)
    seqs: list[int | None] = []
    for size, cursor in _INSERT_TASKS.execute_chunks(tx.execute, parameters):
        seqs += _inserted_seqs(tx, tasks[len(seqs) : len(seqs) + size], cursor)
    return seqs


def _inserted_seqs(
    tx: Transaction, chunk: Sequence[NewTask], cursor: sqlite3.Cursor
) -> Sequence[int | None]:
    """Return the `seq` of each task of a chunk, or None if it was not inserted.

    `seq` is the row id, and SQLite assigns consecutive row ids. So if all rows were inserted, the
    last row id is enough. RETURNING is slower, because it has to fetch a row for each task.
    """
    if not cursor.rowcount:
        return [None] * len(chunk)
    end = (cursor.lastrowid or 0) + 1
    begin = end - cursor.rowcount
    if end - begin == len(chunk):
        return range(begin, end)
    rows = tx.execute("SELECT id, seq FROM task WHERE seq >= ?", (begin,)).fetchall()
    inserted = {unpack_id(packed_id): seq for packed_id, seq in rows}
    # pop: of two tasks with the same id, the first one was inserted.
    return [inserted.pop(new.task.id, None) for new in chunk]


def _insert_states(
    tx: Transaction,
    tasks: Sequence[NewTask],
    tenants: Sequence[int],
    seqs: Sequence[int | None],
    terms: LeaseTerms | None,
) -> list[InitialState | None]:
    """Insert a row into `state` for each task that has a `seq`; return None for the others."""
    now = tx.now
    pairs: dict[tuple[str, str, str], _LaneAndPolicy] = {}
    lanes = dict.fromkeys([new.task.lane for new, seq in zip(tasks, seqs, strict=True) if seq])
    tx.load_lanes([tx.names.lane_id(lane) for lane in lanes])
    parameters: list[Any] = []
    states: list[InitialState | None] = []
    for new, tenant, seq in zip(tasks, tenants, seqs, strict=True):
        if seq is None:
            states.append(None)
            continue
        task = new.task
        pair_key = (task.tenant, task.lane, task.policy_id)
        pair = pairs.get(pair_key)
        if pair is None:
            lane = tx.lane(tx.names.lane_id(task.lane))
            policy = tx.names.policy_id(task.tenant, task.policy_id)
            can_lease = lane.parked_until is None and not lane.paused
            pair = pairs[pair_key] = _LaneAndPolicy(tenant, lane, policy, can_lease)
        lane = pair.lane
        due = max(now, task.next_attempt_at if new.delay_ms is None else now + new.delay_ms)
        lease_on_add = terms if new.lease_on_add and pair.can_lease else None
        worker: int | str
        if lease_on_add is not None and due <= now + lease_on_add.horizon_ms:
            status, wake_at = IN_FLIGHT, due + lease_on_add.length_ms
            worker = tx.names.worker_id(lease_on_add.worker)
            lane.note_lease(wake_at)
            pair.leased_count += 1
        else:
            status, wake_at, worker = PENDING, due, NULL_FOR_NUMBER
            lane.note_due(wake_at)
            pair.pending_count += 1
        # The column `started_at`, which is `Task.first_due_at`, is `due` too.
        parameters += (seq, tenant, lane.id, pair.policy, status, wake_at, due, due, worker)
        states.append((now, due, wake_at, status == IN_FLIGHT))
    _INSERT_STATES.execute(tx.execute, parameters)
    for pair in pairs.values():
        lane, policy = pair.lane, pair.policy
        tx.count_transition(pair.tenant, lane, policy, None, PENDING, pair.pending_count)
        tx.count_transition(pair.tenant, lane, policy, None, IN_FLIGHT, pair.leased_count)
    return states


def _find_existing(tx: Transaction, tenant: int, task: Task) -> AddResult | None:
    row = tx.execute(_FIND_BY_KEY, (tenant, task.key)).fetchone()
    if row is None:
        return None
    stored = decode_task(row)
    is_same = stored.fingerprint == task.fingerprint
    return AddResult(AddStatus.EXISTING if is_same else AddStatus.CONFLICT, stored)


def _reject_id(task: Task) -> NoReturn:
    rule = f"must be new: {task.id} is the id of a task with another idempotency key"
    raise ConfigurationError("id", rule)
