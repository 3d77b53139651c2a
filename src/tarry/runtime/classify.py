"""From the `on` of a user to an outcome for the core."""

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
"""Which errors are worth a retry: types, or a predicate that may also answer with an outcome."""

_TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)
_UNSAFE_TIMEOUT = Outcome(Kind.TRANSIENT, safe=False, timeout=True)
_NEVER = (Cancelled, BlockingWait)
"""Not retried and not counted, whatever `on` says: somebody ended the call, or misused it."""


class Classifier:
    """Tells the errors that are worth a retry from those that are not."""

    __slots__ = ("_cut_off", "_match", "_predicate", "_types", "_wide")

    def __init__(self, on: On | None, *, safe: bool = True) -> None:
        self._cut_off = _TIMEOUT if safe else _UNSAFE_TIMEOUT
        self._types: tuple[type[Exception], ...] = ()
        self._predicate: Callable[[Exception], bool | Outcome] | None = None
        if on is not None and callable(on) and not isinstance(on, type):
            check_not_async("on", on)
            self._predicate = on
        elif on is not None:
            self._types = _checked(on)
        # One type is tested faster than a tuple of one.
        self._match = self._types[0] if len(self._types) == 1 else self._types
        self._wide = self._predicate is not None or any(
            issubclass(error, self._types) for error in (*_NEVER, ExceptionGroup)
        )

    def classify_error(self, error: Exception, serial: int) -> Outcome:
        """Classify an error; `serial` is the bus's count from before its attempt."""
        if isinstance(error, self._match):
            if self._wide and isinstance(error, _NEVER):
                return PERMANENT
            outcome = _TIMEOUT if isinstance(error, TimeoutError) else TRANSIENT
        else:
            outcome = self._other(error)
        if (
            error.__context__ is None
            and getattr(error, RECORD_ATTRIBUTE, None) is None
            and error.__cause__ is None
            and not (self._wide and hasattr(error, "exceptions"))
        ):
            return outcome
        return outcome.replace(retried=True) if has_record_since(error, serial) else outcome

    def _other(self, error: Exception) -> Outcome:
        if isinstance(error, _NEVER):
            return PERMANENT
        if isinstance(error, (AttemptTimeout, DeadlineExceeded)) and not hasattr(
            error, RECORD_ATTRIBUTE
        ):
            return self._cut_off  # by this very loop, which `on` cannot know
        answer: object = self._predicate is not None and self._predicate(error)
        if isinstance(answer, Outcome):
            return answer
        if isinstance(answer, Kind):
            return Outcome(answer)
        if isinstance(answer, (Stop, Wait)) or hasattr(answer, "should_retry"):
            raise ConfigurationTypeError("on", "must answer True, False or a tarry.Outcome", answer)
        if not answer:
            return PERMANENT
        return _TIMEOUT if isinstance(error, TimeoutError) else TRANSIENT


def _checked(on: object) -> tuple[type[Exception], ...]:
    types = cast("tuple[object, ...]", on) if isinstance(on, tuple) else (on,)
    if not types:
        raise ConfigurationError("on", "must name at least one type of error, got ()")
    for item in types:
        if not isinstance(item, type) or not issubclass(item, BaseException):
            rule = "must be an exception type, a tuple of them, or a predicate over the exception"
            raise ConfigurationTypeError("on", rule, on)
        if not issubclass(item, Exception):
            rule = (
                f"must name subclasses of Exception, got {item.__name__}: cancellation and "
                "KeyboardInterrupt are never retried"
            )
            raise ConfigurationTypeError("on", rule)
    return cast("tuple[type[Exception], ...]", types)
