"""The drivers, which make the attempts of functions, coroutine functions and (async) generators.

Each driver has a blocking form and an async form, which runs on asyncio and trio. Both forms leave
all decisions to `RunningCall`. They differ only in how they call the function and how they wait.

The drivers read the number of the newest error record before each attempt. If the error of the
attempt has a newer error record, an inner retry loop has given up on it: see `error_record`.
"""

from __future__ import annotations

import sys
from functools import WRAPPER_ASSIGNMENTS, wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tarry.core.outcome import SUCCESS
from tarry.runtime import event_loops, scopes
from tarry.runtime.call import (
    RunningCall,
    blocking_wait,
    decide_after_first_failure,
    fallback_result,
    fallback_result_async,
)
from tarry.runtime.config import NO_FALLBACK
from tarry.runtime.effects import effects
from tarry.runtime.events import bus
from tarry.runtime.scopes import SECOND_ATTEMPT

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Mapping

    from tarry.core.verdict import Attempt
    from tarry.runtime.config import RetryConfig
    from tarry.runtime.downstream import Downstream

T = TypeVar("T")
Args: TypeAlias = "tuple[Any, ...]"
Kwargs: TypeAlias = "Mapping[str, Any]"
AsyncFunction: TypeAlias = "Callable[..., Awaitable[T]]"
CoroutineFunction: TypeAlias = "Callable[..., Coroutine[Any, Any, T]]"

_get_scope = scopes.current_scope.get
_set_scope = scopes.current_scope.set
_WRAPPER_ATTRIBUTES = (*WRAPPER_ASSIGNMENTS, "__defaults__", "__kwdefaults__")
"""The attributes that a decorated function has in common with the function of the user. Frameworks
read the default values of parameters."""


def wrap(
    fn: Callable[..., T], config: RetryConfig, first: Callable[..., T] | None = None
) -> Callable[..., T]:
    """Return a function that calls `fn` with retries: the fastest that supports `config`.

    If a call has a downstream and no deadline or listener, and the breaker is closed, its first
    attempt calls `first` instead of `fn`. For such calls both must do the same.
    """
    if config.needs_slow_path:
        drive_call = drive if config.fallback is NO_FALLBACK else drive_with_fallback

        @wraps(fn, _WRAPPER_ATTRIBUTES)
        def call(*args: Any, **kwargs: Any) -> T:
            return drive_call(RunningCall.new(config), fn, args, kwargs)

        return call
    if config.downstream is None:
        return _wrap_without_downstream(fn, config)
    return _wrap_with_downstream(fn, config, config.downstream, first or fn)


def wrap_async(
    fn: AsyncFunction[T], config: RetryConfig, first: AsyncFunction[T] | None = None
) -> CoroutineFunction[T]:
    """Like `wrap`, for coroutine functions."""
    if config.needs_slow_path:
        drive_call = drive_async if config.fallback is NO_FALLBACK else drive_with_fallback_async

        @wraps(fn, _WRAPPER_ATTRIBUTES)
        async def call(*args: Any, **kwargs: Any) -> T:
            return await drive_call(RunningCall.new(config), fn, args, kwargs)

        return call
    if config.downstream is None:
        return _wrap_without_downstream_async(fn, config)
    return _wrap_with_downstream_async(fn, config, config.downstream, first or fn)


def _wrap_without_downstream(fn: Callable[..., T], config: RetryConfig) -> Callable[..., T]:
    """Return the wrapper for calls without a downstream and without time limits.

    If no listener, log or `on_retry` needs events, a `RunningCall` is created only after two failed
    attempts. After one, `decide_after_first_failure` returns a `FirstFailure`, a cheaper tuple.
    """

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    def call(*args: Any, **kwargs: Any) -> T:
        if bus.listeners or _get_scope() is not None:
            return drive(RunningCall.new(config), fn, args, kwargs)
        last_record_number = bus.last_record_number
        try:
            if kwargs:  # passing an empty **kwargs would still build a dict
                return fn(*args, **kwargs)
            return fn(*args)
        except Exception as error:
            decision = decide_after_first_failure(config, error, last_record_number)
            if decision is None:
                raise
            if isinstance(decision, tuple):  # a `FirstFailure`; its last item is the `Wait`
                blocking_wait(config, decision[2].delay, error)
        if isinstance(decision, tuple):
            last_record_number = bus.last_record_number
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                running = RunningCall.after_first_failure(config, decision, last_record_number)
                if not running.try_continue(error):
                    raise
        else:
            running = decision
        running.wait()
        return drive(running, fn, args, kwargs)

    return call


