"""The public functions that retry: `retry`, `retrying`, `call`, `acall` and `attempts`.

`attempts` retries a block: `for attempt in tarry.attempts(on=OSError): with attempt: ...`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

from tarry.core.checks import check_instance
from tarry.core.outcome import outcome_of_exception
from tarry.errors import ConfigurationError, ConfigurationTypeError
from tarry.runtime import drivers, event_loops, scopes
from tarry.runtime.call import (
    RunningBlockCall,
    RunningCall,
)
from tarry.runtime.config import (
    CANCEL_IN_COROUTINE_MESSAGE,
    NO_FALLBACK,
    POLICY_ATTEMPTS,
    RETRY_AND_HEDGE_MESSAGE,
    RetryConfig,
)
from tarry.runtime.effects import effects
from tarry.runtime.functions import (
    ASYNC_GENERATOR,
    COROUTINE,
    GENERATOR,
    add_module,
    check_awaitable,
    check_callable,
    flags_of,
    name_of,
    operation_of,
)
from tarry.runtime.options import options_from, reject_unknown_options

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractContextManager
    from types import TracebackType
    from typing import Never, Self, Unpack

    from tarry.core.checks import Seconds
    from tarry.core.outcome import Outcome
    from tarry.core.policy import Policy, Random
    from tarry.core.verdict import Attempt, CallState
    from tarry.runtime.downstream import Downstream
    from tarry.runtime.effects import CancelToken
    from tarry.runtime.options import AsyncOn, On, OnRetry, RetryOptions
    from tarry.runtime.process_settings import Blocking

F = TypeVar("F", bound="Callable[..., Any]")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_DECORATION = "__tarry_retry__"
"""The attribute of a decorated function that holds the original function and the options."""


class Decorator(Protocol):
    """A decorator that returns a function of the same type."""

    def __call__(self, fn: F, /) -> F:
        """Wrap a function."""
        ...


def retry(
    *misused: Never,
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
    fallback: Any = NO_FALLBACK,
    stop: Callable[[CallState], bool] | None = None,
    on_retry: OnRetry | None = None,
    blocking: Blocking | None = None,
    hedging: None = None,
    **unknown: Never,
) -> Decorator:
    """Return a decorator that retries functions, coroutine functions and (async) generators.

    on: which errors to retry: an exception type, a tuple of types, or a predicate over the
        exception. The predicate returns True or False, a number of seconds after which to retry
        (exactly, without jitter), or an `Outcome` with a kind and a server's hint. It also decides
        about an `AttemptTimeout`, which is always retried if `on` names types. For a coroutine
        function, the predicates `on` and `until` may be coroutine functions.
    until: a predicate over the result. If it returns false, the call is retried. It may return an
        `Outcome` too: a transient one is retried, a permanent one ends the call with the result.
    attempts: the maximum number of attempts, including the first; by default that of the policy
        (4). None means no limit; it needs `deadline`, a total budget, a retry budget or `stop`.
    timeout: the time limit of one attempt, in seconds or as a `timedelta`. A plain function then
        runs in a thread, in which it cannot use SQLite connections or thread-local values of the
        caller. The thread continues after the timeout, and its result is discarded. `deadline`
        needs no thread.
    deadline: the time limit of the whole call, including all attempts and waits. Calls
        that the function makes share the deadline. It does not interrupt the functions that are
        given as `on`, `until`, `on_retry`, `stop` and `fallback`.
    policy: all other settings, such as delays. `attempts` and `timeout` override its own.
    downstream: the dependency's breaker, retry budget and limits.
    name: the name in logs and metrics; by default that of the function with its module.
    cancel: a token that ends the waits of a plain function.
    random: the source of random numbers for jitter, such as random.Random(7).
    fallback: what a call that is given up returns instead of raising its error: a value, or a
        function that takes the error. Errors that `on` does not match are still raised. The
        fallback of a coroutine function may be a coroutine function.
    stop: a function that gets a `CallState` before each wait, and returns True to give up.
    blocking: "allow" lets the waits of a plain function block a running event loop. By default, the
        error is raised instead of such a wait: see `tarry.configure`.
    on_retry: a function that gets the event `WillWait` before each wait, or a `logging.Logger` that
        logs the retries instead of the logger "tarry". For a coroutine function, `on_retry` may be
        a coroutine function. An error that it raises is logged and ignored.
    hedging: only raises an error if given, because a call is either retried or hedged.
    """
    options = options_from(locals())
    if misused:  # the decorator was used without parentheses, or with a positional argument
        _reject_errors_by_position(misused)
        raise ConfigurationTypeError(
            "@tarry.retry needs on= to know which errors are worth another attempt, as in "
            "@tarry.retry(on=ConnectionError); a bare @tarry.retry would also retry bugs"
        )
    if hedging is not None:
        raise ConfigurationError(RETRY_AND_HEDGE_MESSAGE)
    reject_unknown_options("retry", unknown)
    config = RetryConfig(**options)

    def decorate(fn: Any, /) -> Any:
        if type(fn) in (classmethod, staticmethod):
            return type(fn)(decorate(fn.__func__))
        if not callable(fn) or isinstance(fn, type):
            msg = f"@tarry.retry decorates functions and methods, got {fn!r}"
            raise ConfigurationTypeError(msg)
        return _wrap(fn, config.with_default_name(operation_of(fn)), options)

    return decorate


def _reject_errors_by_position(arguments: tuple[Any, ...]) -> None:
    """Raise if all arguments are exception types, or the first one is a tuple of them."""
    is_tuple = isinstance(arguments[0], tuple)
    types: tuple[Any, ...] = arguments[0] if is_tuple else arguments
    if types and all(isinstance(item, type) and issubclass(item, BaseException) for item in types):
        names = ", ".join(item.__name__ for item in types)
        on = f"({names})" if len(types) > 1 else names
        raise ConfigurationTypeError(
            f"tarry.retry takes the errors to retry by name: write @tarry.retry(on={on})"
        )


def retrying(fn: F, /, **changes: Unpack[RetryOptions]) -> F:
    """Return a function that `retry` has decorated, with other arguments of `retry`.

    `tarry.retrying(charge, attempts=8)(order)` makes one call with 8 attempts, and so does
    `charge.retrying(attempts=8)(order)`; but type checkers do not know the attribute. The function
    itself is not changed, and the arguments that are not given are those of its decorator. For a
    method, pass the bound method, such as `client.charge`: the attribute of a method raises an
    error, because it would not pass `self`.
    """
    method: Any = fn if isinstance(fn, MethodType) else None
    decorated: Any = fn if method is None else method.__func__
    decoration: tuple[Callable[..., Any], RetryOptions] | None
    decoration = getattr(decorated, _DECORATION, None)
    # `functools.wraps` of another decorator copies the attribute: compare the function, too.
    if decoration is None or decoration[0] is not decorated.__wrapped__:
        msg = f"tarry.retrying takes a function that @tarry.retry has decorated, got {fn!r}"
        raise ConfigurationTypeError(msg)
    original, options = decoration
    wrapped: Any = _wrap_with_changes(original, options, changes)
    if method is not None:
        wrapped = MethodType(wrapped, method.__self__)
    result: F = wrapped
    return result


def _wrap_with_changes(
    fn: Callable[..., Any], options: RetryOptions, changes: RetryOptions
) -> Callable[..., Any]:
    """Return the original function `fn` with retries, with some of its options changed."""
    reject_unknown_options("retrying", {k: v for k, v in changes.items() if k not in options})
    new_options: RetryOptions = {**options, **changes}
    config = RetryConfig(**new_options).with_default_name(operation_of(fn))
    return _wrap(fn, config, new_options)


def _retrying_attribute(
    fn: Callable[..., Any], options: RetryOptions, /, **changes: Unpack[RetryOptions]
) -> Callable[..., Any]:
    """Return `fn` with changed options, for the attribute `retrying` of a decorated function."""
    if _takes_self(fn):
        method = name_of(fn)
        raise ConfigurationTypeError(
            f"{method}.retrying(...) does not pass self or cls to the method: use "
            f"tarry.retrying(object.{method.rpartition('.')[2]}, ...)"
        )
    return _wrap_with_changes(fn, options, changes)


def _takes_self(fn: Any) -> bool:
    """Return whether a function is a method that is not bound, by the name of its parameter."""
    if isinstance(fn, MethodType):
        return False
    while hasattr(fn, "__wrapped__"):  # the parameters of another decorator are usually `*args`
        fn = fn.__wrapped__
    code = getattr(fn, "__code__", None)
    return code is not None and code.co_varnames[: code.co_argcount][:1] in (("self",), ("cls",))


def call(
    fn: Callable[[*Ts], T],
    /,
    *args: *Ts,
    kwargs: Mapping[str, Any] | None = None,
    on: On | None = None,
    until: Callable[[T], bool | Outcome] | None = None,
    attempts: int | None = POLICY_ATTEMPTS,
    timeout: Seconds | None = None,
    deadline: Seconds | None = None,
    policy: Policy | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    cancel: CancelToken | None = None,
    random: Random | None = None,
    fallback: T | Callable[[Exception], T] = NO_FALLBACK,
    stop: Callable[[CallState], bool] | None = None,
    on_retry: OnRetry | None = None,
    blocking: Blocking | None = None,
    **unknown: Never,
) -> T:
    """Call a plain function with retries: `tarry.call(fetch, url, on=OSError)`.

    Takes the arguments of `retry`. `kwargs` are keyword arguments for the function. If a policy is
    given, but not `on`, the connection errors and timeouts of the standard library are retried.
    """
    reject_unknown_options("call", unknown)
    check_callable("call", fn)
    check_instance("kwargs", kwargs, Mapping, "a dict")
    flags = flags_of(fn)
    if flags & COROUTINE:
        msg = f"{name_of(fn)} is a coroutine function: use `await tarry.acall(...)`"
        raise ConfigurationTypeError(msg)
    _check_no_generator(fn, flags)
    if on is None and policy is not None:
        on = outcome_of_exception
    name = name or operation_of(fn)
    config = RetryConfig(
        on,
        until,
        attempts,
        timeout,
        deadline,
        policy,
        downstream,
        name,
        cancel,
        random,
        fallback=fallback,
        stop=stop,
        on_retry=on_retry,
        blocking=blocking,
    )
    config.check_no_async_argument()
    drive = drivers.drive if fallback is NO_FALLBACK else drivers.drive_with_fallback
    return drive(RunningCall.new(config), fn, args, kwargs or {})


async def acall(
    fn: Callable[[*Ts], Awaitable[T]],
    /,
    *args: *Ts,
    kwargs: Mapping[str, Any] | None = None,
    on: AsyncOn | None = None,
    until: Callable[[T], bool | Outcome | Awaitable[bool | Outcome]] | None = None,
    attempts: int | None = POLICY_ATTEMPTS,
    timeout: Seconds | None = None,
    deadline: Seconds | None = None,
    policy: Policy | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    random: Random | None = None,
    fallback: T | Callable[[Exception], T | Awaitable[T]] = NO_FALLBACK,
    stop: Callable[[CallState], bool] | None = None,
    on_retry: OnRetry | None = None,
    **unknown: Never,
) -> T:
    """Await a coroutine function with retries: `await tarry.acall(fetch, url, on=OSError)`.

    Takes the arguments of `call` except `cancel`: cancel the task instead.
    """
    reject_unknown_options("acall", unknown)
    check_callable("acall", fn)
    check_instance("kwargs", kwargs, Mapping, "a dict")
    flags = flags_of(fn)
    _check_no_generator(fn, flags)
    if on is None and policy is not None:
        on = outcome_of_exception
    name = name or operation_of(fn)
    config = RetryConfig(
        on,
        until,
        attempts,
        timeout,
        deadline,
        policy,
        downstream,
        name,
        None,
        random,
        fallback=fallback,
        stop=stop,
        on_retry=on_retry,
    )
    # A plain function may still return an awaitable, as a lambda does.
    checked_fn = fn if flags & COROUTINE else check_awaitable(fn, "call")
    drive = drivers.drive_async if fallback is NO_FALLBACK else drivers.drive_with_fallback_async
    return await drive(RunningCall.new(config), checked_fn, args, kwargs or {})


def attempts(
    *,
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
    stop: Callable[[CallState], bool] | None = None,
    on_retry: OnRetry | None = None,
    blocking: Blocking | None = None,
    **unknown: Never,
) -> Attempts:
    """Retry a block: `for attempt in tarry.attempts(on=OSError):` and `with attempt:` inside.

    In a coroutine, use `async for`, with `with` or `async with`. Takes the arguments of `retry`
    except `fallback`. If `until` is given, the block passes its result to `attempt.set_result`. A
    `timeout` needs `async for`, because a plain block cannot be interrupted. An `on` or `until`
    that is a coroutine function needs `async with`.
    """
    reject_unknown_options("attempts", unknown)
    if not name:
        # The name of the function that contains the loop. `inspect` is slow to import.
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001 - see above
        name = add_module(frame.f_globals.get("__name__"), frame.f_code.co_qualname)
    return Attempts(
        RetryConfig(
            on,
            until,
            attempts,
            timeout,
            deadline,
            policy,
            downstream,
            name,
            cancel,
            random,
            stop=stop,
            on_retry=on_retry,
            blocking=blocking,
        )
    )


def _check_no_generator(fn: object, flags: int) -> None:
    if flags & (GENERATOR | ASYNC_GENERATOR):
        msg = f"{name_of(fn)} is a generator function: decorate it with @tarry.retry(on=...)"
        raise ConfigurationTypeError(msg)


def _wrap(fn: Callable[..., Any], config: RetryConfig, options: RetryOptions) -> Callable[..., Any]:
    """Return the function with retries; `options` are the arguments from which `config` is made."""
    flags = flags_of(fn)
    if flags & (GENERATOR | ASYNC_GENERATOR) and config.has_until:
        msg = f"until tests a result, but {config.operation} is a generator, which has no result"
        raise ConfigurationError(msg)
    if flags & (GENERATOR | ASYNC_GENERATOR) and config.fallback is not NO_FALLBACK:
        msg = f"fallback replaces a result, but {config.operation} is a generator, which has none"
        raise ConfigurationError(msg)
    if not flags & (COROUTINE | ASYNC_GENERATOR):
        config.check_no_async_argument()
    elif config.cancel is not None:
        raise ConfigurationError(CANCEL_IN_COROUTINE_MESSAGE)
    wrapped: Callable[..., Any]
    if flags & GENERATOR:
        wrapped = drivers.wrap_generator(fn, config)
    elif flags & ASYNC_GENERATOR:
        wrapped = drivers.wrap_async_generator(fn, config)
    elif flags & COROUTINE:
        wrapped = drivers.wrap_async(fn, config)
    else:
        wrapped = drivers.wrap(fn, config)
    setattr(wrapped, _DECORATION, (fn, options))
    # Not a reference to `wrapped`: a cycle would keep a local function and its closure alive until
    # the garbage collector runs.
    attribute = partial(_retrying_attribute, fn, options)
    setattr(wrapped, "retrying", attribute)  # noqa: B010 - not in the type
    return wrapped


_NO_RESULT = object()
"""The result of a block that has not called `set_result`."""


class AttemptContext:
    """One attempt of a call, as a context manager: the code inside `with attempt:` is retried.

    `async with attempt:` has the same effect.
    """

    def __init__(self, running_call: RunningCall, attempt: Attempt, *, in_event_loop: bool) -> None:
        self._call = running_call
        self._attempt = attempt
        self._scope_handle: object = None
        self._ends_at = None if attempt.timeout is None else effects.now() + attempt.timeout
        self._timeout_scope: AbstractContextManager[None] | None = None
        if in_event_loop and attempt.timeout is not None:
            self._timeout_scope = event_loops.timeout(attempt.timeout)
        self._result: object = _NO_RESULT
        self.was_entered: bool = False
        self.is_last: bool | None = None
        """Whether no attempt follows; None until the `with` block is left."""

    @property
    def number(self) -> int:
        """The number of this attempt, counted from 1."""
        return self._attempt.number

    def set_result(self, result: object) -> None:
        """Set the result of the block, which `until` tests when the block is left."""
        self._result = result

    def __enter__(self) -> Self:
        config = self._call.config
        if config.classify_error_async is not None or config.classify_result_async is not None:
            self._call.abort()
            raise ConfigurationError(
                "on or until is a coroutine function, which only `async with attempt:` can await"
            )
        return self._enter()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the attempt; return True to suppress its error if another attempt follows."""
        try:
            # A block that succeeds usually has no scope to leave and no result to test. The general
            # case below would take 0.7 us longer. A block with a timeout has a deadline, too.
            if error is None and self._scope_handle is None and not self._call.config.has_until:
                self.is_last = True
                self._call.try_finish(None)
                return False
            final_error = self._leave_scopes(error_type, error, traceback)
            result = self._take_result() if final_error is None else None
            return self._end(error, final_error, result, None)
        except BaseException:
            self._call.abort()
            raise

    async def __aenter__(self) -> Self:
        return self._enter()

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """End the attempt, like `__exit__`, and await predicates that are coroutine functions."""
        config = self._call.config
        outcome = None
        try:
            final_error = self._leave_scopes(error_type, error, traceback)
            result = self._take_result() if final_error is None else None
            if isinstance(final_error, Exception):
                outcome = await self._call.classify_error_async(final_error)
            elif final_error is None and config.classify_result_async is not None:
                outcome = await config.classify_result_async(result)
            return self._end(error, final_error, result, outcome)
        except BaseException:
            self._call.abort()
            raise

    def _enter(self) -> Self:
        if self.was_entered:
            msg = "an attempt can be entered only once: use one `with attempt:` for the whole body"
            raise ConfigurationError(msg)
        self.was_entered = True
        try:
            number = self._attempt.number
            if number > 1 or self._ends_at is not None or scopes.current_scope.get() is not None:
                self._scope_handle = scopes.enter(self._ends_at, number)
            if self._timeout_scope is not None:
                self._timeout_scope.__enter__()
        except BaseException:
            self._call.abort()
            raise
        return self

    def _leave_scopes(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> BaseException | None:
        """End the time limit of the block; return the error of the attempt, such as a timeout."""
        scope = self._timeout_scope
        try:
            timed_out = scope is not None and scope.__exit__(error_type, error, traceback)
        finally:
            self._timeout_scope = None
            if self._scope_handle is not None:
                scopes.leave(self._scope_handle)
        return self._call.timeout_error(self._attempt.timeout or 0.0) if timed_out else error

    def _end(
        self,
        block_error: BaseException | None,
        error: BaseException | None,
        result: object,
        outcome: Outcome | None,
    ) -> bool:
        """Record the error or result of the attempt; return whether to suppress `block_error`."""
        if error is None:
            self.is_last = True  # stays True if `try_finish` raises
            self.is_last = self._call.try_finish(result, outcome)
            return False
        if not isinstance(error, Exception):
            self._call.abort()
            return False
        self.is_last = not self._call.try_continue(error, outcome)
        if self.is_last and error is not block_error:
            raise error
        return not self.is_last

    def _take_result(self) -> object:
        result, self._result = self._result, _NO_RESULT  # do not keep it during the wait
        if result is not _NO_RESULT:
            return result
        if self._call.config.has_until:
            raise ConfigurationError(
                "until tests the result of the block: call attempt.set_result(...) inside "
                "`with attempt:`"
            )
        return None


class Attempts:
    """The return value of `attempts`. Each `for` or `async for` loop over it is a new call."""

    __slots__ = ("_config",)

    def __init__(self, config: RetryConfig) -> None:
        self._config = config

    def __iter__(self) -> AttemptIterator:
        if self._config.policy.attempt_timeout is not None:
            raise ConfigurationError(
                "timeout cannot interrupt the body of a for loop: use @tarry.retry or tarry.call, "
                "or set a timeout on the client that the body uses"
            )
        self._config.check_no_async_argument()
        return AttemptIterator(self._config)

    def __aiter__(self) -> AttemptIterator:
        if self._config.cancel is not None:
            raise ConfigurationError(CANCEL_IN_COROUTINE_MESSAGE)
        return AttemptIterator(self._config)


class AttemptIterator:
    """The attempts of one call in a `for` or an `async for` loop."""

    __slots__ = ("_call", "_context")

    def __init__(self, config: RetryConfig) -> None:
        self._call: RunningBlockCall = RunningBlockCall.new(config)
        self._context: AttemptContext | None = None
        """The latest attempt; None before the first."""

    def __del__(self) -> None:
        """Release the permit of an attempt whose `with` block was never entered."""
        context: AttemptContext | None = getattr(self, "_context", None)
        if context is not None and not context.was_entered:
            self._call.release_permit_in_finalizer()

    def _is_finished(self) -> bool:
        """Return whether no attempt follows; raise if the latest `with` block was never left."""
        if self._context is None:
            return False
        if self._context.is_last is None:
            self._call.abort()
            raise ConfigurationError("the body of the loop must be inside `with attempt:`")
        return self._context.is_last

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> AttemptContext:
        if self._is_finished():
            raise StopIteration
        running_call = self._call
        if self._context is not None:
            running_call.wait()
        try:
            attempt = running_call.begin_attempt()
            if attempt.delay:
                attempt = running_call.wait_for_limiter(attempt)
            self._context = context = AttemptContext(running_call, attempt, in_event_loop=False)
        except BaseException:
            running_call.abort()
            raise
        return context

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AttemptContext:
        if self._is_finished():
            raise StopAsyncIteration
        running_call = self._call
        if self._context is not None:
            await running_call.async_wait()
        try:
            attempt = running_call.begin_attempt()
            if attempt.delay:
                attempt = await running_call.async_wait_for_limiter(attempt)
            self._context = context = AttemptContext(running_call, attempt, in_event_loop=True)
        except BaseException:
            running_call.abort()
            raise
        return context
