"""The REST API of Google Cloud Tasks: create, get, delete and run tasks with an HTTP request.

A queue is a lane key: the tasks of a queue for one host have a lane of their own. Their policy is
`cloud-tasks.QUEUE` if the tenant has such a policy, and `cloud-tasks` otherwise. The name of a
task, if its creator gave one, is its idempotency key.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from tarry.service.api.messages import decode_json, json_response
from tarry.service.api.problems import invalid
from tarry.service.api.quotas import charge_rate_limit, too_many_lanes, too_many_unfinished_tasks
from tarry.service.api.shims.vendor_requests import (
    BAD_REQUEST,
    DOCS_PAGE,
    INVALID,
    TaskLookup,
    build_task_request,
    check_attempt_timeout,
    rename_fields,
    vendor_error,
)
from tarry.service.api.tasks import report_cancellation
from tarry.service.api.trace_context import trace_context_of
from tarry.service.api.views import stored_task_view
from tarry.service.delivery.vendor_headers import CLOUD_TASKS
from tarry.service.store import AddStatus, CancelStatus, RetryNowStatus
from tarry.wire.policies import CLOUD_TASKS_POLICY, MAX_ATTEMPTS, MAX_DURATION_MS, MAX_ENTRIES

if TYPE_CHECKING:
    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.api.problems import ApiError
    from tarry.service.api.routing import Handler
    from tarry.service.api.task_creation import TaskCreation
    from tarry.service.model import Task

_QUEUE_PATH = "/v2/projects/{project}/locations/{location}/queues/{queue}"
_METHODS = ("POST", "GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS")
"""The methods by their numbers in the protocol, from 1; the Python client sends numbers."""
_STATUS_NAMES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED", 409: "ALREADY_EXISTS", 413: "INVALID_ARGUMENT",
    421: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}  # fmt: skip
"""The names of gRPC status codes by HTTP status."""
_QUEUE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_TASK_ID = re.compile(r"[A-Za-z0-9_-]{1,500}")
_MAX_NAME_CHARS = 255
_DURATION = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,9}))?s")
_MIN_BACKOFF_MS, _MAX_BACKOFF_MS = 100, 3_600_000
"""The backoff of a queue of Cloud Tasks that was created without one."""
_UNLIMITED = -1
_RUN_SUFFIX = ":run"
_BASE64_URL = str.maketrans("-_", "+/")
_FIELD_NAMES = {
    "targetUrl": "task.httpRequest.url",
    "method": "task.httpRequest.httpMethod",
    "bodyBase64": "task.httpRequest.body",
    "body": "task.httpRequest.body",
    "idempotencyKey": "task.name",
    "nextAttemptAt": "task.scheduleTime",
    "policy.attemptTimeoutMs": "task.dispatchDeadline",
    "policy.maxAttempts": "task.retryConfig.maxAttempts",
    "policy.totalBudgetMs": "task.retryConfig.maxRetryDuration",
    "policy.initialDelayMs": "task.retryConfig.minBackoff",
    "policy.maxDelayMs": "task.retryConfig.maxBackoff",
    "policy.scheduleMs": "task.retryConfig.maxDoublings",
}


class _Fields(msgspec.Struct, rename="camel", kw_only=True, forbid_unknown_fields=True):
    """Base class of JSON objects."""


class HttpRequest(_Fields):
    """The request to send."""

    url: str
    http_method: str | int = "POST"
    headers: dict[str, str] = {}
    body: str = ""  # base64
    oauth_token: Any = None
    oidc_token: Any = None


class TaskRetryConfig(_Fields):
    """The retries of one task."""

    max_attempts: int = 0
    max_retry_duration: str | None = None
    min_backoff: str | None = None
    max_backoff: str | None = None
    max_doublings: int | None = None


class TaskFields(_Fields):
    """The task to create. The fields from `create_time` on are set by the service."""

    name: str = ""
    http_request: HttpRequest | None = None
    app_engine_http_request: Any = None
    schedule_time: str | None = None
    dispatch_deadline: str | None = None
    retry_config: TaskRetryConfig | None = None
    create_time: Any = None
    dispatch_count: Any = None
    response_count: Any = None
    first_attempt: Any = None
    last_attempt: Any = None
    view: Any = None


class CreateTaskRequest(_Fields):
    """The body of `tasks.create`. Responses always have the basic view, without the body."""

    task: TaskFields
    response_view: Any = None
    parent: Any = None  # the same as in the path


_decoder = msgspec.json.Decoder(CreateTaskRequest)


class CloudTasksShim:
    """Serves the part of the Cloud Tasks API that creates, gets, deletes and runs tasks."""

    def __init__(self, context: ApiContext, task_creation: TaskCreation) -> None:
        self._context = context
        self._task_creation = task_creation
        self._lookup = TaskLookup(context)
        methods = ("GET", "POST", "PUT", "PATCH", "DELETE")
        self.handlers: dict[str, dict[str, Handler]] = {
            f"{_QUEUE_PATH}/tasks": {"POST": self.create, "GET": self._reject_list},
            f"{_QUEUE_PATH}/tasks/{{task}}": {
                "GET": self.get,
                "DELETE": self.delete,
                "POST": self.run,
            },
            "/v2/projects/{path:path}": dict.fromkeys(methods, self._reject_path),
        }

    def render_error(self, error: ApiError) -> ApiResponse:
        """Return the response for an error, in the format of Google's APIs."""
        status = BAD_REQUEST if error.problem.status == INVALID else error.problem.status
        name = _STATUS_NAMES.get(status, "UNKNOWN")
        document = {"code": status, "message": error.problem.detail, "status": name}
        return json_response(status, {"error": document}, *error.headers)

    async def create(self, request: ApiRequest) -> ApiResponse:
        """Create a task."""
        parent, queue = _queue_of(request)
        body = await request.read_any_body(self._context.limits.max_request_bytes)
        task_fields = decode_json(_decoder, body).task
        context, tenant = self._context, request.tenant
        fields = translate_task(task_fields, parent, context.engine.clock.now_ms())
        timeout_ms = fields["policy"].get("attemptTimeoutMs")
        if timeout_ms is not None:
            value = task_fields.dispatch_deadline or ""
            check_attempt_timeout("task.dispatchDeadline", timeout_ms, value, context)
        charge_rate_limit(context.engine.rate_limiter, tenant, 1)
        policy_id = f"{CLOUD_TASKS_POLICY}.{queue}"
        if await context.engine.policies.load(tenant, policy_id) is None:
            policy_id = CLOUD_TASKS_POLICY
        with rename_fields(_vendor_name):
            task_request = build_task_request({**fields, "laneKey": queue, "policyId": policy_id})
            built = await self._task_creation.build(
                tenant, task_request, trace_context_of(request), vendor=CLOUD_TASKS
            )
        (result,) = await self._task_creation.submit([built])
        limits = context.engine.limits
        if result.status is AddStatus.OVER_QUOTA:
            raise too_many_unfinished_tasks(limits)
        if result.status is AddStatus.TOO_MANY_LANES:
            raise too_many_lanes(limits)
        if result.status is not AddStatus.ADDED:
            raise vendor_error(409, f"The task {task_fields.name} already exists.")
        return self._task_response(result.task, parent)

    async def get(self, request: ApiRequest) -> ApiResponse:
        """Get a task that is not finished."""
        parent, _ = _queue_of(request)
        task = await self._find(request, request.path_parameter("task"))
        if task.status.is_finished:
            raise _finished_error(task)
        return self._task_response(task, parent)

    async def delete(self, request: ApiRequest) -> ApiResponse:
        """Cancel a task. A running attempt may still succeed."""
        task = await self._find(request, request.path_parameter("task"))
        status = await self._context.engine.cancel(request.tenant, task.id)
        if status is CancelStatus.FINISHED:
            raise _finished_error(task)
        report_cancellation(request, task.id, status)
        return json_response(200, {})

    async def run(self, request: ApiRequest) -> ApiResponse:
        """Make the next attempt of a task now."""
        parent, _ = _queue_of(request)
        task_id = request.path_parameter("task")
        if not task_id.endswith(_RUN_SUFFIX):
            return await self._reject_path(request)
        task = await self._find(request, task_id.removesuffix(_RUN_SUFFIX))
        if task.status.is_finished:
            raise _finished_error(task)
        engine, tenant = self._context.engine, request.tenant
        charge_rate_limit(engine.rate_limiter, tenant, 1)
        status = await engine.retry_now(tenant, task.id)
        status_before = task.status.name
        task = await self._context.store.get_task(tenant, task.id) or task
        if status is RetryNowStatus.SUCCEEDED:  # since `_find`
            raise _finished_error(task)
        request.report_change(task.id, {"status": status_before}, {"status": task.status.name})
        return self._task_response(task, parent)

    async def _reject_list(self, _: ApiRequest) -> ApiResponse:
        detail = "tasks.list is not supported: use GET /retry-tasks?lane=LANE, or /dead-letters."
        raise vendor_error(501, detail)

    async def _reject_path(self, request: ApiRequest) -> ApiResponse:
        path: str = request.scope["path"]
        detail = (
            f"{request.scope['method']} {path[:200]} of Cloud Tasks is not supported. Queues need "
            f"not be created; /downstreams has their lanes. The page {DOCS_PAGE} lists what is "
            "supported."
        )
        raise vendor_error(501, detail)

    async def _find(self, request: ApiRequest, task_id: str) -> Task:
        parent, queue = _queue_of(request)
        name = f"{parent}/tasks/{task_id}"
        task = await self._lookup.find_by_id(request.tenant, task_id)
        if task is not None and task.lane.partition("@")[2] == queue:
            return task
        if len(name) <= _MAX_NAME_CHARS:
            task = await self._lookup.find_by_key(request.tenant, name)
            if task is not None:
                return task
        raise vendor_error(404, f"The task {name[:300]} does not exist.")

    def _task_response(self, task: Task, parent: str) -> ApiResponse:
        view = stored_task_view(self._context, task)
        is_named = task.key.startswith(f"{parent}/tasks/")
        document: dict[str, Any] = {
            "name": task.key if is_named else f"{parent}/tasks/{task.id}",
            "httpRequest": {
                "url": view.target_url,
                "httpMethod": view.method,
                "headers": view.headers,
            },
            "createTime": _format_time(task.created_at),
            "scheduleTime": _format_time(task.next_attempt_at),
            "dispatchCount": task.attempts,
            "view": "BASIC",
        }
        timeout_ms = (view.policy or {}).get("attemptTimeoutMs")
        if timeout_ms is not None:
            document["dispatchDeadline"] = f"{timeout_ms / 1000:g}s"
        return json_response(200, document)


