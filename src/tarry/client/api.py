"""The service's HTTP API: builds the request of each API call and parses its response.

This module sends nothing. `Client` and `AsyncClient` send the requests that `ServiceApi` builds.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast
from urllib.parse import quote, urlencode
from uuid import uuid4

import msgspec

from tarry.client.errors import (
    Conflict,
    InvalidRequest,
    NotAuthorized,
    NotFound,
    ServiceError,
    ServiceUnavailable,
    TooManyRequests,
)
from tarry.client.options import check_names, encode_mapping, encode_task, task_request, to_epoch_ms
from tarry.client.transport import is_event_stream
from tarry.core.checks import check_positive
from tarry.core.hints import parse_retry_after
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.wire import http
from tarry.wire.policies import policy_to_service
from tarry.wire.tasks import (
    MAX_PAGE_SIZE,
    AttemptLog,
    BatchResults,
    DownstreamInfo,
    Explanation,
    Page,
    PurgeResult,
    ReplayFilter,
    ReplayJob,
    ReplayRequest,
    RetryPolicy,
    RetryTask,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import httpx

    from tarry.client.options import DeadLetterFilter, EnqueueOptions, ReplayOptions, TaskFilter

T = TypeVar("T")

_ERROR_BY_STATUS: dict[int, type[ServiceError]] = {
    401: NotAuthorized,
    403: NotAuthorized,
    404: NotFound,
    409: Conflict,
    429: TooManyRequests,
    502: ServiceUnavailable,
    503: ServiceUnavailable,
    504: ServiceUnavailable,
}
_CONFLICT = 409
_UNAVAILABLE = 503
_JSON = {"content-type": "application/json"}

SendMode: TypeAlias = Literal["retry", "long_poll", "once", "retry_forever"]
"""How a request is sent.

`retry`: retried under the client's policy. `long_poll`: also retried under that policy, but with
separate latency statistics, because the service delays its response on purpose. `once`: not
retried. `retry_forever`: retried until there is a response.
"""


# --- requests and responses -----------------------------------------------------------------------


class ClientResponse(msgspec.Struct, frozen=True):
    """A complete HTTP response."""

    status: int
    headers: Mapping[str, str]
    """Look up names in lower case: either all names are lower case, or the mapping ignores case."""
    content: bytes


class ClientRequest(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """An HTTP request, and the function that parses its response."""

    method: str
    path: str
    """Includes the query string."""
    parse: Callable[[ClientResponse], T]
    """Called for status 2xx and for `extra_statuses`; every other status is an error."""
    headers: dict[str, str] = {}
    content: bytes | None = None
    extra_statuses: frozenset[int] = frozenset()
    """Statuses other than 2xx that `parse` handles."""
    wait_s: float = 0.0
    """Seconds that the service may wait before it responds (`Prefer: wait`)."""
    mode: SendMode = "retry"

    def parse_response(self, received: httpx.Response, content: bytes, now: float) -> T:
        """Return the parsed response, or raise a `ServiceError`.

        `content` is the body that was read from `received`. `now` is in epoch seconds.
        """
        response = ClientResponse(received.status_code, received.headers, content)
        if response.status // 100 == 2 or response.status in self.extra_statuses:  # noqa: PLR2004
            try:
                return self.parse(response)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                msg = (
                    f"the response to {self} is not from a tarry service: {error}. Check the URL "
                    "of the client."
                )
                raise ServiceError(msg, status=response.status) from error
        raise self.to_error(response, now)

    def to_error(self, response: ClientResponse, now: float) -> ServiceError:
        """Return the error for an unsuccessful response.

        `now`, in epoch seconds, is needed for a `Retry-After` header that contains a date.
        """
        status, problem = response.status, parse_problem(response.content)
        explanation = (
            problem.get("detail") or problem.get("title") or "no problem document in the response"
        )
        retry_after = response.headers.get("retry-after")
        error_type = _ERROR_BY_STATUS.get(status)
        if error_type is None:
            error_type = InvalidRequest if 400 <= status < 500 else ServiceError  # noqa: PLR2004
        return error_type(
            f"{self} was answered with {status}: {explanation}",
            status=status,
            problem=problem,
            retry_after=None if retry_after is None else parse_retry_after(retry_after, now),
        )

    def to_httpx(
        self,
        http_client: httpx.Client | httpx.AsyncClient,
        timeout: float,
        read_timeout: float | None,
    ) -> httpx.Request:
        """Return the request for httpx; `read_timeout` defaults to `timeout` plus `wait_s`."""
        if read_timeout is None:
            read_timeout = timeout + self.wait_s
        timeouts = {"connect": timeout, "read": read_timeout, "write": timeout, "pool": timeout}
        return http_client.build_request(
            self.method,
            self.path,
            headers=self.headers,
            content=self.content,
            extensions={"timeout": timeouts},
        )

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def parse_problem(content: bytes) -> dict[str, Any]:
    """Return the members of a problem document; empty for other content, such as a proxy's HTML."""
    try:
        return msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _json_parser(type_: type[T]) -> Callable[[ClientResponse], T]:
    decode = msgspec.json.Decoder(type_).decode
    return lambda response: decode(response.content)


