"""What the HTTP adapters share: functions over the headers of a request and of its answer.

No client is known here. A request is seen through its method and its headers, a mapping that does
not tell upper case from lower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import uuid4

from tarry.core.outcome import SUCCESS, outcome_of_status
from tarry.core.verdict import Reason
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime import deadlines
from tarry.runtime.callables import plain_function
from tarry.runtime.clocks import world
from tarry.runtime.marks import record_of
from tarry.wire import http

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, MutableMapping

    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy

Key: TypeAlias = "str | Callable[[Any], str | None] | None"
"""None, "auto" for a random key, or a function of the request."""

_FIRST_ERROR = 400
_SHORT = 65_536
"""Bytes that cost less to read than a new connection."""
_DIGITS = len(str(_SHORT))
_INSTANT = 0.001
"""Seconds: clients take a timeout of 0 for a mistake, or for "do not block"."""

_NO_KEY = (
    "tarry: the server may have read the request, and its method is not idempotent; an "
    'Idempotency-Key (idempotency_key="auto") makes it safe to send again'
)
_USED_UP = (
    "tarry: the server may have read the request, and its body cannot be sent a second time; "
    "bytes can"
)


def checked_key(idempotency_key: Key) -> Key:
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


def put_key(headers: MutableMapping[str, str], method: str, key: Key, request: Any) -> bool:
    """Put a key on a request that needs one; say whether it has one, its user's own or ours."""
    if http.KEY in headers:
        return True
    if key is None or method in http.IDEMPOTENT_METHODS:
        return False
    text = uuid4().hex if isinstance(key, str) else key(request)
    if text is None:
        return False
    headers[http.KEY] = http.key_text(text)
    return True


def announce(headers: MutableMapping[str, str], attempt: int, limit: float | None) -> float | None:
    """Tell the server which attempt this is and how long it has; return that: None is for ever.

    `limit` is the policy's for one attempt; the ambient deadline may leave less.
    """
    if attempt > 1:
        headers[http.ATTEMPT] = str(attempt)
    elif http.ATTEMPT in headers:  # a redirect has copied it from the request before
        del headers[http.ATTEMPT]
    left = deadlines.remaining()
    if left is not None:
        limit = left if limit is None else min(limit, left)
    if limit is None:
        return None
    headers[http.DEADLINE] = http.deadline_text(limit)
    return max(limit, _INSTANT)


def judge(status: int, headers: Mapping[str, str], policy: Policy, *, repeatable: bool) -> Outcome:
    """Classify an answer."""
    retryable = policy.retryable_statuses
    if status < _FIRST_ERROR and status not in retryable:
        return SUCCESS
    now = world.epoch()
    return outcome_of_status(status, headers, now=now, retryable=retryable, safe=repeatable)


def is_short(headers: Mapping[str, str]) -> bool:
    """Say whether the body of an answer is worth reading, only to keep its connection."""
    length = headers.get("Content-Length", "")
    return (
        length.isascii() and length.isdigit() and len(length) <= _DIGITS and int(length) <= _SHORT
    )


def explain(error: Exception, *, replayable: bool) -> None:
    """Add to the note on an error why its request was not sent again, where safety forbade it."""
    record = record_of(error)
    if record is None or record.reason is not Reason.UNSAFE:
        return
    why = _NO_KEY if replayable else _USED_UP
    if why not in getattr(error, "__notes__", ()):  # one object may be raised many times
        error.add_note(why)
