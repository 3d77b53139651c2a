"""Classify errors: convert an error to an `Outcome`, by the `on` argument of `retry`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, cast

from tarry.core.outcome import PERMANENT, TRANSIENT, Kind, Outcome
from tarry.core.verdict import Stop, Wait
from tarry.errors import (
    AttemptTimeout,
    BlockingWait,
    Cancelled,
    ConfigurationError,
    ConfigurationTypeError,
    DeadlineExceeded,
)
from tarry.runtime.callables import check_not_async
from tarry.runtime.error_record import RECORD_ATTRIBUTE, has_record_since

On: TypeAlias = (
    type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], "bool | Outcome"]
)
"""Which errors to retry: exception types, or a function that returns a bool or an `Outcome`."""

_TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)
_TIMEOUT_NOT_REPEATABLE = Outcome(Kind.TRANSIENT, safe=False, timeout=True)
_NEVER_RETRIED = (Cancelled, BlockingWait)
"""Errors that are never retried or counted as failures, even if `on` matches them. They mean that
the user has cancelled the call or misused tarry."""


class Classifier:
    """Classifies the errors of a retry loop."""

    __slots__ = (
        "_matches_broadly",
        "_predicate",
        "_timeout_outcome",
        "_types",
        "_types_for_isinstance",
    )

    def __init__(self, on: On | None, *, repeatable: bool = True) -> None:
        """Check `on`; `repeatable` is whether an attempt that timed out may be repeated."""
        self._timeout_outcome = _TIMEOUT if repeatable else _TIMEOUT_NOT_REPEATABLE
        self._types: tuple[type[Exception], ...] = ()
        self._predicate: Callable[[Exception], bool | Outcome] | None = None
        if on is not None and callable(on) and not isinstance(on, type):
            check_not_async("on", on)
            self._predicate = on
        elif on is not None:
            self._types = _checked_types(on)
        # isinstance() is faster with a type than with a tuple of one type.
        self._types_for_isinstance = self._types[0] if len(self._types) == 1 else self._types
        self._matches_broadly = self._predicate is not None or any(
            issubclass(error, self._types) for error in (*_NEVER_RETRIED, ExceptionGroup)
        )
        """Whether `on` can match exception groups or errors that are never retried."""

    def classify_error(self, error: Exception, serial: int) -> Outcome:
        """Classify an error; `serial` is the value of `bus.serial` when its attempt began."""
        if isinstance(error, self._types_for_isinstance):
            if self._matches_broadly and isinstance(error, _NEVER_RETRIED):
                return PERMANENT
            outcome = _TIMEOUT if isinstance(error, TimeoutError) else TRANSIENT
        else:
            outcome = self._classify_other(error)
        # Most errors have no record, and no cause, context or group members that could have one.
        # For them, skip the slower search in `has_record_since`.
        if (
            error.__context__ is None
            and getattr(error, RECORD_ATTRIBUTE, None) is None
            and error.__cause__ is None
            and not (self._matches_broadly and hasattr(error, "exceptions"))
        ):
            return outcome
        return outcome.replace(retried=True) if has_record_since(error, serial) else outcome

    def _classify_other(self, error: Exception) -> Outcome:
        """Classify an error that is not an instance of a type in `on`."""
        if isinstance(error, _NEVER_RETRIED):
            return PERMANENT
        if isinstance(error, (AttemptTimeout, DeadlineExceeded)) and not hasattr(
            error, RECORD_ATTRIBUTE
        ):
            return self._timeout_outcome  # raised by this loop: retried even if not in `on`
        result: object = self._predicate is not None and self._predicate(error)
        if isinstance(result, Outcome):
            return result
        if isinstance(result, Kind):
            return Outcome(result)
        if isinstance(result, (Stop, Wait)) or hasattr(result, "should_retry"):
            raise ConfigurationTypeError("on", "must return True, False or a tarry.Outcome", result)
        if not result:
            return PERMANENT
        return _TIMEOUT if isinstance(error, TimeoutError) else TRANSIENT


def _checked_types(on: object) -> tuple[type[Exception], ...]:
    value = on  # pyright would narrow the type of `on` itself after `isinstance`
    types = cast("tuple[object, ...]", on) if isinstance(on, tuple) else (on,)
    if not types:
        raise ConfigurationError("on", "must name at least one type of error, got ()")
    for item in types:
        if not isinstance(item, type) or not issubclass(item, BaseException):
            rule = "must be an exception type, a tuple of them, or a predicate over the exception"
            raise ConfigurationTypeError("on", rule, value)
        if not issubclass(item, Exception):
            rule = (
                f"must name subclasses of Exception, got {item.__name__}: cancellation and "
                "KeyboardInterrupt are never retried"
            )
            raise ConfigurationTypeError("on", rule)
    return cast("tuple[type[Exception], ...]", types)
