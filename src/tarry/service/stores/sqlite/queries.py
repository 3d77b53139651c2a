"""Queries for tasks, attempts and counters, and the conversion of rows into records."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tarry.service.model import MAX_ATTEMPT_NUMBER, AttemptRecord, LaneRecord, Status, Task
from tarry.service.store import (
    MAX_BUSIEST_LANES,
    MAX_DUE_LANES,
    MAX_PAGE_BYTES,
    AttemptsOfMinute,
    Counters,
    DueLane,
    RecordPage,
    StoredTaskFilter,
)
from tarry.service.stores.records import (
    TASK_ID_PATTERN,
    decode_attempt,
    is_task_id,
    parse_cursor,
)
from tarry.service.stores.sqlite.transaction import MINUTE_MS, TENANT_COUNTERS
from tarry.service.stores.task_filters import (
    AFTER_ALL_ROWS,
    RowFilter,
    is_within,
    max_rows,
    range_status,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.stores.sqlite.transaction import ReadTransaction

R = TypeVar("R", bound=msgspec.Struct)

SELECT_TASK = """
SELECT t.id, n.name, l.name, t.key, t.fingerprint, t.packed_content, t.owned_body_ref, u.policy,
       t.policy_version, t.created_at, s.next_attempt_at, s.first_due_at, s.status, s.reason,
       s.attempts, s.attempts_before_replay, s.lost_attempts, s.previous_delay, s.backoff_offset,
       s.last_outcome_kind, s.version, w.name, s.wake_at, s.cancelling, s.replays, s.finished_at,
       s.seq, s.tenant, s.lane, s.policy
FROM state AS s
CROSS JOIN task AS t ON t.seq = s.seq
CROSS JOIN tenant AS n ON n.id = s.tenant
CROSS JOIN lane AS l ON l.id = s.lane
CROSS JOIN policy_use AS u ON u.id = s.policy
LEFT JOIN worker AS w ON w.id = s.worker
"""
"""Start of a query for tasks; the caller appends a WHERE clause on `s`.

The columns are the fields of `Task` in their order, and then `transaction.TaskRowIds`. In SQLite,
CROSS JOIN fixes the join order: `s` is read first, and for each of its rows the other tables."""
STATUS, WAKE_AT, _CANCELLING, SEQ = 12, 22, 23, 26
"""Positions of columns in `SELECT_TASK`. `wake_at` is the due time of a PENDING task, and the end
of the lease of an IN_FLIGHT task."""

DAY_MS = 86_400_000
_ATTEMPT_NUMBER_BITS = MAX_ATTEMPT_NUMBER.bit_length()
_ID_LINE_LENGTH = 37  # an id and a newline
_match_id_lines = re.compile(f"(?:{TASK_ID_PATTERN}\n)*+").fullmatch

_TENANT_ID = "SELECT id FROM tenant WHERE name = ?1"
_SEQ_BY_ID = f"SELECT seq FROM task WHERE id = ?2 AND tenant = ({_TENANT_ID})"
_TASK_BY_SEQ = SELECT_TASK + "WHERE s.seq = ?"
LOCK_TOKENS = "SELECT lock FROM worker WHERE lock IS NOT NULL"
_ATTEMPTS = "SELECT log FROM attempt WHERE id > ? AND id < ? ORDER BY id LIMIT ?"
_LAST_ATTEMPT = f"""
SELECT a.log FROM state AS s
CROSS JOIN attempt AS a ON a.id = s.seq << {_ATTEMPT_NUMBER_BITS} | s.attempts
WHERE s.seq = """
_SELECT_RANGE = """
SELECT seq, status, lane, policy, reason, finished_at FROM state
WHERE tenant = ?1 AND {condition} AND seq > ?2 AND seq < ?3 ORDER BY seq {order} LIMIT ?4
"""


def _build_list_statements(order: str) -> dict[Status | None, str]:
    """Return the statement that lists tasks of each status, and of all statuses (None).

    In the order of adding, one index has the live tasks of a tenant, and another the tasks of each
    finished status. A list of all tasks merges these index ranges by `seq`, which is column 1.
    """
    live_tasks = _SELECT_RANGE.format(condition="finished_at IS NULL", order=order)
    statements: dict[Status | None, str] = {
        status: _SELECT_RANGE.format(
            condition=f"status = {int(status)} AND finished_at IS NOT NULL", order=order
        )
        for status in Status
        if status.is_finished
    }
    ranges = [f"SELECT * FROM ({query})" for query in (live_tasks, *statements.values())]
    statements[Status.PENDING] = statements[Status.IN_FLIGHT] = live_tasks
    statements[None] = " UNION ALL ".join(ranges) + f" ORDER BY 1 {order} LIMIT ?4"
    return statements


_LIST_NEWEST_FIRST = _build_list_statements("DESC")
_LIST_OLDEST_FIRST = _build_list_statements("ASC")
_LANES_BY_PREFIX = "SELECT id FROM lane WHERE tenant = ? AND name >= ? AND name < ?"
_LAST_CHARACTER = "\U0010ffff"
_SEQ_BY_KEY = "SELECT seq FROM task WHERE tenant = ? AND key = ?"
_CREATED_AT = "SELECT created_at FROM task WHERE seq = ?"
_NEXT_CREATED_AT = "SELECT seq, created_at FROM task WHERE seq >= ? ORDER BY seq LIMIT 1"
_CLOCK_STEP_TOLERANCE_MS = 60_000
"""`seq` and `created_at` have the same order, unless the clock was set back by more than this."""
# The columns are in the order of the fields of `LaneRecord`.
SELECT_LANE = """
SELECT l.name, n.name, l.parked_until, l.probes, l.consecutive_opens, l.paused, l.pending,
       l.in_flight, l.exhausted, l.last_claim_at
