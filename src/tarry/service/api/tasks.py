"""`/retry-tasks`: read, list, cancel and retry tasks, or wait for a result (`Prefer: wait`)."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from tarry.core.verdict import Reason
from tarry.errors import StoreUnavailable
from tarry.service.api import problems, views
from tarry.service.api.messages import (
    NoQuery,
    PageLimit,
    PageQuery,
    decode_json,
    json_response,
)
from tarry.service.api.quotas import charge_rate_limit, too_many_unfinished_tasks
from tarry.service.api.routing import Operation
from tarry.service.api.task_validation import check_epoch_ms
from tarry.service.api.views import stored_task_view
from tarry.service.delivery.targets import parse_target_prefix
from tarry.service.model import MAX_ATTEMPT_NUMBER
from tarry.service.redaction import find_secrets, redact_url
from tarry.service.store import CancelStatus, RetryNowStatus
from tarry.service.task_search import TaskFinder, build_column_filter
from tarry.service.tenant_shares import TenantShares
from tarry.wire import tasks as wire
from tarry.wire.search import SEARCH_FIELDS, TIME_FIELDS
from tarry.wire.tasks import (
    AttemptLog,
    BulkCancelRequest,
    BulkCancelResult,
    Page,
    RetryTask,
    Search,
    select_fields,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.model import Task

WAIT_HEADER = {"Prefer": "wait=SECONDS delays the response until the task is finished (RFC 7240)."}

_WAIT_PREFERENCE = re.compile(rb'(?:^|,)\s*wait\s*=\s*"?([0-9]{1,9})"?\s*(?=$|[;,])', re.IGNORECASE)
_RETURN_PREFERENCE = re.compile(rb'(?:^|,)\s*return\s*=\s*"?([a-z]+)"?\s*(?=$|[;,])', re.IGNORECASE)
_FIRST_POLL_INTERVAL_S, _POLL_INTERVAL_S = 0.05, 1.0
"""A task is polled, because another process may finish it without notifying this process. If the
task is not leased to this process, the first intervals are shorter."""
_TASK_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_TASK_PATH = "/retry-tasks/{taskId}"
_CANCELLATIONS_PATH = "/retry-tasks/cancellations"
_CANCEL_CHUNK_TASKS = 200
_MAX_CANCEL_CHUNKS = 10
"""Maximum number of chunks that one request cancels; `nextCursor` continues after the last one."""
_bulk_cancel_decoder = msgspec.json.Decoder(BulkCancelRequest)
_REASONS = tuple(Reason)
_MAX_EXPLAINED_ATTEMPTS = 100
_YIELD_EVERY_VIEWS = 10
"""Number of views after which a list yields to the event loop. Each takes up to 3 ms, if its task
has many secrets that must be redacted."""
_ATTEMPT_CURSOR_PATTERN = "^[0-9]{1,8}$"
_match_attempt_cursor = re.compile(_ATTEMPT_CURSOR_PATTERN).fullmatch
AttemptCursor: TypeAlias = Annotated[
    str, Meta(max_length=1024, extra_json_schema={"pattern": _ATTEMPT_CURSOR_PATTERN})
]


DEAD_LETTER_FILTERS = tuple(name for name in Search.__struct_fields__ if name != "status")


@select_fields("all", "cursor", *DEAD_LETTER_FILTERS)
class PurgeQuery(Search):
    """Filter for the dead letters to purge, and the `nextCursor` of an earlier response.

    Without a filter, `all` must be true.
    """

    all: bool = False
    cursor: wire.TaskCursor | None = None


@select_fields("cursor", *DEAD_LETTER_FILTERS)
class DeadLetterGroupQuery(Search):
    """Filter for the dead letters to count, and the `nextCursor` of an earlier response."""

    cursor: wire.TaskCursor | None = None


@select_fields("cursor", "limit", *DEAD_LETTER_FILTERS)
class DeadLetterQuery(Search):
    """Query parameters of a list of dead letters: filter and page."""

    cursor: wire.TaskCursor | None = None
    limit: PageLimit = 100


@select_fields("cursor", "limit", "status", *DEAD_LETTER_FILTERS)
class TaskQuery(Search):
    """Query parameters of a list of tasks.

    `status=IN_FLIGHT` also matches leased tasks that are not due yet and are shown as PENDING.
    """

    cursor: wire.TaskCursor | None = None
    limit: PageLimit = 100


@select_fields(
    "cursor",
    "status",
    "policy_id",
    "lane",
    "idempotency_key",
    "created_after",
    "created_before",
    "limit",
)
class AttemptQuery(Search):
    """Query parameters of the attempts of many tasks: filter for the tasks, and page."""

    cursor: wire.TaskCursor | None = None
    limit: PageLimit = 100


class TaskAttemptQuery(PageQuery, frozen=True):
    """Query parameters of the attempts of one task."""

    cursor: AttemptCursor | None = None


class ResultWaiter:
    """Delays responses until a task is finished, for a limited number of requests at a time."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._slots = TenantShares(context.limits.max_waiting_requests)
        self._is_closed = False

    async def wait(
        self, request: ApiRequest, task: Task, view: RetryTask
    ) -> tuple[RetryTask, list[tuple[bytes, bytes]]]:
        """Wait until a task is finished, for at most as long as `Prefer: wait` says.

        Return the current view of the task with its last attempt, and the response header that
        confirms the wait. If this process finished the task during the wait, the view has the
        response of the target. If the request has no valid `Prefer: wait`, or if too many requests
        of the tenant wait already, return `view` unchanged and no header.
        """
        wait_match = _WAIT_PREFERENCE.search(b",".join(request.header_values(b"prefer")))
        if wait_match is None or not self._slots.is_available(request.tenant):
            return view, []
        seconds = min(int(wait_match[1]), self._context.limits.max_wait_s)
        if not task.status.is_finished:
            self._slots.acquire(request.tenant)
            try:
                view = await self._poll(request, task, view, seconds)
            finally:
                self._slots.release(request.tenant)
        with suppress(StoreUnavailable):  # the task was stored, and the response must say so
            await views.read_last_attempt(self._context, task, view)
        return view, [(b"preference-applied", b"wait=%d" % seconds)]

    def close(self) -> None:
        """End all waits within a second, so that the server can shut down."""
        self._is_closed = True

    async def _poll(
        self, request: ApiRequest, task: Task, view: RetryTask, seconds: int
    ) -> RetryTask:
        context, stored_task, finished_task = self._context, None, None
        waited_s = 0.0
        # If another process delivers the task, only the store shows that it is finished.
        is_leased_here = context.engine.is_running(task.id) is not None
        interval_s = _POLL_INTERVAL_S if is_leased_here else _FIRST_POLL_INTERVAL_S
        while waited_s < seconds:
            interval_s = min(interval_s, seconds - waited_s)
            finished_task = await context.engine.wait_until_finished(task.id, interval_s)
            waited_s += interval_s
            interval_s = min(interval_s * 2, _POLL_INTERVAL_S)
            try:
                stored_task = await context.store.get_task(task.tenant, task.id)
            except StoreUnavailable:
                stored_task = None
            is_finished = stored_task is not None and stored_task.status.is_finished
            if finished_task is not None or is_finished or self._is_closed or request.is_abandoned:
                break
        if stored_task is not None:
            view = stored_task_view(context, stored_task)
        if finished_task is not None:
            view.status, view.reason = wire.STATUS_NAMES[finished_task.status], finished_task.reason
            view.next_attempt_at = None
            delivery_result = finished_task.delivery_result
            if delivery_result is not None and delivery_result.status is not None:
                content = views.read_content(context, task)
                secrets = find_secrets(content, delivery_result.sent_secrets)
                if delivery_result.has_unknown_secrets:
                    secrets = None
                view.response = views.response_view(delivery_result, secrets)
        return view


