"""Outcomes: results of attempts, classified from an HTTP status, a gRPC code or an exception.

An outcome describes only its attempt. `tarry.core.decide` decides whether to retry.
"""

from __future__ import annotations

from enum import StrEnum
from errno import ECONNREFUSED, EHOSTDOWN, EHOSTUNREACH, ENETDOWN, ENETUNREACH
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tarry.core.checks import check_count, check_one_of
from tarry.core.values import ImmutableValue

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from tarry.core.hints import Hint


class Kind(StrEnum):
    """The class of an outcome.

    TRANSIENT: retryable. THROTTLED: retryable after a longer delay. OVERLOADED: retryable, but the
    server said not to retry, for example in an overload. PERMANENT: not retryable.
    """

    SUCCESS = "success"
    TRANSIENT = "transient"
    THROTTLED = "throttled"
    OVERLOADED = "overloaded"
    PERMANENT = "permanent"


class Outcome(ImmutableValue):
    """The classified result of one attempt.

    hint: whether and when the server wants the next attempt, from Retry-After for example.
    repeatable: the operation is idempotent, or the dependency certainly did not receive it.
    retried_below: an inner retry loop has already retried the operation and given up.
    timeout: the attempt or the server timed out, for which some retry budgets charge more.
    local: the attempt failed in this process, before the dependency was called.
    detail: the HTTP status, the gRPC code or the name of the exception type, for logs.
    """

    __match_args__ = _fields = (
        "kind", "hint", "repeatable", "retried_below", "timeout", "local", "detail",
    )  # fmt: skip
    __slots__ = _fields

    kind: Kind
    hint: Hint | None
    repeatable: bool
    retried_below: bool
    timeout: bool
    local: bool
    detail: str

    def __init__(
        self,
        kind: Kind,
        hint: Hint | None = None,
        *,
        repeatable: bool = True,
        retried_below: bool = False,
        timeout: bool = False,
        local: bool = False,
        detail: str = "",
    ) -> None:
        if not isinstance(kind, Kind):
            check_one_of("kind", kind, [known.value for known in Kind])
            kind = Kind(kind)
        self._set_fields(kind, hint, repeatable, retried_below, timeout, local, detail)

    def replace(self, **changes: Any) -> Outcome:
        """Return a copy with some fields changed."""
        return Outcome(**(self._asdict() | changes))

    @property
    def counts_as_failure(self) -> bool:
        """Whether the attempt failed because of the dependency: neither locally nor permanently."""
        return not self.local and self.kind is not Kind.SUCCESS and self.kind is not Kind.PERMANENT


SUCCESS = Outcome(Kind.SUCCESS)
TRANSIENT = Outcome(Kind.TRANSIENT)
PERMANENT = Outcome(Kind.PERMANENT)

PERMANENT_SERVER_ERRORS = frozenset({501, 505, 506, 508, 510, 511})
"""Statuses 5xx with which the same request fails again: the server lacks a feature that the request
needs (501, 505, 510) or is not configured correctly (506, 508), or the network has a login (511).
"""
# Proxies and CDNs send many other statuses 5xx when a server is down or overloaded: 520 to 530
# (Cloudflare), 529, 598, 599. So each status 5xx is retryable, except for the few above.
RETRYABLE_STATUSES = frozenset({408, 425, 429, *range(500, 600)}) - PERMANENT_SERVER_ERRORS
FAILURE_STATUSES = frozenset(range(300, 600))
"""All statuses that are not a success."""
THROTTLED_STATUSES = frozenset({429, 529})
"""Too Many Requests, and "overloaded" of several APIs, among them Anthropic's."""
RETRYABLE_CODES = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})