FROM lane AS l CROSS JOIN tenant AS n ON n.id = l.tenant
"""
_COUNTERS = ", ".join(f"ifnull(sum({name}), 0)" for name in TENANT_COUNTERS)
# `lane.due_at` is a lower bound, so lanes without a due task may be among those that are searched.
# With an ORDER BY and a LIMIT, SQLite sorts only as many rows as the limit.
_DUE_LANES = f"""
SELECT name, due_at, waiting_for FROM (
    SELECT *, row_number() OVER (PARTITION BY waiting_for ORDER BY due_at, name) AS number FROM (
        SELECT name, waiting_for,
               min(ifnull(first_attempt, retry), ifnull(retry, first_attempt)) AS due_at
        FROM (
            SELECT l.name,
                   CASE WHEN l.paused THEN 'pause' WHEN l.parked_until IS NULL THEN NULL
                        WHEN l.consecutive_opens THEN 'breaker'
                        ELSE 'local-failure' END AS waiting_for,
                   (SELECT min(wake_at) FROM state WHERE lane = l.id
                        AND status = {int(Status.PENDING)}
                        AND last_outcome_kind IS NULL) AS first_attempt,
                   (SELECT min(wake_at) FROM state WHERE lane = l.id
                        AND status = {int(Status.PENDING)}
                        AND last_outcome_kind IS NOT NULL) AS retry
            FROM lane AS l WHERE l.due_at <= ?2 %s))
    WHERE due_at <= ?2)
WHERE number <= {MAX_DUE_LANES} ORDER BY due_at, name
"""
_BUSIEST_LANES = f"{SELECT_LANE} WHERE l.pending + l.in_flight + l.exhausted > 0"
_BY_PENDING_TASKS = "ORDER BY l.pending DESC, l.name LIMIT ?2"
_ATTEMPTS_PER_MINUTE = f"""
SELECT minute, outcome, count FROM series
WHERE tenant = iif(?1 IS NULL, 0, ({_TENANT_ID})) AND minute >= ?2 ORDER BY minute
"""
_NAME_IDS = f"""
SELECT ({_TENANT_ID}), (SELECT id FROM lane WHERE name = ?2),
       (SELECT id FROM policy_use WHERE tenant = ({_TENANT_ID}) AND policy = ?3)
"""


def decode_task(row: Sequence[Any]) -> Task:
    """Convert a row of `SELECT_TASK` into a task."""
    fields = list(row[:SEQ])
    fields[0] = unpack_id(fields[0])
    fields[_CANCELLING] = bool(fields[_CANCELLING])
    # `convert` takes half as long as a call of `Task` with 26 keyword arguments.
    return msgspec.convert(fields, Task)


def decode_row(row: Sequence[Any], record_type: type[R]) -> R:
    """Convert a row into a record; the columns are in the order of the record's fields."""
    fields = dict(zip(record_type.__struct_fields__, row, strict=True))
    return msgspec.convert(fields, record_type, strict=False)  # booleans are stored as 0 and 1


