"""The arguments of `retry`, `call`, `acall` and `attempts`.

`RetryConfig` checks and holds the arguments. `Classifier` converts errors to outcomes, as `on`
specifies. The functions check the callables that users pass.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from copy import copy
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

from tarry import errors
from tarry.core.checks import check_at_least, check_count, check_positive, to_seconds
from tarry.core.outcome import PERMANENT, SUCCESS, TRANSIENT, Kind, Outcome
from tarry.core.policy import POLICY_FIELDS, PRESETS, UNLIMITED_ATTEMPTS, Policy
from tarry.core.text import suggest
from tarry.errors import ConfigurationError, ConfigurationTypeError, short_repr
from tarry.runtime.effects import CancelToken
from tarry.runtime.error_record import RECORD_ATTRIBUTE, has_record_since
from tarry.runtime.events import log_listener_for
from tarry.runtime.process_settings import check_blocking

if TYPE_CHECKING:
    import logging

    from tarry.core.checks import Seconds
    from tarry.core.events import WillWait
    from tarry.core.policy import Random
    from tarry.core.verdict import CallState
    from tarry.runtime.downstream import Downstream
    from tarry.runtime.process_settings import Blocking

On: TypeAlias = (
    type[Exception]
    | tuple[type[Exception], ...]
    | Callable[[Exception], "bool | Seconds | Outcome"]
)
"""Which errors to retry: exception types, or a function that returns whether to retry (a bool),
after which time to retry (seconds or a `timedelta`), or an `Outcome`."""
AsyncOn: TypeAlias = On | Callable[[Exception], "Awaitable[bool | Seconds | Outcome]"]
"""`On`, or a predicate that is a coroutine function, for async calls."""

OnRetry: TypeAlias = Union[  # not a string: see `Seconds`
    Callable[["WillWait"], object], "logging.Logger", "logging.LoggerAdapter[logging.Logger]"
]
"""The argument `on_retry`: a function to call before each wait, or a logger for the retries."""

TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True)
_TIMEOUT_NOT_REPEATABLE = Outcome(Kind.TRANSIENT, repeatable=False, timeout=True)
_NEVER_RETRIED_ERRORS = (errors.Cancelled, errors.BlockingWait, ConfigurationError)
"""Errors that are never retried or counted as failures, even if `on` matches them. They mean that
the user has cancelled the call, that a wait would block an event loop, or that tarry is misused."""

RETRY_AND_HEDGE_MESSAGE = (
    "a call can have a retry policy or a hedging policy, but not both (gRFC A6): "
    "use tarry.retry(...) or tarry.hedge(...)"
)
CANCEL_IN_COROUTINE_MESSAGE = (
    "the argument cancel works only with plain functions; cancel the task of a coroutine instead"
)

_DEFAULT_POLICY = Policy()


class _Default:
    """The default of an argument for which None has a meaning of its own."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


POLICY_ATTEMPTS: Any = _Default("POLICY_ATTEMPTS")
"""The default of `attempts`: the `max_attempts` of the policy. None means no limit."""
NO_FALLBACK: Any = _Default("NO_FALLBACK")
"""The default of `fallback`: a call that is given up raises an error. None would be a result."""


