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

TYPE_CHECKING = False  # type checkers know the name; importing `typing` for it costs 10 ms
if TYPE_CHECKING:
    from typing import Any, Self

_NOT_SHOWN = object()


class TarryError(Exception):
    """The base class of all exceptions of tarry."""


class ConfigurationError(TarryError, ValueError):
    """An argument or setting is invalid, or two of them contradict each other."""

    def __init__(self, field: str, rule: str | None = None, value: object = _NOT_SHOWN) -> None:
        """Compose the message from the arguments.

        `ConfigurationError("max_attempts", "must be at least 1", 0)` has the message "max_attempts
        must be at least 1, got 0". Without a value the message ends after the rule. A single
        argument is the complete message, for an error that is not about one field.
        """
        self.field: str | None = None if rule is None else field
        """The name of the invalid argument or setting; None if the error is about several."""
        self.rule: str = field if rule is None else rule
        """The broken rule ("must be at least 1"), or the complete message when `field` is None."""
        self.has_value: bool = value is not _NOT_SHOWN
        """Whether the message shows the invalid value. Secret values are not passed."""
        self.value: object = value if self.has_value else None
        """The invalid value; None when it is not shown."""
        message = self.rule if self.field is None else f"{self.field} {self.rule}"
        super().__init__(f"{message}, got {short_repr(value)}" if self.has_value else message)

    def with_field(self, field: str) -> Self:
        """Return a copy of the error with another name for the field, such as its name in JSON.

        An index is kept: `secrets[1]` becomes `signing_secrets[1]`. An error without a field is
        returned unchanged.
        """
        if self.field is None:
            return self
        _, bracket, index = self.field.partition("[")
        value = self.value if self.has_value else _NOT_SHOWN
        return type(self)(f"{field}{bracket}{index}", self.rule, value)


class ConfigurationTypeError(ConfigurationError, TypeError):
    """A value has the wrong type, or an argument is missing."""


def short_repr(value: object, limit: int = 60) -> str:
    """Return the repr of a value for an error message, cut after `limit` characters.

    Everything before the last `@` is redacted if it looks like the beginning of a URL with a
    password. A URL in a wrong place would otherwise show its password in a log.
    """
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print an int of more than 4,300 digits
        return "a number of thousands of digits"
    before, _, after = text.rpartition("@")
    if (":" in before or "//" in before) and not before.endswith("[redacted]"):
        text = f"{text[0]}[redacted]@{after}"
    return text if len(text) <= limit else f"{text[:limit]}..."


class Rejected(TarryError):
    """The breaker, a limit or the deadline rejected the call, usually before an attempt."""

    def __init__(
        self, message: str, *, downstream: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.downstream = downstream
        """The name of the downstream, or None for a call without a downstream."""
        self.retry_after = retry_after
        """Seconds after which a new call can succeed; None when that is not known."""


class BreakerOpen(Rejected):
    """The circuit breaker of the downstream is open; `__cause__` is a copy of the last failure."""


class LimitReached(Rejected):
    """A local limit is reached: of calls to a downstream, attempt threads or stored responses."""


class DeadlineExceeded(Rejected, TimeoutError):
    """The deadline passed before an attempt, or during one that the server may have processed."""


class AttemptTimeout(TarryError, TimeoutError):
    """An attempt took longer than its timeout. If it runs in a thread, it continues to run."""


class ResultNotAccepted(TarryError):
    """No attempt had a result that `until=` or the classifier accepts; `result` is the last."""

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
    """The wait of a plain function for a rate limiter would block the running event loop."""


class MissingExtra(TarryError, ImportError):
    """An optional dependency is not installed; the message has the pip command."""


class StoreUnavailable(TarryError):
    """The store of the retry service is unreachable, full or locked. Try again later."""

    partition: int | None = None
    """The number of the partition of the store that has failed, if other partitions may work."""


class Overloaded(TarryError):
    """The retry service is at capacity; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
