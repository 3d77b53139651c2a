"""Functions that the HTTP adapters share. They need header mappings that ignore case."""

from __future__ import annotations

import warnings
from ssl import SSLEOFError, SSLError, SSLZeroReturnError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import uuid4

from tarry.core.outcome import SUCCESS, outcome_of_status
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError, ConfigurationTypeError, ResultNotAccepted
from tarry.runtime import deadlines, derived_keys, scopes
from tarry.runtime.effects import effects
from tarry.runtime.error_record import RECORD_ATTRIBUTE, record_of
from tarry.runtime.functions import check_not_async
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping

    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy
    from tarry.errors import BlockingWait

KeyOption: TypeAlias = "str | Callable[[Any], str | None] | None"
"""An adapter's `idempotency_key`: None, "auto" for random or derived keys, or a function of the
request."""
ResponseHeaders: TypeAlias = "Mapping[str, str] | Iterable[tuple[str, str]]"
"""The headers of a response, as a mapping or as pairs of a name and a value."""

_get_scope = scopes.current_scope.get
_get_keyed_request = derived_keys.current_request.get

_MIN_ERROR_STATUS = 400
_MAX_DRAINED_BYTES = 65_536
"""Up to this size, reading the rest of a body (draining) is cheaper than a new connection."""
_MAX_CONTENT_LENGTH_DIGITS = len(str(_MAX_DRAINED_BYTES))
DRAIN_TIMEOUT_S = 0.1
MIN_TIMEOUT_S = 0.001
"""The shortest timeout passed to HTTP clients. Some reject 0, or treat it as non-blocking."""

_REASONS_WITHOUT_RETRIES = (Reason.NOT_REPEATABLE, Reason.PERMANENT, Reason.RETRIES_OFF)

_NO_KEY_NOTE = (
    "tarry: the server may have read the request, and its method is not idempotent; an "
    'Idempotency-Key (idempotency_key="auto") makes it repeatable'
)
_BODY_CONSUMED_NOTE = (
    "tarry: the server may have read the request, and its body cannot be sent a second time; "
    "pass the body as bytes"
)


class RequestSnapshot(NamedTuple):
    """A request in a form that does not depend on the HTTP client."""

    method: str
    url: str
    headers: Iterable[tuple[str, str]]
    body: bytes | None
    """b"" if the request has no body; None if its body is not bytes, such as a file."""


class HttpClientFunctions(NamedTuple):
    """The functions of an adapter that depend on its HTTP client, such as httpx."""

    is_async: bool
    classify_error: Callable[[Exception, bool], Outcome]
    """Takes an error and whether the request is repeatable."""
    classify_response: Callable[[Policy, bool, Any], Outcome]
    """Takes the policy, whether the request is repeatable, and a response."""
    release_connection: Callable[[Any], Any]
    """Drains a short body and releases the connection, so that it can be reused; returns whether
    the user can still read the response. A coroutine function if `is_async`."""
    snapshot: Callable[[Any], RequestSnapshot]
    async_client: str = ""
    """The client to use in a coroutine instead, for errors; "" if `is_async`."""


def check_idempotency_key(idempotency_key: KeyOption) -> KeyOption:
    """Return an adapter's argument `idempotency_key`; raise ConfigurationError if it is invalid."""
    if idempotency_key is None or idempotency_key == "auto":
        return idempotency_key
    rule = 'must be "auto", a function of the request, or None'
    if isinstance(idempotency_key, str):
        rule = f"{rule}, got {idempotency_key!r}: all requests would have the same key"
        raise ConfigurationError("idempotency_key", rule)
    if not callable(idempotency_key):
        raise ConfigurationTypeError("idempotency_key", rule, idempotency_key)
    check_not_async("idempotency_key", idempotency_key)
    return idempotency_key


def try_make_repeatable(
    method: str,
    headers: MutableMapping[str, str],
    idempotency_key: KeyOption,
    policy: Policy,
    request: Any,
    snapshot: Callable[[Any], RequestSnapshot],
) -> bool:
    """Add an idempotency key to `headers` if needed; return whether the request is repeatable.

    A repeatable request can safely be sent again after the server has read it. A key is needed if
    the method is not idempotent and `headers` has no key. `policy` has the header of the key;
    `snapshot` is called only for a derived key.
    """
    if method in http.IDEMPOTENT_METHODS or headers.get(policy.idempotency_key_header):
        return True
    if idempotency_key is not None:
        if not isinstance(idempotency_key, str):
            key = idempotency_key(request)
        # The only string that `check_idempotency_key` allows is "auto".
        elif (keyed_request := _get_keyed_request()) is None:
            key = uuid4().hex
        else:
            _, url, _, body = snapshot(request)
            key = keyed_request.derive_call_key(method, url, body)
        if key is not None:
            headers[policy.idempotency_key_header] = http.format_idempotency_key(
                http.check_idempotency_key(key), policy.idempotency_key_format
            )
            return True
    return http.is_repeatable(method, has_key=False)  # slower, but accepts lower case too


