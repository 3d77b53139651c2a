"""Runs the attempts of coroutine functions and async generators, on asyncio and trio."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.outcome import SUCCESS
from tarry.runtime import clocks, deadlines
from tarry.runtime.call import RunningCall, decide_after_first_failure
from tarry.runtime.clocks import system
from tarry.runtime.downstream import MAX_UNCOUNTED_SUCCESSES
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping

    from tarry.runtime.config import RetryConfig
    from tarry.runtime.downstream import Downstream

T = TypeVar("T")

_get_deadline_scope = deadlines.scope.get


def wrap(
    fn: Callable[..., Awaitable[T]], config: RetryConfig
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the fastest wrapper of `fn` that supports the options in `config`."""
    if config.needs_full_driver:
        return _wrap_full(fn, config)
    if config.downstream is None:
        return _wrap_plain(fn, config)
    return _wrap_guarded(fn, config, config.downstream)


def wrap_generator(
    fn: Callable[..., AsyncGenerator[Any, Any]], config: RetryConfig
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """Retry an async generator until it yields its first item; later errors are not retried."""

    @wraps(fn)
    async def first_item(*args: Any, **kwargs: Any) -> tuple[AsyncGenerator[Any, Any] | None, Any]:
        generator = fn(*args, **kwargs)
        # Hide the inner generator from the event loop, which closes all generators that it knows
        # when it shuts down. It knows the outer generator, which closes the inner one. If it knew
        # both, it would close both at the same time.
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(None, None)
        try:
            item = anext(generator)
        finally:
            sys.set_asyncgen_hooks(*hooks)
        try:
            return generator, await item
        except StopAsyncIteration:
            return None, None

    retry_first_item = wrap(first_item, config)

    @wraps(fn)
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator, item = await retry_first_item(*args, **kwargs)
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
            # If the generator is running, the event loop is closing it at shutdown.
            if not getattr(generator, "ag_running", False):
                await generator.aclose()

    return generate


async def drive(
    running: RunningCall,
    fn: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    """Make attempts until the call succeeds or is given up; return its result or raise."""
    try:
        while True:
            attempt = running.begin_attempt()
            if running.config.passes_number:
                kwargs = {**kwargs, "number": attempt.number}
            if attempt.delay:
                await running.async_wait(attempt.delay)
            try:
                if attempt.timeout is None:
                    result = await fn(*args, **kwargs) if kwargs else await fn(*args)
                else:
                    result = await _call_with_timeout(running, attempt.timeout, fn, args, kwargs)
            except Exception as error:
                if not running.should_retry(error):
                    raise
            else:
                if running.accepts(result):
                    return result
                await release_result(running, result)
            await running.async_wait()
    except BaseException:
        running.abort()
        raise


async def release_result(running: RunningCall, result: object) -> None:
    """Release the connection of a result that was not accepted, before the wait for a retry."""
    release = running.config.release
    if release is not None and not await release(result):
        running.discard_error()


async def _call_with_timeout(
    running: RunningCall,
    timeout: float,
    fn: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    deadline_key = deadlines.enter(system.now() + timeout)
    try:
        with clocks.timeout(timeout):
            return await fn(*args, **kwargs)
    finally:
        deadlines.leave(deadline_key)
    raise running.timeout_error(timeout)


def _wrap_full(
    fn: Callable[..., Awaitable[T]], config: RetryConfig
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the wrapper that creates a `RunningCall` for each call; it supports all options."""

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        return await drive(RunningCall.new(config), fn, args, kwargs)

    return call


def _wrap_plain(
    fn: Callable[..., Awaitable[T]], config: RetryConfig
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the wrapper for calls without a downstream and without limits; see `sync_driver`."""

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        if bus.listeners or _get_deadline_scope() is not None:
            return await drive(RunningCall.new(config), fn, args, kwargs)
        serial = bus.serial
        try:
            if kwargs:  # passing an empty **kwargs would still build a dict
                return await fn(*args, **kwargs)
            return await fn(*args)
        except Exception as error:
            decision = decide_after_first_failure(config, error, serial)
            if decision is None:
                raise
            # A tuple is a `FirstFailure`; its last item is the wait.
            if isinstance(decision, tuple) and decision[2].delay > 0:
                await system.async_sleep(decision[2].delay)
        if isinstance(decision, tuple):
            serial = bus.serial
            try:
                return await fn(*args, **kwargs)
            except Exception as error:
                running = RunningCall(config, None, None, serial)
                running.adopt_first_failure(*decision)
                if not running.should_retry(error):
                    raise
        else:
            running = decision
        await running.async_wait()
        return await drive(running, fn, args, kwargs)

    return call


def _wrap_guarded(
    fn: Callable[..., Awaitable[T]], config: RetryConfig, downstream: Downstream
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the wrapper for calls with a downstream, fast if the first attempt succeeds.

    The code is that of `sync_driver`, which has the comments. Change both together.
    """
    closed, successes = downstream.closed, downstream.uncounted_successes
    classify_result = config.classify_result

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        breaker = downstream.breaker
        if (
            (breaker is not None and breaker.state is not closed)
            or bus.listeners
            or _get_deadline_scope() is not None
        ):
            return await drive(RunningCall.new(config), fn, args, kwargs)
        permit = 0 if breaker is None else breaker.generation
        serial, clock = bus.serial, system.now
        started = clock()
        try:
            result = await fn(*args, **kwargs) if kwargs else await fn(*args)
            succeeded = classify_result is None or classify_result(result) is SUCCESS
        except Exception as error:
            running = RunningCall.after_first_attempt(config, started, serial, permit)
            if not running.should_retry(error):
                raise
        else:
            if succeeded:
                now = clock()
                if breaker is None or breaker.is_fault_free:
                    successes.append((permit, started, now))
                    if len(successes) > MAX_UNCOUNTED_SUCCESSES:
                        downstream.count_successes()
                else:
                    downstream.record(permit, SUCCESS, now - started, now, system.draw())
                return result
            running = RunningCall.after_first_attempt(config, started, serial, permit)
            if running.accepts(result):
                return result
            await release_result(running, result)
        await running.async_wait()
        return await drive(running, fn, args, kwargs)

    return call
