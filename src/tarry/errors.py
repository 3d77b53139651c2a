"""Every exception that tarry raises itself. The error a call ends with is otherwise the user's own.

TarryError
├── ConfigurationError (ValueError)
│   └── ConfigurationTypeError (TypeError)
├── Rejected
│   ├── BreakerOpen
│   ├── LimitReached
│   └── DeadlineExceeded (TimeoutError)
├── AttemptTimeout (TimeoutError)
├── ResultNotAccepted
├── HandedOff
├── Cancelled
├── BlockingWait (RuntimeError)
├── StoreUnavailable
├── Overloaded
├── ServiceError
│   ├── ServiceUnreachable (ConnectionError)
│   ├── ServiceUnavailable
│   ├── InvalidRequest
│   ├── NotAuthorized
│   ├── NotFound
│   ├── Conflict
│   └── TooManyRequests
├── NotFinished (TimeoutError)
└── MissingExtra (ImportError)
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in tarry/__init__.py
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class TarryError(Exception):
    """The base of everything in this file."""


class ConfigurationError(TarryError, ValueError):
    """A value that breaks a rule; the message names the field, the rule and what was given."""


class ConfigurationTypeError(ConfigurationError, TypeError):
    """A value of the wrong type, or an argument that is missing."""


class Rejected(TarryError):
    """The call was not let through to its dependency; nothing was sent."""

    def __init__(
        self, message: str, *, downstream: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.downstream = downstream
        """The name of the dependency that was not called."""
        self.retry_after = retry_after
        """Seconds after which another try makes sense, when that is known."""


class BreakerOpen(Rejected):
    """The circuit breaker of the dependency is open."""


class LimitReached(Rejected):
    """The rate, concurrency or in-flight limit of the dependency is used up."""


class DeadlineExceeded(Rejected, TimeoutError):
    """The deadline of the call had passed, or passed while an attempt ran."""


class AttemptTimeout(TarryError, TimeoutError):
    """One attempt took longer than its timeout and was abandoned."""


class ResultNotAccepted(TarryError):
    """No attempt gave a result that `until` accepts; `result` holds the last one."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class HandedOff(TarryError):
    """The retry service goes on with the call, as `task`; `__cause__` is how it ended here."""

    def __init__(self, message: str, task: Any = None) -> None:
        super().__init__(message)
        self.task = task
        """The task, as `enqueue` of the service's client returned it."""


class Cancelled(TarryError):
    """A cancel token ended the call while it waited; `__cause__` is the last error."""


class BlockingWait(TarryError, RuntimeError):
    """A plain function would have blocked a running event loop while it waits."""


class MissingExtra(TarryError, ImportError):
    """An optional dependency is not installed; the message has the install line."""


class StoreUnavailable(TarryError):
    """A store could not do its work (it is away, full, locked); the call may be repeated."""


class Overloaded(TarryError):
    """The service has as much to do as it can hold; `retry_after` seconds later it may not."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServiceError(TarryError):
    """The retry service did not do what its client asked for."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        problem: Mapping[str, object] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status of the answer; None when there was none."""
        self.problem: dict[str, object] = dict(problem or {})
        """The members of the problem document (RFC 9457) that was the answer."""
        self.retry_after = retry_after
        """Seconds after which another try makes sense, when that is known."""

    @property
    def title(self) -> str | None:
        """What kind of problem it is."""
        return self._text("title")

    @property
    def detail(self) -> str | None:
        """What is wrong this time."""
        return self._text("detail")

    @property
    def field(self) -> str | None:
        """The path of the field that is wrong, as the API names it, where it is one."""
        return self._text("field")

    def _text(self, member: str) -> str | None:
        value = self.problem.get(member)
        return value if isinstance(value, str) else None


class ServiceUnreachable(ServiceError, ConnectionError):
    """No answer came; whether the request was read is not known."""


class ServiceUnavailable(ServiceError):
    """The service, or what stands before it, cannot do it now (502, 503, 504)."""


class InvalidRequest(ServiceError):
    """The service refuses the request; `field` names what is wrong (400, 413, 422 and the like)."""


class NotAuthorized(ServiceError):
    """The API key is missing, wrong or revoked (401, 403)."""


class NotFound(ServiceError):
    """There is no such task, policy, replay or downstream (404)."""


class Conflict(ServiceError):
    """It is there, but not in a state for this (409)."""


class TooManyRequests(ServiceError):
    """A quota is used up; `retry_after` seconds later it may not be (429)."""


class NotFinished(TarryError, TimeoutError):
    """The time to wait was over first; `last` is what was waited for, as it stood then."""

    def __init__(self, message: str, last: object = None) -> None:
        super().__init__(message)
        self.last = last