def _wrap_without_downstream_async(
    fn: AsyncFunction[T], config: RetryConfig
) -> CoroutineFunction[T]:
    """Like `_wrap_without_downstream`, for coroutine functions."""

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    async def call(*args: Any, **kwargs: Any) -> T:
        if bus.listeners or _get_scope() is not None:
            return await drive_async(RunningCall.new(config), fn, args, kwargs)
        last_record_number = bus.last_record_number
        try:
            if kwargs:
                return await fn(*args, **kwargs)
            return await fn(*args)
        except Exception as error:
            decision = decide_after_first_failure(config, error, last_record_number)
            if decision is None:
                raise
            if isinstance(decision, tuple) and decision[2].delay > 0:
                await effects.async_sleep(decision[2].delay)
        if isinstance(decision, tuple):
            last_record_number = bus.last_record_number
            try:
                _set_scope(SECOND_ATTEMPT)
                try:
                    return await fn(*args, **kwargs)
                finally:
                    scopes.leave(SECOND_ATTEMPT.handle)
            except Exception as error:
                running = RunningCall.after_first_failure(config, decision, last_record_number)
                if not running.try_continue(error):
                    raise
        else:
            running = decision
        await running.async_wait()
        return await drive_async(running, fn, args, kwargs)

    return call


def _wrap_with_downstream(
    fn: Callable[..., T], config: RetryConfig, downstream: Downstream, first: Callable[..., T]
) -> Callable[..., T]:
    """Return the wrapper for calls with a downstream, which is fast if the first attempt succeeds.

    A first attempt that succeeds while the breaker is closed creates no `RunningCall` and usually
    acquires no lock: see `success_counter`. If the breaker is not closed, `drive` makes the whole
    call. If the first attempt fails, `drive` makes the retries.
    """
    breaker, count_success = downstream.breaker, downstream.success_counter()
    classify_result = config.classify_result

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    def call(*args: Any, **kwargs: Any) -> T:
        # Read without the downstream's lock. A call that starts while another thread opens the
        # breaker is therefore treated as if it had started just before.
        permit = 0 if breaker is None else breaker.permit_if_closed
        if permit is None or bus.listeners or _get_scope() is not None:
            return drive(RunningCall.new(config), fn, args, kwargs)
        last_record_number, clock = bus.last_record_number, effects.now
        started = clock()
        try:
            # Passing an empty **kwargs would still build a dict.
            result = first(*args, **kwargs) if kwargs else first(*args)
            succeeded = classify_result is None or classify_result(result) is SUCCESS
        except Exception as error:
            running = RunningCall.after_first_attempt(config, started, last_record_number, permit)
            if not running.try_continue(error):
                raise
        else:
            if succeeded:
                count_success(permit, started, clock())
                return result
            running = RunningCall.after_first_attempt(config, started, last_record_number, permit)
            if running.try_finish(result):
                return result
            release_result(running, result)
        running.wait()
        return drive(running, fn, args, kwargs)

    return call