def attempt_row_id(seq: int, number: int) -> int:
    """Return the row id of an attempt, so that the attempts of a task are adjacent and in order."""
    if number > MAX_ATTEMPT_NUMBER:  # the row would belong to another task
        msg = f"attempt number {number} is above {MAX_ATTEMPT_NUMBER}"
        raise OverflowError(msg)
    return seq << _ATTEMPT_NUMBER_BITS | number


def pack_ids(task_ids: Sequence[str]) -> list[bytearray | None]:
    """Return each task id as 16 bytes, or None if it is malformed; see `pack_id`."""
    # Checking and converting all ids as one string takes half as long as `pack_id` for each.
    lines = "\n".join([*task_ids, ""])
    if len(lines) != _ID_LINE_LENGTH * len(task_ids) or not _match_id_lines(lines):
        return [pack_id(task_id) for task_id in task_ids]
    packed = bytearray.fromhex(lines.replace("-", ""))
    return [packed[begin : begin + 16] for begin in range(0, len(packed), 16)]


def pack_id(task_id: str) -> bytearray | None:
    """Return a task id as 16 bytes, as it is stored, or None if it is malformed."""
    return bytearray.fromhex(task_id.replace("-", "")) if is_task_id(task_id) else None


def unpack_id(packed: bytes) -> str:
    """Return the text form of a task id that is stored as 16 bytes."""
    text = packed.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def get_task(tx: ReadTransaction, tenant: str, task_id: str) -> Task | None:
    """Return a task of a tenant, or None if it does not exist."""
    statement = f"{SELECT_TASK} WHERE s.seq = ({_SEQ_BY_ID})"
    row = tx.execute(statement, (tenant, pack_id(task_id))).fetchone()
    return None if row is None else decode_task(row)


def list_attempts(
    tx: ReadTransaction, tenant: str, task_id: str, after: int = 0, limit: int = 100
) -> list[AttemptRecord]:
    """Return a page of a task's attempt log, starting after attempt number `after`."""
    row = tx.execute(_SEQ_BY_ID, (tenant, pack_id(task_id))).fetchone()
    if row is None:
        return []
    id_range = (attempt_row_id(row[0], after), attempt_row_id(row[0] + 1, 0))
    attempts: list[AttemptRecord] = []
    page_bytes = 0
    for (log,) in tx.execute(_ATTEMPTS, (*id_range, limit)):
        attempts.append(decode_attempt(log))
        page_bytes += len(log)
        if page_bytes >= MAX_PAGE_BYTES:
            break
    return attempts


def list_attempts_of_tasks(
    tx: ReadTransaction,
    tenant: str,
    task_filter: StoredTaskFilter,
    *,
    cursor: str | None = None,
    limit: int = 100,
) -> RecordPage[tuple[str, AttemptRecord]]:
    """List attempts, newest task first; the cursor is the row id of the last attempt read."""
    last_row_id = None if cursor is None else parse_cursor(cursor)
    task_cursor = None
    if last_row_id is not None:  # the task of that attempt may have further attempts
        task_cursor = str((last_row_id >> _ATTEMPT_NUMBER_BITS) + 1)
    page = find_tasks(tx, tenant, task_filter, task_cursor, limit, oldest_first=False)
    items: list[tuple[str, AttemptRecord]] = []
    for seq in page.items:
        after = attempt_row_id(seq, 0)
        if last_row_id is not None and last_row_id >> _ATTEMPT_NUMBER_BITS == seq:
            after = last_row_id
        parameters = (after, attempt_row_id(seq + 1, 0), limit - len(items))
        logs = tx.execute(_ATTEMPTS, parameters).fetchall()
        if not logs:
            continue
        [(packed_id,)] = tx.execute("SELECT id FROM task WHERE seq = ?", (seq,))
        items += [(unpack_id(packed_id), decode_attempt(log)) for (log,) in logs]
        if len(items) == limit:
            return RecordPage(items, str(attempt_row_id(seq, items[-1][1].attempt_number)))
    if page.cursor is None:
        return RecordPage(items, None)
    # Continue before the first attempt of the next older task.
    return RecordPage(items, str(attempt_row_id(int(page.cursor) - 1, 0)))