class RetryConfig:
    """The configuration of a retry loop, shared by all calls of a decorated function."""

    # Without slots, a call that creates a `RunningCall` would take 6.4 us instead of 6 us.
    __slots__ = (
        "__dict__",  # for the attributes with a default, which few configurations set
        "cancel", "classify_error", "classify_result", "deadline", "downstream", "draw_random",
        "has_until", "operation", "passes_attempt_number", "policy", "release_connection",
    )  # fmt: skip

    classify_error_async: Callable[[Exception, int], Awaitable[Outcome]] | None = None
    """Classifies an error if `on` is a coroutine function; otherwise None."""
    classify_result_async: Callable[[Any], Awaitable[Outcome]] | None = None
    """Classifies a result if `until` is a coroutine function; otherwise None."""
    fallback: Any = NO_FALLBACK
    """What a call that is given up returns: a value, or a function that takes the error."""
    stop: Callable[[CallState], bool] | None = None
    """Returns whether the call is given up before a retry."""
    on_retry: Callable[[WillWait], object] | None = None
    """Called with the event before each wait."""
    logs_retries: bool = False
    """Whether retries are logged by a logger of the user, instead of the logger "tarry"."""
    allows_blocking: bool | None = None
    """Whether waits may block a running event loop; None: as `tarry.configure` says."""
    blocking_wait_advice: str = (
        "`await` a coroutine function (a block: `async for`), or use a thread"
    )
    """What to do if a wait would block an event loop."""
    async_argument: tuple[str, object] | None = None
    """The name and value of an argument that is a coroutine function, which only async calls can
    await; None if there is no such argument."""

    def __init__(
        self,
        on: AsyncOn | None = None,
        until: Callable[[Any], bool | Outcome | Awaitable[bool | Outcome]] | None = None,
        attempts: int | None = POLICY_ATTEMPTS,
        timeout: Seconds | None = None,
        deadline: Seconds | None = None,
        policy: Policy | None = None,
        downstream: Downstream | None = None,
        name: str | None = None,
        cancel: CancelToken | None = None,
        random: Random | None = None,
        *,
        fallback: Any = NO_FALLBACK,
        stop: Callable[[CallState], bool] | None = None,
        on_retry: OnRetry | None = None,
        blocking: Blocking | None = None,
        classify_result: Callable[[Any], Outcome] | None = None,
        release_connection: Callable[[Any], Any] | None = None,
        repeatable: bool | None = None,
        passes_attempt_number: bool = False,
    ) -> None:
        if on is None and until is None:
            raise ConfigurationTypeError(
                "on is missing: choose which errors are worth another attempt, as in "
                "@tarry.retry(on=ConnectionError). There is no default, because retrying every "
                "error repeats bugs and hides them; write on=Exception if you mean that"
            )
        check_policy(policy)
        check_instance("cancel", cancel, CancelToken, "a tarry.CancelToken()")
        check_instance("name", name, str, "a string")
        if downstream is not None:
            from tarry.runtime.downstream import Downstream

            check_instance("downstream", downstream, Downstream, 'a tarry.Downstream("name")')
        if random is not None and not hasattr(random, "random"):
            rule = "must be a source such as random.Random(7)"
            raise ConfigurationTypeError("random", rule, random)
        changes: dict[str, Any] = {}
        if attempts is None:
            changes["max_attempts"] = UNLIMITED_ATTEMPTS
        elif attempts is not POLICY_ATTEMPTS:
            changes["max_attempts"] = check_count("attempts", attempts)
        if timeout is not None:
            changes["attempt_timeout"] = check_positive("timeout", to_seconds(timeout))
        base = policy or _DEFAULT_POLICY
        self.policy: Policy = base.replace(**changes) if changes else base
        if attempts is None and (
            deadline is None
            and stop is None
            and self.policy.total_budget is None
            and (downstream is None or downstream.budget is None)
        ):
            raise ConfigurationError(
                "attempts=None needs another limit: deadline=, a policy with a total_budget, a "
                "downstream with a retry budget, or stop="
            )
        classifier = Classifier(on, repeatable=repeatable)
        self.classify_error: Callable[[Exception, int], Outcome] = classifier.classify_error
        if classifier.has_predicate and self._detect_async("on", on):
            self.classify_error_async = classifier.classify_error_async
        self.has_until: bool = until is not None
        self.classify_result: Callable[[Any], Outcome] | None = classify_result
        """Classifies a result, as `until` specifies. An adapter passes its own function, because an
        HTTP request that failed returns a response."""
        if until is not None:
            self._set_until(until)
        if blocking is not None:
            self.allows_blocking = check_blocking(blocking)
        if fallback is not NO_FALLBACK or stop is not None or on_retry is not None:
            self._set_hooks(fallback, stop, on_retry)
        self.release_connection: Callable[[Any], Any] | None = release_connection
        """Releases the connection of a response before the wait for the next attempt. Returns
        whether the user can still read the response."""
        self.passes_attempt_number: bool = passes_attempt_number
        """Whether the called function takes the keyword argument `attempt_number`."""
        self.deadline: float | None = (
            None if deadline is None else check_positive("deadline", to_seconds(deadline))
        )
        self.downstream: Downstream | None = downstream
        self.operation: str = name or ""
        """The name of the calls in errors, logs and metrics; "" if the user has given none."""
        self.cancel: CancelToken | None = cancel
        self.draw_random: Callable[[], float] | None = None if random is None else random.random
        """Returns a random number for jitter; None if the user passed no `random`."""

    def _set_until(self, until: Callable[[Any], object]) -> None:
        if not callable(until):
            raise ConfigurationTypeError("until", "must be a predicate over the result", until)
        if self._detect_async("until", until):
            async_until = cast("Callable[[Any], Awaitable[object]]", until)
            self.classify_result_async = partial(_classify_by_async_until, async_until)
        else:
            self.classify_result = partial(_classify_by_until, until)

    def _set_hooks(
        self,
        fallback: Any,
        stop: Callable[[CallState], bool] | None,
        on_retry: OnRetry | None,
    ) -> None:
        if fallback is not NO_FALLBACK:
            self._detect_async("fallback", fallback)
            self.fallback = fallback
        if stop is not None:
            _check_stop(stop)
            self.stop = stop
        if on_retry is not None:
            # A logger is recognised by its methods, because importing `logging` is slow.
            self.logs_retries = hasattr(on_retry, "isEnabledFor") and hasattr(on_retry, "log")
            if self.logs_retries:
                on_retry = log_listener_for(on_retry)
            elif not callable(on_retry) or isinstance(on_retry, type):
                rule = "must be a function that takes a tarry.WillWait, or a logging.Logger"
                raise ConfigurationTypeError("on_retry", rule, on_retry)
            self._detect_async("on_retry", on_retry)
            self.on_retry = on_retry

    @property
    def needs_slow_path(self) -> bool:
        """Whether each call needs a `RunningCall`; the fast path creates it only after failures."""
        return (
            self.has_until
            or self.classify_error_async is not None
            or self.fallback is not NO_FALLBACK
            or self.stop is not None
            or (self.classify_result is not None and self.downstream is None)
            or self.deadline is not None
            or self.policy.attempt_timeout is not None
            or self.policy.total_budget is not None
            or (self.downstream is not None and self.downstream.has_limiters)
        )

    def _detect_async(self, argument: str, fn: object) -> bool:
        """Return whether an argument is a coroutine function; if so, set `async_argument`."""
        check_not_async_generator(argument, fn)
        is_coroutine = bool(flags_of(fn) & COROUTINE)
        if is_coroutine:
            self.async_argument = argument, fn
        return is_coroutine

    def check_no_async_argument(self) -> None:
        """Raise if an argument is a coroutine function, because a plain function is retried."""
        if self.async_argument is not None:
            name, fn = self.async_argument
            raise ConfigurationTypeError(
                f"{name} is the coroutine function {name_of(fn)}, which only an async call can "
                f"await: retry a coroutine function, or pass a plain function as {name}"
            )

    def with_default_name(self, operation: str) -> RetryConfig:
        """Return a copy with this name; return self if the user has given a name."""
        if self.operation:
            return self
        named = copy(self)
        named.operation = operation
        return named


