"""Queries for tasks, attempts and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tarry.service.model import LaneRecord, Status
from tarry.service.store import (
    MAX_BUSIEST_LANES,
    MAX_DUE_LANES,
    MAX_PAGE_BYTES,
    AttemptsOfMinute,
    Counters,
    DueLane,
    RecordPage,
)
from tarry.service.stores.postgres.constants import (
    FIRST_ATTEMPT_QUEUE,
    LIVE_COLUMNS,
    RETRY_QUEUE,
    SEQ_DAY_BITS,
    TASK_JOINS,
)
from tarry.service.stores.postgres.lanes import SELECT_LANE
from tarry.service.stores.postgres.rows import (
    FINISHED_COLUMNS,
    FINISHED_STATUSES,
    decode_attempt,
    decode_row,
    decode_task,
    decode_text,
    encode_optional,
    encode_text,
)
from tarry.service.stores.records import is_task_id, parse_cursor
from tarry.service.stores.task_filters import (
    AFTER_ALL_ROWS,
    MAX_SCANNED_ROWS,
    RowFilter,
    is_within,
    max_rows,
    range_status,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import AttemptRecord, Task
    from tarry.service.store import StoredTaskFilter
    from tarry.service.stores.postgres.database import Database

MINUTE_MS = 60_000
DAY_MS = 86_400_000
_CONTENT_CHUNK_SIZE = 50
"""Tasks whose content is read at once for a list; a content may be large."""

_TASKS = f"""
SELECT {LIVE_COLUMNS} FROM tarry.live AS s {TASK_JOINS}
WHERE s.tenant = $1 AND s.seq = ANY ($2::bigint[])
UNION ALL
SELECT {FINISHED_COLUMNS} FROM tarry.finished AS s {TASK_JOINS}
WHERE s.tenant = $1 AND s.status IN {FINISHED_STATUSES} AND s.seq = ANY ($2::bigint[])
"""
_FIND_SEQ = """
SELECT k.tenant, k.seq FROM tarry.task_key AS k JOIN tarry.tenant AS t ON t.id = k.tenant
WHERE k.id = $1 AND t.name = $2
"""
_FIND_SEQS = """
SELECT k.id::text, k.seq FROM tarry.task_key AS k JOIN tarry.tenant AS t ON t.id = k.tenant
WHERE k.id = ANY ($1::uuid[]) AND t.name = $2
"""
_ATTEMPTS = """
SELECT number, due_at, worker, log FROM tarry.attempt
WHERE seq = $1 AND number > $2 ORDER BY number LIMIT $3
"""
_ATTEMPTS_OF_TASKS = """
SELECT k.seq, k.id::text, a.number, a.due_at, a.worker, a.log
FROM unnest($1::bigint[]) WITH ORDINALITY AS i (seq, ord)
JOIN tarry.task_key AS k ON k.seq = i.seq
JOIN tarry.attempt AS a ON a.seq = i.seq AND (i.seq <> $2 OR a.number > $3)
ORDER BY i.ord, a.number LIMIT $4
"""
_LAST_ATTEMPTS = """
SELECT i.seq, a.number, a.due_at, a.worker, a.log FROM unnest($1::bigint[]) AS i (seq)
CROSS JOIN LATERAL (
    SELECT * FROM tarry.attempt AS a WHERE a.seq = i.seq ORDER BY a.number DESC LIMIT 1) AS a
"""
_CONTENTS = "SELECT seq, content FROM tarry.content WHERE seq = ANY ($1::bigint[])"
_NAME_IDS = """
SELECT (SELECT id FROM tarry.tenant WHERE name = $1),
    (SELECT id FROM tarry.lane WHERE name = $2),
    (SELECT u.id FROM tarry.policy_use AS u JOIN tarry.tenant AS t ON t.id = u.tenant
        WHERE t.name = $1 AND u.policy = $3)
"""
_LANES_BY_PREFIX = """
SELECT id FROM tarry.lane WHERE tenant = $1 AND name >= $2 AND starts_with(name, $2)
"""
_SEQ_BY_KEY = "SELECT seq FROM tarry.task_key WHERE tenant = $1 AND key = $2"


def _build_list_statement(status: Status | None, order: str) -> str:
    """Return the statement that lists live tasks (None), or finished tasks with a status."""
    if status is None:
        # The queues 0 and 1 are PENDING (0), queue 2 is IN_FLIGHT (1).
        table, condition = "live", ""
        columns = "queue / 2 AS status, lane, policy, NULL::text AS reason, NULL::bigint"
    else:
        table, condition = "finished", f"AND status = {int(status)}"
        columns = "status, lane, policy, reason, finished_at"
    return f"""
