"""Operations on live tasks (PENDING or IN_FLIGHT): add, claim, finish, release, cancel, retry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.model import Status
from tarry.service.store import (
    AddResult,
    AddStatus,
    CancelStatus,
    ClaimResult,
    FinishStatus,
    NewTask,
    RetryNowStatus,
)
from tarry.service.stores.postgres.constants import (
    ADDED_LEASED,
    EXISTS,
    HALF_OPEN_ROW,
    HEADER_ROW,
    ID_CONFLICT_STATE,
    LEASED_QUEUE,
    LIVE_COLUMNS,
    OVER_QUOTA,
    RENEWED_ROW,
    SUPERSEDED,
    TASK_JOINS,
)
from tarry.service.stores.postgres.group_flush import DEFER_FLUSH
from tarry.service.stores.postgres.rows import (
    FINISHED_COLUMNS,
    FINISHED_STATUSES,
    decode_task,
    decode_text,
    encode_ids,
    encode_numbers,
    encode_optionals,
    encode_text,
    encode_texts,
)
from tarry.service.stores.records import encode, is_task_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tarry.service.model import Task
    from tarry.service.store import LeaseTerms, Release, TaskResult
    from tarry.service.stores.postgres.database import Database, Transaction

# The transactions of these four statements are flushed by `Database.flush`. Behind a pooler, their
# search_path is not set, so all names are qualified. `unnest` with several arguments is a part of
# the grammar, and always the built-in function.
_ADD = f"""
SELECT r.* FROM {DEFER_FLUSH}, tarry.add_1(
    ROW($1, $2, $3, $4, $5)::tarry.names_1,
    (SELECT pg_catalog.array_agg(ROW(i.*)::tarry.new_task_1) FROM unnest(
        $6::pg_catalog.text::pg_catalog.uuid[], $7::pg_catalog.text::integer[],
        $8::pg_catalog.text::integer[], $9::pg_catalog.text::integer[], $10::pg_catalog.text[],
        $11::pg_catalog.bytea[], $12::pg_catalog.text[], $13::pg_catalog.text::integer[],
        $14::pg_catalog.text::bigint[], $15::pg_catalog.text::bigint[],
        $16::pg_catalog.text::boolean[]) AS i),
    $17, $18, $19, $20, $21, $22, $23) AS r
"""
_CLAIM = f"SELECT r.* FROM {DEFER_FLUSH}, tarry.claim_1($1, $2, $3, $4, $5, $6, $7, $8) AS r"
_FINISH = f"""
SELECT tarry.finish_1(
    (SELECT pg_catalog.array_agg(ROW(i.*)::tarry.result_1) FROM unnest(
        $1::pg_catalog.text[], $2::pg_catalog.text::pg_catalog.uuid[],
        $3::pg_catalog.text::integer[], $4::pg_catalog.text[], $5::pg_catalog.text::smallint[],
        $6::pg_catalog.text[], $7::pg_catalog.text::bigint[], $8::pg_catalog.text::bigint[],
        $9::pg_catalog.text[], $10::pg_catalog.text::double precision[],
        $11::pg_catalog.text::integer[], $12::pg_catalog.text[]) AS i),
    $13, $14), {DEFER_FLUSH}
