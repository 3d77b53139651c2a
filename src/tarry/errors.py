"""The exceptions that tarry raises itself. Exceptions of the called function are raised unchanged.

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
└── MissingExtra (ImportError)

The errors of the retry service's client are in `tarry.client.errors`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in tarry/__init__.py
if TYPE_CHECKING:
    from typing import Any, Self

_NOT_SHOWN = object()


class TarryError(Exception):
    """The base class of all exceptions of tarry."""


class ConfigurationError(TarryError, ValueError):
    """A value breaks a rule, or two arguments contradict each other."""

    def __init__(self, field: str, rule: str | None = None, value: object = _NOT_SHOWN) -> None:
        """Compose the message from the arguments.

        `ConfigurationError("max_attempts", "must be at least 1", 0)` has the message "max_attempts
        must be at least 1, got 0". Without a value the message ends after the rule. A single
        argument is the complete message, for an error that is not about one field.
        """
        self.field: str | None = None if rule is None else field
        """The name of the rejected argument or setting; None when the error is not about one."""
        self.rule: str = field if rule is None else rule
        """The broken rule as a predicate ("must be at least 1"); without a field, the message."""
        self.has_value: bool = value is not _NOT_SHOWN
        """Whether the message shows the rejected value. Secrets are never shown."""
        self.value: object = value if self.has_value else None
        """The rejected value; None when it is not shown."""
        message = self.rule if self.field is None else f"{self.field} {self.rule}"
        super().__init__(f"{message}, got {short_repr(value)}" if self.has_value else message)

    def with_field(self, field: str) -> Self:
        """Return the same error with another field name: the name in JSON, TOML or the CLI.

        An index is kept: `secrets[1]` becomes `signing_secrets[1]`. An error without a field is
        returned unchanged.
        """
        if self.field is None:
            return self
        _, bracket, index = self.field.partition("[")
        value = self.value if self.has_value else _NOT_SHOWN
        return type(self)(f"{field}{bracket}{index}", self.rule, value)


class ConfigurationTypeError(ConfigurationError, TypeError):
    """A value of the wrong type, or an argument that is missing."""


def short_repr(value: object, limit: int = 60) -> str:
    """Return the repr of a value for an error message, cut after `limit` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an int of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= limit else f"{text[:limit]}..."


class Rejected(TarryError):
    """The call was rejected. Nothing was sent, unless the deadline passed during an attempt."""

    def __init__(
        self, message: str, *, downstream: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.downstream = downstream
        """The name of the dependency that was not called."""
        self.retry_after = retry_after
        """Seconds after which a new call can succeed, when that is known."""


class BreakerOpen(Rejected):
    """The circuit breaker of the dependency is open."""


class LimitReached(Rejected):
    """The local rate limit, concurrency limit or in-flight limit for the dependency is reached."""


class DeadlineExceeded(Rejected, TimeoutError):
    """The deadline passed before an attempt, or during one that may have reached the dependency."""


class AttemptTimeout(TarryError, TimeoutError):
    """An attempt took longer than its timeout and was stopped."""


class ResultNotAccepted(TarryError):
    """All results were rejected by `until`, or classified as failures; `result` is the last."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
        self.result = result


class HandedOff(TarryError):
    """The call was handed to the retry service as `task`; `__cause__` is the last local error."""

    def __init__(self, message: str, task: Any = None) -> None:
        super().__init__(message)
        self.task = task
        """The task that `Client.enqueue` returned."""


class Cancelled(TarryError):
    """A cancel token ended the call during a wait; `__cause__` is the last error."""


class BlockingWait(TarryError, RuntimeError):
    """A synchronous call would block the running event loop during its wait."""


class MissingExtra(TarryError, ImportError):
    """An optional dependency is not installed; the message has the pip command."""


class StoreUnavailable(TarryError):
    """A store is unreachable, full or locked; the operation can be repeated."""


class Overloaded(TarryError):
    """The service is at capacity; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