_OPTIONS = (
    "on", "until", "attempts", "timeout", "deadline", "policy", "downstream", "name", "cancel",
    "random", "fallback", "stop", "on_retry", "blocking",
)  # fmt: skip
_OPTIONS_OF_OTHER_LIBRARIES = {
    "tries": "attempts", "max_tries": "attempts", "max_attempts": "attempts",
    "max_time": "deadline", "exceptions": "on", "exception": "on", "retry": "on", "wait": "policy",
    "delay": "initial_delay", "wait_initial": "initial_delay", "wait_max": "max_delay",
    "wait_exp_base": "multiplier", "wait_jitter": "jitter", "circuit_breaker": "breaker",
    "giveup": "on", "retry_error_callback": "fallback", "before_sleep": "on_retry",
    "on_backoff": "on_retry", "logger": "on_retry", "stop_after": "attempts",
    "stop_after_attempt": "attempts", "stop_after_delay": "deadline",
}  # fmt: skip
"""Names in tenacity, stamina, backoff and retry, with the corresponding names in tarry."""


def reject_unknown_options(api_name: str, options: dict[str, Any]) -> None:
    """Raise an error with the right spelling if a public function got options it does not have."""
    for name in options:
        option = _OPTIONS_OF_OTHER_LIBRARIES.get(name, name)
        if option not in _OPTIONS:
            option = suggest(option, _OPTIONS, similarity=0.8) or option
        if name == "reraise":  # of tenacity
            advice = "leave it out, because the error of the last attempt is always raised"
        elif name in _OPTIONS:
            advice = "tarry.retry and tarry.call have it"
        elif option in _OPTIONS:
            advice = f"use {option}="
        elif option in ("breaker", "budget", "limiter", "max_in_flight"):
            advice = f'use downstream=tarry.Downstream("name", {option}=...)'
        elif any(option == field.name for field in POLICY_FIELDS):
            advice = f"use policy=tarry.Policy({option}=...)"
        else:
            advice = f"it has {', '.join(_OPTIONS)}"
            if api_name in ("call", "acall"):
                advice += f", kwargs; for an argument of the function, use kwargs={{{name!r}: ...}}"
        raise ConfigurationTypeError(f"tarry.{api_name} has no argument {name}=; {advice}")


def check_instance(field: str, value: object, expected: type, description: str) -> None:
    """Raise unless `value` is None or an instance of `expected`."""
    if value is not None and not isinstance(value, expected):
        raise ConfigurationTypeError(field, f"must be {description}", value)


def check_policy(policy: object) -> None:
    """Raise unless `policy` is None or a `Policy`; the error says how to use a preset."""
    description = "a tarry.Policy(...)"
    if isinstance(policy, str) and policy in PRESETS:
        description = f"a policy, such as tarry.Policy.preset({policy!r})"
    check_instance("policy", policy, Policy, description)


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