def last_attempts(
    tx: ReadTransaction, tenant: str, task_ids: Sequence[str]
) -> dict[str, AttemptRecord]:
    """Return the latest entry of the attempt log of each task that has one, by task id."""
    attempts: dict[str, AttemptRecord] = {}
    for task_id in task_ids:
        parameters = (tenant, pack_id(task_id))
        row = tx.execute(f"{_LAST_ATTEMPT} ({_SEQ_BY_ID})", parameters).fetchone()
        if row is not None:
            attempts[task_id] = decode_attempt(row[0])
    return attempts


def list_tasks(
    tx: ReadTransaction,
    tenant: str,
    task_filter: StoredTaskFilter,
    *,
    cursor: str | None = None,
    limit: int = 100,
    oldest_first: bool = False,
) -> RecordPage[Task]:
    """List tasks; the cursor is the last `seq` read for the previous page."""
    page = find_tasks(tx, tenant, task_filter, cursor, limit, oldest_first=oldest_first)
    tasks: list[Task] = []
    page_bytes = 0
    for seq in page.items:
        tasks.append(decode_task(tx.execute(_TASK_BY_SEQ, (seq,)).fetchone()))
        page_bytes += len(tasks[-1].packed_content)
        if page_bytes >= MAX_PAGE_BYTES and seq != page.items[-1]:
            return RecordPage(tasks, str(seq))
    return RecordPage(tasks, page.cursor)


def find_tasks(
    tx: ReadTransaction,
    tenant: str,
    task_filter: StoredTaskFilter,
    cursor: str | None,
    limit: int,
    *,
    oldest_first: bool,
) -> RecordPage[int]:
    """Find the `seq` of matching tasks; see `list_tasks`."""
    position = None if cursor is None else parse_cursor(cursor)
    name_ids = resolve_names(tx, tenant, task_filter.lane, task_filter.policy_id)
    if name_ids is None:
        return RecordPage(items=[], cursor=None)
    tenant_id, wanted_lane, wanted_policy = name_ids
    wanted_lanes = None if wanted_lane is None else {wanted_lane}
    if (prefix := task_filter.lane_prefix) is not None:
        name_range = (prefix, prefix + _LAST_CHARACTER)
        lanes = {lane for (lane,) in tx.execute(_LANES_BY_PREFIX, (tenant_id, *name_range))}
        wanted_lanes = lanes if wanted_lanes is None else wanted_lanes & lanes
    after, before = _seq_range(tx, tenant_id, task_filter)
    if position is not None and oldest_first:
        after = max(after, position)
    elif position is not None:
        before = min(before, position)
    statements = _LIST_OLDEST_FIRST if oldest_first else _LIST_NEWEST_FIRST
    statement, row_limit = statements[range_status(task_filter)], max_rows(task_filter, limit)
    row_filter = RowFilter(task_filter, wanted_lanes, wanted_policy, task_filter.reason)
    created_from, created_until = task_filter.created_from, task_filter.created_until
    found: list[int] = []
    scanned = last_seq = 0
    rows = tx.execute(statement, (tenant_id, after, before, row_limit))
    for seq, *columns in rows:
        scanned, last_seq = scanned + 1, seq
        if not row_filter.matches(*columns):
            continue
        if created_from is not None or created_until is not None:
            [(created_at,)] = tx.execute(_CREATED_AT, (seq,))
            if not is_within(created_at, created_from, created_until):
                continue
        if not _matches_decoded(tx, seq, task_filter):
            continue
        if len(found) == limit:
            return RecordPage(found, str(found[-1]))
        found.append(seq)
    return RecordPage(found, str(last_seq) if scanned == row_limit else None)


