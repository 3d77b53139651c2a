"""The configuration of a retry loop: the checked values and the defaults of its options."""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from tarry.core.checks import check_count, check_instance, check_positive, to_seconds
from tarry.core.policy import PRESETS, UNLIMITED_ATTEMPTS, Policy
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime.classifier import Classifier, classify_by_async_until, classify_by_until
from tarry.runtime.effects import CancelToken
from tarry.runtime.events import log_listener_for
from tarry.runtime.functions import (
    COROUTINE,
    check_not_async,
    check_not_async_generator,
    flags_of,
    name_of,
)
from tarry.runtime.process_settings import check_blocking

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.core.checks import Seconds
    from tarry.core.events import WillWait
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Random
    from tarry.core.verdict import CallState
    from tarry.runtime.downstream import Downstream
    from tarry.runtime.options import AsyncOn, OnRetry
    from tarry.runtime.process_settings import Blocking

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
        """Check the arguments: the options of `retry`, and then those that only adapters pass."""
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
            self.classify_result_async = partial(classify_by_async_until, async_until)
        else:
            self.classify_result = partial(classify_by_until, until)

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


def check_policy(policy: object) -> None:
    """Raise unless `policy` is None or a `Policy`; the error says how to use a preset."""
    description = "a tarry.Policy(...)"
    if isinstance(policy, str) and policy in PRESETS:
        description = f"a policy, such as tarry.Policy.preset({policy!r})"
    check_instance("policy", policy, Policy, description)


def _check_stop(stop: object) -> None:
    is_function = callable(stop) and not isinstance(stop, type)  # an object of a class is true
    if not is_function or type(stop).__module__.partition(".")[0] == "tenacity":
        rule = (
            "must be a function that takes a tarry.CallState and returns whether to give up; to "
            "limit the number of attempts or the time, use attempts= and deadline="
        )
        raise ConfigurationTypeError("stop", rule, stop)
    check_not_async("stop", stop)