def _classify_by_until(until: Callable[[Any], object], result: object) -> Outcome:
    return _outcome_from_until(until(result))


async def _classify_by_async_until(
    until: Callable[[Any], Awaitable[object]], result: object
) -> Outcome:
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


_AWAITABLE_PREDICATE = (
    "returned an awaitable, which is awaited only if the predicate is written as `async def`"
)


def reject_awaitable(field: str, value: Any, rule: str) -> None:
    """Raise if a function of the user that is not awaited has returned an awaitable."""
    if hasattr(value, "__await__"):
        if hasattr(value, "close"):
            value.close()  # otherwise Python warns that the coroutine was never awaited
        raise ConfigurationTypeError(field, rule)


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


# Bits of `code.co_flags`, copied from `inspect`, because importing `inspect` is slow.
GENERATOR, COROUTINE, ASYNC_GENERATOR = 0x20, 0x80 | 0x100, 0x200


def flags_of(fn: Any) -> int:
    """Return the `co_flags` of a callable's code; 0 if the callable is not written in Python."""
    fn = _unwrap(fn)
    code = getattr(fn, "__code__", None)
    if code is None:
        code = getattr(type(fn).__call__, "__code__", None)
    return 0 if code is None else int(code.co_flags)


def name_of(fn: Any) -> str:
    """Return the qualified name of a callable, for error messages."""
    fn = _unwrap(fn)
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def operation_of(fn: Any) -> str:
    """Return the name of a callable with its module, for events, logs and metrics."""
    return add_module(getattr(_unwrap(fn), "__module__", None), name_of(fn))


def add_module(module: str | None, qualname: str) -> str:
    """Return "orders.charge" for `charge` in the module `orders`.

    The module of a script is left out, because it is always "__main__".
    """
    return f"{module}.{qualname}" if module and module != "__main__" else qualname


def check_callable(api_name: str, fn: Any) -> None:
    """Raise if `fn` is not callable; the user has probably written `fn()` instead of `fn`."""
    if not callable(fn):
        if hasattr(fn, "cr_code"):
            fn.close()  # otherwise Python warns that the coroutine was never awaited
        raise ConfigurationTypeError(
            f"tarry.{api_name} takes the function and its arguments, not the result of a call: "
            f"got {fn!r}"
        )


def check_awaitable(fn: Callable[..., Any], sync_api: str) -> Callable[..., Any]:
    """Return a function that calls `fn`, and raises if the result cannot be awaited.

    `sync_api` is the public function for plain functions. An error that `fn` raises before it
    returns gets a note with this name, because only the first result shows whether `fn` is plain.
    """

    # Not named `call`: `error_record` finds drivers by their names.
    def call_and_check(*args: Any, **kwargs: Any) -> Any:
        try:
            result = fn(*args, **kwargs)
        except Exception as error:
            note = (
                f"tarry: the error was raised before {name_of(fn)} returned an awaitable; if it is "
                f"a plain function, use tarry.{sync_api}(...)"
            )
            if note not in getattr(error, "__notes__", ()):  # it may be raised several times
                error.add_note(note)
            raise
        # A generator-based coroutine has no `__await__`.
        if not hasattr(result, "__await__") and not hasattr(result, "gi_code"):
            raise ConfigurationTypeError(
                f"{name_of(fn)} returned {short_repr(result)}, which cannot be awaited: it is a "
                f"plain function, use tarry.{sync_api}(...)"
            )
        return result

    return call_and_check


def _check_stop(stop: object) -> None:
    is_function = callable(stop) and not isinstance(stop, type)  # an object of a class is true
    if not is_function or type(stop).__module__.partition(".")[0] == "tenacity":
        rule = (
            "must be a function that takes a tarry.CallState and returns whether to give up; to "
            "limit the number of attempts or the time, use attempts= and deadline="
        )
        raise ConfigurationTypeError("stop", rule, stop)
    check_not_async("stop", stop)


def check_not_async(field: str, fn: object) -> None:
    """Raise if `fn` is async: its result would be a coroutine object, which is always true."""
    if flags_of(fn) & (COROUTINE | ASYNC_GENERATOR):
        rule = f"must be a plain function, got the coroutine function {name_of(fn)}"
        raise ConfigurationTypeError(field, rule)


def check_not_async_generator(field: str, fn: object) -> None:
    """Raise if `fn` is an async generator function, whose result cannot be awaited."""
    if flags_of(fn) & ASYNC_GENERATOR:
        rule = f"must be a function, got the async generator function {name_of(fn)}"
        raise ConfigurationTypeError(field, rule)


def _unwrap(fn: Any) -> Any:
    """Return the function inside `functools.partial` objects and bound methods."""
    while True:
        if isinstance(fn, partial):
            # pyright does not know the type of the function inside a bare `partial`.
            fn = fn.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        else:
            return fn