def _ignore_content(_: ClientResponse) -> None:
    """Return None: the status of the response is all that matters."""


def _expect_event_stream(response: ClientResponse) -> None:
    """Raise `ServiceError` unless the response is an event stream."""
    if not is_event_stream(response.headers):
        msg = (
            "the response to GET /events is not an event stream. Check that the URL of the client "
            "is the address of a tarry service."
        )
        raise ServiceError(msg, status=response.status)


_parse_task = _json_parser(RetryTask)
_parse_tasks = _json_parser(Page[RetryTask])
_parse_batch_results = _json_parser(BatchResults)
_parse_attempts = _json_parser(Page[AttemptLog])
_parse_explanation = _json_parser(Explanation)
_parse_replay_job = _json_parser(ReplayJob)
_parse_replay_jobs = _json_parser(Page[ReplayJob])
_parse_purge_result = _json_parser(PurgeResult)
_parse_policy = _json_parser(RetryPolicy)
_parse_policies = _json_parser(Page[RetryPolicy])
_parse_downstream = _json_parser(DownstreamInfo)
_parse_downstreams = _json_parser(Page[DownstreamInfo])

_encode = msgspec.json.Encoder().encode


# --- the API's calls ------------------------------------------------------------------------------


class Health(msgspec.Struct, frozen=True):
    """Whether the service accepts and processes tasks.

    `failing` maps the name of each failing check to its cause.
    """

    ready: bool
    failing: dict[str, Any] = {}


