"""Builds the requests of the service's HTTP API, and parses the responses.

This module sends nothing: `Client` and `AsyncClient` send the requests that `ServiceApi` builds.
An API call that takes several requests is an `Operation`, which a client runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from functools import lru_cache
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast
from urllib.parse import quote, urlencode
from uuid import uuid4

import msgspec

from tarry.client import errors, options
from tarry.client.transport import STREAM_READ_TIMEOUT_S, is_event_stream
from tarry.core.checks import check_at_least, check_positive
from tarry.core.hints import parse_retry_after
from tarry.core.outcome import RETRYABLE_STATUSES
from tarry.core.policy import Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError, TarryError, short_repr
from tarry.runtime.effects import effects
from tarry.runtime.scopes import cap_at_deadline
from tarry.wire import http
from tarry.wire import tasks as wire
from tarry.wire.policies import policy_to_request_json
from tarry.wire.tasks import Page, ReplayJob, RetryPolicy, RetryTask

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import httpx

    from tarry.client.options import DeadLetterFilter, Duration, TaskFilter
    from tarry.client.transport import ClientConfig, SendMode

T = TypeVar("T")
Operation: TypeAlias = Generator["ClientRequest[Any] | float", Any, T]
"""An API call that takes several requests, as a generator.

It yields either a request, which the client sends, or a number of seconds, which the client sleeps.
For a request, the value of the `yield` expression is the parsed response. The generator's return
value is the result of the operation.
"""

FINISHED_STATUSES = frozenset({"SUCCEEDED", "EXHAUSTED", "CANCELLED"})

_ERROR_TYPE_BY_STATUS: dict[int, type[errors.ServiceError]] = {
    401: errors.NotAuthorized,
    403: errors.NotAuthorized,
    404: errors.NotFound,
    409: errors.Conflict,
    429: errors.TooManyRequests,
}
_FIRST_CLIENT_ERROR, _FIRST_SERVER_ERROR = 400, 500
_CONFLICT_STATUS = 409
_UNAVAILABLE_STATUS = 503
_JSON_HEADERS = {"content-type": "application/json"}
_CANCELLATIONS_PATH = "/retry-tasks/cancellations"

_POLL_BACKOFF = Policy(initial_delay=0.05, multiplier=1.5, max_delay=2.0, jitter="equal")
"""Pauses after polls to which the service responded without waiting."""
_MAX_LONG_POLL_S = 20
"""Shorter than the idle timeout of common proxies."""
_LONG_POLL_MARGIN_S = 0.5
"""A long poll ends this long before the caller's timeout, so that its response still arrives."""
_MIN_LONG_POLL_S = 1.0
"""A long poll that returns sooner than this is followed by a pause, because the service did not
wait before it responded."""


class ClientRequest(msgspec.Struct, Generic[T], frozen=True):
    """An HTTP request, and the function that parses its response."""

    method: str
    path: str
    """Includes the query string."""
    parse: Callable[[httpx.Response], T]
    """Called for status 2xx and for `extra_statuses`; every other status is an error."""
    headers: dict[str, str] = {}
    content: bytes | None = None
    extra_statuses: frozenset[int] = frozenset()
    """Statuses outside 2xx that `parse` accepts."""
    wait_s: float = 0.0
    """Seconds that the service may wait before it responds (`Prefer: wait`)."""
    read_timeout_s: float | None = None
    """By default, the client's timeout plus `wait_s`."""
    mode: SendMode = "retry"

    def parse_response(self, response: httpx.Response) -> T:
        """Return the parsed response, or raise a `ServiceError`."""
        if response.is_success or response.status_code in self.extra_statuses:
            try:
                return self.parse(response)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                msg = f"the response to {self} is not from a tarry service: {error}."
                msg += " Check the URL of the client."
                raise errors.ServiceError(msg, status=response.status_code) from error
        raise self.to_error(response)

    def to_error(self, response: httpx.Response) -> errors.ServiceError:
        """Return the error for an unsuccessful response."""
        header = response.headers.get("retry-after")
        retry_after = None if header is None else parse_retry_after(header, effects.unix_time())
        return self.build_error(response.status_code, _parse_problem(response), retry_after)

    def build_error(
        self, status: int, problem: Mapping[str, Any], retry_after: float | None = None
    ) -> errors.ServiceError:
        """Return the error for a status and a problem document."""
        explanation = problem.get("detail") or problem.get("title") or "no problem document"
        error_type = _ERROR_TYPE_BY_STATUS.get(status)
        if error_type is None:
            is_client_error = _FIRST_CLIENT_ERROR <= status < _FIRST_SERVER_ERROR
            error_type = errors.InvalidRequest if is_client_error else errors.ServiceError
            if status > _FIRST_SERVER_ERROR and status in RETRYABLE_STATUSES:
                error_type = errors.ServiceUnavailable
        message = f"{self} was answered with {status}: {explanation}"
        return error_type(message, status=status, problem=problem, retry_after=retry_after)

    def to_httpx(self, config: ClientConfig) -> httpx.Request:
        """Return the request for httpx."""
        import httpx

        timeout = config.timeout
        read_timeout = self.read_timeout_s or timeout + self.wait_s
        timeouts = {"connect": timeout, "read": read_timeout, "write": timeout, "pool": timeout}
        return httpx.Request(
            self.method,
            _parse_url(config.url + self.path),
            headers=config.headers | self.headers,
            content=self.content,
            extensions={"timeout": timeouts},
        )

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@lru_cache(64)  # most requests of a program have the same few URLs
def _parse_url(url: str) -> httpx.URL:
    import httpx

    return httpx.URL(url)


