"""`/retry-tasks`: read, list, cancel and retry tasks.

Also the `Prefer` header (RFC 7240) of these requests: `wait=SECONDS` and `return=minimal`.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.api import problems
from tarry.service.api.explanation import explain_task
from tarry.service.api.messages import NoQuery, PageQuery, json_response
from tarry.service.api.problems import from_configuration_error
from tarry.service.api.routing import Operation
from tarry.service.api.views import (
    attempt_view,
    find_secrets,
    internal_lane_name,
    read_content,
    response_view,
    stored_task_view,
)
from tarry.service.model import Status
from tarry.service.store import CancelStatus, RetryNowStatus, TaskFilter
from tarry.wire.tasks import (
    STATUS_NAMES,
    AttemptLog,
    Explanation,
    LaneName,
    Page,
    PolicyName,
    ReasonName,
    RetryTask,
    StatusName,
)

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.engine.reporting import TaskCompletion
    from tarry.service.model import Task


_TASK_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_REASONS = tuple(Reason)
_MAX_EXPLAINED_ATTEMPTS = 100
_MAX_CURSOR_DIGITS = 9
_YIELD_EVERY_TASKS = 100
"""Number of tasks after which the decoding of a page yields to the event loop."""


class DeadLetterQuery(PageQuery, frozen=True):
    """Query parameters of a list of dead letters: filter and page."""

    policy_id: PolicyName | None = None
    lane: LaneName | None = None
    reason: ReasonName | None = None


class TaskQuery(DeadLetterQuery, frozen=True):
    """Query parameters of a list of tasks: filter and page.

    A task is listed as IN_FLIGHT from the time it is leased, shortly before its attempt starts.
    """

    status: StatusName | None = None


class AttemptQuery(PageQuery, frozen=True):
    """Query parameters of a list of attempts."""


class TaskResource:
    """The operations on the tasks of a tenant."""

    def __init__(self, context: ApiContext, result_waiter: ResultWaiter) -> None:
        self._context = context
        self._result_waiter = result_waiter

    def operations(self) -> list[Operation]:
        """Return the operations on tasks."""
        return [
            Operation(
                method="GET",
                path="/retry-tasks",
                operation_id="listTasks",
                summary="List tasks, newest first.",
                handler=self.list_tasks,
                query_type=TaskQuery,
                responses={200: Page[RetryTask]},
                error_statuses=(400, 422, 503),
            ),
            Operation(
                method="GET",
                path="/retry-tasks/{taskId}",
                operation_id="getTask",
                summary="Get a task: status, number of attempts, time of the next one.",
                handler=self.get,
                query_type=NoQuery,
                responses={200: RetryTask},
                error_statuses=(400, 404, 422, 503),
                request_headers=WAIT_HEADER,
            ),
            Operation(
                method="DELETE",
                path="/retry-tasks/{taskId}",
                operation_id="cancelTask",
                summary="Cancel a task. 202: an attempt is running and will be the last one.",
                handler=self.cancel,
                query_type=NoQuery,
                responses={200: RetryTask, 202: RetryTask},
                error_statuses=(400, 404, 409, 422, 503),
            ),
            Operation(
                method="GET",
                path="/retry-tasks/{taskId}/attempts",
                operation_id="listAttempts",
                summary="List the attempts of a task, oldest first.",
                handler=self.list_attempts,
                query_type=AttemptQuery,
                responses={200: Page[AttemptLog]},
                error_statuses=(400, 404, 422, 503),
            ),
            Operation(
                method="GET",
                path="/retry-tasks/{taskId}/explain",
                operation_id="explainTask",
                summary="Explain in words why a task was retried or not, and what happens next.",
                handler=self.explain,
                query_type=NoQuery,
                responses={200: Explanation},
                error_statuses=(400, 404, 422, 503),
            ),
            Operation(
                method="POST",
                path="/retry-tasks/{taskId}/retry",
                operation_id="retryTask",
                summary="Make the next attempt now; a dead letter starts over. 202: an attempt is "
                "running.",
                handler=self.retry,
                query_type=NoQuery,
                responses={200: RetryTask, 202: RetryTask},
                error_statuses=(400, 404, 409, 422, 503),
            ),
        ]

    async def list_tasks(self, request: ApiRequest) -> ApiResponse:
        """List tasks, newest first."""
        query = request.parse_query(TaskQuery)
        status = None if query.status is None else Status[query.status]
        return json_response(200, await self.read_page(request.tenant, query, status))

    async def read_page(
        self, tenant: str, query: DeadLetterQuery, status: Status | None
    ) -> Page[RetryTask]:
        """Return a page of the tasks that match `query` and `status`; None matches any status."""
        check_reason("reason", query.reason)
        task_filter = TaskFilter(
            status=status,
            policy_id=query.policy_id,
            lane=None if query.lane is None else internal_lane_name(tenant, query.lane),
            reason=query.reason,
        )
        try:
            page = await self._context.store.list_tasks(
                tenant, task_filter, cursor=query.cursor, limit=query.limit
            )
        except ConfigurationError as error:
            raise from_configuration_error("cursor", error) from None
        items: list[RetryTask] = []
        for i, task in enumerate(page.items, 1):
            items.append(self._view(task))
            if not i % _YIELD_EVERY_TASKS:
                await asyncio.sleep(0)
        return Page(items=items, next_cursor=page.cursor)

    async def get(self, request: ApiRequest) -> ApiResponse:
        """Return one task; with `Prefer: wait`, respond only when the task is finished."""
        request.parse_query(NoQuery)
        task = await self._find(request)
        view = self._view(task)
        if b"prefer" in request.headers:
            wait_s = self._result_waiter.requested_wait(request)
            if wait_s is not None:
                view = await self._result_waiter.wait(task, view, wait_s)
                return json_response(200, view, wait_applied(wait_s))
        return json_response(200, view)

    async def cancel(self, request: ApiRequest) -> ApiResponse:
        """Cancel a task."""
        request.parse_query(NoQuery)
        cancel_status = await self._context.engine.cancel(request.tenant, _task_id(request))
        task = await self._find(request)
        if cancel_status is CancelStatus.TERMINAL:
            raise problems.conflict(
                problems.ALREADY_FINISHED,
                f"The task is {task.status.name}.",
                taskStatus=task.status.name,
            )
        return json_response(
            202 if cancel_status is CancelStatus.REQUESTED else 200, self._view(task)
        )

    async def retry(self, request: ApiRequest) -> ApiResponse:
        """Make the next attempt now."""
        request.parse_query(NoQuery)
        retry_status = await self._context.engine.retry_now(request.tenant, _task_id(request))
        task = await self._find(request)
        status = task.status.name
        if retry_status is RetryNowStatus.FINISHED:
            detail = f"The task is {status}. Create a new one."
            raise problems.conflict(problems.ALREADY_FINISHED, detail, taskStatus=status)
        if retry_status is RetryNowStatus.RUNNING and task.cancelling:
            detail = "The task is being cancelled. Create a new one."
            raise problems.conflict(problems.ALREADY_FINISHED, detail, taskStatus=status)
        return json_response(
            202 if retry_status is RetryNowStatus.RUNNING else 200, self._view(task)
        )

    async def list_attempts(self, request: ApiRequest) -> ApiResponse:
        """List the attempts of a task, oldest first."""
        query = request.parse_query(AttemptQuery)
        after_number = 0
        if query.cursor is not None:
            is_number = query.cursor.isascii() and query.cursor.isdigit()
            if not is_number or len(query.cursor) > _MAX_CURSOR_DIGITS:
                raise problems.invalid("cursor", "must be a nextCursor of this list")
            after_number = int(query.cursor)
        task = await self._find(request)
        attempts = await self._context.store.list_attempts(
            request.tenant, task.id, after=after_number, limit=query.limit + 1
        )
        # One more than requested was read, to find out whether there is another page.
        page, has_more = attempts[: query.limit], len(attempts) > query.limit
        secrets = find_secrets(read_content(self._context, task))
        return json_response(
            200,
            Page(
                items=[attempt_view(task.id, attempt, secrets) for attempt in page],
                next_cursor=str(page[-1].number) if has_more else None,
            ),
        )

    async def explain(self, request: ApiRequest) -> ApiResponse:
        """Explain the retry decisions of a task."""
        request.parse_query(NoQuery)
        context = self._context
        task = await self._find(request)
        after = max(0, task.attempts - _MAX_EXPLAINED_ATTEMPTS)
        attempts = await context.store.list_attempts(
            request.tenant, task.id, after=after, limit=_MAX_EXPLAINED_ATTEMPTS
        )
        chosen = await context.engine.policies.read(
            task.tenant, task.policy_id, task.policy_version
        )
        return json_response(
            200,
            explain_task(
                task,
                read_content(context, task),
                attempts,
                chosen=None if chosen is None else chosen.policy,
                lane=await context.store.get_lane(task.lane),
                now=context.engine.clock.now(),
            ),
        )

    async def _find(self, request: ApiRequest) -> Task:
        task = await self._context.store.get_task(request.tenant, _task_id(request))
        if task is None:
            raise problems.no_such("task")
        return task

    def _view(self, task: Task) -> RetryTask:
        return stored_task_view(self._context, task)


def check_reason(field: str, reason: str | None) -> None:
    """Raise ApiError for an unknown reason.

    A filter with an unknown reason would match nothing, as if there were no failures.
    """
    if reason is not None and reason not in _REASONS:
        raise problems.invalid(field, f"must be {' or '.join(_REASONS)}", reason)


def _task_id(request: ApiRequest) -> str:
    """Return the task id of the path; raise ApiError (404) if it is not a UUID."""
    task_id = request.path_params["taskId"]
    if not _TASK_ID.fullmatch(task_id):
        raise problems.no_such("task")
    return task_id


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