"""
_RELEASE = f"SELECT tarry.release_1($1, $2, $3, $4), {DEFER_FLUSH}"
_LOCK = "SELECT tarry.lock_1($1, $2, $3, $4)"
_VERSIONS = """
SELECT k.id, s.version FROM tarry.task_key AS k
JOIN tarry.live AS s ON s.tenant = k.tenant AND s.seq = k.seq WHERE k.id = ANY ($1::uuid[])
"""
_CANCEL = "SELECT tarry.cancel_1($1, $2, $3)"
_RETRY_NOW = "SELECT tarry.retry_now_1($1, $2, $3, $4)"
_FIND_BY_KEYS = f"""
WITH wanted AS MATERIALIZED (
    SELECT k.tenant, k.seq FROM unnest($1::text[], $2::text[]) AS i (tenant, key)
    JOIN tarry.tenant AS t ON t.name = i.tenant
    JOIN tarry.task_key AS k ON k.tenant = t.id AND k.key = i.key
)
SELECT {LIVE_COLUMNS} FROM wanted AS w
JOIN tarry.live AS s ON s.tenant = w.tenant AND s.seq = w.seq {TASK_JOINS}
UNION ALL
SELECT {FINISHED_COLUMNS} FROM wanted AS w
JOIN tarry.finished AS s
    ON s.tenant = w.tenant AND s.status IN {FINISHED_STATUSES} AND s.seq = w.seq
{TASK_JOINS}
"""
_UNKNOWN_LEASES = f"""
SELECT k.id, s.version,
    CASE WHEN s.wake_at - $3::bigint > tarry.now_1($4) THEN s.wake_at - $3 END AS deferred_until
