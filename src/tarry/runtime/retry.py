"""The public functions that retry: `retry`, `call`, `acall` and `attempts`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from tarry.core.outcome import outcome_of_exception
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime import drivers
from tarry.runtime.call import RunningCall
from tarry.runtime.config import (
    ASYNC_GENERATOR,
    CANCEL_IN_COROUTINE_MESSAGE,
    COROUTINE,
    GENERATOR,
    RETRY_AND_HEDGE_MESSAGE,
    RetryConfig,
    check_callable,
    flags_of,
    name_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from typing import Never

    from tarry.core.policy import Policy, Random
    from tarry.runtime.attempts import Attempts
    from tarry.runtime.clocks import CancelToken
    from tarry.runtime.config import On
    from tarry.runtime.downstream import Downstream

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Decorator(Protocol):
    """A decorator that returns a function of the same type."""

    def __call__(self, fn: F, /) -> F:
        """Wrap a function."""
        ...


def retry(
    *misused: Never,
    on: On | None = None,
    until: Callable[[Any], bool] | None = None,
    attempts: int | None = None,
    timeout: float | None = None,
    deadline: float | None = None,
    policy: Policy | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    cancel: CancelToken | None = None,
    random: Random | None = None,
    hedging: None = None,
) -> Decorator:
    """Return a decorator that retries functions, coroutine functions and (async) generators.

    on: which errors to retry: an exception type, a tuple of types, or a predicate over the
        exception. The predicate may also return an `Outcome`, with a kind and a server's hint.
    until: a predicate over the result. If it returns false, the call is retried.
    attempts: the maximum number of attempts, including the first (default 4).
    timeout: the time limit of one attempt in seconds. A plain function then runs in a thread, which
        is not stopped by the timeout; its result is discarded.
    deadline: the time limit of the whole call in seconds, including all attempts and waits. Calls
        that the function makes share the deadline.
    policy: all other settings: delays, jitter, total budget, statuses.
    downstream: the dependency's breaker, retry budget and limits.
    name: the name in logs and metrics; by default the name of the function.
    cancel: a token that ends the waits of a plain function.
    random: the source of random numbers for jitter, such as random.Random(7).
    """
    if misused:
        msg = (
            "@tarry.retry needs on=, which errors are worth another attempt, as in "
            "@tarry.retry(on=ConnectionError); a bare @tarry.retry would also retry bugs"
        )
        raise ConfigurationTypeError(msg)
    if hedging is not None:
        raise ConfigurationError(RETRY_AND_HEDGE_MESSAGE)
    config = RetryConfig(
        on=on,
        until=until,
        attempts=attempts,
        timeout=timeout,
        deadline=deadline,
        policy=policy,
        downstream=downstream,
        name=name,
        cancel=cancel,
        random=random,
    )

    def decorate(fn: Any, /) -> Any:
        if type(fn) in (classmethod, staticmethod):
            return type(fn)(decorate(fn.__func__))
        if not callable(fn) or isinstance(fn, type):
            msg = f"@tarry.retry decorates functions and methods, got {fn!r}"
            raise ConfigurationTypeError(msg)
        return _wrap(fn, config.with_default_name(name_of(fn)))

    return decorate


def call(
    fn: Callable[[*Ts], T],
    /,
    *args: *Ts,
    on: On | None = None,
    until: Callable[[T], bool] | None = None,
    attempts: int | None = None,
    timeout: float | None = None,
    deadline: float | None = None,
    policy: Policy | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    cancel: CancelToken | None = None,
    random: Random | None = None,
) -> T:
    """Call a plain function with retries: `tarry.call(fetch, url, on=OSError)`.

    Takes the arguments of `retry`. To pass keyword arguments to the function, use a lambda or
    `functools.partial`. If a policy is given, `on` is optional. By default, the standard library's
    connection errors and timeouts are then retried.
    """
    check_callable("call", fn)
    if flags_of(fn) & COROUTINE:
        msg = f"{name_of(fn)} is a coroutine function: use `await tarry.acall(...)`"
        raise ConfigurationTypeError(msg)
    _check_no_generator(fn)
    config = RetryConfig(
        on=outcome_of_exception if on is None and policy is not None else on,
        until=until,
        attempts=attempts,
        timeout=timeout,
        deadline=deadline,
        policy=policy,
        downstream=downstream,
        name=name or name_of(fn),
        cancel=cancel,
        random=random,
    )
    return drivers.drive(RunningCall.new(config), fn, args, {})


async def acall(
    fn: Callable[[*Ts], Awaitable[T]],
    /,
    *args: *Ts,
    on: On | None = None,
    until: Callable[[T], bool] | None = None,
    attempts: int | None = None,
    timeout: float | None = None,
    deadline: float | None = None,
    policy: Policy | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    random: Random | None = None,
) -> T:
    """Await a coroutine function with retries: `await tarry.acall(fetch, url, on=OSError)`."""
    check_callable("acall", fn)
    _check_no_generator(fn)
    config = RetryConfig(
        on=outcome_of_exception if on is None and policy is not None else on,
        until=until,
        attempts=attempts,
        timeout=timeout,
        deadline=deadline,
        policy=policy,
        downstream=downstream,
        name=name or name_of(fn),
        random=random,
    )
    return await drivers.drive_async(RunningCall.new(config), fn, args, {})


def attempts(
    *,
    on: On | None = None,
    attempts: int | None = None,
    timeout: float | None = None,
    deadline: float | None = None,
    policy: Policy | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    cancel: CancelToken | None = None,
    random: Random | None = None,
) -> Attempts:
    """Retry a block: `for attempt in tarry.attempts(on=OSError):` and `with attempt:` inside.

    In a coroutine, use `async for`, but still a plain `with`. Takes the arguments of
    `retry` except `until`, because a block has no result. A `timeout` needs `async for`, because
    a plain block cannot be interrupted.
    """
    from tarry.runtime.attempts import Attempts

    return Attempts(
        RetryConfig(
            on=on,
            attempts=attempts,
            timeout=timeout,
            deadline=deadline,
            policy=policy,
            downstream=downstream,
            name=name or sys._getframe(1).f_code.co_qualname,  # noqa: SLF001 - no public way to get it
            cancel=cancel,
            random=random,
        )
    )


def _check_no_generator(fn: object) -> None:
    if flags_of(fn) & (GENERATOR | ASYNC_GENERATOR):
        msg = f"{name_of(fn)} is a generator function: decorate it with @tarry.retry(on=...)"
        raise ConfigurationTypeError(msg)


def _wrap(fn: Callable[..., Any], config: RetryConfig) -> Callable[..., Any]:
    flags = flags_of(fn)
    if flags & (GENERATOR | ASYNC_GENERATOR) and config.until is not None:
        msg = f"until tests a result, but {config.operation} is a generator, which has no result"
        raise ConfigurationError(msg)
    if flags & (COROUTINE | ASYNC_GENERATOR) and config.cancel is not None:
        raise ConfigurationError(CANCEL_IN_COROUTINE_MESSAGE)
    if flags & GENERATOR:
        return drivers.wrap_generator(fn, config)
    if not flags & (COROUTINE | ASYNC_GENERATOR):
        return drivers.wrap(fn, config)
    if flags & ASYNC_GENERATOR:
        return drivers.wrap_async_generator(fn, config)
    return drivers.wrap_async(fn, config)