class TaskResource:
    """The operations on the tasks of a tenant."""

    def __init__(self, context: ApiContext, result_waiter: ResultWaiter) -> None:
        self._context = context
        self.finder: TaskFinder = TaskFinder(context.store, context.codec)
        self._result_waiter = result_waiter

    @Operation("GET", "/retry-tasks", "listTasks", Page[RetryTask], query=TaskQuery)
    async def list_tasks(self, request: ApiRequest) -> ApiResponse:
        """List tasks, newest first."""
        query = request.parse_query(TaskQuery)
        search = check_search(query)
        page = await self.read_page(request.tenant, search, query.cursor, query.limit)
        return json_response(200, page)

    async def read_page(
        self, tenant: str, search: Search, cursor: str | None, limit: int
    ) -> Page[RetryTask]:
        """Return a page of the tasks that match a search."""
        with problems.convert_errors("cursor"):
            page = await self.finder.find_page(tenant, search, cursor=cursor, limit=limit)
        now = self._context.engine.clock.now_ms()
        items: list[RetryTask] = []
        for number, found in enumerate(page.items):
            items.append(views.found_task_view(found, now))
            if not number % _YIELD_EVERY_VIEWS:
                await asyncio.sleep(0)
        return Page(items=items, next_cursor=page.cursor)

    @Operation("GET", _TASK_PATH, "getTask", RetryTask, headers=WAIT_HEADER)
    async def get(self, request: ApiRequest) -> ApiResponse:
        """Get a task: status, number of attempts, time of the next attempt."""
        request.parse_query(NoQuery)
        task = await self._find(request)
        view = stored_task_view(self._context, task)
        view, headers = await self._result_waiter.wait(request, task, view)
        if not headers:  # otherwise `wait` has read the last attempt
            await views.read_last_attempt(self._context, task, view)
        return json_response(200, view, *headers)

    @Operation("DELETE", _TASK_PATH, "cancelTask", RetryTask, statuses=(200, 202), errors=(409,))
    async def cancel(self, request: ApiRequest) -> ApiResponse:
        """Cancel a task. 202: an attempt is running and will be the last one."""
        request.parse_query(NoQuery)
        cancel_status = await self._context.engine.cancel(request.tenant, _task_id(request))
        task = await self._find(request)
        status = task.status.name
        if cancel_status is CancelStatus.FINISHED:
            raise problems.ALREADY_FINISHED.error(f"The task is {status}.", taskStatus=status)
        report_cancellation(request, task.id, cancel_status)
        http_status = 202 if cancel_status is CancelStatus.REQUESTED else 200
        view = stored_task_view(self._context, task)
        await views.read_last_attempt(self._context, task, view)
        return json_response(http_status, view)

    @Operation("POST", _CANCELLATIONS_PATH, "cancelTasks", BulkCancelResult, body=BulkCancelRequest)
    async def cancel_many(self, request: ApiRequest) -> ApiResponse:
        """Cancel all unfinished tasks that match a filter, or count them."""
        body = await request.read_body(self._context.limits.max_request_bytes)
        cancel_request = decode_json(_bulk_cancel_decoder, body)
        tenant, engine = request.tenant, self._context.engine
        search_filter = cancel_request.filter or wire.SearchFilter()
        search = check_search(search_filter, "filter.")
        result = BulkCancelResult(
            matched=0, cancelled=0, running=0, next_cursor=cancel_request.cursor
        )
        if cancel_request.dry_run:
            result.matched = await self.finder.count(tenant, search, is_live=True)
            result.next_cursor = None
            return json_response(200, result)
        check_not_empty(
            search, wire.SearchFilter.__struct_encode_fields__, is_all=cancel_request.all
        )
        try:
            for _ in range(_MAX_CANCEL_CHUNKS):
                with problems.convert_errors("cursor"):
                    page = await self.finder.find_ids(
                        tenant,
                        search,
                        is_live=True,
                        cursor=result.next_cursor,
                        limit=_CANCEL_CHUNK_TASKS,
                    )
                # The store applies concurrent calls in one transaction.
                statuses = await asyncio.gather(
                    *(engine.cancel(tenant, task_id) for task_id in page.items),
                    return_exceptions=True,
                )
                result.matched += len(page.items)
                result.cancelled += statuses.count(CancelStatus.CANCELLED)
                result.running += statuses.count(CancelStatus.REQUESTED)
                for status in statuses:
                    if isinstance(status, BaseException):
                        raise status
                result.next_cursor = page.cursor
                if page.cursor is None:
                    break
        finally:  # the store may fail after some tasks
            if result.cancelled or result.running:
                after = {"cancelled": result.cancelled, "running": result.running}
                request.report_change(
                    query_fields(search_filter), {"matched": result.matched}, after
                )
        return json_response(200, result)

    @Operation(
        "GET", f"{_TASK_PATH}/attempts", "listAttempts", Page[AttemptLog], query=TaskAttemptQuery
    )
    async def list_attempts(self, request: ApiRequest) -> ApiResponse:
        """List the attempts of a task, oldest first."""
        query = request.parse_query(TaskAttemptQuery)
        after_number = 0
        if query.cursor is not None:
            if not _match_attempt_cursor(query.cursor):
                raise problems.invalid("cursor", "must be a nextCursor of this list")
            after_number = min(int(query.cursor), MAX_ATTEMPT_NUMBER)
        task = await self._find(request)
        attempts = await self._context.store.list_attempts(
            request.tenant, task.id, after=after_number, limit=query.limit
        )
        secrets = find_secrets(views.read_content(self._context, task))
        items: list[AttemptLog] = []
        for number, attempt in enumerate(views.read_attempts(self._context, attempts)):
            items.append(views.attempt_view(task.id, attempt, secrets))
            if not number % _YIELD_EVERY_VIEWS:
                await asyncio.sleep(0)
        has_more = bool(attempts) and attempts[-1].attempt_number < task.attempts
        next_cursor = str(attempts[-1].attempt_number) if has_more else None
        return json_response(200, Page(items=items, next_cursor=next_cursor))

    @Operation("GET", "/attempts", "exportAttempts", Page[AttemptLog], query=AttemptQuery)
    async def export_attempts(self, request: ApiRequest) -> ApiResponse:
        """List the attempts of many tasks, without messages and excerpts; newest task first."""
        query = request.parse_query(AttemptQuery)
        tenant = request.tenant
        task_filter = build_column_filter(tenant, check_search(query))
        with problems.convert_errors("cursor"):
            page = await self._context.store.list_attempts_of_tasks(
                tenant, task_filter, cursor=query.cursor, limit=query.limit
            )
        items = [views.exported_attempt_view(task_id, attempt) for task_id, attempt in page.items]
        return json_response(200, Page(items=items, next_cursor=page.cursor))

    @Operation("GET", f"{_TASK_PATH}/explain", "explainTask", wire.Explanation)
    async def explain(self, request: ApiRequest) -> ApiResponse:
        """Explain in words why a task was retried or not, and what happens next."""
        request.parse_query(NoQuery)
        context = self._context
        task = await self._find(request)
        after = max(0, task.attempts - _MAX_EXPLAINED_ATTEMPTS)
        attempts = await context.store.list_attempts(
            request.tenant, task.id, after=after, limit=_MAX_EXPLAINED_ATTEMPTS
        )
        policies = context.engine.policies
        named_policy = await policies.load(task.tenant, task.policy_id, task.policy_version)
        local_stats = context.engine.local_stats(task.lane)
        content = views.read_content(context, task)
        missing_secret = None
        if content is not None and content.secret_headers is not None:
            missing_secret = context.engine.secrets.find_unavailable(
                task.tenant, task.lane, content.secret_headers
            )
        lane = await context.store.get_lane(task.lane)
        explanation = views.explain_task(
            task,
            content,
            views.read_attempts(context, attempts),
            named_policy=None if named_policy is None else named_policy.policy,
            lane=lane,
            wait_reason=None if local_stats is None else local_stats.wait_reason,
            blocked_reason=context.engine.blocked_reason(task.lane),
            waiting_for=None if lane is None else context.engine.waiting_for(lane),
            is_running=context.engine.is_running(task.id),
            missing_secret=missing_secret,
            now=context.engine.clock.now_ms(),
        )
        return json_response(200, explanation)

    @Operation("POST", f"{_TASK_PATH}/retry", "retryTask", RetryTask, (200, 202), errors=(409, 429))
    async def retry(self, request: ApiRequest) -> ApiResponse:
        """Make the next attempt now, also of a dead or cancelled task. 202: an attempt runs."""
        request.parse_query(NoQuery)
        engine, task_id = self._context.engine, _task_id(request)
        status_before = (await self._find(request)).status.name
        charge_rate_limit(engine.rate_limiter, request.tenant, 1)
        retry_status = await engine.retry_now(request.tenant, task_id)
        if retry_status is RetryNowStatus.OVER_QUOTA:
            raise too_many_unfinished_tasks(engine.limits)
        task = await self._find(request)
        status, is_running = task.status.name, retry_status is RetryNowStatus.IN_FLIGHT
        if retry_status is RetryNowStatus.SUCCEEDED:
            detail = "The task is SUCCEEDED. Create a new one."
            raise problems.ALREADY_FINISHED.error(detail, taskStatus=status)
        if is_running and task.cancelling:
            detail = "The task is being cancelled. Retry it when it is CANCELLED."
            raise problems.ALREADY_FINISHED.error(detail, taskStatus=status)
        view = stored_task_view(self._context, task)
        if retry_status is RetryNowStatus.DUE:
            request.report_change(task.id, {"status": status_before}, {"status": view.status})
        await views.read_last_attempt(self._context, task, view)
        return json_response(202 if is_running else 200, view)

    async def _find(self, request: ApiRequest) -> Task:
        task = await self._context.store.get_task(request.tenant, _task_id(request))
        if task is None:
            raise problems.no_such("task")
        return task


