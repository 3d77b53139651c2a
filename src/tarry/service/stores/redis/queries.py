"""Queries of tasks, of their attempts and of counters."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tarry.service.model import MAX_ATTEMPT_NUMBER, Status
from tarry.service.store import (
    MAX_BUSIEST_LANES,
    MAX_PAGE_BYTES,
    AttemptsOfMinute,
    Counters,
    DueLane,
    RecordPage,
    select_due_lanes,
)
from tarry.service.stores.records import decode_attempt, parse_cursor
from tarry.service.stores.redis.codec import decode_task, pack_id, pack_ids, split_rows, unpack_id
from tarry.service.stores.redis.lanes import read_all_lanes
from tarry.service.stores.redis.task_lists import TaskScan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import AttemptRecord, Task
    from tarry.service.store import StoredTaskFilter
    from tarry.service.stores.redis.partitions import Partitions

_ATTEMPT_CURSOR_BASE = 1 << MAX_ATTEMPT_NUMBER.bit_length()
"""Greater than the number of every attempt."""
_MAX_BYTES_OF_TASKS = MAX_PAGE_BYTES * 16
"""Maximum size of the attempts of several tasks in one reply. Larger than that of a page, because
the rest is not read by another call; Redis is blocked meanwhile."""


async def get_task(partitions: Partitions, tenant: str, task_id: str) -> Task | None:
    """Return a task, or None if it does not exist."""
    packed_id = pack_id(task_id)
    if packed_id is None:
        return None
    reply = await partitions.run_for_tenant(tenant, "get_tasks", tenant, [packed_id])
    if not reply:
        return None
    _, task = decode_task(reply)
    return task


async def list_tasks(
    partitions: Partitions,
    tenant: str,
    task_filter: StoredTaskFilter,
    *,
    cursor: str | None = None,
    limit: int = 100,
    oldest_first: bool = False,
) -> RecordPage[Task]:
    """List tasks."""
    position = None if cursor is None else parse_cursor(cursor)
    scan = _scan(partitions, tenant, task_filter, position, oldest_first=oldest_first)
    return await scan.list_tasks(limit)


async def count_tasks(partitions: Partitions, tenant: str, task_filter: StoredTaskFilter) -> int:
    """Return the number of tasks that match a filter."""
    return await _scan(partitions, tenant, task_filter).count()


def _scan(
    partitions: Partitions,
    tenant: str,
    task_filter: StoredTaskFilter,
    position: int | None = None,
    *,
    oldest_first: bool = False,
) -> TaskScan:
    partition = partitions.partition_of(tenant)
    return TaskScan(
        partitions, partition, tenant, task_filter, position=position, oldest_first=oldest_first
    )


async def last_attempts(
    partitions: Partitions, tenant: str, task_ids: Sequence[str]
) -> dict[str, AttemptRecord]:
    """Return the last attempt of each task that has one, by task id."""
    packed_ids = pack_ids(task_ids)
    # -1: only the last attempt of each task.
    arguments = (tenant, packed_ids, -1, len(packed_ids), _MAX_BYTES_OF_TASKS)
    reply = await partitions.run_for_tenant(tenant, "attempts", *arguments)
    return {
        unpack_id(packed_id): decode_attempt(attempts[0])
        for packed_id, *attempts in reply
        if attempts
    }


async def list_attempts(
    partitions: Partitions, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
) -> list[AttemptRecord]:
    """Return attempts of a task."""
    arguments = (tenant, pack_ids([task_id]), after, limit, MAX_PAGE_BYTES)
    reply = await partitions.run_for_tenant(tenant, "attempts", *arguments)
    return [decode_attempt(attempt) for _, *attempts in reply for attempt in attempts]


async def list_attempts_of_tasks(
    partitions: Partitions,
    tenant: str,
    task_filter: StoredTaskFilter,
    *,
    cursor: str | None = None,
    limit: int = 100,
) -> RecordPage[tuple[str, AttemptRecord]]:
    """List attempts with the ids of their tasks."""
    # A cursor is the number of a task and the number of its last attempt in one integer.
    last_task, last_attempt, position = None, 0, None
    if cursor is not None:
        last_task, last_attempt = divmod(parse_cursor(cursor), _ATTEMPT_CURSOR_BASE)
        position = last_task + 1  # begins with the same task, which may have more attempts
    page = await _scan(partitions, tenant, task_filter, position).list_ids(limit)
    number_of_task = {task_id: number for number, task_id in page.items}
    task_ids = list(number_of_task)
    is_continued = bool(task_ids) and number_of_task[task_ids[0]] == last_task
    items: list[tuple[str, AttemptRecord]] = []
    # Only of the first task, attempts may have been returned before.
    for ids, after in ((task_ids[:1], last_attempt if is_continued else 0), (task_ids[1:], 0)):
        if ids and len(items) < limit:
            arguments = (tenant, pack_ids(ids), after, limit - len(items), _MAX_BYTES_OF_TASKS)
            reply = await partitions.run_for_tenant(tenant, "attempts", *arguments)
            items += [
                (unpack_id(packed_id), decode_attempt(attempt))
                for packed_id, *attempts in reply
                for attempt in attempts
            ]
    if len(items) == limit:
        task_id, attempt = items[-1]
        return RecordPage(
            items, str(number_of_task[task_id] * _ATTEMPT_CURSOR_BASE + attempt.attempt_number)
        )
    if page.cursor is None:
        return RecordPage(items, None)
    # The attempts of all tasks of `page` are returned: continue with the next older task.
    return RecordPage(items, str((int(page.cursor) - 1) * _ATTEMPT_CURSOR_BASE))


async def counters(partitions: Partitions, tenant: str | None = None) -> Counters:
    """Return the counters of one tenant, or their sums over all tenants (None)."""
    partition_numbers = partitions.partitions_of(tenant)
    replies = await partitions.run_on(partition_numbers, "counters", tenant)
    now = max(reply[0] for reply in replies)
    _, *columns = zip(*replies, strict=True)  # the first column has the times
    sums = [sum(column) for column in columns]
    lanes = [lane async for lane in read_all_lanes(partitions, tenant)]
    due_lanes = (
        DueLane(lane.name, due, lane.to_record().waiting_for)
        for lane, due in lanes
        if 0 < due <= now  # 0: no pending task
    )
    used = [lane for lane, _ in lanes if lane.pending or lane.in_flight or lane.exhausted]
    used.sort(key=lambda lane: (-lane.pending, lane.name))
    return Counters(
        task_counts={status: sums[status] for status in Status},
        superseded_count=sums[len(Status)],
        due_lanes=select_due_lanes(due_lanes),
        busiest_lanes=[lane.to_record() for lane in used[:MAX_BUSIEST_LANES]],
    )


async def attempts_per_minute(
    partitions: Partitions, tenant: str | None, *, since: int
) -> list[AttemptsOfMinute]:
    """Return the attempt counts of one tenant, or of all tenants (None), sorted by minute."""
    partition_numbers = partitions.partitions_of(tenant)
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for reply in await partitions.run_on(partition_numbers, "attempts_per_minute", tenant, since):
        for field, count in split_rows(reply, 2):
            minute, _, outcome = field.decode().partition(":")
            counts[int(minute)][outcome] += int(count)
    return [AttemptsOfMinute(minute, dict(counts[minute])) for minute in sorted(counts)]