def translate_task(task: TaskFields, parent: str, now_ms: int) -> dict[str, Any]:
    """Return the JSON fields of `POST /retry-tasks` for a task, or raise ApiError.

    Lane key and policy are missing.
    """
    if task.app_engine_http_request is not None:
        raise invalid("task.appEngineHttpRequest", "is not supported: use httpRequest with a URL")
    http_request = task.http_request
    if http_request is None:
        raise invalid("task.httpRequest", "is missing")
    for name in ("oauth_token", "oidc_token"):
        if getattr(http_request, name) is not None:
            camel_name = name.replace("_t", "T")
            rule = (
                "is not supported: define the token in the setting `secrets`, and create the task "
                'with POST /retry-tasks and {"Authorization": {"secret": NAME}}'
            )
            raise invalid(f"task.httpRequest.{camel_name}", rule)
    body = http_request.body.translate(_BASE64_URL).rstrip("=")
    fields: dict[str, Any] = {
        "targetUrl": http_request.url,
        "method": _method_name(http_request.http_method),
        "headers": http_request.headers,
        "bodyBase64": body + "=" * (-len(body) % 4) if body else None,
        "policy": _policy_overrides(task),
    }
    if task.name:
        fields["idempotencyKey"] = _check_name(task.name, parent)
    if task.schedule_time is not None:
        due_ms = _parse_time("task.scheduleTime", task.schedule_time)
        if due_ms > now_ms:
            fields["nextAttemptAt"] = due_ms
    return fields