def _matches_decoded(tx: ReadTransaction, seq: int, task_filter: StoredTaskFilter) -> bool:
    """Return whether a task matches the functions of a filter that decode it."""
    if task_filter.matches_attempt is not None:
        row = tx.execute(f"{_LAST_ATTEMPT} ?", (seq,)).fetchone()
        if row is None or not task_filter.matches_attempt(decode_attempt(row[0])):
            return False
    if task_filter.matches_content is None:
        return True
    [(content,)] = tx.execute("SELECT packed_content FROM task WHERE seq = ?", (seq,))
    return task_filter.matches_content(content)


def _seq_range(
    tx: ReadTransaction, tenant_id: int, task_filter: StoredTaskFilter
) -> tuple[int, int]:
    """Return exclusive limits of the `seq` of tasks with the wanted key and creation time."""
    after, before = -1, AFTER_ALL_ROWS
    if task_filter.key is not None:
        row = tx.execute(_SEQ_BY_KEY, (tenant_id, task_filter.key)).fetchone()
        if row is None:
            return 0, 0
        after, before = row[0] - 1, row[0] + 1
    if task_filter.created_from is not None:
        time = task_filter.created_from - _CLOCK_STEP_TOLERANCE_MS
        after = max(after, _first_seq_created_at(tx, time) - 1)
    if task_filter.created_until is not None:
        time = task_filter.created_until + _CLOCK_STEP_TOLERANCE_MS + 1
        before = min(before, _first_seq_created_at(tx, time))
    return after, before


def _first_seq_created_at(tx: ReadTransaction, time: int) -> int:
    """Return the lowest `seq` of tasks created at `time` or later, found by bisection."""
    [(last_seq,)] = tx.execute("SELECT ifnull(max(seq), 0) FROM task")
    low, high = 0, last_seq + 1
    while low < high:
        middle = (low + high) // 2
        row = tx.execute(_NEXT_CREATED_AT, (middle,)).fetchone()
        if row is None or row[1] >= time:
            high = middle
        else:
            low = row[0] + 1
    return low


def resolve_names(
    tx: ReadTransaction, tenant: str, lane: str | None, policy: str | None
) -> tuple[int, int | None, int | None] | None:
    """Return the ids of a tenant, lane and policy; None if one of the names is unknown.

    If the name of the lane or policy is None (not part of a filter), its id is None too.
    """
    tenant_id, lane_id, policy_id = tx.execute(_NAME_IDS, (tenant, lane, policy)).fetchone()
    is_lane_unknown = lane is not None and lane_id is None
    is_policy_unknown = policy is not None and policy_id is None
    if tenant_id is None or is_lane_unknown or is_policy_unknown:
        return None
    return tenant_id, lane_id, policy_id


def counters(tx: ReadTransaction, tenant: str | None = None) -> Counters:
    """Return the counters of one tenant, or their sums over all tenants (None)."""
    where, parameters = ("", ()) if tenant is None else ("WHERE name = ?", (tenant,))
    row = tx.execute(f"SELECT {_COUNTERS} FROM tenant {where}", parameters).fetchone()
    of_tenant = "" if tenant is None else f"AND l.tenant = ({_TENANT_ID})"
    due_lanes = tx.execute(_DUE_LANES % of_tenant, (tenant, tx.now)).fetchall()
    busiest_lanes = f"{_BUSIEST_LANES} {of_tenant} {_BY_PENDING_TASKS}"
    lane_rows = tx.execute(busiest_lanes, (tenant, MAX_BUSIEST_LANES)).fetchall()
    return Counters(
        task_counts={status: row[status] for status in Status},
        superseded_count=row[len(Status)],
        due_lanes=[DueLane(*due_lane) for due_lane in due_lanes],
        busiest_lanes=[decode_row(lane_row, LaneRecord) for lane_row in lane_rows],
    )


def attempts_per_minute(
    tx: ReadTransaction, tenant: str | None, since: int
) -> list[AttemptsOfMinute]:
    """Return the attempt counts per minute, from the minute of `since`, or a day ago if later."""
    since = max(since - since % MINUTE_MS, tx.now - DAY_MS)
    minutes: list[AttemptsOfMinute] = []
    for minute, outcome, count in tx.execute(_ATTEMPTS_PER_MINUTE, (tenant, since)):
        if not minutes or minutes[-1].minute != minute:
            minutes.append(AttemptsOfMinute(minute, {}))
        minutes[-1].counts_by_outcome[outcome] = count
    return minutes
