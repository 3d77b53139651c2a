"""Hand a failed call off to the retry service, which retries the request later.

An adapter calls `try_hand_off` after a call has failed. If the service accepts the request as a
task, `try_hand_off` raises `HandedOff`. Otherwise it returns, and the adapter raises the error or
returns the last response, as without a hand-off. If the hand-off failed, a note on the error and a
log line give the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4
from zlib import crc32

from tarry.core.decide import HINT_SPREAD
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationTypeError, HandedOff, ResultNotAccepted
from tarry.runtime import scopes
from tarry.runtime.effects import effects
from tarry.runtime.error_record import attach_record, record_of
from tarry.runtime.functions import COROUTINE, flags_of
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from tarry.adapters.http.messages import HttpClientFunctions
    from tarry.core.policy import Policy
    from tarry.core.verdict import CallRecord
    from tarry.wire.tasks import RetryTask, SecretReference

T_co = TypeVar("T_co", covariant=True)

HAND_OFF_REASONS = frozenset({
    Reason.ATTEMPTS, Reason.BREAKER_OPEN, Reason.BUDGET_EMPTY, Reason.LIMIT,
    Reason.HINT_TOO_LONG, Reason.TOTAL_BUDGET, Reason.DEADLINE, Reason.RETRIES_OFF,
})  # fmt: skip
"""A call that is given up for one of these reasons may succeed later, and is handed off."""
HAND_OFF_TIMEOUT_S = 5.0
"""The longest time that a hand-off may take. The deadline of the failed call does not apply."""

_DROPPED_HEADERS = http.HOP_BY_HOP_HEADERS | frozenset({
    # Headers that belong to one attempt. The retry service sets its own for each attempt.
    "accept-encoding", "content-length", "expect", "traceparent", "tracestate",
    http.ATTEMPT_HEADER.lower(), http.DEADLINE_HEADER.lower(),
})  # fmt: skip
_FAILURE_PREFIX = "not handed off to the retry service: "
_NOTE_PREFIX = "tarry: " + _FAILURE_PREFIX


class TaskClient(Protocol[T_co]):
    """A client of the retry service: `tarry.Client` or `tarry.AsyncClient`."""

    def enqueue(
        self,
        url: str,
        body: bytes | None,
        *,
        method: str,
        headers: Mapping[str, str | SecretReference],
        key: str,
        delay: float | None,
        policy: str,
        overrides: Mapping[str, str] | None,
        prior_attempts: int,
    ) -> T_co:
        """Return when the service has stored the task; an async client returns an awaitable."""
        ...


SyncTaskClient: TypeAlias = "TaskClient[RetryTask]"
AsyncTaskClient: TypeAlias = "TaskClient[Awaitable[RetryTask]]"


@dataclass(frozen=True)
class HandOff(Generic[T_co]):
    """A client for hand-offs, and the name of the policy for the tasks that it creates.

    The argument `hand_off` of an adapter is a `HandOff`, or a client alone, for the service's
    policy `default`. `secrets` has names of secrets of the service by the names of headers, such as
    `{"Authorization": "orders-api"}`. If a request has such a header, its value is not handed off.
    Instead, the service sends the current value of the secret at each attempt.
    """

    client: TaskClient[T_co]
    policy: str = field(default="default", kw_only=True)
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], kw_only=True)

    def __post_init__(self) -> None:
        """Check policy and secrets; the adapter checks the client."""
        if not isinstance(self.policy, str):
            rule = "must be the name of a policy of the service"
            raise ConfigurationTypeError("policy", rule, self.policy)
        if not isinstance(self.secrets, Mapping) or not all(
            isinstance(text, str) for item in self.secrets.items() for text in item
        ):
            rule = 'must be a dict of names of secrets, such as {"Authorization": "orders-api"}'
            raise ConfigurationTypeError("secrets", rule)


SyncHandOff: TypeAlias = "SyncTaskClient | HandOff[RetryTask]"
AsyncHandOff: TypeAlias = "AsyncTaskClient | HandOff[Awaitable[RetryTask]]"


class _CannotHandOff(Exception):
    """The request cannot be handed off. The message is the reason."""


class HandOffSender:
    """Hands failed calls of one adapter off to the retry service; does nothing without a client.

    Args:
        hand_off: the adapter's argument `hand_off`.
        policy: the policy of the adapter.
        http_functions: the functions that are specific to the HTTP client.
    """

    def __init__(
        self,
        hand_off: SyncHandOff | AsyncHandOff | None,
        policy: Policy,
        http_functions: HttpClientFunctions,
    ) -> None:
        self._task_policy: str = "default"
        self._secrets: dict[str, str] = {}
        task_client: object = hand_off
        if isinstance(hand_off, HandOff):
            task_client, self._task_policy = hand_off.client, hand_off.policy
            self._secrets = {name.lower(): secret for name, secret in hand_off.secrets.items()}
        enqueue = getattr(task_client, "enqueue", None)
        is_async = http_functions.is_async
        is_valid = callable(enqueue) and bool(flags_of(enqueue) & COROUTINE) is is_async
        if task_client is not None and (isinstance(task_client, type) or not is_valid):
            name, reason = ("AsyncClient", "is async") if is_async else ("Client", "is not async")
            rule = f'must be a tarry.{name}("http://127.0.0.1:8080"), because this adapter {reason}'
            raise ConfigurationTypeError("hand_off", rule, task_client)
        self._task_client: Any = task_client
        self._policy = policy
        self._http_functions = http_functions

    def try_hand_off(self, request: Any, error: Exception) -> None:
        """Hand off the call that failed with this error and raise HandedOff, or return."""
        # With a sync client the coroutine awaits nothing, so one `send` runs it to its end.
        with suppress(StopIteration):
            self.async_try_hand_off(request, error).send(None)

    async def async_try_hand_off(self, request: Any, error: Exception) -> None:
        """Like `try_hand_off`, for async adapters."""
        call_record = record_of(error)
        if self._task_client is None or call_record is None:
            return
        reason = call_record.reason
        if reason is None or reason not in HAND_OFF_REASONS:
            return
        try:
            arguments = self._enqueue_arguments(request, error)
            arguments["prior_attempts"] = call_record.attempts
            token = scopes.current_scope.set(None)
            try:
                scopes.enter(effects.now() + HAND_OFF_TIMEOUT_S)
                task = self._task_client.enqueue(**arguments)
                if self._http_functions.is_async:
                    task = await task
            finally:
                scopes.current_scope.reset(token)
        except Exception as hand_off_error:
            _report_failure(error, call_record, hand_off_error)
            return
        except BaseException:
            await self._release_response(error)
            raise
        await self._release_response(error)
        task_id = getattr(task, "task_id", task)
        message = f"{call_record.operation}: handed off as task {task_id}: {reason.description}"
        handed_off = HandedOff(message, task)
        # An outer retry would create a second task. No other call can raise this new error object,
        # so the error record is valid without a check of the traceback: see `error_record`.
        attach_record(handed_off, call_record, no_outer_retry=True, check_traceback=False)
        raise handed_off from error

    async def _release_response(self, error: Exception) -> None:
        """Release the connection of the last response, if the call failed with a response."""
        if isinstance(error, ResultNotAccepted):
            released = self._http_functions.release_connection(error.result)
            if self._http_functions.is_async:
                await released

    def _enqueue_arguments(self, request: Any, error: Exception) -> dict[str, Any]:
        """Return the arguments for `enqueue`; raise _CannotHandOff if the request is unsuitable."""
        method, url, header_lines, body = self._http_functions.snapshot(request)
        scheme, authority, path, query, _ = urlsplit(url)
        # Drop the credentials before the "@": the HTTP client has put them into the headers.
        authority = authority.rpartition("@")[2]
        headers = _task_headers(header_lines)
        host = headers.get("host", authority)
        if _normalized_origin(scheme, host) == _normalized_origin(scheme, authority):
            # The retry service derives the Host header from the URL. Any other Host header is kept,
            # so that the service rejects the task and does not send it with a wrong Host.
            headers.pop("host", None)
        key_header = self._policy.idempotency_key_header
        key = headers.pop(key_header.lower(), "").strip()
        if not http.is_repeatable(method, has_key=bool(key)):
            raise _CannotHandOff(
                f'a {method} is not repeatable without an {key_header}; set idempotency_key="auto"'
            )
        if body is None:
            raise _CannotHandOff(
                "the body of the request is a file or a stream; only bytes can be handed off"
            )
        overrides = None
        if key:
            # The service repeats the key byte by byte, whatever the policy of the task says.
            overrides = {"idempotencyKeyHeader": key_header, "idempotencyKeyFormat": "PLAIN"}
        else:
            key = uuid4().hex
        # A secret is only sent to a target to which the caller has sent the header itself.
        references = {n: {"secret": secret} for n, secret in self._secrets.items() if n in headers}
        return {
            "url": f"{scheme}://{authority}{path or '/'}{'?' if query else ''}{query}",
            "body": body or None,
            "method": method,
            "headers": headers | references,
            "key": key,
            "delay": self._first_delay(error, key),
            "policy": self._task_policy,
            "overrides": overrides,
        }

    def _first_delay(self, error: Exception, key: str) -> float | None:
        """Return the delay that the last response requested; None if it requested none.

        Up to 10 % are added, so that the tasks of many clients are not due at the same time. The
        addition depends only on the key: a request that is handed off twice has the same delay.
        """
        if not isinstance(error, ResultNotAccepted):
            return None
        classify = self._http_functions.classify_response
        repeatable = True  # either value gives the same hint
        hint = classify(self._policy, repeatable, error.result).hint
        requested_s = None if hint is None else hint.delay
        if not requested_s:
            return None
        return requested_s * (1.0 + HINT_SPREAD * crc32(key.encode()) / 2**32)


def _report_failure(call_error: Exception, record: CallRecord, hand_off_error: Exception) -> None:
    """Report why a call was not handed off: in a note on the call's error, and in the log.

    The log is needed for calls that return their last response, because a response has no notes.
    """
    is_unsuitable = isinstance(hand_off_error, _CannotHandOff)
    error_type = "" if is_unsuitable else f"{type(hand_off_error).__name__}: "
    description = f"{error_type}{hand_off_error}"
    notes: list[str] = getattr(call_error, "__notes__", [])
    other_notes = [note for note in notes if not note.startswith(_NOTE_PREFIX)]
    # Not `setattr`: the class of the error may forbid it.
    object.__setattr__(call_error, "__notes__", [*other_notes, _NOTE_PREFIX + description])
    import logging

    fields = {"event": "tarry.not_handed_off", "operation": record.operation, "why": description}
    message = f"{_FAILURE_PREFIX}%s, operation=%s"
    logging.getLogger("tarry").warning(
        message, description, record.operation, extra={"tarry": fields}
    )


def _task_headers(header_lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers of the task, with repeated headers joined (RFC 9110, 5.3)."""
    headers: dict[str, str] = {}
    for original_name, value in header_lines:
        name = original_name.lower()
        separator = "; " if name == "cookie" else ", "
        headers[name] = f"{headers[name]}{separator}{value}" if name in headers else value
    # The Connection header lists further headers that apply only to this connection.
    hop_by_hop = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    dropped = _DROPPED_HEADERS | hop_by_hop
    return {name: value for name, value in headers.items() if name not in dropped}


def _normalized_origin(scheme: str, authority: str) -> str:
    """Return the normalized origin, for comparison; an invalid authority is returned unchanged."""
    try:
        url = urlsplit(f"{scheme}://{authority}")
        return http.origin_of(scheme, url.hostname or "", url.port)
    except ValueError:
        return authority