FROM tarry.lane AS l
JOIN tarry.live AS s ON s.lane = l.id AND s.queue = {LEASED_QUEUE}
JOIN tarry.task_key AS k ON k.seq = s.seq
WHERE l.in_flight > 0 AND s.worker = $1 AND k.id <> ALL ($2::uuid[])
"""
_FINISH_STATUSES = (FinishStatus.APPLIED, FinishStatus.SUPERSEDED, FinishStatus.CANCELLED)
_CANCEL_STATUSES = (CancelStatus.CANCELLED, CancelStatus.REQUESTED, CancelStatus.FINISHED)
_RETRY_STATUSES = (
    RetryNowStatus.DUE,
    RetryNowStatus.IN_FLIGHT,
    RetryNowStatus.SUCCEEDED,
    RetryNowStatus.OVER_QUOTA,
)
_MAX_ADD_TRIES = 5
_ADDED = AddStatus.ADDED  # read once, because it takes 0.27 us in Python 3.11
_SEQ = -1  # index of the number of a task, the last column of its row


class _Positions:
    """Assigns positions to distinct keys, from 1 as in SQL arrays."""

    def __init__(self) -> None:
        self._positions: dict[Any, int] = {}

    def get(self, key: Any) -> int:
        """Return the position of a key."""
        return self._positions.setdefault(key, len(self._positions) + 1)

    def keys(self) -> list[Any]:
        """Return the keys in the order of their positions."""
        return list(self._positions)


async def add(
    database: Database,
    tasks: Sequence[NewTask],
    terms: LeaseTerms | None,
    quota: int | None,
    lane_quota: int | None,
) -> list[AddResult]:
    """Add tasks, and lease those with `lease_on_add`; see `Store.add`."""
    if not tasks:
        return []
    now = database.now()
    flush_number = await database.begin_deferred_flush()
    results: list[AddResult | None] = [None] * len(tasks)
    positions = list(range(len(tasks)))
    for _ in range(_MAX_ADD_TRIES):
        batch = [tasks[position] for position in positions]
        rows = await _call_add(database.fetch, _add_arguments(batch, terms, quota, lane_quota, now))
        existing = await _find_existing(database, batch, rows)
        for position, new, row in zip(positions, batch, rows, strict=True):
            results[position] = _to_add_result(new, row, terms, existing)
        # A task with the key of a new task may have been deleted between the two statements.
        positions = [position for position in positions if results[position] is None]
        if not positions:
            await database.flush(flush_number)
            return [result for result in results if result is not None]
    raise StoreUnavailable("a task with the same idempotency key is being replaced; try again")


async def _call_add(fetch: Callable[..., Any], arguments: tuple[object, ...]) -> list[Any]:
    try:
        rows: list[Any] = await fetch(_ADD, *arguments)
    except Exception as error:
        if getattr(error, "sqlstate", None) != ID_CONFLICT_STATE:
            raise
        rule = f"must be new: {error} is the id of a task with another idempotency key"
        raise ConfigurationError("id", rule) from None
    return rows


def _add_arguments(
    tasks: Sequence[NewTask],
    terms: LeaseTerms | None,
    quota: int | None,
    lane_quota: int | None,
    now: int | None,
) -> tuple[object, ...]:
    tenants, lanes, policies = _Positions(), _Positions(), _Positions()
    for new in tasks:
        if not is_task_id(new.task.id):
            raise ConfigurationError("id", "must be a UUID in its usual form", new.task.id)
    task_list = [new.task for new in tasks]
    # A lane belongs to one tenant, so any of its tasks gives it.
    lane_tenant = {task.lane: task.tenant for task in task_list}
    task_tenants = [tenants.get(task.tenant) for task in task_list]
    task_lanes = [lanes.get(task.lane) for task in task_list]
    task_policies = [policies.get((task.tenant, task.policy_id)) for task in task_list]
    return (
        encode_texts(tenants.keys()),
        encode_texts(lanes.keys()),
        [tenants.get(lane_tenant[lane]) for lane in lanes.keys()],  # noqa: SIM118 - no dict
        [encode_text(policy) for _, policy in policies.keys()],  # noqa: SIM118 - no dict
        [tenants.get(tenant) for tenant, _ in policies.keys()],  # noqa: SIM118 - no dict
        encode_ids([task.id for task in task_list]),
        encode_numbers(task_tenants),
        encode_numbers(task_lanes),
        encode_numbers(task_policies),
        [encode_text(task.key) for task in task_list],
        [task.fingerprint for task in task_list],
        encode_optionals([task.owned_body_ref for task in task_list]),
        encode_numbers([task.policy_version for task in task_list]),
        encode_numbers([task.next_attempt_at for task in task_list]),
        encode_numbers([new.delay_ms for new in tasks]),
        encode_numbers([new.lease_on_add and terms is not None for new in tasks]),
        [task.packed_content for task in task_list],
        None if terms is None else encode_text(terms.worker),
        0 if terms is None else terms.length_ms,
        0 if terms is None else terms.horizon_ms,
        quota,
        lane_quota,
        now,
    )


async def _find_existing(
    database: Database, tasks: Sequence[NewTask], rows: Sequence[Any]
) -> dict[tuple[str, str], Task]:
    """Return the stored tasks with the keys of tasks that were not added, by tenant and key."""
    found = [new.task for new, row in zip(tasks, rows, strict=True) if row[0] == EXISTS]
    if not found:
        return {}
    stored = await database.fetch(
        _FIND_BY_KEYS,
        [encode_text(task.tenant) for task in found],
        [encode_text(task.key) for task in found],
    )
    decoded = [decode_task(row) for row in stored]
    return {(task.tenant, task.key): task for task in decoded}


def _to_add_result(
    new: NewTask,
    row: Sequence[Any],
    terms: LeaseTerms | None,
    existing: Mapping[tuple[str, str], Task],
) -> AddResult | None:
    """Convert a row of `add_1`; return None if the existing task was not found."""
    task = new.task
    result, created_at, due, wake_at = row
    if result <= ADDED_LEASED:
        is_leased = result == ADDED_LEASED
        worker = terms.worker if is_leased and terms is not None else None
        task.set_added(created_at, due, wake_at=wake_at, worker=worker)
        return AddResult(_ADDED, task, is_leased)
    if result == EXISTS:
        found = existing.get((task.tenant, task.key))
        if found is None:
            return None
        is_same = found.fingerprint == task.fingerprint
        return AddResult(AddStatus.EXISTING if is_same else AddStatus.CONFLICT, found)
    is_quota = result == OVER_QUOTA
    return AddResult(AddStatus.OVER_QUOTA if is_quota else AddStatus.TOO_MANY_LANES, task)


async def claim(
    database: Database,
    terms: LeaseTerms,
    limit: int,
    per_lane: int,
    lane_limits: Mapping[str, int],
) -> ClaimResult:
    """Lease up to `limit` tasks; see `Store.claim`."""
    flush_number = await database.begin_deferred_flush()
    rows = await database.fetch(
        _CLAIM,
        encode_text(terms.worker),
        terms.length_ms,
        terms.horizon_ms,
        limit,
        per_lane,
        encode_texts(lane_limits),
        list(lane_limits.values()),
        database.now(),
    )
    claimed = ClaimResult(0, [], {}, None)
    leased: list[tuple[int, int, Task]] = []
    half_open: dict[str, int] = {}
    for row in rows:
        kind = row[0]
        if kind == HEADER_ROW:  # has these three values in columns of tasks
            claimed.now, claimed.next_at = row["created_at"], row["next_attempt_at"]
            claimed.lost_attempts = row["attempts"]
        elif kind == HALF_OPEN_ROW:
            half_open[decode_text(row["lane"])] = row["attempts"]  # consecutive opens
        else:
            fields = tuple(row)
            task = decode_task(fields[1:])
            if kind == RENEWED_ROW:
                claimed.renewed_tasks = [*claimed.renewed_tasks, task]
            else:
                leased.append((task.next_attempt_at, fields[_SEQ], task))
    leased.sort(key=lambda entry: entry[:2])
    claimed.tasks = [task for _, _, task in leased]
    if half_open:
        lanes = {task.lane for task in claimed.tasks}
        claimed.consecutive_opens_by_lane = {
            lane: opens for lane, opens in half_open.items() if lane in lanes
        }
    if claimed.tasks or claimed.renewed_tasks or claimed.lost_attempts:
        await database.flush(flush_number)
    return claimed


async def finish(database: Database, results: Sequence[TaskResult]) -> list[FinishStatus]:
    """Log attempts and write the next states of tasks that still have the version of the lease."""
    if not results:
        return []
    now = database.now()
    flush_number = await database.begin_deferred_flush()
    has_callbacks = any(result.callback_task is not None for result in results)
    if len({result.task.id for result in results}) == len(results) and not has_callbacks:
        numbers: list[int] = await database.fetch_value(_FINISH, *_finish_arguments(results, now))
        statuses = [_FINISH_STATUSES[number] for number in numbers]
    else:
        statuses = await database.transact(lambda tx: _finish_in_transaction(tx, results, now))
    await database.flush(flush_number)
    return statuses


async def _finish_in_transaction(
    tx: Transaction, results: Sequence[TaskResult], now: int | None
) -> list[FinishStatus]:
    """Write results that need several statements: callback tasks, or several results of a task."""
    batches: list[list[TaskResult]] = [[]]
    ids: set[str] = set()
    for result in results:
        if result.task.id in ids:  # its version must be the one that the previous result has set
            batches.append([])
            ids.clear()
        ids.add(result.task.id)
        batches[-1].append(result)
    callback_tasks = await _find_callback_tasks(tx, results)
    changed_tasks = [*(result.task for result in results), *callback_tasks]
    await tx.fetch(
        _LOCK,
        [result.task.id for result in results],
        encode_texts({task.lane for task in changed_tasks}),
        encode_texts({task.lane for task in callback_tasks}),
        encode_texts({task.tenant for task in changed_tasks}),
    )
    statuses: list[FinishStatus] = []
    for batch in batches:
        numbers = await tx.fetch_value(_FINISH, *_finish_arguments(batch, now))
        statuses += [_FINISH_STATUSES[number] for number in numbers]
    callbacks = [
        NewTask(result.callback_task)
        for result, status in zip(results, statuses, strict=True)
        if result.callback_task is not None and status is FinishStatus.APPLIED
    ]
    if callbacks:
        await _call_add(tx.fetch, _add_arguments(callbacks, None, None, None, now))
    return statuses


async def _find_callback_tasks(tx: Transaction, results: Sequence[TaskResult]) -> list[Task]:
    """Return the callback tasks of results, without those of results that will be superseded.

    Locking creates the lanes of callback tasks. A superseded result must not create a lane.
    """
    ids = [result.task.id for result in results if result.callback_task is not None]
    rows = await tx.fetch(_VERSIONS, ids) if ids else ()
    versions = {str(task_id): version for task_id, version in rows}
    tasks: list[Task] = []
    for result in results:
        version = versions.get(result.task.id)
        if version is None or result.task.version < version:
            continue  # finished, or leased again: versions only grow
        if result.callback_task is not None:
            tasks.append(result.callback_task)
        if result.status is not Status.PENDING:
            del versions[result.task.id]  # finished: later results of the task are superseded
    return tasks


def _finish_arguments(results: Sequence[TaskResult], now: int | None) -> tuple[object, ...]:
    attempts = [result.attempt for result in results]
    # With the length of a lease, `finish_1` stores a result that is PENDING as IN_FLIGHT.
    leases = [
        result.renewed_lease if result.status is Status.PENDING else None for result in results
    ]
    return (
        [encode_text(result.task.tenant) for result in results],
        encode_ids([result.task.id for result in results]),
        encode_numbers([result.task.version for result in results]),
        [None if attempt is None else encode_text(attempt.outcome) for attempt in attempts],
        encode_numbers([int(result.status) for result in results]),
        encode_optionals([result.reason for result in results]),
        encode_numbers([result.next_attempt_at for result in results]),
        encode_numbers([None if lease is None else lease.length_ms for lease in leases]),
        encode_optionals([None if lease is None else lease.worker for lease in leases]),
        encode_numbers([result.previous_delay for result in results]),
        encode_numbers([result.backoff_offset for result in results]),
        encode_optionals([result.last_outcome_kind for result in results]),
        [None if attempt is None else encode(attempt) for attempt in attempts],
        now,
    )


async def release(database: Database, releases: Sequence[Release]) -> list[FinishStatus]:
    """Make leased tasks PENDING again; see `Store.release`."""
    if not releases:
        return []
    flush_number = await database.begin_deferred_flush()
    # The second release of a lease in a batch finds that the lease is lost. A batch may also have
    # releases of an earlier lease of the same task, which has another version.
    unique = {(each.task.id, each.task.version): each for each in reversed(releases)}
    numbers = await database.fetch_value(
        _RELEASE,
        [task_id for task_id, _ in unique],
        [version for _, version in unique],
        [each.deferred_until for each in unique.values()],
        database.now(),
    )
    await database.flush(flush_number)
    number_by_lease = dict(zip(unique, numbers, strict=True))
    return [
        _FINISH_STATUSES[number_by_lease.pop((each.task.id, each.task.version), SUPERSEDED)]
        for each in releases
    ]


async def release_unknown_leases(
    database: Database, terms: LeaseTerms, known_ids: Collection[str]
) -> int:
    """Release the leases of a worker for tasks that are not in `known_ids`; see `Store`."""
    now = database.now()
    flush_number = await database.begin_deferred_flush()
    known = [task_id for task_id in known_ids if is_task_id(task_id)]
    parameters = (encode_text(terms.worker), known, terms.length_ms, now)
    rows = await database.fetch(_UNKNOWN_LEASES, *parameters)
    if not rows:
        return 0
    columns = ([row[position] for row in rows] for position in range(3))
    numbers = await database.fetch_value(_RELEASE, *columns, now)
    await database.flush(flush_number)
    return sum(_FINISH_STATUSES[number] is not FinishStatus.SUPERSEDED for number in numbers)


async def cancel(database: Database, tenant: str, task_id: str) -> CancelStatus | None:
    """Cancel a task; an IN_FLIGHT task becomes CANCELLED only when its lease ends."""
    if not is_task_id(task_id):
        return None
    parameters = (encode_text(tenant), task_id, database.now())
    number: int | None = await database.fetch_value(_CANCEL, *parameters)
    return None if number is None else _CANCEL_STATUSES[number]


async def retry_now(
    database: Database, tenant: str, task_id: str, *, quota: int | None = None
) -> RetryNowStatus | None:
    """Make a task due now, unless it is IN_FLIGHT or SUCCEEDED; see `Store.retry_now`."""
    if not is_task_id(task_id):
        return None
    parameters = (encode_text(tenant), task_id, quota, database.now())
    number: int | None = await database.fetch_value(_RETRY_NOW, *parameters)
    return None if number is None else _RETRY_STATUSES[number]