SELECT seq, {columns}, created_at FROM tarry.{table}
WHERE tenant = $1 {condition} AND seq > $2 AND seq < $3 ORDER BY seq {order} LIMIT $4
"""


def _build_list_statements(order: str) -> dict[Status | None, str]:
    """Return the statement that lists tasks of each status, and of all statuses (None)."""
    finished: dict[Status | None, str] = {
        status: _build_list_statement(status, order) for status in Status if status.is_finished
    }
    live = _build_list_statement(None, order)
    ranges = " UNION ALL ".join(f"({query})" for query in (live, *finished.values()))
    return {
        **finished,
        Status.PENDING: live,
        Status.IN_FLIGHT: live,
        None: f"{ranges} ORDER BY seq {order} LIMIT $4",
    }


_LIST_NEWEST_FIRST = _build_list_statements("DESC")
_LIST_OLDEST_FIRST = _build_list_statements("ASC")
_COUNTER_NAMES = (*[status.name.lower() for status in Status], "superseded")
_COUNTERS = "SELECT {} FROM tarry.tenant WHERE $1::text IS NULL OR name = $1".format(
    ", ".join(f"coalesce(sum({name}), 0)::bigint" for name in _COUNTER_NAMES)
)
# `lane.due_at` is a lower bound, so lanes without a due task may be among those that are searched.
_DUE_LANES = f"""
SELECT name, due_at, waiting_for FROM (
    SELECT d.*, row_number() OVER (PARTITION BY waiting_for ORDER BY due_at, name COLLATE "C")
        AS number
    FROM (
        SELECT l.name, CASE WHEN l.paused THEN 'pause' WHEN l.parked_until IS NULL THEN NULL
                WHEN l.consecutive_opens > 0 THEN 'breaker' ELSE 'local-failure' END AS waiting_for,
            least(
                (SELECT min(s.wake_at) FROM tarry.live AS s
                    WHERE s.lane = l.id AND s.queue = {FIRST_ATTEMPT_QUEUE}),
                (SELECT min(s.wake_at) FROM tarry.live AS s
                    WHERE s.lane = l.id AND s.queue = {RETRY_QUEUE})) AS due_at
        FROM tarry.lane AS l
        WHERE l.due_at <= tarry.now_1($2)
            AND ($1::text IS NULL OR l.tenant = (SELECT id FROM tarry.tenant WHERE name = $1))
    ) AS d
    WHERE due_at <= tarry.now_1($2)
) AS d
WHERE number <= {MAX_DUE_LANES} ORDER BY due_at, name COLLATE "C"
"""
_BUSIEST_LANES = f"""
{SELECT_LANE} WHERE l.pending + l.in_flight + l.exhausted > 0
    AND ($1::text IS NULL OR n.name = $1)
ORDER BY l.pending DESC, l.name LIMIT {MAX_BUSIEST_LANES}
"""
_ATTEMPTS_PER_MINUTE = """
SELECT minute, outcome, sum(count)::bigint FROM tarry.series
WHERE tenant = CASE WHEN $1::text IS NULL THEN 0
        ELSE (SELECT id FROM tarry.tenant WHERE name = $1) END
    AND minute >= greatest($2, tarry.now_1($3) - 86400000)
GROUP BY minute, outcome ORDER BY minute, outcome
"""


async def get_task(database: Database, tenant: str, task_id: str) -> Task | None:
    """Return a task of a tenant, or None if it does not exist."""
    if not is_task_id(task_id):
        return None
    for _ in range(2):  # a task with the same id may replace a deleted one between the statements
        found = await database.fetch_row(_FIND_SEQ, task_id, encode_text(tenant))
        if found is None:
            return None
        rows = await database.fetch(_TASKS, found[0], [found[1]])
        if rows:
            return decode_task(rows[0])
    return None


async def list_attempts(
    database: Database, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
) -> list[AttemptRecord]:
    """Return a page of a task's attempt log, starting after attempt number `after`."""
    if not is_task_id(task_id):
        return []
    found = await database.fetch_row(_FIND_SEQ, task_id, encode_text(tenant))
    if found is None:
        return []
    attempts: list[AttemptRecord] = []
    page_bytes = 0
    while len(attempts) < limit and page_bytes < MAX_PAGE_BYTES:
        chunk = min(_CONTENT_CHUNK_SIZE, limit - len(attempts))
        rows = await database.fetch(_ATTEMPTS, found[1], after, chunk)
        for row in rows:
            attempts.append(decode_attempt(*row))
            after = row[0]
            page_bytes += len(row[-1] or b"")
            if page_bytes >= MAX_PAGE_BYTES:
                break
        if len(rows) < chunk:
            break
    return attempts


