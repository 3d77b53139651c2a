"""Arguments of the client's methods: their types, their checks and their JSON encoding."""

from __future__ import annotations

import json
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Required, TypeAlias, TypedDict, Unpack
from uuid import uuid4

import msgspec
from msgspec import UNSET, Raw

from tarry.core.checks import check_at_least
from tarry.core.text import did_you_mean
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.wire import http
from tarry.wire.search import SEARCH_FIELDS, TIME_FIELDS
from tarry.wire.tasks import (
    MAX_BATCH_SIZE,
    MAX_TIME_MS,
    BatchRequest,
    RetryTaskRequest,
    SecretReference,
    StatusName,
)

Duration: TypeAlias = float | timedelta
"""Seconds, or a timedelta."""
Instant: TypeAlias = float | datetime
"""Seconds since 1970, as `time.time()` returns them, or a datetime with a time zone."""

MAX_BATCH_BYTES = 8 << 20
"""Maximum size of the JSON of one batch: half of the service's default limit for a request."""

_encode_struct = msgspec.json.Encoder().encode


class EnqueueOptions(TypedDict, total=False):
    """Keyword arguments of `enqueue`.

    The value of a header is a string, or `{"secret": "orders-api"}` for a secret that the operator
    of the service has defined. `body_ref` names an object in the body store of the service.
    `policy` names a policy. `key` is the idempotency key of the task and its attempts; by default,
    the client generates one. `lane_key`, such as the id of a customer, gives the tasks with this
    key their own lane among the tasks for the same host. `delay` or `at` sets the time of the first
    attempt. `overrides` changes fields of the policy for this task, such as `{"maxAttempts": 3}`.
    `callback` is the URL that receives the result, and `callback_policy` names the policy for
    sending it. `prior_attempts` is the number of attempts made before the task was created; the
    header `X-Retry-Attempt` of the task includes them. `traceparent` (W3C Trace Context) is sent to
    the target with each attempt, together with `tracestate`; by default, both are those of the
    current span of OpenTelemetry; `traceparent=None` sends neither.
    """

    method: str
    headers: Mapping[str, str | SecretReference] | None
    body_ref: str | None
    policy: str
    policy_version: int | None
    key: str | None
    lane_key: str | None
    delay: Duration | None
    at: Instant | None
    overrides: Mapping[str, Any] | None
    callback: str | None
    callback_policy: str | None
    prior_attempts: int
    traceparent: str | None
    tracestate: str | None


class EnqueueArguments(EnqueueOptions, total=False):
    """All arguments of `enqueue` as a dict: one task of `enqueue_many`.

    `body` is text, bytes or any JSON value; None means no body.
    """

    url: Required[str]
    body: Any


class FilterOptions(TypedDict, total=False):
    """Filter for tasks; an empty filter matches all tasks.

    `url_prefix` is the beginning of the target URL, with the whole host. `key` is the idempotency
    key. `last_status` is the status of the last attempt: 503, "5xx" or a gRPC code such as
    "UNAVAILABLE". `error` is the class of its error, such as "timeout", or a part of the message.
    """

    policy: str | None
    lane: str | None
    url_prefix: str | None
    key: str | None
    created_after: Instant | None
    created_before: Instant | None
    last_status: int | str | None
    error: str | None


class DeadLetterFilter(FilterOptions, total=False):
    """Filter for dead letters; an empty filter matches all dead letters. See `FilterOptions`."""

    reason: str | None
    finished_after: Instant | None
    finished_before: Instant | None


class PurgeOptions(DeadLetterFilter, total=False):
    """Which dead letters to delete. Without a filter, `all` must be True."""

    all: bool


class TaskFilter(DeadLetterFilter, total=False):
    """Filter for lists of tasks; see `FilterOptions`."""

    status: StatusName | None


class ReplayOptions(DeadLetterFilter, total=False):
    """Which dead letters to replay, and how fast.

    `before` is the same as `finished_before`. `rate` is in tasks per second, by default 50; 0: all
    at once. Without a filter, `all` must be True, except in a dry run, which only counts the
    matching dead letters.
    """

    all: bool
    before: Instant | None
    rate: float | None
    dry_run: bool


