"""What the HTTP adapters share: functions over the headers of a request and of its answer.

No client is known here. A request is seen through its method and its headers, a mapping that does
not tell upper case from lower.
"""

from __future__ import annotations

import warnings
from ssl import SSLEOFError, SSLError, SSLZeroReturnError
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

from tarry.core.outcome import SUCCESS, outcome_of_status
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError, ConfigurationTypeError, ResultNotAccepted
from tarry.runtime import deadlines
from tarry.runtime.callables import plain_function
from tarry.runtime.clocks import system
from tarry.runtime.error_record import MARK, record_of
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping

    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy
    from tarry.errors import BlockingWait

IdempotencyKey: TypeAlias = "str | Callable[[Any], str | None] | None"
"""None, "auto" for a random key, or a function of the request."""
HeaderPairs: TypeAlias = "Mapping[str, str] | Iterable[tuple[str, str]]"
"""The headers of an answer."""

_deadline = deadlines.scope.get

_FIRST_ERROR = 400
MAX_DRAINED_BYTES = 65_536
"""Bytes that cost less to read than a new connection."""
_DIGITS = len(str(MAX_DRAINED_BYTES))
DRAIN_TIMEOUT_S = 0.1
"""Seconds that such a body may take."""
MIN_TIMEOUT_S = 0.001
"""Seconds: clients take a timeout of 0 for a mistake, or for "do not block"."""

_NO_KEY = (
    "tarry: the server may have read the request, and its method is not idempotent; an "
    'Idempotency-Key (idempotency_key="auto") makes it safe to send again'
)
_USED_UP = (
    "tarry: the server may have read the request, and its body cannot be sent a second time; "
    "bytes can"
)


def check_idempotency_key(idempotency_key: IdempotencyKey) -> IdempotencyKey:
    """Return the argument of an adapter, or say what is wrong with it."""
    if idempotency_key is None or idempotency_key == "auto":
        return idempotency_key
    wanted = 'idempotency_key must be "auto", a function of the request, or None, got '
    if isinstance(idempotency_key, str):
        msg = f"{wanted}{idempotency_key!r}: one key for all requests would make them one"
        raise ConfigurationError(msg)
    if not callable(idempotency_key):
        msg = f"{wanted}{idempotency_key!r}"
        raise ConfigurationTypeError(msg)
    plain_function("idempotency_key", idempotency_key)
    return idempotency_key


def make_repeatable(
    method: str, headers: MutableMapping[str, str], key: IdempotencyKey, request: Any
) -> bool:
    """Say whether a request may be sent again although the server may have read it.

    One that needs a key for that gets one, unless it has its user's own or nobody wants that.
    """
    if method in http.IDEMPOTENT_METHODS or headers.get(http.KEY):
        return True
    if key is not None:
        text = uuid4().hex if isinstance(key, str) else key(request)
        if text is not None:
            headers[http.KEY] = http.key_text(text)
            return True
    return http.repeatable(method, keyed=False)


def attempt_time_limit(attempt_timeout: float | None) -> float | None:
    """Return the seconds that an attempt has: what the policy gives it, or the deadline leaves."""
    if _deadline() is None:
        return attempt_timeout
    limits = (attempt_timeout, deadlines.remaining())
    return min((limit for limit in limits if limit is not None), default=None)


def set_attempt_headers(
    headers: MutableMapping[str, str], attempt: int, limit: float | None
) -> None:
    """Tell the server which attempt this is and how long it has; None is for ever."""
    if attempt > 1:
        headers[http.ATTEMPT] = str(attempt)
    if limit is not None:
        headers[http.DEADLINE] = http.deadline_text(limit)


def response_classifier(
    pairs: Callable[[Any], HeaderPairs],
) -> Callable[[Policy, bool, Any], Outcome]:
    """Return what classifies answers that have a `status_code`.

    `pairs` returns the headers, each line of a repeated one by itself: joined, they say nothing.
    """

    def judge(policy: Policy, repeatable: bool, response: Any) -> Outcome:  # noqa: FBT001
        status: int = response.status_code
        if status < _FIRST_ERROR and status not in policy.retryable_statuses:
            return SUCCESS  # at once: this is on the path of every request
        return classify_response(status, pairs(response), policy, repeatable=repeatable)

    return judge


def classify_response(
    status: int, headers: HeaderPairs, policy: Policy, *, repeatable: bool
) -> Outcome:
    """Classify an answer by its status and headers."""
    now, retryable = system.unix_time(), policy.retryable_statuses
    return outcome_of_status(status, headers, now=now, retryable=retryable, safe=repeatable)


def classify_proxy_refusal(status: int) -> Outcome:
    """Classify a proxy's refusal to connect us: the server has seen nothing."""
    return outcome_of_status(status, now=system.unix_time())


def is_permanent_tls_error(error: object) -> bool:
    """Say whether TLS failed for good. A certificate does not heal; a lost connection may."""
    lost = isinstance(error, (SSLEOFError, SSLZeroReturnError))
    return isinstance(error, SSLError) and not lost


def is_worth_draining(headers: Mapping[str, str]) -> bool:
    """Return whether a body is short enough to read it only to keep its connection open.

    A chunked body has no Content-Length: it counts as short until it has been read too long.
    """
    length = headers.get("Content-Length", "0")
    return (
        length.isascii()
        and length.isdigit()
        and len(length) <= _DIGITS
        and int(length) <= MAX_DRAINED_BYTES
    )


def drain_timeout() -> float:
    """Return the seconds that such a body may take: a wait is not held up by it."""
    left = deadlines.remaining()
    return DRAIN_TIMEOUT_S if left is None else min(DRAIN_TIMEOUT_S, left)


def final_response(error: ResultNotAccepted) -> Any:
    """Return the answer that a call ended with. `tarry.record_of(answer)` says why it ended."""
    object.__setattr__(error.result, MARK, getattr(error, MARK, None))
    return error.result


def on_blocking_wait(error: BlockingWait) -> Any:
    """Return the answer, or raise the error, after which a wait would freeze an event loop."""
    cause = error.__cause__
    if isinstance(cause, ResultNotAccepted):
        warnings.warn(f"{error}; this answer is returned as it is", RuntimeWarning, stacklevel=2)
        return cause.result
    if cause is None:
        raise error
    cause.add_note(f"tarry: {error}")
    raise cause


def add_safety_note(error: Exception, *, replayable: bool) -> None:
    """Add to the note on an error why its request was not sent again, where safety forbade it."""
    record = record_of(error)
    if record is None or record.reason is not Reason.UNSAFE:
        return
    why = _NO_KEY if replayable else _USED_UP
    if why not in getattr(error, "__notes__", ()):  # one object may be raised many times
        error.add_note(why)
