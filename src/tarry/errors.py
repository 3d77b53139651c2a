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
└── MissingExtra (ImportError)

The errors of the retry service's client are in `tarry.client.errors`.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in tarry/__init__.py
if TYPE_CHECKING:
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