GRPC_CODES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""The names of the gRPC status codes; the index is the number of the code."""

_MIN_ERROR_STATUS = 400
_TIMEOUT_STATUSES = frozenset({408, 504})
_CONNECT_ERRNOS = frozenset({ECONNREFUSED, EHOSTDOWN, EHOSTUNREACH, ENETDOWN, ENETUNREACH})


def outcome_of_status(
    status: int,
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    *,
    now: float,
    retryable: AbstractSet[int] = RETRYABLE_STATUSES,
    repeatable: bool = True,
) -> Outcome:
    """Classify an HTTP response; `now` is in epoch seconds, to compare with dates in `headers`.

    `repeatable`: the request is idempotent, so it can be sent again although the server got it.
    """
    check_count("status", status)
    if status < _MIN_ERROR_STATUS and status not in retryable:
        return SUCCESS
    from tarry.core.hints import hint_from_headers  # imported only after a failure

    hint = hint_from_headers(headers, now)
    return outcome_of_error_status(status, hint, status in retryable, repeatable)


def outcome_of_error_status(
    status: int,
    hint: Hint | None,
    is_retryable: bool,  # noqa: FBT001 - the cache takes 0.3 us more with keywords
    repeatable: bool = True,  # noqa: FBT001, FBT002 - see above
) -> Outcome:
    """Classify an HTTP response whose status is not a success; `hint` is from its headers."""
    # There are few different outcomes without a hint, so they are cached: building one takes 2 us.
    build = _build_status_outcome if hint is not None else _cached_status_outcome
    return build(status, hint, is_retryable, repeatable)


def _build_status_outcome(
    status: int,
    hint: Hint | None,
    is_retryable: bool,  # noqa: FBT001 - called with the arguments of `outcome_of_error_status`
    repeatable: bool,  # noqa: FBT001 - see above
) -> Outcome:
    kind = Kind.THROTTLED if status in THROTTLED_STATUSES else Kind.TRANSIENT
    kind = _apply_should_retry(kind, hint, is_retryable=is_retryable)
    timeout = status in _TIMEOUT_STATUSES
    return Outcome(kind, hint, repeatable=repeatable, timeout=timeout, detail=str(status))


_cached_status_outcome = lru_cache(256)(_build_status_outcome)


def outcome_of_code(
    code: str | int,
    metadata: Iterable[tuple[str, str | bytes]] = (),
    *,
    retryable: AbstractSet[str] = RETRYABLE_CODES,
    repeatable: bool = True,
) -> Outcome:
    """Classify a gRPC status code, given by name or number, and its trailing metadata."""
    if isinstance(code, int):
        name = GRPC_CODES[code] if 0 <= code < len(GRPC_CODES) else str(code)
    else:
        name = code.upper()
    if name == "OK":
        return SUCCESS
    from tarry.core.hints import hint_from_grpc

    hint = hint_from_grpc(metadata)
    kind = Kind.THROTTLED if name == "RESOURCE_EXHAUSTED" else Kind.TRANSIENT
    kind = _apply_should_retry(kind, hint, is_retryable=name in retryable)
    if hint is not None and hint.should_retry is False:  # pushback can forbid retries of any code
        kind = Kind.OVERLOADED
    timeout = name == "DEADLINE_EXCEEDED"
    return Outcome(kind, hint, repeatable=repeatable, timeout=timeout, detail=name)


def outcome_of_exception(error: BaseException, *, repeatable: bool = True) -> Outcome:
    """Classify a network error of the standard library; any other exception is permanent.

    If no connection was made, the operation is always repeatable.
    """
    detail = type(error).__name__
    if _is_connect_error(error):
        return Outcome(Kind.TRANSIENT, detail=detail)
    if isinstance(error, (ConnectionError, TimeoutError)):
        timeout = isinstance(error, TimeoutError)
        return Outcome(Kind.TRANSIENT, repeatable=repeatable, timeout=timeout, detail=detail)
    return Outcome(Kind.PERMANENT, repeatable=repeatable, detail=detail)


def _is_connect_error(error: BaseException) -> bool:
    if isinstance(error, ConnectionRefusedError):
        return True
    # gaierror is recognised by its name, because the core does not import `socket`.
    is_unknown_host = any(base.__name__ == "gaierror" for base in type(error).__mro__)
    return isinstance(error, OSError) and (is_unknown_host or error.errno in _CONNECT_ERRNOS)


def _apply_should_retry(kind: Kind, hint: Hint | None, *, is_retryable: bool) -> Kind:
    """Return `kind` if the failure can be retried, otherwise OVERLOADED or PERMANENT.

    `hint.should_retry` overrides `is_retryable`. OVERLOADED means that only the hint forbids it.
    """
    should_retry = None if hint is None else hint.should_retry
    if should_retry or (is_retryable and should_retry is None):
        return kind
    return Kind.OVERLOADED if is_retryable else Kind.PERMANENT