def _parse_problem(response: httpx.Response) -> dict[str, Any]:
    """Return the members of a problem document; empty for other content, such as HTML."""
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _decoder(type_: type[T]) -> Callable[[httpx.Response], T]:
    """Return a function that decodes the JSON of a response into a type."""
    return lambda response: msgspec.json.decode(response.content, type=type_)


def _check_event_stream(response: httpx.Response) -> None:
    if not is_event_stream(response):
        msg = "the response to GET /events is not an event stream. Check the URL of the client."
        raise errors.ServiceError(msg, status=response.status_code)


def _task_or_error(
    request: ClientRequest[RetryTask], result: wire.BatchResult
) -> RetryTask | errors.ServiceError | None:
    if result.task is not None:
        return result.task
    if result.status in RETRYABLE_STATUSES:
        return None
    return request.build_error(result.status, result.problem or {})


class Health(msgspec.Struct, frozen=True):
    """Whether the service accepts and processes tasks.

    `failing` maps the name of each failing check to its cause.
    """

    ready: bool
    failing: dict[str, Any] = {}


class _Readiness(msgspec.Struct):
    """The response of a service that is ready, with partitions of its store that fail."""

    failing: dict[str, Any] = {}


_decode_readiness = msgspec.json.Decoder(_Readiness).decode