class AttemptFilter(TypedDict, total=False):
    """Filter for the tasks whose attempts are exported; `key` is the idempotency key."""

    status: StatusName | None
    policy: str | None
    lane: str | None
    key: str | None
    created_after: Instant | None
    created_before: Instant | None


class CancelOptions(FilterOptions, total=False):
    """Which tasks to cancel. Without a filter, `all` must be True, except in a dry run.

    The filters are described in `FilterOptions`. A dry run only counts the matching tasks.
    """

    all: bool
    dry_run: bool


_ARGUMENT_NAMES: dict[str, tuple[str, ...]] = {
    "enqueue": ("url", "body", *EnqueueOptions.__annotations__),
    "tasks": tuple(TaskFilter.__annotations__),
    "export_attempts": tuple(AttemptFilter.__annotations__),
    "cancel_many": tuple(CancelOptions.__annotations__),
    "dead_letters": tuple(DeadLetterFilter.__annotations__),
    "purge": tuple(PurgeOptions.__annotations__),
    "replay": tuple(ReplayOptions.__annotations__),
}


_FIELD_BY_ARGUMENT = {field.argument: field for field in SEARCH_FIELDS.values()}
_TIME_ARGUMENTS = {"before", *(SEARCH_FIELDS[name].argument for name in TIME_FIELDS)}


def check_argument_names(method: str, arguments: Iterable[str]) -> None:
    """Raise `ConfigurationTypeError` for an argument that the client's method does not have."""
    names = _ARGUMENT_NAMES[method]
    for name in arguments:
        if name not in names:
            rule = f"is not an argument of {method}; {did_you_mean(name, names)}"
            raise ConfigurationTypeError(name, rule)


def to_epoch_ms(argument: str, instant: Instant) -> int:
    """Return an instant in milliseconds since 1970, the unit of the API."""
    if isinstance(instant, datetime):
        if instant.utcoffset() is None:
            rule = "must have a time zone, as datetime.now(UTC) has"
            raise ConfigurationError(argument, rule, instant)
        instant = instant.timestamp()
    ms = round(check_at_least(argument, instant, 0) * 1000)
    if ms > MAX_TIME_MS:
        rule = f"must be in seconds since 1970, got {instant!r}: are these milliseconds?"
        raise ConfigurationError(argument, rule)
    return ms


def to_query(method: str, filters: Mapping[str, Any]) -> dict[str, str | int | None]:
    """Return the filters of a client's method with the names and units of the API."""
    check_argument_names(method, filters)
    query: dict[str, str | int | None] = {}
    for argument, value in filters.items():
        field = _FIELD_BY_ARGUMENT.get(argument)
        name = argument if field is None else field.api_name
        query[name] = None if value is None else _to_query_value(argument, value)
    return query


def _to_query_value(argument: str, value: Any) -> str | int:
    if argument in _TIME_ARGUMENTS:
        return to_epoch_ms(argument, value)
    return str(value) if argument == "last_status" else value


def to_seconds(argument: str, duration: Duration) -> float:
    """Return a duration in seconds."""
    seconds = duration.total_seconds() if isinstance(duration, timedelta) else duration
    return check_at_least(argument, seconds, 0)