def _policy_overrides(task: TaskFields) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    if task.dispatch_deadline is not None:
        field = "task.dispatchDeadline"
        overrides["attemptTimeoutMs"] = _parse_duration(field, task.dispatch_deadline)
    config = task.retry_config
    if config is None:
        return overrides
    parse = partial(_parse_config_duration, config)
    if config.max_attempts:
        if not _UNLIMITED <= config.max_attempts <= MAX_ATTEMPTS:
            rule = f"must be -1 (no limit) or 1 to {MAX_ATTEMPTS}"
            raise invalid("task.retryConfig.maxAttempts", rule, config.max_attempts)
        is_unlimited = config.max_attempts == _UNLIMITED
        overrides["maxAttempts"] = MAX_ATTEMPTS if is_unlimited else config.max_attempts
    if duration_ms := parse("max_retry_duration"):
        if config.max_attempts > 0:
            rule = (
                "must not be given together with maxAttempts: Cloud Tasks stops when both are "
                "reached, this service when one is. Give one of them"
            )
            raise invalid("task.retryConfig.maxRetryDuration", rule)
        overrides |= {"maxAttempts": MAX_ATTEMPTS, "totalBudgetMs": duration_ms}
    min_ms, max_ms = parse("min_backoff"), parse("max_backoff")
    if min_ms:
        overrides["initialDelayMs"] = min_ms
    if max_ms:
        overrides["maxDelayMs"] = max_ms
    if config.max_doublings is not None:
        doublings = config.max_doublings
        overrides |= _backoff_overrides(
            min_ms or _MIN_BACKOFF_MS, max_ms or _MAX_BACKOFF_MS, doublings
        )
    return overrides