class ServiceApi:
    """Builds requests and operations; each docstring describes the effect of the API call."""

    def enqueue(
        self, url: str, body: Any, wait: float | None, arguments: options.EnqueueOptions
    ) -> ClientRequest[RetryTask]:
        """Add a task, and wait up to `wait` seconds for its result."""
        options.check_argument_names("enqueue", arguments)
        task = options.build_task_request(url, body, **arguments)
        headers = _JSON_HEADERS | _idempotency_header(task.idempotency_key)
        wait_s = 0 if wait is None else ceil(check_positive("wait", wait))
        if wait_s:
            headers["prefer"] = f"wait={wait_s}"
        content, parse = options.encode_task(task), _decoder(RetryTask)
        return ClientRequest("POST", "/retry-tasks", parse, headers, content, wait_s=wait_s)

    def coalesce(
        self, requests: Sequence[ClientRequest[RetryTask]]
    ) -> ClientRequest[list[RetryTask | errors.ServiceError | None]]:
        """Add the tasks of one or several `enqueue` requests with one request.

        Its result has the task or the error of each request; None if the service could not add the
        task now. The request of this task can be sent by itself, and is then retried.
        """
        if len(requests) == 1:
            [single] = requests
            return ClientRequest(
                single.method,
                single.path,
                lambda response: [single.parse(response)],
                single.headers,
                single.content,
            )

        def parse(response: httpx.Response) -> list[RetryTask | errors.ServiceError | None]:
            results = _decoder(wire.BatchResults)(response).results
            if len(results) != len(requests):
                msg = f"{len(results)} results for a batch of {len(requests)} tasks"
                raise msgspec.DecodeError(msg)
            return [
                _task_or_error(request, result)
                for request, result in zip(requests, results, strict=True)
            ]

        content = b'{"tasks":[%b]}' % b",".join([request.content or b"" for request in requests])
        headers = _JSON_HEADERS | _idempotency_header()  # as in `enqueue_many`
        return ClientRequest("POST", "/retry-tasks/batch", parse, headers, content)

    def enqueue_many(
        self, tasks: Iterable[options.EnqueueArguments]
    ) -> Operation[list[wire.BatchResult]]:
        """Add any number of tasks in batches; the results are in the order of the tasks."""
        results: list[wire.BatchResult] = []
        try:
            for content in options.encode_batches(tasks):
                # The batch may be repeated, because `build_task_request` gives each task a key.
                headers = _JSON_HEADERS | _idempotency_header()
                response = yield ClientRequest(
                    "POST", "/retry-tasks/batch", _decoder(wire.BatchResults), headers, content
                )
                results += response.results
        except TarryError as error:
            if results:
                note = f"tarry: the first {len(results)} tasks were processed before this error. "
                note += "If each task has its own key=, all of them can be sent again."
                error.add_note(note)
            raise
        return results

    def get(self, task: str | RetryTask, wait_s: int = 0) -> ClientRequest[RetryTask]:
        """Get a task. The service responds when the task has finished or after `wait_s` seconds."""
        path, parse = _task_path(task), _decoder(RetryTask)
        if not wait_s:
            return ClientRequest("GET", path, parse)
        headers = {"prefer": f"wait={wait_s}"}
        return ClientRequest("GET", path, parse, headers, wait_s=wait_s, mode="long_poll")

    def wait(self, task: str | RetryTask, timeout: Duration | None) -> Operation[RetryTask]:
        """Wait until a task has finished."""
        return _poll_until(
            lambda wait_s: self.get(task, wait_s),
            lambda latest: latest.status in FINISHED_STATUSES,
            timeout,
        )

    def tasks(self, cursor: str | None, filters: TaskFilter) -> ClientRequest[Page[RetryTask]]:
        """List tasks."""
        query = options.to_query("tasks", filters)
        return _page_request("/retry-tasks", _decoder(Page[RetryTask]), cursor, query)

    def attempts(
        self, cursor: str | None, task: str | RetryTask
    ) -> ClientRequest[Page[wire.AttemptLog]]:
        """List the attempts of a task."""
        path = f"{_task_path(task)}/attempts"
        return _page_request(path, _decoder(Page[wire.AttemptLog]), cursor)

    def export_attempts(
        self, cursor: str | None, filters: options.AttemptFilter
    ) -> ClientRequest[Page[wire.AttemptLog]]:
        """List the attempts of many tasks."""
        query = options.to_query("export_attempts", filters)
        return _page_request("/attempts", _decoder(Page[wire.AttemptLog]), cursor, query)

    def explain(self, task: str | RetryTask) -> ClientRequest[wire.Explanation]:
        """Get the explanation of why a task was retried or not."""
        return ClientRequest("GET", f"{_task_path(task)}/explain", _decoder(wire.Explanation))

    def cancel(self, task: str | RetryTask) -> Operation[RetryTask]:
        """Cancel a task and return it, even if an earlier request has cancelled it."""

        def parse(response: httpx.Response) -> RetryTask | None:
            if response.status_code != _CONFLICT_STATUS:
                return _decoder(RetryTask)(response)
            if _parse_problem(response).get("taskStatus") == "CANCELLED":
                return None
            raise request.to_error(response)

        request: ClientRequest[RetryTask | None] = ClientRequest(
            "DELETE", _task_path(task), parse, extra_statuses=frozenset({_CONFLICT_STATUS})
        )
        cancelled_task: RetryTask | None = yield request
        if cancelled_task is None:
            cancelled_task = yield self.get(task)
        return cast("RetryTask", cancelled_task)

    def cancel_many(self, arguments: options.CancelOptions) -> Operation[wire.BulkCancelResult]:
        """Cancel all matching tasks, with as many requests as needed."""
        query = options.to_query("cancel_many", arguments)
        is_all = query.pop("all", False)
        body: dict[str, Any] = {"dryRun": query.pop("dry_run", False)}
        body["filter"] = {name: value for name, value in query.items() if value is not None}
        if is_all:
            body["all"] = True
        total = wire.BulkCancelResult(matched=0, cancelled=0, running=0, next_cursor=None)
        while True:
            # As in `retry`, the request has no idempotency key: the response to a repeated request
            # would not count the tasks that the first request has cancelled.
            content, parse = msgspec.json.encode(body), _decoder(wire.BulkCancelResult)
            part: wire.BulkCancelResult = yield ClientRequest(
                "POST", _CANCELLATIONS_PATH, parse, _JSON_HEADERS, content
            )
            total.matched += part.matched
            total.cancelled += part.cancelled
            total.running += part.running
            if part.next_cursor is None:
                return total
            body["cursor"] = part.next_cursor

    def retry(self, task: str | RetryTask) -> ClientRequest[RetryTask]:
        """Make the next attempt of a task now."""
        # Without an idempotency key, the client does not repeat a request that the service may have
        # received. Sent twice, this request could cause two attempts.
        return ClientRequest("POST", f"{_task_path(task)}/retry", _decoder(RetryTask))

    def dead_letters(
        self, cursor: str | None, filters: DeadLetterFilter
    ) -> ClientRequest[Page[RetryTask]]:
        """List dead letters."""
        query = options.to_query("dead_letters", filters)
        return _page_request("/dead-letters", _decoder(Page[RetryTask]), cursor, query)

    def purge(self, arguments: options.PurgeOptions) -> Operation[int]:
        """Delete all matching dead letters; return how many were deleted."""
        query = options.to_query("purge", arguments)
        if query.pop("all", False):
            query["all"] = "true"
        purged_count, has_more = 0, True
        while has_more:  # the service limits the number of dead letters that a request deletes
            path = _with_query("/dead-letters", query)
            response = yield ClientRequest("DELETE", path, _decoder(wire.PurgeResult))
            purged_count += response.purged
            has_more, query["cursor"] = response.more, response.next_cursor
        return purged_count

    def replay(self, arguments: options.ReplayOptions) -> ClientRequest[ReplayJob]:
        """Start a replay of dead letters. As in `retry`, the request has no idempotency key."""
        query = options.to_query("replay", arguments)
        rate, dry_run = query.pop("rate", None), query.pop("dry_run", False)
        is_all = query.pop("all", False)
        replay: dict[str, Any] = {
            "filter": {name: value for name, value in query.items() if value is not None}
        }
        if rate is not None:
            replay["rate"] = check_at_least("rate", cast("float", rate), 0)
        if is_all:
            replay["all"] = True
        if dry_run:
            replay["dryRun"] = dry_run
        content, parse = msgspec.json.encode(replay), _decoder(ReplayJob)
        return ClientRequest("POST", "/dead-letters/replays", parse, _JSON_HEADERS, content)

    def replays(self) -> ClientRequest[Page[ReplayJob]]:
        """List the latest replays."""
        return ClientRequest("GET", "/dead-letters/replays", _decoder(Page[ReplayJob]))

    def fetch_replay(self, job: ReplayJob) -> Operation[ReplayJob]:
        """Return the current state of a replay."""
        if job.replay_id is not None:  # a dry run has no id, and has already finished
            job = yield _replay_request("GET", job.replay_id)
        return job

    def cancel_replay(self, job: ReplayJob) -> Operation[ReplayJob]:
        """Cancel a replay; return its current state."""
        if job.replay_id is not None:
            job = yield _replay_request("DELETE", job.replay_id)
        return job

    def wait_for_replay(self, job: ReplayJob, timeout: Duration | None) -> Operation[ReplayJob]:
        """Wait until a replay has finished. A dry run, which has no id, is already finished."""
        if job.replay_id is None:
            return job
        request = _replay_request("GET", job.replay_id)
        return (
            yield from _poll_until(
                lambda _wait_s: request, lambda latest: latest.status != "RUNNING", timeout
            )
        )

    def policies(self, cursor: str | None) -> ClientRequest[Page[RetryPolicy]]:
        """List policies."""
        return _page_request("/retry-policies", _decoder(Page[RetryPolicy]), cursor)

    def policy(self, policy_id: str, version: int | None) -> ClientRequest[RetryPolicy]:
        """Get a policy."""
        query = "" if version is None else f"?version={version}"
        return ClientRequest("GET", _policy_path(policy_id) + query, _decoder(RetryPolicy))

    def put_policy(
        self, policy_id: str, policy: Policy | Mapping[str, Any]
    ) -> ClientRequest[RetryPolicy]:
        """Create a policy, or a new version of it."""
        if isinstance(policy_id, str) and "/" in policy_id:
            rule = "must contain only letters, digits and ._-"
            raise ConfigurationError("policy_id", rule, policy_id)
        fields = policy_to_request_json(policy) if isinstance(policy, Policy) else policy
        path, content = _policy_path(policy_id), options.encode_mapping("policy", fields)
        return ClientRequest("PUT", path, _decoder(RetryPolicy), _JSON_HEADERS, content)

    def delete_policy(self, policy_id: str) -> ClientRequest[None]:
        """Delete a policy."""
        return ClientRequest("DELETE", _policy_path(policy_id), lambda _: None)

    def downstreams(self, cursor: str | None) -> ClientRequest[Page[wire.DownstreamInfo]]:
        """List downstreams."""
        return _page_request("/downstreams", _decoder(Page[wire.DownstreamInfo]), cursor)

    def downstream_page(
        self, cursor: str | None, limit: int | None
    ) -> ClientRequest[Page[wire.DownstreamInfo]]:
        """List up to `limit` downstreams."""
        path = _with_query("/downstreams", {"limit": limit, "cursor": cursor})
        return ClientRequest("GET", path, _decoder(Page[wire.DownstreamInfo]))

    def downstream(self, lane: str) -> ClientRequest[wire.DownstreamInfo]:
        """Get a downstream."""
        path = f"/downstreams/{_path_segment('lane', lane)}"
        return ClientRequest("GET", path, _decoder(wire.DownstreamInfo))

    def change_lane(
        self, lane: str, action: Literal["pause", "resume", "reset"], *, create: bool = False
    ) -> ClientRequest[wire.DownstreamInfo]:
        """Change the state of a lane. The idempotency key makes the request repeatable."""
        path = f"/downstreams/{_path_segment('lane', lane)}/{action}{_create_query(create)}"
        return ClientRequest("POST", path, _decoder(wire.DownstreamInfo), _idempotency_header())

    def set_limits(
        self,
        lane: str,
        rate_per_second: float | None,
        concurrency: int | None,
        breaker: Mapping[str, Any] | None,
        budget: Mapping[str, Any] | None,
        *,
        create: bool,
    ) -> ClientRequest[wire.DownstreamInfo]:
        """Replace the limits of a lane."""
        limits = {
            "ratePerSecond": rate_per_second,
            "concurrency": concurrency,
            "breaker": breaker,
            "budget": budget,
        }
        path = f"/downstreams/{_path_segment('lane', lane)}{_create_query(create)}"
        content = options.encode_mapping("limits", limits)
        return ClientRequest("PUT", path, _decoder(wire.DownstreamInfo), _JSON_HEADERS, content)

    def create_signing_secret(
        self,
        lane: str | None,
        type_: wire.SecretType,
        secret: str | None,
        expire_previous: Duration | None,
    ) -> ClientRequest[wire.SigningSecret]:
        """Create a signing secret. As in `retry`, the request has no idempotency key."""
        fields = wire.SigningSecretRequest(lane=lane, type=type_, secret=secret)
        if expire_previous is not None:
            seconds = options.to_seconds("expire_previous", expire_previous)
            fields.expire_previous_ms = round(seconds * 1000)
        content, parse = msgspec.json.encode(fields), _decoder(wire.SigningSecret)
        return ClientRequest("POST", "/signing-secrets", parse, _JSON_HEADERS, content)

    def workers(self) -> ClientRequest[Page[wire.WorkerInfo]]:
        """List the processes of the service."""
        return ClientRequest("GET", "/workers", _decoder(Page[wire.WorkerInfo]))

    def signing_secrets(self) -> ClientRequest[Page[wire.SigningSecret]]:
        """List signing secrets."""
        return ClientRequest("GET", "/signing-secrets", _decoder(Page[wire.SigningSecret]))

    def delete_signing_secret(self, secret_id: str) -> ClientRequest[None]:
        """Delete a signing secret."""
        path = f"/signing-secrets/{_path_segment_of_id('secret_id', secret_id)}"
        return ClientRequest("DELETE", path, lambda _: None)

    def health(self) -> ClientRequest[Health]:
        """Check the health of the service. Not retried, because "not ready" is a valid result."""

        def parse(response: httpx.Response) -> Health:
            if response.status_code != _UNAVAILABLE_STATUS:
                with suppress(msgspec.DecodeError):
                    return Health(ready=True, failing=_decode_readiness(response.content).failing)
                return Health(ready=True)
            failing = _parse_problem(response).get("failing")
            if not isinstance(failing, dict):
                raise request.to_error(response)
            # The types in a dict from JSON are unknown.
            return Health(ready=False, failing=failing)  # pyright: ignore[reportUnknownArgumentType]

        request: ClientRequest[Health] = ClientRequest(
            "GET", "/readyz", parse, extra_statuses=frozenset({_UNAVAILABLE_STATUS}), mode="once"
        )
        return request

    def events(self, mode: SendMode) -> ClientRequest[None]:
        """Open the event stream. `parse` checks only the headers; the client reads the events."""
        headers, timeout_s = {"accept": "text/event-stream"}, STREAM_READ_TIMEOUT_S
        return ClientRequest(
            "GET", "/events", _check_event_stream, headers, read_timeout_s=timeout_s, mode=mode
        )