class ServiceApi:
    """Builds the request of each API call.

    The summaries of the methods describe the effect of the request when a client sends it.
    """

    # --- tasks ------------------------------------------------------------------------------------

    def enqueue(
        self, url: str, body: Any, wait: float | None, options: EnqueueOptions
    ) -> ClientRequest[RetryTask]:
        """Add a task, and wait up to `wait` seconds for its result."""
        check_names("enqueue", options)
        task = task_request(url, body, **options)
        headers = _JSON | _idempotency_header(task.idempotency_key)
        wait_s = 0 if wait is None else ceil(check_positive("wait", wait))
        if wait_s:
            headers["prefer"] = f"wait={wait_s}"
        return ClientRequest(
            method="POST",
            path="/retry-tasks",
            parse=_parse_task,
            headers=headers,
            content=encode_task(task),
            wait_s=wait_s,
        )

    def enqueue_batch(self, content: bytes) -> ClientRequest[BatchResults]:
        """Add a batch of tasks. It may be retried, because each task has an idempotency key."""
        return ClientRequest(
            method="POST",
            path="/retry-tasks/batch",
            parse=_parse_batch_results,
            headers=_JSON | _idempotency_header(),
            content=content,
        )

    def get(self, task: str | RetryTask, wait_s: int = 0) -> ClientRequest[RetryTask]:
        """Get a task. The service responds once it has finished, or after `wait_s` seconds."""
        path = _task_path(task)
        if not wait_s:
            return ClientRequest(method="GET", path=path, parse=_parse_task)
        return ClientRequest(
            method="GET",
            path=path,
            parse=_parse_task,
            headers={"prefer": f"wait={wait_s}"},
            wait_s=wait_s,
            mode="long_poll",
        )

    def tasks(self, cursor: str | None, filters: TaskFilter) -> ClientRequest[Page[RetryTask]]:
        """List tasks."""
        check_names("tasks", filters)
        return _page_request("/retry-tasks", _parse_tasks, cursor, _to_query(filters))

    def attempts(
        self, cursor: str | None, task: str | RetryTask
    ) -> ClientRequest[Page[AttemptLog]]:
        """List the attempts of a task."""
        return _page_request(f"{_task_path(task)}/attempts", _parse_attempts, cursor)

    def explain(self, task: str | RetryTask) -> ClientRequest[Explanation]:
        """Get the explanation of why a task was retried or not."""
        return ClientRequest(
            method="GET", path=f"{_task_path(task)}/explain", parse=_parse_explanation
        )

    def try_cancel(self, task: str | RetryTask) -> ClientRequest[RetryTask | None]:
        """Cancel a task. The parsed response is None if the task was already cancelled.

        For example, an earlier attempt of this request has cancelled it, but its response was lost.
        """

        def parse(response: ClientResponse) -> RetryTask | None:
            if response.status != _CONFLICT:
                return _parse_task(response)
            if parse_problem(response.content).get("taskStatus") == "CANCELLED":
                return None
            raise request.to_error(response, now=0.0)

        request: ClientRequest[RetryTask | None] = ClientRequest(
            method="DELETE",
            path=_task_path(task),
            parse=parse,
            extra_statuses=frozenset({_CONFLICT}),
        )
        return request

    def retry(self, task: str | RetryTask) -> ClientRequest[RetryTask]:
        """Make the next attempt of a task now.

        The request has no idempotency key, so the client does not repeat it once the service may
        have received it. Sent twice, it could cause two attempts.
        """
        return ClientRequest(method="POST", path=f"{_task_path(task)}/retry", parse=_parse_task)

    # --- dead letters -----------------------------------------------------------------------------

    def dead_letters(
        self, cursor: str | None, filters: DeadLetterFilter
    ) -> ClientRequest[Page[RetryTask]]:
        """List dead letters."""
        check_names("dead_letters", filters)
        return _page_request("/dead-letters", _parse_tasks, cursor, _to_query(filters))

    def purge_batch(self, filters: DeadLetterFilter) -> ClientRequest[PurgeResult]:
        """Delete the first batch of matching dead letters; the service limits its size."""
        check_names("purge", filters)
        path = _with_query("/dead-letters", _to_query(filters))
        return ClientRequest(method="DELETE", path=path, parse=_parse_purge_result)

    def replay(self, options: ReplayOptions) -> ClientRequest[ReplayJob]:
        """Start a replay of dead letters.

        The request has no idempotency key, so the client does not repeat it once the service may
        have received it. Sent twice, it could start two replays.
        """
        check_names("replay", options)
        before, rate = options.get("before"), options.get("rate")
        replay = ReplayRequest(
            filter=ReplayFilter(
                lane=options.get("lane"),
                policy_id=options.get("policy"),
                reason=options.get("reason"),
                before=None if before is None else to_epoch_ms("before", before),
            ),
            rate=None if rate is None else check_positive("rate", rate),
            dry_run=options.get("dry_run", False),
        )
        return ClientRequest(
            method="POST",
            path="/dead-letters/replays",
            parse=_parse_replay_job,
            headers=_JSON,
            content=_encode(replay),
        )

    def replays(self) -> ClientRequest[Page[ReplayJob]]:
        """List the latest replays."""
        return ClientRequest(method="GET", path="/dead-letters/replays", parse=_parse_replay_jobs)

    def replay_job(
        self, replay_id: str, method: Literal["GET", "DELETE"]
    ) -> ClientRequest[ReplayJob]:
        """Get a replay (method GET), or cancel it (DELETE)."""
        path = f"/dead-letters/replays/{_path_segment_of_id('replay_id', replay_id)}"
        return ClientRequest(method=method, path=path, parse=_parse_replay_job)

    # --- policies and downstreams -----------------------------------------------------------------

    def policies(self, cursor: str | None) -> ClientRequest[Page[RetryPolicy]]:
        """List policies."""
        return _page_request("/retry-policies", _parse_policies, cursor)

    def policy(self, policy_id: str, version: int | None) -> ClientRequest[RetryPolicy]:
        """Get a policy."""
        query = "" if version is None else f"?version={version}"
        return ClientRequest(
            method="GET", path=_policy_path(policy_id) + query, parse=_parse_policy
        )

    def put_policy(
        self, policy_id: str, policy: Policy | Mapping[str, Any]
    ) -> ClientRequest[RetryPolicy]:
        """Create a policy, or a new version of it."""
        if isinstance(policy_id, str) and "/" in policy_id:
            rule = "must contain only letters, digits and ._-"
            raise ConfigurationError("policy_id", rule, policy_id)
        fields = policy_to_service(policy) if isinstance(policy, Policy) else policy
        return ClientRequest(
            method="PUT",
            path=_policy_path(policy_id),
            parse=_parse_policy,
            headers=_JSON,
            content=encode_mapping("policy", fields),
        )

    def delete_policy(self, policy_id: str) -> ClientRequest[None]:
        """Delete a policy."""
        return ClientRequest(method="DELETE", path=_policy_path(policy_id), parse=_ignore_content)

    def downstreams(self, cursor: str | None) -> ClientRequest[Page[DownstreamInfo]]:
        """List downstreams."""
        return _page_request("/downstreams", _parse_downstreams, cursor)

    def change_lane(
        self, lane: str, action: Literal["pause", "resume", "reset"]
    ) -> ClientRequest[DownstreamInfo]:
        """Change the state of a lane.

        The request has an idempotency key, so that the client retries it. Sent twice, it has the
        same effect as once.
        """
        return ClientRequest(
            method="POST",
            path=f"/downstreams/{_path_segment('lane', lane)}/{action}",
            parse=_parse_downstream,
            headers=_idempotency_header(),
        )

    # --- the service itself -----------------------------------------------------------------------

    def health(self) -> ClientRequest[Health]:
        """Check the health of the service. Not retried, because "not ready" is a valid result."""

        def parse(response: ClientResponse) -> Health:
            if response.status != _UNAVAILABLE:
                return Health(ready=True)
            failing = parse_problem(response.content).get("failing")
            if not isinstance(failing, dict):
                raise request.to_error(response, now=0.0)
            return Health(ready=False, failing=failing)  # pyright: ignore[reportUnknownArgumentType]

        request: ClientRequest[Health] = ClientRequest(
            method="GET",
            path="/readyz",
            parse=parse,
            extra_statuses=frozenset({_UNAVAILABLE}),
            mode="once",
        )
        return request

    def events(self, mode: SendMode) -> ClientRequest[None]:
        """Open the event stream. Parsing checks only the headers; the client reads the events."""
        return ClientRequest(
            method="GET",
            path="/events",
            parse=_expect_event_stream,
            headers={"accept": "text/event-stream"},
            mode=mode,
        )