def _wrap_with_downstream_async(
    fn: AsyncFunction[T], config: RetryConfig, downstream: Downstream, first: AsyncFunction[T]
) -> CoroutineFunction[T]:
    """Like `_wrap_with_downstream`, for coroutine functions."""
    breaker, count_success = downstream.breaker, downstream.success_counter()
    classify_result = config.classify_result

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    async def call(*args: Any, **kwargs: Any) -> T:
        permit = 0 if breaker is None else breaker.permit_if_closed
        if permit is None or bus.listeners or _get_scope() is not None:
            return await drive_async(RunningCall.new(config), fn, args, kwargs)
        last_record_number, clock = bus.last_record_number, effects.now
        started = clock()
        try:
            result = await first(*args, **kwargs) if kwargs else await first(*args)
            succeeded = classify_result is None or classify_result(result) is SUCCESS
        except Exception as error:
            running = RunningCall.after_first_attempt(config, started, last_record_number, permit)
            if not running.try_continue(error):
                raise
        else:
            if succeeded:
                count_success(permit, started, clock())
                return result
            running = RunningCall.after_first_attempt(config, started, last_record_number, permit)
            if running.try_finish(result):
                return result
            await release_result_async(running, result)
        await running.async_wait()
        return await drive_async(running, fn, args, kwargs)

    return call


def drive(running: RunningCall, fn: Callable[..., T], args: Args, kwargs: Kwargs) -> T:
    """Make attempts until the call succeeds or is given up; return its result or raise."""
    try:
        while True:
            attempt = running.begin_attempt()
            if running.config.passes_attempt_number:
                kwargs = {**kwargs, "attempt_number": attempt.number}
            if attempt.delay:
                attempt = running.wait_for_limiter(attempt)
            try:
                if attempt.timeout is not None or _get_scope():
                    result = _call_in_scope(running, attempt, fn, args, kwargs)
                else:
                    result = fn(*args, **kwargs) if kwargs else fn(*args)
            except Exception as error:
                if not running.try_continue(error):
                    raise
            else:
                if running.try_finish(result):
                    return result
                release_result(running, result)
            running.wait()
    except BaseException:
        running.abort()
        raise


async def drive_async(running: RunningCall, fn: AsyncFunction[T], args: Args, kwargs: Kwargs) -> T:
    """Like `drive`, for a coroutine function."""
    try:
        while True:
            attempt = running.begin_attempt()
            if running.config.passes_attempt_number:
                kwargs = {**kwargs, "attempt_number": attempt.number}
            if attempt.delay:
                attempt = await running.async_wait_for_limiter(attempt)
            try:
                # Tasks that the attempt starts get its number from the scope: see `attempt_number`.
                if attempt.number > 1 or attempt.timeout is not None or _get_scope():
                    result = await _call_in_scope_async(running, attempt, fn, args, kwargs)
                else:
                    result = await fn(*args, **kwargs) if kwargs else await fn(*args)
            except Exception as error:
                outcome = None
                if running.config.classify_error_async is not None:
                    outcome = await running.classify_error_async(error)
                if not running.try_continue(error, outcome):
                    raise
            else:
                classify_result = running.config.classify_result_async
                outcome = None if classify_result is None else await classify_result(result)
                if running.try_finish(result, outcome):
                    return result
                await release_result_async(running, result)
            await running.async_wait()
    except BaseException:
        running.abort()
        raise


def drive_with_fallback(
    running: RunningCall, fn: Callable[..., T], args: Args, kwargs: Kwargs
) -> T:
    """Like `drive`, but return the fallback of a call that is given up."""
    try:
        return drive(running, fn, args, kwargs)
    except Exception as error:
        if not running.has_given_up:
            raise
        result: T = fallback_result(running.config.fallback, error)
        return result


async def drive_with_fallback_async(
    running: RunningCall, fn: AsyncFunction[T], args: Args, kwargs: Kwargs
) -> T:
    """Like `drive_with_fallback`, for a coroutine function."""
    try:
        return await drive_async(running, fn, args, kwargs)
    except Exception as error:
        if not running.has_given_up:
            raise
        result: T = await fallback_result_async(running.config.fallback, error)
        return result


def release_result(running: RunningCall, result: object) -> None:
    """Release the connection of a response before a retry; drop one that is no longer readable."""
    release_connection = running.config.release_connection
    if release_connection is not None and not release_connection(result):
        running.discard_error()