def _poll_until(
    build_request: Callable[[int], ClientRequest[T]],
    is_finished: Callable[[T], bool],
    timeout: Duration | None,
) -> Operation[T]:
    """Poll until a task or replay has finished; raise `NotFinished` after the timeout.

    `build_request` takes the seconds that the service may wait before it responds.
    """
    timeout_s = inf if timeout is None else options.to_seconds("timeout", timeout)
    deadline = cap_at_deadline(effects.now() + timeout_s)
    delay: float | None = None  # of the latest pause
    pause_count = 0
    while True:
        started_at = effects.now()
        wait_s = max(0.0, min(deadline - started_at - _LONG_POLL_MARGIN_S, _MAX_LONG_POLL_S))
        request = build_request(int(wait_s))
        resource: T = yield request
        if is_finished(resource):
            return resource
        now = effects.now()
        remaining_s = deadline - now
        if remaining_s <= 0:
            status = getattr(resource, "status", None)
            raise errors.NotFinished(f"{request.path} is still {status}", resource)
        if request.wait_s and now - started_at >= _MIN_LONG_POLL_S:
            continue
        pause_count += 1
        max_delay = _POLL_BACKOFF.ceiling(pause_count)  # before jitter
        delay = _POLL_BACKOFF.delay(max_delay, delay, effects.draw_random())
        yield min(delay, remaining_s)