def report_cancellation(request: ApiRequest, task_id: str, status: CancelStatus | None) -> None:
    """Report a task that was cancelled, or is cancelled after the attempt that runs."""
    if status is CancelStatus.CANCELLED:
        request.report_change(task_id, {"status": "PENDING"}, {"status": "CANCELLED"})
    elif status is CancelStatus.REQUESTED:
        after = {"status": "IN_FLIGHT", "cancelling": True}
        request.report_change(task_id, {"status": "IN_FLIGHT"}, after)


def query_fields(query: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of a filter that are set, for the log."""
    fields: dict[str, Any] = msgspec.to_builtins(query)
    names = ("all", "cursor", "limit")
    return {name: value for name, value in fields.items() if value and name not in names}


def check_search(query: Search, parent_field: str = "") -> Search:
    """Return the search for a query or a filter, with the canonical URL prefix.

    Raises ApiError for an invalid field; its name in the error starts with `parent_field`.
    """
    if query.reason is not None and query.reason not in _REASONS:
        # An empty list would look as if no task had failed.
        rule = f"must be {' or '.join(_REASONS)}"
        raise problems.invalid(f"{parent_field}reason", rule, query.reason)
    values = {name: getattr(query, name) for name in Search.__struct_fields__}
    for name in TIME_FIELDS:
        check_epoch_ms(parent_field + SEARCH_FIELDS[name].api_name, values[name])
    if query.url_prefix is not None:
        with problems.convert_errors(f"{parent_field}urlPrefix"):
            values["url_prefix"] = url = parse_target_prefix(query.url_prefix).url
        if redact_url(url) != url:
            # Any key could otherwise find out a redacted value, one character after the other.
            rule = "must end before the value of a secret query parameter, which is not searched"
            raise problems.invalid(f"{parent_field}urlPrefix", rule)
    return Search(**values)


def check_not_empty(search: Search, filters: Iterable[str], *, is_all: bool) -> None:
    """Raise ApiError if a search without filters is not marked as a search for all tasks.

    The error lists the `filters`, with their names in the API.
    """
    if search == Search(status=search.status) and not is_all:
        rule = f"must be true if no filter is given; filters are {', '.join(filters)}"
        raise problems.invalid("all", rule)


def prefers_minimal(request: ApiRequest) -> bool:
    """Return whether the request has `Prefer: return=minimal`."""
    # If a preference is repeated, the first one counts (RFC 7240, section 2).
    return_match = _RETURN_PREFERENCE.search(b",".join(request.header_values(b"prefer")))
    return return_match is not None and return_match[1].lower() == b"minimal"


def _task_id(request: ApiRequest) -> str:
    """Return the task id of the path; raise ApiError (404) if it is not a UUID."""
    task_id = request.path_parameter("taskId")
    if not _TASK_ID.fullmatch(task_id):
        raise problems.no_such("task")
    return task_id
