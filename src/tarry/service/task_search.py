"""Search for tasks, also by target URL and by the result of the last attempt.

The store selects tasks by its columns (`TaskFilter`). It cannot read the URL and the error, which
may be encrypted, so this module decodes the tasks of a page and compares them.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tarry.service.encryption import DecryptionFailed
from tarry.service.model import LOST, Status
from tarry.service.store import Page, TaskFilter

if TYPE_CHECKING:
    from tarry.service.encryption import Codec
    from tarry.service.model import AttemptRecord, ReplayRecord, Task, TaskContent
    from tarry.service.store import Store

_MAX_SCANNED_TASKS = 2_000
"""Maximum number of tasks that are decoded for one page, even if none matches."""
_YIELD_EVERY_TASKS = 100
"""Number of tasks after which the decoding of a page yields to the event loop."""
_STATUS_CLASS = re.compile("[1-5]xx")


class TaskSearch(msgspec.Struct, frozen=True, kw_only=True):
    """Which tasks to find; None matches all."""

    filter: TaskFilter
    url_prefix: str | None = None
    """The beginning of the canonical target URL, see `parse_target_prefix`."""
    last_status: str | None = None
    """The status of the last attempt: 503, a class such as 5xx, or the name of a gRPC code."""
    error: str | None = None
    """The error class of the last attempt, or a part of its error message; the case is ignored."""

    @property
    def needs_decoding(self) -> bool:
        """Whether tasks have to be decoded, because the store cannot evaluate the whole search."""
        return (self.url_prefix, self.last_status, self.error) != (None, None, None)


class FoundTask(NamedTuple):
    """A task with its content and its last attempt, both decrypted if their key is configured."""

    task: Task
    content: TaskContent | None
    """None: it cannot be decrypted."""
    last_attempt: AttemptRecord | None
    """None: no attempt was made yet."""


class TaskFinder:
    """Finds tasks in the store."""

    def __init__(self, store: Store, codec: Codec) -> None:
        self._store = store
        self._codec = codec

    async def find_page(
        self,
        tenant: str,
        search: TaskSearch,
        *,
        cursor: str | None,
        limit: int,
        oldest_first: bool = False,
    ) -> Page[FoundTask]:
        """Return up to `limit` matching tasks and the cursor of the next page.

        A page may be short or empty, although it is not the last one, see `Page`.
        """
        found: list[FoundTask] = []
        scanned = 0
        while True:
            page = await self._store.list_tasks(
                tenant, search.filter, cursor=cursor, limit=limit, oldest_first=oldest_first
            )
            task_ids = [task.id for task in page.items if task.attempts]
            attempts = await self._store.last_attempts(tenant, task_ids) if task_ids else {}
            for task in page.items:
                scanned += 1
                found_task = self._decode(task, attempts.get(task.id))
                if _matches(found_task, search):
                    found.append(found_task)
                if not scanned % _YIELD_EVERY_TASKS:
                    await asyncio.sleep(0)
            cursor = page.cursor
            if found or cursor is None or scanned >= _MAX_SCANNED_TASKS or not page.items:
                return Page(found, cursor)

    async def find_ids(
        self, tenant: str, search: TaskSearch, *, cursor: str | None, limit: int
    ) -> Page[str]:
        """Return the ids of matching tasks, oldest first, and the cursor of the next page."""
        tasks: list[Task]
        if search.needs_decoding:
            found_page = await self.find_page(
                tenant, search, cursor=cursor, limit=limit, oldest_first=True
            )
            tasks, cursor = [found.task for found in found_page.items], found_page.cursor
        else:
            page = await self._store.list_tasks(
                tenant, search.filter, cursor=cursor, limit=limit, oldest_first=True
            )
            tasks, cursor = page.items, page.cursor
        return Page([task.id for task in tasks], cursor)

    async def count(self, tenant: str, search: TaskSearch) -> int:
        """Return the number of matching tasks."""
        if not search.needs_decoding:
            return await self._store.count_tasks(tenant, search.filter)
        count, cursor = 0, None
        while True:
            page = await self.find_ids(tenant, search, cursor=cursor, limit=_MAX_SCANNED_TASKS)
            count += len(page.items)
            cursor = page.cursor
            if cursor is None:
                return count

    def _decode(self, task: Task, last_attempt: AttemptRecord | None) -> FoundTask:
        content = None
        try:
            content = self._codec.unpack(task.packed_content)
            if last_attempt is not None:
                last_attempt = self._codec.decrypt_attempt(last_attempt)
        except (DecryptionFailed, msgspec.MsgspecError):
            pass  # the task can still be listed and cancelled
        return FoundTask(task, content, last_attempt)


def search_of_replay(replay: ReplayRecord) -> TaskSearch:
    """Return the search for the dead letters of a replay."""
    return TaskSearch(
        filter=TaskFilter(
            status=Status.EXHAUSTED,
            policy_id=replay.policy_id,
            lane=replay.lane,
            lane_prefix=replay.lane_prefix,
            reason=replay.reason,
            key=replay.key,
            created_from=replay.created_from,
            created_until=replay.created_until,
            finished_from=replay.finished_from,
            finished_until=replay.before or None,
        ),
        url_prefix=replay.url_prefix,
        last_status=replay.last_status,
        error=replay.error,
    )


def last_error_class(attempt: AttemptRecord) -> str | None:
    """Return why an attempt got no response, or None."""
    return LOST if attempt.outcome == LOST else attempt.error_class


def _matches(found: FoundTask, search: TaskSearch) -> bool:
    """Return whether a task matches the part of a search that the store does not evaluate."""
    prefix, content, attempt = search.url_prefix, found.content, found.last_attempt
    if prefix is not None and (content is None or not content.url.startswith(prefix)):
        return False
    if search.last_status is not None and not _has_status(attempt, search.last_status):
        return False
    return search.error is None or _has_error(attempt, search.error)


def _has_status(attempt: AttemptRecord | None, wanted: str) -> bool:
    if attempt is None or attempt.status is None:
        return False
    status, wanted = str(attempt.status).lower(), wanted.lower()
    if _STATUS_CLASS.fullmatch(wanted):
        return isinstance(attempt.status, int) and status[:1] == wanted[:1]
    return status == wanted


def _has_error(attempt: AttemptRecord | None, wanted: str) -> bool:
    if attempt is None:
        return False
    wanted = wanted.lower()
    return wanted == last_error_class(attempt) or wanted in (attempt.error or "").lower()
