"""The conversion of errors and results to outcomes, as the options `on` and `until` specify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tarry import errors
from tarry.core.checks import check_at_least, to_seconds
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime.error_record import RECORD_ATTRIBUTE, has_record_since
from tarry.runtime.functions import reject_awaitable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.runtime.options import AsyncOn

TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)
_TIMEOUT_NOT_REPEATABLE = Outcome(Kind.TRANSIENT, repeatable=False, timeout=True)
_NEVER_RETRIED_ERRORS = (errors.Cancelled, errors.BlockingWait, ConfigurationError)
"""Errors that are never retried or counted as failures, even if `on` matches them. They mean that
the user has cancelled the call, that a wait would block an event loop, or that tarry is misused."""
_AWAITABLE_PREDICATE = (
    "returned an awaitable, which is awaited only if the predicate is written as `async def`"
)


class Classifier:
    """Converts the errors of a retry loop to outcomes."""

    __slots__ = (
        "_attempt_timeout_outcome", "_deadline_outcome", "_matches_broadly", "_predicate", "_types",
        "has_predicate",
    )  # fmt: skip

    def __init__(self, on: AsyncOn | None, *, repeatable: bool | None = None) -> None:
        """Check `on`.

        Only adapters pass `repeatable`: whether an attempt that timed out may be repeated. Their
        own function as `on` knows only the errors of their client.
        """
        self._deadline_outcome = _TIMEOUT_NOT_REPEATABLE if repeatable is False else TIMEOUT
        types: tuple[type[Exception], ...] = ()
        self._predicate: Callable[[Exception], object] | None = None
        if on is not None and callable(on) and not isinstance(on, type):
            self._predicate = on
        elif on is not None:
            types = _checked_types(on)
        self.has_predicate: bool = self._predicate is not None
        self._attempt_timeout_outcome = (
            None if self.has_predicate and repeatable is None else self._deadline_outcome
        )
        """The outcome of an attempt that timed out; None if the user's predicate decides."""
        # isinstance() is faster with a type than with a tuple of one type.
        self._types = types[0] if len(types) == 1 else types
        self._matches_broadly = self._predicate is not None or any(
            issubclass(error, types) for error in (*_NEVER_RETRIED_ERRORS, ExceptionGroup)
        )
        """Whether `on` may match an exception group or one of `_NEVER_RETRIED_ERRORS`."""

    def classify_error(self, error: Exception, last_record_number: int) -> Outcome:
        """Return the outcome of an attempt that raised `error`.

        `last_record_number` is the number of the newest error record when the attempt began.
        """
        if isinstance(error, self._types):
            if self._matches_broadly and isinstance(error, _NEVER_RETRIED_ERRORS):
                return PERMANENT
            outcome = TIMEOUT if isinstance(error, TimeoutError) else TRANSIENT
        else:
            outcome = self._classify_other(error)
        # Most errors have no error record of an inner retry loop, which has given up on them, and
        # no cause, context, response or group members with one: skip the slower search for them.
        if (
            error.__context__ is None
            and getattr(error, RECORD_ATTRIBUTE, None) is None
            and error.__cause__ is None
            and getattr(error, "response", None) is None
            and not (self._matches_broadly and hasattr(error, "exceptions"))
        ):
            return outcome
        retried_below = has_record_since(error, last_record_number)
        return outcome.replace(retried_below=True) if retried_below else outcome

    async def classify_error_async(self, error: Exception, last_record_number: int) -> Outcome:
        """Like `classify_error`, if `on` is a coroutine function."""
        predicate = cast("Callable[[Exception], Awaitable[object]]", self._predicate)
        outcome = self._classify_tarry_error(error)
        if outcome is None:
            outcome = _outcome_from_on(await predicate(error), error)
        retried_below = has_record_since(error, last_record_number)
        return outcome.replace(retried_below=True) if retried_below else outcome

    def _classify_other(self, error: Exception) -> Outcome:
        """Classify an error that is not an instance of a type in `on`."""
        outcome = self._classify_tarry_error(error)
        if outcome is not None:
            return outcome
        value = self._predicate is not None and self._predicate(error)
        return _outcome_from_on(value, error)

    def _classify_tarry_error(self, error: Exception) -> Outcome | None:
        """Classify an error that tarry itself has raised; return None if `on` decides."""
        if isinstance(error, _NEVER_RETRIED_ERRORS):
            return PERMANENT
        if hasattr(error, RECORD_ATTRIBUTE):
            return None  # raised by an inner retry loop
        if isinstance(error, errors.AttemptTimeout):
            return self._attempt_timeout_outcome
        return self._deadline_outcome if isinstance(error, errors.DeadlineExceeded) else None


def _outcome_from_on(value: object, error: Exception) -> Outcome:
    """Return the outcome of an error for which the predicate `on` has returned `value`."""
    if value is False:
        return PERMANENT
    is_timeout = isinstance(error, TimeoutError)
    if value is True:
        return TIMEOUT if is_timeout else TRANSIENT
    if isinstance(value, Outcome):
        return value
    if isinstance(value, Kind):
        return Outcome(value)
    value = to_seconds(value)
    if isinstance(value, (int, float)):
        from tarry.core.hints import Hint  # imported only after such a failure

        delay = check_at_least("the result of on", value, 0)
        hint = Hint(delay, exact=True, source="on")
        return Outcome(Kind.TRANSIENT, hint, timeout=is_timeout)
    reject_awaitable("on", value, _AWAITABLE_PREDICATE)
    rule = "must return True, False, a delay (seconds or a timedelta), or a tarry.Outcome"
    raise ConfigurationTypeError("on", rule, value)


def classify_by_until(until: Callable[[Any], object], result: object) -> Outcome:
    """Return the outcome of a result, as the predicate `until` decides."""
    return _outcome_from_until(until(result))


async def classify_by_async_until(
    until: Callable[[Any], Awaitable[object]], result: object
) -> Outcome:
    """Like `classify_by_until`, for a predicate that is a coroutine function."""
    return _outcome_from_until(await until(result))


def _outcome_from_until(value: object) -> Outcome:
    """Return the outcome of a result for which the predicate `until` has returned `value`."""
    if value is True:
        return SUCCESS
    if isinstance(value, Outcome):
        return value
    if isinstance(value, Kind):
        return Outcome(value)
    reject_awaitable("until", value, _AWAITABLE_PREDICATE)
    return SUCCESS if value else TRANSIENT


def _checked_types(on: object) -> tuple[type[Exception], ...]:
    rejected_value = on  # a second name, because pyright narrows the type of `on` after isinstance
    types = cast("tuple[object, ...]", on) if isinstance(on, tuple) else (on,)
    if not types:
        rule = (
            "must name at least one type of error, got (); to retry no error, use "
            "on=lambda error: False"
        )
        raise ConfigurationError("on", rule)
    for item in types:
        if not isinstance(item, type) or not issubclass(item, BaseException):
            rule = "must be an exception type, a tuple of them, or a predicate over the exception"
            raise ConfigurationTypeError("on", rule, rejected_value)
        if not issubclass(item, Exception):
            rule = (
                f"must name subclasses of Exception, got {item.__name__}: cancellation and "
                "KeyboardInterrupt are never retried"
            )
            raise ConfigurationTypeError("on", rule)
    return cast("tuple[type[Exception], ...]", types)