def _task_path(task: str | RetryTask) -> str:
    task_id = task.task_id if isinstance(task, RetryTask) else task
    return f"/retry-tasks/{_path_segment_of_id('task', task_id)}"


def _policy_path(policy_id: str) -> str:
    return f"/retry-policies/{_path_segment_of_id('policy_id', policy_id)}"


def _create_query(create: bool) -> str:  # noqa: FBT001 - the parameter of the API
    return "?create=true" if create else ""


def _path_segment(argument: str, name: str) -> str:
    """Return a name as one segment of a path: percent-encoded, including its slashes."""
    if not isinstance(name, str) or not name.strip("."):  # ".." would change the path
        raise ConfigurationTypeError(argument, "must be a non-empty name, not only dots", name)
    return quote(name, safe="")


def _path_segment_of_id(argument: str, id_: str) -> str:
    """Return an id as one segment of a path, percent-encoded.

    Raises `NotFound` for an id with a slash, because no id of the service has a slash. No request
    is sent, because some servers unescape `%2F` and would route the request to another path.
    """
    segment = _path_segment(argument, id_)
    if "/" in id_:
        msg = f"There is no such {argument.removesuffix('_id')}: {short_repr(id_)} has a slash."
        raise errors.NotFound(msg)
    return segment


def _with_query(path: str, query: Mapping[str, str | int | None]) -> str:
    """Return a path with a query string; parameters that are None are left out."""
    parameters = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(parameters)}" if parameters else path


def _page_request(
    path: str,
    parse: Callable[[httpx.Response], Page[T]],
    cursor: str | None,
    query: Mapping[str, str | int | None] | None = None,
) -> ClientRequest[Page[T]]:
    """Return the request for the page of a list that starts at a cursor."""
    # The first page has the service's default size, because many callers need no second page. The
    # following pages are as large as possible.
    limit = None if cursor is None else str(wire.MAX_PAGE_SIZE)
    parameters = {**(query or {}), "limit": limit, "cursor": cursor}
    return ClientRequest("GET", _with_query(path, parameters), parse)


def _replay_request(method: str, replay_id: str) -> ClientRequest[ReplayJob]:
    path = f"/dead-letters/replays/{_path_segment_of_id('replay_id', replay_id)}"
    return ClientRequest(method, path, _decoder(ReplayJob))


def _idempotency_header(key: str | None = None) -> dict[str, str]:
    """Return the header that makes a request repeatable; it has a new key if `key` is None."""
    # Quoted, because the service would remove the quotes of a key that begins with a quote.
    return {http.IDEMPOTENCY_KEY_HEADER.lower(): http.quote_idempotency_key(key or str(uuid4()))}
