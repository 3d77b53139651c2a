"""Search for tasks, also by target URL and by the result of the last attempt.

The store selects tasks by its columns (`StoredTaskFilter`). It cannot read the URL and the last
attempt, which may be encrypted, so it calls functions of this module that decode and compare them.

The `lane` of a `Search` has its name in the API. The `url_prefix` is canonical, see
`parse_target_prefix`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import msgspec

from tarry.service.delivery.targets import parse_target_prefix, stored_lane_name
from tarry.service.encryption import DecryptionFailed
from tarry.service.model import LOST, Status
from tarry.service.store import RecordPage, StoredTaskFilter

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.encryption import Codec
    from tarry.service.model import AttemptRecord, ReplayRecord, Task, TaskContent
    from tarry.service.store import Store
    from tarry.wire.tasks import Search

_MAX_READS_PER_PAGE = 4
"""After this many reads, each of a bounded number of tasks, a page ends, even if it is empty."""
_GROUP_PAGE_TASKS = 500
_MAX_GROUP_PAGES = 20
"""`TaskFinder.group` reads at most this many pages of this size."""
_MAX_GROUPS = 500
"""After this many groups, each with the content of a task, `TaskFinder.group` reads no more pages.
The views of 10,000 groups blocked the event loop for 0.13 s."""
_YIELD_EVERY_TASKS = 100
"""Number of tasks after which the decoding of a page yields to the event loop."""
_STATUS_CLASS = re.compile("[1-5]xx")


class FoundTask(NamedTuple):
    """A task with its content and its last attempt, both decrypted if their key is configured."""

    task: Task
    content: TaskContent | None
    """None: it cannot be decrypted or decoded."""
    last_attempt: AttemptRecord | None
    """None: no attempt was made yet."""


class TaskGroup(NamedTuple):
    """Tasks of one lane with the same reason."""

    newest: FoundTask
    task_count: int


class TaskFinder:
    """Finds tasks in the store."""

    def __init__(self, store: Store, codec: Codec) -> None:
        self._store = store
        self._codec = codec
        self._scan_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant: only one `count` or `group`, which may read many tasks, runs for a tenant at
        a time. A lock is removed when no request uses it."""

    async def find_page(
        self, tenant: str, search: Search, *, cursor: str | None, limit: int
    ) -> RecordPage[FoundTask]:
        """Return up to `limit` matching tasks, newest first, and the cursor of the next page.

        A page may be short or empty, although it is not the last one, see `RecordPage`.
        """
        task_filter = self._build_filter(tenant, search)
        page = await self._list_tasks(tenant, task_filter, cursor, limit)
        task_ids = [task.id for task in page.items if task.attempts]
        attempts = await self._store.last_attempts(tenant, task_ids) if task_ids else {}
        found: list[FoundTask] = []
        for number, task in enumerate(page.items):
            found.append(self._decode(task, attempts.get(task.id)))
            if not number % _YIELD_EVERY_TASKS:
                await asyncio.sleep(0)
        return RecordPage(found, page.cursor)

    async def find_ids(
        self,
        tenant: str,
        search: Search,
        *,
        is_live: bool = False,
        cursor: str | None,
        limit: int,
    ) -> RecordPage[str]:
        """Return the ids of matching tasks, oldest first, and the cursor of the next page.

        With `is_live`, only live (PENDING or IN_FLIGHT) tasks match.
        """
        task_filter = self._build_filter(tenant, search, is_live=is_live)
        page = await self._list_tasks(tenant, task_filter, cursor, limit, oldest_first=True)
        return RecordPage([task.id for task in page.items], page.cursor)

    async def group(
        self,
        tenant: str,
        search: Search,
        *,
        cursor: str | None,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> RecordPage[TaskGroup]:
        """Group up to 10,000 matching tasks by reason and lane, the group of the newest task first.

        The cursor continues with older tasks, which may belong to the same groups. If there are
        many groups, or if `is_abandoned` returns that the client has disconnected, it does so after
        fewer tasks.
        """
        async with self._scan_locks.setdefault(tenant, asyncio.Lock()):
            return await self._group(tenant, search, cursor, is_abandoned)

    async def _group(
        self,
        tenant: str,
        search: Search,
        cursor: str | None,
        is_abandoned: Callable[[], bool],
    ) -> RecordPage[TaskGroup]:
        newest: dict[tuple[str | None, str], FoundTask] = {}
        counts: Counter[tuple[str | None, str]] = Counter()
        task_filter = self._build_filter(tenant, search)
        page: RecordPage[Task] = RecordPage([], cursor)
        for _ in range(_MAX_GROUP_PAGES):
            page = await self._list_tasks(tenant, task_filter, page.cursor, _GROUP_PAGE_TASKS)
            first_of_group: dict[tuple[str | None, str], Task] = {}
            for task in page.items:
                group = (task.reason, task.lane)
                counts[group] += 1
                if group not in newest:
                    first_of_group.setdefault(group, task)
            task_ids = [task.id for task in first_of_group.values() if task.attempts]
            attempts = await self._store.last_attempts(tenant, task_ids) if task_ids else {}
            for group, task in first_of_group.items():
                newest[group] = self._decode(task, attempts.get(task.id))
            if page.cursor is None or len(newest) >= _MAX_GROUPS or is_abandoned():
                break
        groups = [TaskGroup(newest[group], counts[group]) for group in newest]
        return RecordPage(groups, page.cursor)

    async def count(self, tenant: str, search: Search, *, is_live: bool = False) -> int:
        """Return the number of matching tasks; with `is_live`, only live tasks match."""
        task_filter = self._build_filter(tenant, search, is_live=is_live)
        async with self._scan_locks.setdefault(tenant, asyncio.Lock()):
            return await self._store.count_tasks(tenant, task_filter)

    async def _list_tasks(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        cursor: str | None,
        limit: int,
        *,
        oldest_first: bool = False,
    ) -> RecordPage[Task]:
        page: RecordPage[Task] = RecordPage([], cursor)
        for _ in range(_MAX_READS_PER_PAGE):
            page = await self._store.list_tasks(
                tenant, task_filter, cursor=page.cursor, limit=limit, oldest_first=oldest_first
            )
            if page.items or page.cursor is None:
                break
        return page

    def _build_filter(
        self, tenant: str, search: Search, *, is_live: bool = False
    ) -> StoredTaskFilter:
        """Return the filter of a search, with functions that decode only what is compared."""
        is_attempt_compared = (search.last_status, search.error) != (None, None)
        return msgspec.structs.replace(
            build_column_filter(tenant, search, is_live=is_live),
            matches_attempt=partial(self._matches_attempt, search) if is_attempt_compared else None,
            matches_content=None if search.url_prefix is None else partial(self._has_url, search),
        )

    def _matches_attempt(self, search: Search, attempt: AttemptRecord) -> bool:
        if search.last_status is not None and not _has_status(attempt, search.last_status):
            return False
        if search.error is None:
            return True
        wanted = search.error.lower()
        if wanted == last_error_class(attempt):
            return True
        with suppress(DecryptionFailed, msgspec.MsgspecError):
            attempt = self._codec.decrypt_attempt(attempt)
        return wanted in (attempt.error_message or "").lower()

    def _has_url(self, search: Search, packed_content: bytes) -> bool:
        try:
            return self._codec.unpack(packed_content).url.startswith(search.url_prefix or "")
        except (DecryptionFailed, msgspec.MsgspecError):
            return False

    def _decode(self, task: Task, last_attempt: AttemptRecord | None) -> FoundTask:
        content = None
        try:
            content = self._codec.unpack(task.packed_content)
            if last_attempt is not None:
                last_attempt = self._codec.decrypt_attempt(last_attempt)
        except (DecryptionFailed, msgspec.MsgspecError):
            pass  # the task can still be listed and cancelled
        return FoundTask(task, content, last_attempt)


def build_column_filter(tenant: str, search: Search, *, is_live: bool = False) -> StoredTaskFilter:
    """Return the part of a search that the store compares with its columns."""
    lane, lane_prefix = search.lane, None
    if search.url_prefix is not None:
        # The store selects the lanes of the host, so that fewer tasks have to be decoded.
        lane_prefix = stored_lane_name(tenant, parse_target_prefix(search.url_prefix).endpoint)
    return StoredTaskFilter(
        status=None if search.status is None else Status[search.status],
        is_live=is_live,
        policy_id=search.policy_id,
        lane=None if lane is None else stored_lane_name(tenant, lane),
        lane_prefix=lane_prefix,
        reason=search.reason,
        key=search.idempotency_key,
        created_from=search.created_after,
        created_until=search.created_before,
        finished_from=search.finished_after,
        finished_until=search.finished_before,
    )


def search_of_replay(replay: ReplayRecord) -> Search:
    """Return the search that finds the dead letters of a replay."""
    return msgspec.structs.replace(replay.search, finished_before=replay.before or None)


def last_error_class(attempt: AttemptRecord) -> str | None:
    """Return the error class of an attempt that got no response, else None."""
    return LOST if attempt.outcome == LOST else attempt.error_class


def _has_status(attempt: AttemptRecord, wanted: str) -> bool:
    if attempt.response_status is None:
        return False
    status, wanted = str(attempt.response_status).lower(), wanted.lower()
    if _STATUS_CLASS.fullmatch(wanted):
        return isinstance(attempt.response_status, int) and status[:1] == wanted[:1]
    return status == wanted
