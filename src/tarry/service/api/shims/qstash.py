"""The API of QStash: publish a message or a batch, get and cancel messages.

A message is a task. The policy `qstash` has the delays of QStash; headers of a message override it.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from hashlib import sha256
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import msgspec

from tarry.core.text import did_you_mean
from tarry.service.api.messages import decode_json, json_response
from tarry.service.api.problems import convert_errors, invalid
from tarry.service.api.quotas import charge_rate_limit, too_many_lanes, too_many_unfinished_tasks
from tarry.service.api.shims.retry_delay import plan_delays_ms
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
from tarry.service.delivery.targets import public_lane_name
from tarry.service.delivery.vendor_headers import QSTASH
from tarry.service.store import AddStatus, CancelStatus
from tarry.wire.policies import (
    MAX_ATTEMPTS,
    MAX_DURATION_MS,
    QSTASH_POLICY,
    SERVICE_PRESETS,
    policy_from_json,
)
from tarry.wire.tasks import MAX_BATCH_SIZE

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tarry.service.api.context import ApiContext
    from tarry.service.api.messages import ApiRequest, ApiResponse
    from tarry.service.api.problems import ApiError
    from tarry.service.api.routing import Handler
    from tarry.service.api.task_creation import TaskCreation
    from tarry.service.model import Task
    from tarry.service.store import AddResult, Ingest

_TOO_MANY_REQUESTS = 429
_PUBLISH_PATH = b"/v2/publish/"
_PREFIX, _FORWARD_PREFIX = "upstash-", "upstash-forward-"
_DEDUPLICATION_WINDOW_MS = 600_000
"""How long QStash recognises a duplicate. The idempotency keys of tarry are recognised as long as
their tasks are stored, which is a week by default."""
_MAX_DEDUPLICATION_ID_CHARS = _MAX_FLOW_CONTROL_CHARS = 200
_MAX_HEADERS = 256
"""Maximum number of headers of a message, counted before names that differ only in case are merged.
An HTTP request has the same limit. Without this limit, a batch with a million headers in one
message took 2 s of the event loop."""
_MAX_SHOWN_NAME_CHARS = 100
"""Length after which the name of an invalid header is cut off in an error."""
_DEFAULT_RETRIES = SERVICE_PRESETS[QSTASH_POLICY].max_attempts - 1
_MAX_COMPUTED_DELAYS = 100
_YIELD_EVERY_MESSAGES = 50
"""Number of messages of a batch after which other requests are handled."""
_MAX_SECONDS = 100_000_000_000
"""A larger number of seconds since 1970 is probably in milliseconds."""
_DURATION = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,8})m)?(?:([0-9]{1,10})s)?")
_GENERATED_KEY = re.compile(r".*@[0-9]+|content-[0-9a-f]{64}(?::[0-9]+)?")
"""Matches the keys that `_deduplication_keys` generates for later windows and for contents."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_MERGED_SLASHES = re.compile(r"https?:/[^/]", re.IGNORECASE)

_HEADERS = {
    name.lower(): name
    for name in (
        "Upstash-Method", "Upstash-Delay", "Upstash-Not-Before", "Upstash-Retries",
        "Upstash-Retry-Delay", "Upstash-Timeout", "Upstash-Callback", "Upstash-Deduplication-Id",
        "Upstash-Content-Based-Deduplication", "Upstash-Flow-Control-Key",
        "Upstash-Flow-Control-Value", "Upstash-Redact-Fields",
    )
}  # fmt: skip
_IGNORED_PREFIXES = ("upstash-label", "upstash-telemetry-")
"""Headers that change neither the delivery nor the visibility of a message."""
_UNSUPPORTED_HEADERS = {
    "upstash-failure-callback": (
        "is not supported: use Upstash-Callback, whose request has the status EXHAUSTED if the "
        "delivery has failed"
    ),
    "upstash-callback-": "is not supported: a callback has no settings of its own",
    "upstash-cron": "is not supported: let cron publish the message",
    "upstash-schedule-": "is not supported: let cron publish the message",
    "upstash-queue": "is not supported: tasks are not delivered in order",
}
"""Headers without a counterpart, by the beginning of their names, with the solution."""
_UNSUPPORTED_PATHS = {
    "enqueue": "Queues are not supported, because tasks are not delivered in order. Publish the "
    "message; Upstash-Flow-Control-Key gives messages a lane of their own.",
    "queues": "Queues are not supported. See /downstreams for lanes.",
    "schedules": "Schedules are not supported: let cron publish the messages.",
    "topics": "URL groups are not supported: publish a message to each URL.",
    "dlq": "Use /dead-letters.",
    "events": "Use /retry-tasks and /events.",
    "logs": "Use /retry-tasks and /events.",
    "keys": "The key of Upstash-Signature is a signing secret: use /signing-secrets.",
}
_FIELD_NAMES = {
    "targetUrl": "The destination",
    "method": "Upstash-Method",
    "callbackUrl": "Upstash-Callback",
    "laneKey": "Upstash-Flow-Control-Key",
    "idempotencyKey": "Upstash-Deduplication-Id",
    "nextAttemptAt": "Upstash-Not-Before",
    "delayMs": "Upstash-Delay",
    "policy.maxAttempts": "Upstash-Retries",
    "policy.scheduleMs": "Upstash-Retry-Delay",
    "policy.attemptTimeoutMs": "Upstash-Timeout",
}
_UNITS_S = (86_400, 3_600, 60, 1)