async def list_attempts_of_tasks(
    database: Database,
    tenant: str,
    task_filter: StoredTaskFilter,
    *,
    cursor: str | None = None,
    limit: int = 100,
) -> RecordPage[tuple[str, AttemptRecord]]:
    """List attempts, newest task first; the cursor is `seq` and number of the last attempt."""
    last_seq, last_number, task_cursor = 0, 0, None
    if cursor is not None:
        seq_text, _, number_text = cursor.partition("-")
        last_seq, last_number = parse_cursor(seq_text), parse_cursor(number_text or "0")
        task_cursor = str(last_seq + 1)  # the task of that attempt may have further attempts
    page = await find_tasks(database, tenant, task_filter, task_cursor, limit, oldest_first=False)
    rows = await database.fetch(_ATTEMPTS_OF_TASKS, page.items, last_seq, last_number, limit)
    items = [(task_id, decode_attempt(*attempt)) for _, task_id, *attempt in map(tuple, rows)]
    if len(items) == limit:
        return RecordPage(items, f"{rows[-1][0]}-{items[-1][1].attempt_number}")
    if page.cursor is None:
        return RecordPage(items, None)
    # The attempts of all tasks of `page` are returned: continue with the next older task.
    return RecordPage(items, f"{int(page.cursor) - 1}-0")


async def last_attempts(
    database: Database, tenant: str, task_ids: Sequence[str]
) -> dict[str, AttemptRecord]:
    """Return the latest entry of the attempt log of each task that has one, by task id."""
    wanted = [task_id for task_id in task_ids if is_task_id(task_id)]
    rows = await database.fetch(_FIND_SEQS, wanted, encode_text(tenant))
    id_of_seq = {seq: task_id for task_id, seq in rows}
    attempts = await _last_attempts(database, list(id_of_seq))
    return {id_of_seq[seq]: attempt for seq, attempt in attempts.items()}


async def _last_attempts(database: Database, seqs: Sequence[int]) -> dict[int, AttemptRecord]:
    rows = await database.fetch(_LAST_ATTEMPTS, seqs) if seqs else []
    return {row[0]: decode_attempt(*tuple(row)[1:]) for row in rows}


async def list_tasks(
    database: Database,
    tenant: str,
    task_filter: StoredTaskFilter,
    *,
    cursor: str | None = None,
    limit: int = 100,
    oldest_first: bool = False,
) -> RecordPage[Task]:
    """List tasks; the cursor is the last `seq` read for the previous page."""
    page = await find_tasks(database, tenant, task_filter, cursor, limit, oldest_first=oldest_first)
    if not page.items:
        return RecordPage([], page.cursor)
    tenant_id = await database.fetch_value(
        "SELECT id FROM tarry.tenant WHERE name = $1", encode_text(tenant)
    )
    tasks: list[Task] = []
    page_bytes = 0
    for begin in range(0, len(page.items), _CONTENT_CHUNK_SIZE):
        seqs = page.items[begin : begin + _CONTENT_CHUNK_SIZE]
        rows = await database.fetch(_TASKS, tenant_id, seqs)
        row_of_seq = {row[-1]: row for row in rows}
        for seq in seqs:
            if seq not in row_of_seq:
                continue  # deleted meanwhile
            tasks.append(decode_task(tuple(row_of_seq[seq])))
            page_bytes += len(tasks[-1].packed_content)
            if page_bytes >= MAX_PAGE_BYTES and seq != page.items[-1]:
                return RecordPage(tasks, str(seq))
    return RecordPage(tasks, page.cursor)


async def count_tasks(database: Database, tenant: str, task_filter: StoredTaskFilter) -> int:
    """Count tasks in steps of bounded size."""
    count, cursor = 0, None
    while True:
        page = await find_tasks(
            database, tenant, task_filter, cursor, MAX_SCANNED_ROWS, oldest_first=True
        )
        count += len(page.items)
        cursor = page.cursor
        if cursor is None:
            return count