async def release_result_async(running: RunningCall, result: object) -> None:
    """Like `release_result`, for a `release_connection` that is a coroutine function."""
    release_connection = running.config.release_connection
    if release_connection is not None and not await release_connection(result):
        running.discard_error()


def _call_in_scope(
    running: RunningCall, attempt: Attempt, fn: Callable[..., T], args: Args, kwargs: Kwargs
) -> T:
    """Make an attempt in a new scope: in a thread, if the policy has an attempt timeout."""
    timeout = attempt.timeout
    deadline = None if timeout is None else effects.now() + timeout
    scope_handle = scopes.enter(deadline, attempt.number)
    try:
        if timeout is None or running.policy.attempt_timeout is None:
            # A `timeout` then comes from a deadline, which does not interrupt a plain function.
            return fn(*args, **kwargs)
        from tarry.runtime.parallel import call_in_thread

        return call_in_thread(running, timeout, lambda: fn(*args, **kwargs))
    finally:
        scopes.leave(scope_handle)


async def _call_in_scope_async(
    running: RunningCall, attempt: Attempt, fn: AsyncFunction[T], args: Args, kwargs: Kwargs
) -> T:
    timeout = attempt.timeout
    deadline = None if timeout is None else effects.now() + timeout
    scope_handle = scopes.enter(deadline, attempt.number)
    try:
        if timeout is None:
            return await fn(*args, **kwargs)
        with event_loops.timeout(timeout):
            return await fn(*args, **kwargs)
    finally:
        scopes.leave(scope_handle)
    raise running.timeout_error(timeout)


def wrap_generator(
    fn: Callable[..., Generator[Any, Any, Any]], config: RetryConfig
) -> Callable[..., Generator[Any, Any, Any]]:
    """Retry a generator until it yields its first item; later errors are not retried."""

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    def start(*args: Any, **kwargs: Any) -> tuple[Generator[Any, Any, Any] | None, Any]:
        """Return a new generator and its first item; (None, its return value) if it yields none."""
        generator = fn(*args, **kwargs)
        try:
            return generator, next(generator)
        except StopIteration as end:
            return None, end.value

    start_with_retries = wrap(start, config)

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator, item = start_with_retries(*args, **kwargs)
        if generator is None:
            return item
        try:
            while True:
                try:
                    sent = yield item
                except GeneratorExit:
                    raise
                except BaseException as error:
                    item = generator.throw(error)
                else:
                    item = next(generator) if sent is None else generator.send(sent)
        except StopIteration as end:
            return end.value
        finally:
            generator.close()

    return generate


def wrap_async_generator(
    fn: Callable[..., AsyncGenerator[Any, Any]], config: RetryConfig
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """Retry an async generator until it yields its first item; later errors are not retried."""

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    async def start(*args: Any, **kwargs: Any) -> tuple[AsyncGenerator[Any, Any] | None, Any]:
        generator = fn(*args, **kwargs)
        # Hide this inner generator from the event loop. At shutdown the loop closes all registered
        # generators at the same time, but the outer generator, `generate`, must close this one.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        try:
            awaitable_item = anext(generator)
        finally:
            sys.set_asyncgen_hooks(*hooks)
        try:
            return generator, await awaitable_item
        except StopAsyncIteration:
            return None, None

    start_with_retries = wrap_async(start, config)

    @wraps(fn, _WRAPPER_ATTRIBUTES)
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator, item = await start_with_retries(*args, **kwargs)
        if generator is None:
            return
        try:
            while True:
                try:
                    sent = yield item
                except GeneratorExit:
                    raise
                except BaseException as error:
                    item = await generator.athrow(error)
                else:
                    item = await generator.asend(sent)
        except StopAsyncIteration:
            return
        finally:
            # If the inner generator is running, the event loop is already closing it at shutdown.
            if not getattr(generator, "ag_running", False):
                await generator.aclose()

    return generate
