"""The `Prefer` header (RFC 7240): `wait=SECONDS` and `return=minimal`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable
from tarry.service.api.redact import find_secrets
from tarry.service.api.views import read_content, response_view, stored_task_view
from tarry.wire.tasks import STATUS_NAMES

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.request import ApiRequest
    from tarry.service.engine.reporting import TaskCompletion
    from tarry.service.model import Task
    from tarry.wire.tasks import RetryTask

_WAIT = re.compile(r'(?:^|,)\s*wait\s*=\s*"?([0-9]{1,9})"?\s*(?=$|[;,])', re.IGNORECASE)
_RETURN = re.compile(rb'(?:^|,)\s*return\s*=\s*"?([a-z]+)"?\s*(?=$|[;,])', re.IGNORECASE)
_POLL_INTERVAL_S = 1.0
"""The task is polled, because another process may finish it without notifying this one."""

WAIT_HEADER = {"Prefer": "wait=SECONDS delays the response until the task is finished (RFC 7240)."}
MINIMAL_HEADER = {"Prefer": "return=minimal returns only the taskId of each task (RFC 7240)."}
MINIMAL_APPLIED = (b"preference-applied", b"return=minimal")


class ResultWaiter:
    """Delays responses until a task is finished, for a limited number of requests."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._waiting_requests = 0
        self._is_closed = False

    def requested_wait(self, request: ApiRequest) -> int | None:
        """Return the seconds to wait, at most `max_wait_s`.

        Return None if the request has no valid `Prefer: wait`, or too many requests wait already.
        """
        wait_match = _WAIT.search(b",".join(request.header_lines(b"prefer")).decode("latin-1"))
        if (
            wait_match is None
            or self._waiting_requests >= self._context.limits.max_waiting_requests
        ):
            return None
        return min(int(wait_match[1]), self._context.limits.max_wait_s)

    async def wait(self, task: Task, view: RetryTask, seconds: int) -> RetryTask:
        """Wait until a task is finished, for at most `seconds`, and return its current view.

        The view has the response of the target if the task was finished during the wait.
        """
        if task.status.is_terminal:
            return view
        self._waiting_requests += 1
        try:
            stored, completion = await self._poll(task, seconds)
        finally:
            self._waiting_requests -= 1
        if stored is not None:
            view = stored_task_view(self._context, stored)
        if completion is not None:
            view.status, view.reason = STATUS_NAMES[completion.status], completion.reason
            if completion.status.is_terminal:
                view.next_attempt_at = None
            if completion.delivered is not None and completion.delivered.status is not None:
                secrets = find_secrets(read_content(self._context, task))
                view.response = response_view(completion.delivered, secrets)
        return view

    def close(self) -> None:
        """End all waits within a second, so that the server can shut down."""
        self._is_closed = True

    async def _poll(self, task: Task, seconds: int) -> tuple[Task | None, TaskCompletion | None]:
        context, stored = self._context, None
        for _ in range(seconds):
            completion = await context.engine.wait_for_completion(task.id, _POLL_INTERVAL_S)
            try:
                stored = await context.store.get_task(task.tenant, task.id)
            except StoreUnavailable:
                stored = None
            is_finished = completion is not None or (
                stored is not None and stored.status.is_terminal
            )
            if is_finished or self._is_closed:
                return stored, completion
        return stored, None


def wait_applied(seconds: int) -> tuple[bytes, bytes]:
    """Return the response header that confirms `Prefer: wait`."""
    return b"preference-applied", b"wait=%d" % seconds


def prefers_minimal(request: ApiRequest) -> bool:
    """Return whether the request has `Prefer: return=minimal`."""
    # The first preference of a name counts (RFC 7240, 2).
    return_match = _RETURN.search(b",".join(request.header_lines(b"prefer")))
    return return_match is not None and return_match[1].lower() == b"minimal"