async def find_tasks(
    database: Database,
    tenant: str,
    task_filter: StoredTaskFilter,
    cursor: str | None,
    limit: int,
    *,
    oldest_first: bool,
) -> RecordPage[int]:
    """Find the `seq` of matching tasks; see `list_tasks`."""
    position = None if cursor is None else parse_cursor(cursor)
    tenant_id, lane_id, policy_id = await database.fetch_row(
        _NAME_IDS,
        encode_text(tenant),
        encode_optional(task_filter.lane),
        encode_optional(task_filter.policy_id),
    )
    is_lane_unknown = task_filter.lane is not None and lane_id is None
    is_policy_unknown = task_filter.policy_id is not None and policy_id is None
    if tenant_id is None or is_lane_unknown or is_policy_unknown:
        return RecordPage([], None)
    wanted_lanes = None if lane_id is None else {lane_id}
    if task_filter.lane_prefix is not None:
        prefix = encode_text(task_filter.lane_prefix)
        rows = await database.fetch(_LANES_BY_PREFIX, tenant_id, prefix)
        lanes = {row[0] for row in rows}
        wanted_lanes = lanes if wanted_lanes is None else wanted_lanes & lanes
    after, before = await _seq_range(database, tenant_id, task_filter)
    if position is not None and oldest_first:
        after = max(after, position)
    elif position is not None:
        before = min(before, position)
    statements = _LIST_OLDEST_FIRST if oldest_first else _LIST_NEWEST_FIRST
    statement, row_limit = statements[range_status(task_filter)], max_rows(task_filter, limit)
    rows = await database.fetch(statement, tenant_id, after, before, row_limit)
    reason = encode_optional(task_filter.reason)
    row_filter = RowFilter(task_filter, wanted_lanes, policy_id, reason)
    matching = [
        seq
        for seq, *columns, created_at in map(tuple, rows)
        if row_filter.matches(*columns)
        and is_within(created_at, task_filter.created_from, task_filter.created_until)
    ]
    matching = await _match_decoded(database, matching, task_filter)
    if len(matching) > limit:
        return RecordPage(matching[:limit], str(matching[limit - 1]))
    return RecordPage(matching, str(rows[-1][0]) if len(rows) == row_limit else None)


async def _match_decoded(
    database: Database, seqs: list[int], task_filter: StoredTaskFilter
) -> list[int]:
    """Return the tasks that match the functions of a filter, which need attempts or contents."""
    matches_attempt, matches_content = task_filter.matches_attempt, task_filter.matches_content
    if matches_attempt is not None:
        attempts = await _last_attempts(database, seqs)
        seqs = [seq for seq in seqs if seq in attempts and matches_attempt(attempts[seq])]
    if matches_content is None:
        return seqs
    matching: list[int] = []
    for begin in range(0, len(seqs), _CONTENT_CHUNK_SIZE):
        chunk = seqs[begin : begin + _CONTENT_CHUNK_SIZE]
        content = dict(tuple(row) for row in await database.fetch(_CONTENTS, chunk))
        matching += [seq for seq in chunk if seq in content and matches_content(content[seq])]
    return matching


async def _seq_range(
    database: Database, tenant_id: int, task_filter: StoredTaskFilter
) -> tuple[int, int]:
    """Return exclusive limits of the `seq` of tasks with the wanted key and day of creation."""
    after, before = -1, AFTER_ALL_ROWS
    if task_filter.key is not None:
        seq = await database.fetch_value(_SEQ_BY_KEY, tenant_id, encode_text(task_filter.key))
        if seq is None:
            return 0, 0
        after, before = seq - 1, seq + 1
    # One day more on each side: the clock may have been set while tasks were added.
    if task_filter.created_from is not None:
        first_day = task_filter.created_from // DAY_MS - 1
        after = max(after, _first_seq_of_day(first_day) - 1)
    if task_filter.created_until is not None:
        next_day = task_filter.created_until // DAY_MS + 2
        before = min(before, _first_seq_of_day(next_day))
    return after, before


def _first_seq_of_day(day: int) -> int:
    return min(max(day << SEQ_DAY_BITS, 0), AFTER_ALL_ROWS)


async def counters(database: Database, tenant: str | None = None) -> Counters:
    """Return the counters of one tenant, or their sums over all tenants (None)."""
    name = encode_optional(tenant)
    row = await database.fetch_row(_COUNTERS, name)
    due_lanes = await database.fetch(_DUE_LANES, name, database.now())
    lanes = await database.fetch(_BUSIEST_LANES, name)
    return Counters(
        task_counts={status: row[status] for status in Status},
        superseded_count=row[len(Status)],
        due_lanes=[
            DueLane(decode_text(lane), due_at, waiting_for)
            for lane, due_at, waiting_for in due_lanes
        ],
        busiest_lanes=[decode_row(tuple(lane), LaneRecord) for lane in lanes],
    )


async def attempts_per_minute(
    database: Database, tenant: str | None, *, since: int
) -> list[AttemptsOfMinute]:
    """Return the attempt counts per minute, from the minute of `since`, or a day ago if later."""
    start = since - since % MINUTE_MS
    rows: list[Any] = await database.fetch(
        _ATTEMPTS_PER_MINUTE, encode_optional(tenant), start, database.now()
    )
    minutes: list[AttemptsOfMinute] = []
    for minute, outcome, count in rows:
        if not minutes or minutes[-1].minute != minute:
            minutes.append(AttemptsOfMinute(minute, {}))
        minutes[-1].counts_by_outcome[decode_text(outcome)] = count
    return minutes
