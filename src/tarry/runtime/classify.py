"""Classify errors: from the `on` argument of `retry` to an `Outcome`."""

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
"""Which errors to retry: types, or a predicate, which may also return an `Outcome`."""

_TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)
_UNSAFE_TIMEOUT = Outcome(Kind.TRANSIENT, safe=False, timeout=True)
_NEVER_RETRIED = (Cancelled, BlockingWait)
"""Never retried or counted, even if `on` matches: the user ended the call or misused tarry."""


class Classifier:
    """Classifies the errors of a retry loop."""

    __slots__ = ("_is_broad", "_match", "_predicate", "_timeout_outcome", "_types")

    def __init__(self, on: On | None, *, safe: bool = True) -> None:
        self._timeout_outcome = _TIMEOUT if safe else _UNSAFE_TIMEOUT
        self._types: tuple[type[Exception], ...] = ()
        self._predicate: Callable[[Exception], bool | Outcome] | None = None
        if on is not None and callable(on) and not isinstance(on, type):
            check_not_async("on", on)
            self._predicate = on
        elif on is not None:
            self._types = _checked_types(on)
        # isinstance() is faster with a type than with a tuple that holds one type.
        self._match = self._types[0] if len(self._types) == 1 else self._types
        self._is_broad = self._predicate is not None or any(
            issubclass(error, self._types) for error in (*_NEVER_RETRIED, ExceptionGroup)
        )
        """Whether `on` can match exception groups or errors that are never retried."""

    def classify_error(self, error: Exception, serial: int) -> Outcome:
        """Classify an error; `serial` is the value of `bus.serial` before its attempt."""
        if isinstance(error, self._match):
            if self._is_broad and isinstance(error, _NEVER_RETRIED):
                return PERMANENT
            outcome = _TIMEOUT if isinstance(error, TimeoutError) else TRANSIENT
        else:
            outcome = self._classify_other(error)
        # Most errors have no cause, context, record or members: skip the search for a record.
        if (
            error.__context__ is None
            and getattr(error, RECORD_ATTRIBUTE, None) is None
            and error.__cause__ is None
            and not (self._is_broad and hasattr(error, "exceptions"))
        ):
            return outcome
        return outcome.replace(retried=True) if has_record_since(error, serial) else outcome

    def _classify_other(self, error: Exception) -> Outcome:
        """Classify an error that is not of a type in `on`."""
        if isinstance(error, _NEVER_RETRIED):
            return PERMANENT
        if isinstance(error, (AttemptTimeout, DeadlineExceeded)) and not hasattr(
            error, RECORD_ATTRIBUTE
        ):
            return self._timeout_outcome  # a timeout of this loop, which `on` need not name
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
    value = on  # keeps its type, which `isinstance` narrows for pyright
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