class DeduplicationKeys(NamedTuple):
    """The idempotency keys of a message with a deduplication id or content-based deduplication.

    The keys of different ids never collide: if an id looks like a generated key, its first key is
    generated, too.
    """

    first: str
    """The key in the first window."""
    prefix: str
    """The key in a later window, without the number of the window at its end."""


class Message(msgspec.Struct, frozen=True):
    """A message: the fields of its task, and the options that the shim itself implements."""

    fields: dict[str, Any]
    """The JSON fields of `POST /retry-tasks`, without the idempotency key."""
    deduplication: DeduplicationKeys | None = None
    flow_control: dict[str, int] = {}
    """`parallelism`, `rate`, and `period` in seconds."""
    hide_body: bool = False


class BatchMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a batch."""

    destination: str
    headers: dict[str, str] = {}
    body: str | None = None
    queue: str | None = None


class MessageIds(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """The messages to cancel."""

    message_ids: list[str]


_batch_decoder = msgspec.json.Decoder(list[BatchMessage])
_ids_decoder = msgspec.json.Decoder(MessageIds)


class QStashShim:
    """Serves the part of QStash's API that publishes, gets and cancels messages."""

    def __init__(self, context: ApiContext, task_creation: TaskCreation) -> None:
        self._context = context
        self._task_creation = task_creation
        self._lookup = TaskLookup(context)
        methods = ("GET", "POST", "PUT", "PATCH", "DELETE")
        self.handlers: dict[str, dict[str, Handler]] = {
            "/v2/publish/{destination:path}": {"POST": self.publish},
            "/v2/batch": {"POST": self.publish_batch},
            "/v2/messages": {"DELETE": self.cancel_many},
            "/v2/messages/{messageId}": {"GET": self.get, "DELETE": self.cancel},
            "/v2/{path:path}": dict.fromkeys(methods, self._reject_path),
        }

    def render_error(self, error: ApiError) -> ApiResponse:
        """Return the response for an error: `{"error": "..."}`."""
        status = BAD_REQUEST if error.problem.status == INVALID else error.problem.status
        headers = [*error.headers]
        retry_after = dict(headers).get(b"retry-after")
        if status == _TOO_MANY_REQUESTS and retry_after is not None:
            # The clients of QStash ignore Retry-After. The error that they raise has the value of
            # this header as `reset`.
            reset = ceil(self._context.engine.clock.now_ms() / 1000) + int(retry_after)
            headers.append((b"burst-ratelimit-reset", str(reset).encode()))
        return json_response(status, {"error": error.problem.detail}, *headers)

    async def publish(self, request: ApiRequest) -> ApiResponse:
        """Create a task. The status is 202 if the message is a duplicate."""
        body = await request.read_any_body(self._context.limits.max_request_bytes)
        charge_rate_limit(self._context.engine.rate_limiter, request.tenant, 1)
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.scope["headers"]
        ]
        message = translate_message(
            _destination_of(request), headers, body, self._context.engine.clock.now_ms()
        )
        (result,) = await self._add(request, [message])
        return json_response(202 if result["deduplicated"] else 201, result)

    async def publish_batch(self, request: ApiRequest) -> ApiResponse:
        """Create a task for each message. If one message is invalid, none is created."""
        body = await request.read_body(self._context.limits.max_batch_bytes)
        entries = decode_json(_batch_decoder, body)
        if len(entries) > MAX_BATCH_SIZE:
            rule = f"must have at most {MAX_BATCH_SIZE} messages"
            raise invalid("The batch", rule, len(entries))
        # Before the translation, which can take seconds.
        charge_rate_limit(self._context.engine.rate_limiter, request.tenant, len(entries))
        messages: list[Message] = []
        now = self._context.engine.clock.now_ms()
        for index, entry in enumerate(entries):
            with rename_fields(str, f"[{index}] "):
                if entry.queue:
                    raise invalid("queue", _UNSUPPORTED_HEADERS["upstash-queue"])
                content = (entry.body or "").encode()
                destination = _check_destination(entry.destination)
                messages.append(translate_message(destination, entry.headers.items(), content, now))
            # An expression in Upstash-Retry-Delay can take 3 ms. Other requests must not wait until
            # all expressions of a batch are evaluated.
            await asyncio.sleep(0)
        return json_response(200, await self._add(request, messages))

    async def get(self, request: ApiRequest) -> ApiResponse:
        """Get a message that is not finished."""
        task = await self._find(request)
        if task.status.is_finished:
            raise _finished_error(task)
        view = stored_task_view(self._context, task)
        policies = self._context.engine.policies
        named = await policies.load(task.tenant, task.policy_id, task.policy_version)
        max_retries = 0
        if named is not None:
            max_retries = policy_from_json(view.policy or {}, named.policy).max_attempts - 1
        document: dict[str, Any] = {
            "messageId": task.id,
            "url": view.target_url,
            "method": view.method,
            "header": {name: [value] for name, value in view.headers.items()},
            "maxRetries": max_retries,
            "notBefore": view.next_attempt_at,
            "createdAt": view.created_at,
        }
        if view.callback_url is not None:
            document["callback"] = view.callback_url
        if lane_key := view.lane.partition("@")[2]:
            document["flowControlKey"] = lane_key
        return json_response(200, document)

    async def cancel(self, request: ApiRequest) -> ApiResponse:
        """Cancel a message. A running attempt may still succeed."""
        task = await self._find(request)
        status = await self._context.engine.cancel(request.tenant, task.id)
        if status is CancelStatus.FINISHED:
            raise _finished_error(task)
        report_cancellation(request, task.id, status)
        return json_response(202, {})

    async def cancel_many(self, request: ApiRequest) -> ApiResponse:
        """Cancel the messages that the body lists."""
        body = await request.read_any_body(self._context.limits.max_request_bytes)
        if not body:
            detail = (
                "messageIds must be given: the service does not cancel all messages at once. "
                "`POST /retry-tasks/cancellations` cancels all tasks that match a filter."
            )
            raise vendor_error(BAD_REQUEST, detail)
        message_ids = decode_json(_ids_decoder, body).message_ids
        if len(message_ids) > MAX_BATCH_SIZE:
            rule = f"must have at most {MAX_BATCH_SIZE} entries"
            raise invalid("messageIds", rule, len(message_ids))
        cancelled = 0
        for message_id in message_ids:
            if await self._lookup.find_by_id(request.tenant, message_id) is not None:
                status = await self._context.engine.cancel(request.tenant, message_id)
                report_cancellation(request, message_id, status)
                cancelled += status in {CancelStatus.CANCELLED, CancelStatus.REQUESTED}
        return json_response(200, {"cancelled": cancelled})

    async def _reject_path(self, request: ApiRequest) -> ApiResponse:
        path = request.path_parameter("path")
        help_text = _UNSUPPORTED_PATHS.get(path.partition("/")[0], "")
        detail = f"/v2/{path[:100]} of QStash is not supported. {help_text}".rstrip()
        raise vendor_error(501, f"{detail} The page {DOCS_PAGE} lists what is.")

    async def _find(self, request: ApiRequest) -> Task:
        message_id = request.path_parameter("messageId")
        task = await self._lookup.find_by_id(request.tenant, message_id)
        if task is None:
            raise vendor_error(404, f"There is no message {message_id[:100]}.")
        return task

    async def _add(self, request: ApiRequest, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Create the tasks of all messages, or raise ApiError; return the result of each."""
        creation, limits = self._task_creation, self._context.engine.limits
        built: list[Ingest] = []
        try:
            for index, message in enumerate(messages):
                prefix = f"[{index}] " if len(messages) > 1 else ""
                if not (index + 1) % _YIELD_EVERY_MESSAGES:
                    await asyncio.sleep(0)
                with rename_fields(_vendor_name, prefix):
                    key = message.deduplication.first if message.deduplication else None
                    built.append(await self._build(request, message, key))
        except BaseException:
            await creation.discard(built)
            raise
        add_results = await creation.submit(built) if built else ()
        results: list[dict[str, Any]] = []
        for message, first_result in zip(messages, add_results, strict=True):
            result = first_result
            if result.status in {AddStatus.EXISTING, AddStatus.CONFLICT}:
                result = await self._add_after_window(request, message, result)
            if result.status in {AddStatus.OVER_QUOTA, AddStatus.TOO_MANY_LANES}:
                is_lane = result.status is AddStatus.TOO_MANY_LANES
                error = too_many_lanes(limits) if is_lane else too_many_unfinished_tasks(limits)
                stored = [each.task.id for each in add_results if each.status is AddStatus.ADDED]
                if not stored:
                    raise error
                detail = f"{error.problem.detail} Of this batch, {', '.join(stored)} were stored."
                raise vendor_error(error.problem.status, detail, error.headers)
            is_duplicate = result.status is not AddStatus.ADDED
            results.append({"messageId": result.task.id, "deduplicated": is_duplicate})
        return results

    async def _add_after_window(
        self, request: ApiRequest, message: Message, existing: AddResult
    ) -> AddResult:
        """Add a message whose deduplication id was used before, unless that was in the window.

        Time is divided into windows that begin when the first task was created. A later task has
        the number of its window in its idempotency key. A task that was created at most a window
        ago is in the same window or in the previous one.
        """
        now, window_ms = self._context.engine.clock.now_ms(), _DEDUPLICATION_WINDOW_MS
        window = (now - existing.task.created_at) // window_ms
        if window < 1 or message.deduplication is None:
            return existing
        key = message.deduplication.prefix
        previous = await self._lookup.find_by_key(request.tenant, f"{key}{window - 1}")
        if previous is not None and now - previous.created_at < window_ms:
            return msgspec.structs.replace(existing, task=previous)
        built = await self._build(request, message, f"{key}{window}")
        (result,) = await self._task_creation.submit([built])
        return result

    async def _build(self, request: ApiRequest, message: Message, key: str | None) -> Ingest:
        task_request = build_task_request({**message.fields, "idempotencyKey": key})
        timeout_ms = message.fields["policy"].get("attemptTimeoutMs")
        if timeout_ms is not None:
            value = f"{timeout_ms // 1000}s"
            check_attempt_timeout("Upstash-Timeout", timeout_ms, value, self._context)
        built = await self._task_creation.build(
            request.tenant,
            task_request,
            trace_context_of(request),
            hide_body=message.hide_body,
            vendor=QSTASH,
        )
        try:
            self._check_flow_control(built.task.lane, message.flow_control)
        except BaseException:
            await self._task_creation.discard([built])
            raise
        return built

    def _check_flow_control(self, lane: str, flow_control: dict[str, int]) -> None:
        """Raise ApiError if the limits of the lane allow more than the message does."""
        if not flow_control:
            return
        limits, _ = self._context.engine.configured_limits(lane)
        wanted: dict[str, float] = {}
        if "parallelism" in flow_control:
            wanted["concurrency"] = flow_control["parallelism"]
        if "rate" in flow_control:
            wanted["ratePerSecond"] = flow_control["rate"] / flow_control.get("period", 1)
        actual = {"concurrency": limits.concurrency, "ratePerSecond": limits.rate_per_second}
        if any((actual[name] or float("inf")) > value for name, value in wanted.items()):
            document = msgspec.json.encode(wanted).decode()
            rule = (
                "has stricter limits than the lane of the message. Set the limits of the lane "
                f"once: PUT /downstreams/{public_lane_name(lane)} with the body {document}"
            )
            raise invalid("Upstash-Flow-Control-Value", rule)


def translate_message(
    destination: str, headers: Collection[tuple[str, str]], body: bytes, now_ms: int
) -> Message:
    """Return the message for the headers and the body of a request, or raise ApiError."""
    if len(headers) > _MAX_HEADERS:
        raise invalid("headers", f"must have at most {_MAX_HEADERS} entries", len(headers))
    options: dict[str, str] = {}
    forwarded_values: dict[str, list[str]] = {}
    for given_name, value in headers:
        name = given_name.lower()
        if name in {"content-type", f"{_FORWARD_PREFIX}content-type"}:
            forwarded_values["content-type"] = [value]
        elif name.startswith(_FORWARD_PREFIX):
            forwarded_values.setdefault(name.removeprefix(_FORWARD_PREFIX), []).append(value)
        elif name.startswith(_PREFIX):
            _check_header_name(name)
            if name in options:
                raise invalid(_HEADERS[name], "must be given only once")
            if name in _HEADERS:
                options[name] = value.strip()
    # Joined at the end, because a batch can have many spellings of one name with long values.
    forwarded = {name: ", ".join(values) for name, values in forwarded_values.items()}
    fields: dict[str, Any] = {
        "targetUrl": destination,
        "method": options.get("upstash-method", "POST").upper(),
        "headers": forwarded,
        "bodyBase64": b64encode(body).decode() if body else None,
        "policyId": QSTASH_POLICY,
        "policy": _policy_overrides(options),
        "callbackUrl": options.get("upstash-callback"),
        "laneKey": options.get("upstash-flow-control-key"),
    }
    if "upstash-not-before" in options:  # has precedence over Upstash-Delay, as in QStash
        not_before = _parse_number("upstash-not-before", options["upstash-not-before"])
        if not_before > _MAX_SECONDS:
            rule = "must be seconds since 1970 (are these milliseconds?)"
            raise invalid("Upstash-Not-Before", rule, not_before)
        if not_before * 1000 > now_ms:
            fields["nextAttemptAt"] = not_before * 1000
    elif "upstash-delay" in options:
        fields["delayMs"] = _parse_duration("upstash-delay", options["upstash-delay"])
    return Message(
        fields,
        _deduplication_keys(options, destination, forwarded, body),
        _parse_flow_control(options.get("upstash-flow-control-value", "")),
        _is_body_redacted(options.get("upstash-redact-fields", "")),
    )


def _check_header_name(name: str) -> None:
    if name in _HEADERS or name.startswith(_IGNORED_PREFIXES):
        return
    shown_name = name.title()[:_MAX_SHOWN_NAME_CHARS]
    for prefix, rule in _UNSUPPORTED_HEADERS.items():
        if name.startswith(prefix):
            raise invalid(shown_name, rule)
    suggestion = did_you_mean(shown_name, _HEADERS.values(), otherwise="the headers are")
    raise invalid(shown_name, f"is not a known header; {suggestion}")


def _policy_overrides(options: dict[str, str]) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    retries = None
    if "upstash-retries" in options:
        retries = _parse_number("upstash-retries", options["upstash-retries"])
        if retries >= MAX_ATTEMPTS:
            raise invalid("Upstash-Retries", f"must be less than {MAX_ATTEMPTS}", retries)
        overrides["maxAttempts"] = retries + 1
    if "upstash-retry-delay" in options:
        # If the tenant has replaced the policy with one that has more retries, the last delay
        # repeats.
        count = _DEFAULT_RETRIES if retries is None else max(retries, 1)
        if count > _MAX_COMPUTED_DELAYS:
            rule = f"must be at most {_MAX_COMPUTED_DELAYS} with Upstash-Retry-Delay"
            raise invalid("Upstash-Retries", rule, retries)
        with convert_errors("Upstash-Retry-Delay"):
            delays = plan_delays_ms(options["upstash-retry-delay"], count)
        overrides |= {"backoffType": "SCHEDULE", "scheduleMs": delays, "jitterType": "NONE"}
    if "upstash-timeout" in options:
        timeout_ms = _parse_duration("upstash-timeout", options["upstash-timeout"])
        overrides["attemptTimeoutMs"] = timeout_ms
    return overrides


def _deduplication_keys(
    options: dict[str, str], destination: str, forwarded: dict[str, str], body: bytes
) -> DeduplicationKeys | None:
    deduplication_id = options.get("upstash-deduplication-id")
    if deduplication_id is not None:
        if not 0 < len(deduplication_id) <= _MAX_DEDUPLICATION_ID_CHARS:
            rule = f"must have 1 to {_MAX_DEDUPLICATION_ID_CHARS} characters"
            raise invalid("Upstash-Deduplication-Id", rule)
        prefix = f"{deduplication_id}@"
        is_ambiguous = _GENERATED_KEY.fullmatch(deduplication_id) is not None
        return DeduplicationKeys(f"{prefix}0" if is_ambiguous else deduplication_id, prefix)
    choice = options.get("upstash-content-based-deduplication", "false").lower()
    if choice not in {"true", "false"}:
        raise invalid("Upstash-Content-Based-Deduplication", "must be true or false", choice)
    if choice == "false":
        return None
    content = msgspec.msgpack.encode((destination, sorted(forwarded.items()), body))
    key = f"content-{sha256(content).hexdigest()}"
    return DeduplicationKeys(key, f"{key}:")


def _parse_flow_control(text: str) -> dict[str, int]:
    name, flow_control = "Upstash-Flow-Control-Value", dict[str, int]()
    if len(text) > _MAX_FLOW_CONTROL_CHARS:
        raise invalid(name, f"must have at most {_MAX_FLOW_CONTROL_CHARS} characters")
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key == "period":
            number = _parse_duration(name.lower(), value) // 1000
        elif key in {"parallelism", "rate"} and _NUMBER.fullmatch(value):
            number = int(value)
        else:
            number = 0
        if number < 1:
            rule = "must consist of parallelism=N, rate=N and period=DURATION"
            raise invalid(name, rule, text)
        flow_control[key] = number
    return flow_control


def _is_body_redacted(text: str) -> bool:
    fields = list(filter(None, (part.strip() for part in text.split(","))))
    for part in fields:
        if part != "body":
            rule = (
                "must be body: headers are redacted if their names suggest a secret, as in "
                "Authorization or X-Api-Key"
            )
            raise invalid("Upstash-Redact-Fields", rule, part)
    return bool(fields)


def _parse_number(name: str, text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise invalid(_HEADERS[name], "must be a whole number, at least 0", text)
    return int(text)


def _parse_duration(name: str, text: str) -> int:
    """Return milliseconds for a duration such as `10s`, `1h30m` or `2d`."""
    match = _DURATION.fullmatch(text)
    if match is None or not text:
        rule = "must be a duration, such as 10s, 5m, 2h, 1d or 1d12h"
        raise invalid(_HEADERS[name], rule, text)
    parts = zip(match.groups(default="0"), _UNITS_S, strict=True)
    duration_ms = sum(int(number) * unit_s * 1000 for number, unit_s in parts)
    if duration_ms > MAX_DURATION_MS:
        raise invalid(_HEADERS[name], "must be at most 100 years", text)
    return duration_ms


def _destination_of(request: ApiRequest) -> str:
    """Return the URL after `/v2/publish/`, with its query, which is the query of the request."""
    # `path` is percent-decoded. `raw_path` has the URL as it was sent.
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    destination = raw.partition(b"?")[0].partition(_PUBLISH_PATH)[2]
    if query := request.scope.get("query_string", b""):
        destination += b"?" + query
    return _check_destination(destination.decode("latin-1"))


def _check_destination(text: str) -> str:
    destination = text if "://" in text else unquote(text)
    if "://" not in destination:
        rule = "must be a URL with http:// or https://: URL groups and api/ are not supported"
        if _MERGED_SLASHES.match(destination):
            rule = "must have two slashes after the scheme: a proxy has merged them. Encode the URL"
        raise invalid("The destination", rule, destination[:100])
    return destination


def _vendor_name(field: str) -> str:
    """Return the name that a field of `POST /retry-tasks` has in QStash."""
    if field.startswith("headers."):
        return f"Upstash-Forward-{field.removeprefix('headers.')}"
    return _FIELD_NAMES.get(field.partition("[")[0], field)


def _finished_error(task: Task) -> ApiError:
    detail = (
        f"The message {task.id} is not in delivery any more: its task is {task.status.name} "
        f"(GET /retry-tasks/{task.id})."
    )
    return vendor_error(404, detail)