# --- paths, queries and headers -------------------------------------------------------------------


def _task_path(task: str | RetryTask) -> str:
    task_id = task.task_id if isinstance(task, RetryTask) else task
    return f"/retry-tasks/{_path_segment_of_id('task', task_id)}"


def _policy_path(policy_id: str) -> str:
    return f"/retry-policies/{_path_segment_of_id('policy_id', policy_id)}"


def _path_segment(field: str, name: str) -> str:
    """Return a name as one segment of a path: percent-encoded, including its slashes."""
    if not isinstance(name, str) or not name.strip("."):  # ".." would change the path
        raise ConfigurationTypeError(field, "must be a non-empty name", name)
    return quote(name, safe="")


def _path_segment_of_id(field: str, id_: str) -> str:
    """Return an id as one segment of a path, percent-encoded.

    Raises `NotFound` for an id with a slash, because no id of the service has one. It is not sent,
    because some servers unescape `%2F` and would route the request to another path.
    """
    segment = _path_segment(field, id_)
    if "/" in id_:
        msg = f"There is no such {field.removesuffix('_id')}: {short_repr(id_)} has a slash."
        raise NotFound(msg)
    return segment


def _with_query(path: str, query: Mapping[str, str | None]) -> str:
    """Return a path with a query string; parameters that are None are left out."""
    parameters = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(parameters)}" if parameters else path


def _to_query(filters: TaskFilter | DeadLetterFilter) -> Mapping[str, str | None]:
    """Return a filter as query parameters, with the names that the API uses."""
    values = cast("Mapping[str, str | None]", filters)
    return {"policyId" if name == "policy" else name: value for name, value in values.items()}


def _page_request(
    path: str,
    parse: Callable[[ClientResponse], Page[T]],
    cursor: str | None,
    query: Mapping[str, str | None] | None = None,
) -> ClientRequest[Page[T]]:
    """Return the request for the page of a list that starts at a cursor."""
    # The first page has the service's default size, because many callers need no second page. The
    # following pages are as large as possible.
    limit = None if cursor is None else str(MAX_PAGE_SIZE)
    parameters = {**(query or {}), "limit": limit, "cursor": cursor}
    return ClientRequest(method="GET", path=_with_query(path, parameters), parse=parse)


def _idempotency_header(key: str | None = None) -> dict[str, str]:
    """Return the header that lets the client retry a request; by default with a new key."""
    return {http.IDEMPOTENCY_KEY_HEADER.lower(): http.format_idempotency_key(key or str(uuid4()))}
