"""`Prefer: wait=SECONDS` (RFC 7240): a request that is answered when its task has ended."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable
from tarry.service.api.redact import secrets_of
from tarry.service.api.views import read_content, response_view, stored_task_view
from tarry.wire.tasks import STATUS_NAMES

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest
    from tarry.service.engine.reporting import TaskCompletion
    from tarry.service.model import Task
    from tarry.wire.tasks import RetryTask

_WAIT = re.compile(r'(?:^|,)\s*wait\s*=\s*"?([0-9]{1,9})"?\s*(?=$|[;,])', re.IGNORECASE)
_LOOK = 1.0
"""Seconds between two looks at the store: a task may end in another process, which tells no one."""

WAIT_HEADER = {"Prefer": "wait=SECONDS answers with the outcome when it comes in time (RFC 7240)."}
"""What the document says about it."""


class ResultWaiter:
    """Those who wait, of whom there are only so many."""

    def __init__(self, around: ApiContext) -> None:
        self._around = around
        self._waiting = 0
        self._is_over = False

    def asked_for(self, asked: ApiRequest) -> int | None:
        """Return the seconds to wait; a preference that makes no sense, or is too much, is none."""
        found = _WAIT.search(b",".join(asked.lines(b"prefer")).decode("latin-1"))
        if found is None or self._waiting >= self._around.limits.max_waiting_requests:
            return None
        return min(int(found[1]), self._around.limits.max_wait_s)

    async def outcome(self, task: Task, view: RetryTask, seconds: int) -> RetryTask:
        """Return a task as it ended, with its target's answer, or as it stands by then."""
        if task.status.is_terminal:
            return view
        self._waiting += 1
        try:
            stored, settled = await self._end_of(task, seconds)
        finally:
            self._waiting -= 1
        if stored is not None:
            view = stored_task_view(self._around, stored)
        if settled is not None:
            view.status, view.reason = STATUS_NAMES[settled.status], settled.reason
            if settled.status.is_terminal:
                view.next_attempt_at = None
            if settled.delivered is not None and settled.delivered.status is not None:
                secrets = secrets_of(read_content(self._around, task))
                view.response = response_view(settled.delivered, secrets)
        return view

    def close(self) -> None:
        """Let nobody wait any longer, so that their connections do not hold up the end."""
        self._is_over = True

    async def _end_of(self, task: Task, seconds: int) -> tuple[Task | None, TaskCompletion | None]:
        around, stored = self._around, None
        for _ in range(seconds):
            settled = await around.engine.settled(task.id, _LOOK)
            try:
                stored = await around.store.get_task(task.tenant, task.id)
            except StoreUnavailable:
                stored = None
            ended = settled is not None or (stored is not None and stored.status.is_terminal)
            if ended or self._is_over:
                return stored, settled
        return stored, None


def wait_applied(seconds: int) -> tuple[bytes, bytes]:
    """Return the header that says that it was waited."""
    return b"preference-applied", b"wait=%d" % seconds