def _backoff_overrides(min_ms: int, max_ms: int, doublings: int) -> dict[str, Any]:
    """Return the backoff that doubles the delay `doublings` times, then increases it linearly."""
    field = "task.retryConfig.maxDoublings"
    if doublings < 0:
        raise invalid(field, "must be at least 0", doublings)
    # Above 64, the delay has reached every possible maximum.
    step_ms = min_ms << min(doublings, 64)
    overrides: dict[str, Any] = {"initialDelayMs": min_ms, "maxDelayMs": max_ms}
    if step_ms >= max_ms:
        return overrides | {"backoffType": "EXPONENTIAL", "multiplier": 2}
    if doublings == 0:
        return overrides | {"backoffType": "LINEAR"}
    delays_ms, delay_ms = list[int](), min_ms
    while delay_ms < max_ms and len(delays_ms) < MAX_ENTRIES:
        delays_ms.append(delay_ms)
        delay_ms = delay_ms + step_ms if len(delays_ms) > doublings else delay_ms * 2
    if len(delays_ms) == MAX_ENTRIES:
        rule = f"must be larger: there are more than {MAX_ENTRIES} delays up to maxBackoff"
        raise invalid(field, rule, doublings)
    return {"backoffType": "SCHEDULE", "scheduleMs": [*delays_ms, max_ms]}


def _parse_config_duration(config: TaskRetryConfig, name: str) -> int:
    """Return a duration of a retry config in milliseconds; 0 if it is not given."""
    text: str | None = getattr(config, name)
    if text is None:
        return 0
    words = name.split("_")
    camel_name = words[0] + "".join(word.title() for word in words[1:])
    return _parse_duration(f"task.retryConfig.{camel_name}", text)


def _parse_duration(field: str, text: str) -> int:
    """Return milliseconds for a duration such as `30s` or `0.500s`."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise invalid(field, "must be seconds with the unit s, such as 30s or 0.5s", text)
    duration_ms = int(match[1]) * 1000 + int((match[2] or "0").ljust(3, "0")[:3])
    if duration_ms > MAX_DURATION_MS:
        raise invalid(field, "must be at most 100 years", text)
    return duration_ms


def _parse_time(field: str, text: str) -> int:
    """Return epoch milliseconds for a time as in RFC 3339."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise invalid(field, "must be a time as in RFC 3339: 2026-11-18T09:30:00Z", text)
    return int(time.timestamp() * 1000)


def _format_time(epoch_ms: int) -> str:
    time = datetime.fromtimestamp(epoch_ms / 1000, UTC)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _method_name(method: str | int) -> str:
    if method in {0, "HTTP_METHOD_UNSPECIFIED"}:
        return "POST"
    if isinstance(method, int):
        if not 0 < method <= len(_METHODS):
            rule = f"must be {', '.join(_METHODS)}, or a number from 1 to {len(_METHODS)}"
            raise invalid("task.httpRequest.httpMethod", rule, method)
        return _METHODS[method - 1]
    return method


def _check_name(name: str, parent: str) -> str:
    prefix = f"{parent}/tasks/"
    if not name.startswith(prefix) or not _TASK_ID.fullmatch(name.removeprefix(prefix)):
        rule = f"must be {prefix}TASK_ID, with an id of A-Z a-z 0-9 _ -"
        raise invalid("task.name", rule, name)
    if len(name) > _MAX_NAME_CHARS:
        rule = f"must have at most {_MAX_NAME_CHARS} characters in this service"
        raise invalid("task.name", rule, len(name))
    return name


def _queue_of(request: ApiRequest) -> tuple[str, str]:
    """Return the resource name of the queue, and its id."""
    project, location, queue = map(request.path_parameter, ("project", "location", "queue"))
    if not _QUEUE_ID.fullmatch(queue):
        rule = "must be 1 to 64 letters, digits or hyphens, and begin with a letter or digit"
        raise invalid("The queue id", rule, queue[:100])
    return f"projects/{project}/locations/{location}/queues/{queue}", queue


def _vendor_name(field: str) -> str:
    """Return the name that a field of `POST /retry-tasks` has in Cloud Tasks."""
    if field.startswith("headers"):
        return f"task.httpRequest.{field}"
    return _FIELD_NAMES.get(field.partition("[")[0], field)


def _finished_error(task: Task) -> ApiError:
    detail = (
        f"The task is not in its queue any more: it is {task.status.name} "
        f"(GET /retry-tasks/{task.id})."
    )
    return vendor_error(404, detail)