def limit_by_deadline(timeout_s: float | None) -> float | None:
    """Return the shorter of the timeout and the time until the deadline; None if both are None."""
    if _get_scope() is None:
        return timeout_s
    limits = (timeout_s, deadlines.remaining())
    return min((limit for limit in limits if limit is not None), default=None)


def set_attempt_headers(
    headers: MutableMapping[str, str], attempt_number: int, time_limit_s: float | None
) -> None:
    """Set the header with the attempt number (from 2 on), and the header with the time limit."""
    if attempt_number > 1:
        headers[http.ATTEMPT_HEADER] = str(attempt_number)
    if time_limit_s is not None:
        headers[http.DEADLINE_HEADER] = http.format_deadline_ms(time_limit_s)


def make_response_classifier(
    get_headers: Callable[[Any], ResponseHeaders],
) -> Callable[[Policy, bool, Any], Outcome]:
    """Return a function that classifies responses with an attribute `status_code`.

    `get_headers` returns one pair for each header line: joined values could not be parsed.
    """

    def classify(policy: Policy, repeatable: bool, response: Any) -> Outcome:  # noqa: FBT001 - passed by position
        status: int = response.status_code
        # Hot path: most responses can be classified without reading their headers.
        if status < _MIN_ERROR_STATUS and status not in policy.retryable_statuses:
            return SUCCESS
        return classify_status(status, get_headers(response), policy, repeatable=repeatable)

    return classify


def classify_status(
    status: int, headers: ResponseHeaders, policy: Policy, *, repeatable: bool
) -> Outcome:
    """Classify the status of a response, with the hints in its headers."""
    now, retryable = effects.unix_time(), policy.retryable_statuses
    return outcome_of_status(status, headers, now=now, retryable=retryable, repeatable=repeatable)


def classify_proxy_refusal(status: int) -> Outcome:
    """Classify a proxy's refusal to open a tunnel. The server has not seen the request."""
    return outcome_of_status(status, now=effects.unix_time())


def is_permanent_tls_error(error: object) -> bool:
    """Return whether `error` is a TLS error, other than a connection that was lost."""
    return isinstance(error, SSLError) and not isinstance(error, (SSLEOFError, SSLZeroReturnError))


def is_worth_draining(headers: Mapping[str, str]) -> bool:
    """Return whether the body is short or of unknown length, according to its headers."""
    length = headers.get("Content-Length", "0")
    is_number = length.isascii() and length.isdigit() and len(length) <= _MAX_CONTENT_LENGTH_DIGITS
    return is_number and int(length) <= _MAX_DRAINED_BYTES


class DrainedBody:
    """Collects the rest of a body that the user has not read, within limits of size and time."""

    def __init__(self) -> None:
        self.timeout: float = limit_by_deadline(DRAIN_TIMEOUT_S) or 0.0
        """The seconds that are available for reading."""
        self._ends_at = effects.now() + self.timeout
        self._chunks: list[bytes] = []
        self._bytes_left = _MAX_DRAINED_BYTES

    def add(self, chunk: bytes) -> bool:
        """Add a chunk; return False if the body is now too long, or reading took too long."""
        self._chunks.append(chunk)
        self._bytes_left -= len(chunk)
        return self._bytes_left >= 0 and effects.now() <= self._ends_at

    def content(self) -> bytes:
        """Return the chunks that were added, joined."""
        return b"".join(self._chunks)


def final_response(error: ResultNotAccepted) -> Any:
    """Return the last response of a call that was given up, with the record for `record_of`."""
    object.__setattr__(error.result, RECORD_ATTRIBUTE, getattr(error, RECORD_ATTRIBUTE, None))
    return error.result


def forbids_more_retries(error: ResultNotAccepted) -> bool:
    """Return whether the layers above must not retry a call that was given up.

    They may retry what this layer has not: a request that is not repeatable here, or any request if
    the policy has a single attempt or retries are off.
    """
    call_record = record_of(error)
    if call_record is None or call_record.reason in _REASONS_WITHOUT_RETRIES:
        return False
    return call_record.attempts > 1 or call_record.reason is not Reason.ATTEMPTS


def last_response_or_raise(error: BlockingWait) -> Any:
    """End a call whose next wait would block the event loop: return its response, or raise."""
    cause = error.__cause__
    if isinstance(cause, ResultNotAccepted):
        warnings.warn(f"{error}; this response is returned", RuntimeWarning, stacklevel=2)
        return cause.result
    if cause is None:
        raise error
    cause.add_note(f"tarry: {error}")
    raise cause


def add_not_repeatable_note(error: Exception, *, can_resend_body: bool) -> None:
    """Add a note to an error if its request was not retried because it is not repeatable."""
    call_record = record_of(error)
    if call_record is None or call_record.reason is not Reason.NOT_REPEATABLE:
        return
    note = _NO_KEY_NOTE if can_resend_body else _BODY_CONSUMED_NOTE
    if note not in getattr(error, "__notes__", ()):  # the same object may be raised several times
        error.add_note(note)
