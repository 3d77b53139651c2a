"""Lists and counts of tasks: reads tasks in steps, and applies filters.

The scripts apply all fields of a filter except its functions, which are called here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tarry.service.store import MAX_PAGE_BYTES, RecordPage
from tarry.service.stores.records import decode_attempt
from tarry.service.stores.redis.codec import (
    TASK_LENGTH,
    decode_task,
    decode_tasks,
    pack_id,
    split_rows,
    unpack_id,
)

if TYPE_CHECKING:
    from tarry.service.model import Task
    from tarry.service.store import StoredTaskFilter
    from tarry.service.stores.redis.partitions import Partitions

MAX_SCANNED_TASKS = 2000
"""Maximum number of tasks that are read for one page of a filtered list, even if few match."""
MAX_DECODED_TASKS = 500
"""The same, if the filter has functions that decode tasks."""
_STEP_SIZE = 500
"""Maximum number of tasks that one script reads. It blocks Redis for about 2 ms."""
_DECODED_STEP_SIZE = 100
_AFTER_ALL_TASKS = 1 << 52  # greater than every number of a task
_FILTER_FIELDS = (
    "status",
    "policy_id",
    "lane",
    "lane_prefix",
    "reason",
    "key",
    "created_from",
    "created_until",
    "finished_from",
    "finished_until",
)


class _Step(NamedTuple):
    """The tasks that one script has found."""

    read_count: int
    found_count: int
    is_complete: bool
    values: list[Any]


class TaskScan:
    """Reads the tasks of a tenant that match a filter, in the order of adding or in reverse."""

    def __init__(
        self,
        partitions: Partitions,
        partition: int,
        tenant: str,
        task_filter: StoredTaskFilter,
        *,
        position: int | None = None,
        oldest_first: bool = False,
    ) -> None:
        self._partitions = partitions
        self._partition = partition
        self._tenant = tenant
        self._filter = task_filter
        self._oldest_first = oldest_first
        self._after, self._before = -1, _AFTER_ALL_TASKS
        self._continue_after(position)
        self._script_filter = _to_script_filter(task_filter)
        self.has_functions: bool = not (
            task_filter.matches_attempt is None and task_filter.matches_content is None
        )
        self.last_number: int = 0
        """The number of the last task that was read."""

    def _continue_after(self, number: int | None) -> None:
        if number is not None and self._oldest_first:
            self._after = min(number, _AFTER_ALL_TASKS)
        elif number is not None:
            self._before = min(number, _AFTER_ALL_TASKS)

    async def list_tasks(self, limit: int) -> RecordPage[Task]:
        """Return a page of tasks; the cursor is the number of the last task of the page."""
        page = await self._list_numbered_tasks(limit)
        return RecordPage([task for _, task in page.items], page.cursor)

    async def list_ids(self, limit: int) -> RecordPage[tuple[int, str]]:
        """Return a page of the numbers and ids of tasks."""
        if self.has_functions:
            page = await self._list_numbered_tasks(limit)
            return RecordPage([(number, task.id) for number, task in page.items], page.cursor)
        ids: list[tuple[int, str]] = []
        read_count = 0
        while True:
            step = await self._read("ids", _STEP_SIZE, limit + 1 - len(ids))
            read_count += step.read_count
            rows = split_rows(step.values, 2)
            ids += [(number, unpack_id(packed_id)) for packed_id, number in rows]
            if len(ids) > limit:
                return RecordPage(ids[:limit], str(ids[limit - 1][0]))
            if step.is_complete:
                return RecordPage(ids, None)
            if read_count >= MAX_SCANNED_TASKS:
                return RecordPage(ids, str(self.last_number))

    async def _list_numbered_tasks(self, limit: int) -> RecordPage[tuple[int, Task]]:
        items: list[tuple[int, Task]] = []
        page_bytes = read_count = 0
        max_read = MAX_DECODED_TASKS if self.has_functions else max(MAX_SCANNED_TASKS, limit + 1)
        while True:
            found: list[tuple[int, Task]] = []
            is_full = len(items) >= limit or page_bytes >= MAX_PAGE_BYTES
            if is_full and not self.has_functions:
                # Only check whether another task matches: then the page has a cursor.
                step = await self._read("ids", _STEP_SIZE, 1)
                if step.found_count:
                    return RecordPage(items, str(items[-1][0]))
            else:
                step, found = await self._read_tasks(limit - len(items))
            for number, task in found:
                if len(items) >= limit or page_bytes >= MAX_PAGE_BYTES:
                    return RecordPage(items, str(items[-1][0]))
                items.append((number, task))
                page_bytes += len(task.packed_content)
            read_count += step.read_count
            if step.is_complete:
                return RecordPage(items, None)
            if read_count >= max_read:
                return RecordPage(items, str(self.last_number))

    async def count(self) -> int:
        """Return the number of matching tasks."""
        count = 0
        while True:
            if self.has_functions:
                step, found = await self._read_tasks(_DECODED_STEP_SIZE)
                count += len(found)
            else:
                step = await self._read("count", _STEP_SIZE, _STEP_SIZE)
                count += step.found_count
            if step.is_complete:
                return count

    async def _read_tasks(self, limit: int) -> tuple[_Step, list[tuple[int, Task]]]:
        """Read tasks; return the step, and the tasks that match the whole filter."""
        if not self.has_functions:
            step = await self._read("tasks", _STEP_SIZE, limit)
            return step, list(decode_tasks(step.values))
        step = await self._read("attempts", _DECODED_STEP_SIZE, _DECODED_STEP_SIZE)
        found: list[tuple[int, Task]] = []
        for attempt, *values in split_rows(step.values, 1 + TASK_LENGTH):
            number, task = decode_task(values)
            if self._matches_functions(attempt, task):
                found.append((number, task))
        return step, found

    def _matches_functions(self, attempt: bytes, task: Task) -> bool:
        matches_attempt = self._filter.matches_attempt
        matches_content = self._filter.matches_content
        if matches_attempt is not None and not (
            attempt and matches_attempt(decode_attempt(attempt))
        ):
            return False
        return matches_content is None or matches_content(task.packed_content)

    async def _read(self, mode: str, max_read: int, max_found: int) -> _Step:
        reply = await self._partitions.run(
            self._partition,
            "list_tasks",
            self._tenant,
            self._script_filter,
            self._after,
            self._before,
            self._oldest_first,
            max_read,
            max_found,
            MAX_PAGE_BYTES,
            mode,
        )
        read_count, found_count, last_number, is_complete, values = reply
        if read_count:
            self.last_number = last_number
            self._continue_after(last_number)
        return _Step(read_count, found_count, bool(is_complete), values)


def _to_script_filter(task_filter: StoredTaskFilter) -> dict[str, Any]:
    """Return the fields of a filter that are set, as an argument of a script."""
    fields = {name: getattr(task_filter, name) for name in _FILTER_FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    if task_filter.status is not None:
        fields["status"] = int(task_filter.status)
    if task_filter.is_live:
        fields["is_live"] = True
    if task_filter.key is not None:
        fields["key_id"] = pack_id(task_filter.key)
    return fields