def _to_dict(argument: str, value: object) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigurationTypeError(argument, "must be a dict", value)
    # The types of keys and values are unknown.
    return dict(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def build_task_request(
    url: str, body: Any = None, **options: Unpack[EnqueueOptions]
) -> RetryTaskRequest:
    """Return the API's representation of the task that the arguments of `enqueue` describe."""
    policy, key = options.get("policy", "default"), options.get("key")
    delay, at = options.get("delay"), options.get("at")
    if not isinstance(policy, str):
        rule = (
            f"must be the name of a policy, got {short_repr(policy)}. Store a policy under a name "
            "with put_policy(), or change fields for one task with overrides="
        )
        raise ConfigurationTypeError("policy", rule)
    if delay is not None and at is not None:
        rule = "cannot be combined with delay: both set the time of the first attempt"
        raise ConfigurationError("at", rule)
    # The request always has a key, so that retrying the request does not create a second task.
    key = str(uuid4()) if key is None else key
    http.check_idempotency_key(key)
    is_bytes = isinstance(body, (bytes, bytearray))
    if "traceparent" in options:
        traceparent, tracestate = options["traceparent"], None
    else:
        traceparent, tracestate = _current_trace()
    return RetryTaskRequest(
        target_url=url,
        method=options.get("method", "POST"),
        headers=_to_dict("headers", options.get("headers")),
        body=UNSET if body is None or is_bytes else Raw(_encode_json("body", body)),
        body_base64=b64encode(body).decode() if is_bytes else None,
        body_ref=options.get("body_ref"),
        policy_id=policy,
        policy_version=options.get("policy_version"),
        idempotency_key=key,
        lane_key=options.get("lane_key"),
        delay_ms=None if delay is None else round(to_seconds("delay", delay) * 1000),
        next_attempt_at=None if at is None else to_epoch_ms("at", at),
        policy_overrides=_to_dict("overrides", options.get("overrides")),
        callback_url=options.get("callback"),
        callback_policy_id=options.get("callback_policy"),
        prior_attempts=options.get("prior_attempts", 0),
        traceparent=traceparent,
        tracestate=options.get("tracestate", tracestate),
    )


def _current_trace() -> tuple[str | None, str | None]:
    """Return the `traceparent` and `tracestate` of the current span of OpenTelemetry, if any."""
    opentelemetry_trace = sys.modules.get("opentelemetry.trace")
    if opentelemetry_trace is None:
        return None, None
    span = opentelemetry_trace.get_current_span().get_span_context()
    if not span.is_valid:
        return None, None
    traceparent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return traceparent, span.trace_state.to_header() or None


def encode_task(task: RetryTaskRequest) -> bytes:
    """Return a task as JSON."""
    try:
        return _encode_struct(task)
    except (TypeError, ValueError) as error:
        msg = f"the task has a value that JSON cannot represent: {error}"
        raise ConfigurationTypeError(msg) from None


def encode_batches(tasks: Iterable[EnqueueArguments]) -> Iterator[bytes]:
    """Split the tasks into batches within the limits of the service; yield the JSON of each."""
    batch: list[Raw] = []
    batch_bytes = 0
    for index, task in enumerate(tasks):
        encoded = _encode_batch_item(index, task)
        if batch and (len(batch) == MAX_BATCH_SIZE or batch_bytes + len(encoded) > MAX_BATCH_BYTES):
            yield _encode_struct(BatchRequest(tasks=batch))
            batch, batch_bytes = [], 0
        batch.append(Raw(encoded))
        batch_bytes += len(encoded)
    if batch:
        yield _encode_struct(BatchRequest(tasks=batch))


def _encode_batch_item(index: int, task: EnqueueArguments) -> bytes:
    argument = f"tasks[{index}]"
    if not isinstance(task, Mapping):
        rule = 'must be a dict of the arguments of enqueue, such as {"url": ...}'
        raise ConfigurationTypeError(argument, rule, task)
    if "url" not in task:
        raise ConfigurationTypeError(argument, "must have a url")
    try:
        check_argument_names("enqueue", task)
        return encode_task(build_task_request(**task))
    except ConfigurationError as error:
        if error.field is None:
            raise type(error)(f"{argument}: {error}") from None
        raise error.with_field(f"{argument}.{error.field}") from None


def encode_mapping(argument: str, value: Mapping[str, Any]) -> bytes:
    """Return the JSON of a mapping that the user passed; `argument` is its name in errors."""
    return _encode_json(argument, _to_dict(argument, value))


def _encode_json(argument: str, value: object) -> bytes:
    # Encodes with json, because msgspec silently encodes NaN and infinity as null.
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        rule = f"must be text, bytes or a value that JSON can represent: {error}"
        raise ConfigurationTypeError(argument, rule) from None
