"""The driver for coroutines and async generators, on asyncio and trio."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.outcome import SUCCESS
from tarry.runtime import deadlines, event_loops
from tarry.runtime.call import RunningCall, decide_after_first_failure
from tarry.runtime.clocks import system
from tarry.runtime.downstream import MAX_UNCOUNTED_SUCCESSES
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping

    from tarry.runtime.config import RetryConfig
    from tarry.runtime.downstream import Downstream

T = TypeVar("T")

_deadline = deadlines.scope.get


def wrap(
    fn: Callable[..., Awaitable[T]],
    config: RetryConfig,
    first: Callable[..., Awaitable[T]] | None = None,
    is_success: Callable[[T], bool] | None = None,
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the cheapest wrapper that does what the config asks for.

    An adapter may pass `first`, a quicker function for first attempts, and `is_success`, a quicker
    test than `config.classify_result` for most of the results that are successes.
    """
    if config.needs_run:
        return _full(fn, config)
    if config.downstream is None:
        return _plain(fn, config)
    classify_result = config.classify_result
    if is_success is None and classify_result is not None:

        def is_success(result: T) -> bool:
            return classify_result(result) is SUCCESS

    return _guarded(fn, config, config.downstream, first or fn, is_success)


def wrap_generator(
    fn: Callable[..., AsyncGenerator[Any, Any]], config: RetryConfig
) -> Callable[..., AsyncGenerator[Any, Any]]:
    """Retry an async generator until its first item; from then on it is the caller's."""

    @wraps(fn)
    async def first(*args: Any, **kwargs: Any) -> tuple[AsyncGenerator[Any, Any] | None, Any]:
        generator = fn(*args, **kwargs)
        # The loop shall know the generator that the caller has, which closes this one. If it knew
        # both, it would close them at once when it shuts down.
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

    first_of = wrap(first, config)

    @wraps(fn)
    async def generate(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator, item = await first_of(*args, **kwargs)
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
            if not getattr(generator, "ag_running", False):  # at shutdown the loop closes both
                await generator.aclose()

    return generate


async def drive(
    run: RunningCall,
    fn: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    """Make attempts until the call is over."""
    try:
        while True:
            attempt = run.begin_attempt()
            if run.config.passes_number:
                kwargs = {**kwargs, "number": attempt.number}
            if attempt.delay:
                await run.async_wait(attempt.delay)
            try:
                if attempt.timeout is None:
                    result = await fn(*args, **kwargs) if kwargs else await fn(*args)
                else:
                    result = await _limited(run, attempt.timeout, fn, args, kwargs)
            except Exception as error:
                if not run.should_retry(error):
                    raise
            else:
                if run.accepts(result):
                    return result
                await release_result(run, result)
            await run.async_wait()
    except BaseException:
        run.abort()
        raise


async def release_result(run: RunningCall, result: object) -> None:
    """Keep no connection during the wait that a result has caused."""
    release = run.config.release
    if release is not None and not await release(result):
        run.discard_error()


async def _limited(
    run: RunningCall,
    timeout: float,
    fn: Callable[..., Awaitable[T]],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    key = deadlines.enter(system.now() + timeout)
    try:
        with event_loops.timeout(timeout):
            return await fn(*args, **kwargs)
    finally:
        deadlines.leave(key)
    raise run.timeout_error(timeout)


def _full(
    fn: Callable[..., Awaitable[T]], config: RetryConfig
) -> Callable[..., Coroutine[Any, Any, T]]:
    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        return await drive(RunningCall.new(config), fn, args, kwargs)

    return call


def _plain(
    fn: Callable[..., Awaitable[T]], config: RetryConfig
) -> Callable[..., Coroutine[Any, Any, T]]:
    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        if bus.listeners or _deadline() is not None:
            return await drive(RunningCall.new(config), fn, args, kwargs)
        serial = bus.serial
        try:
            if kwargs:  # to merge nothing costs a dict
                return await fn(*args, **kwargs)
            return await fn(*args)
        except Exception as error:
            first = decide_after_first_failure(config, error, serial)
            if first is None:
                raise
            if isinstance(first, tuple) and first[2].delay > 0:
                await system.async_sleep(first[2].delay)
        if isinstance(first, tuple):
            serial = bus.serial
            try:
                return await fn(*args, **kwargs)
            except Exception as error:
                run = RunningCall(config, None, None, serial)
                run.adopt_first_failure(*first)
                if not run.should_retry(error):
                    raise
        else:
            run = first
        await run.async_wait()
        return await drive(run, fn, args, kwargs)

    return call


def _guarded(
    fn: Callable[..., Awaitable[T]],
    config: RetryConfig,
    downstream: Downstream,
    first: Callable[..., Awaitable[T]],
    is_success: Callable[[T], bool] | None,
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the wrapper for calls that share a downstream: the guarded happy path.

    The twin of `sync_driver._guarded`, which has the comments. Keep the two the same.
    """
    closed, successes = downstream.closed, downstream.uncounted_successes

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        breaker = downstream.breaker
        if (
            (breaker is not None and breaker.state is not closed)
            or bus.listeners
            or _deadline() is not None
        ):
            return await drive(RunningCall.new(config), fn, args, kwargs)
        permit = 0 if breaker is None else breaker.generation
        serial, clock = bus.serial, system.now
        started = clock()
        try:
            result = await first(*args, **kwargs) if kwargs else await first(*args)
            succeeded = is_success is None or is_success(result)
        except Exception as error:
            run = RunningCall.after_first_attempt(config, started, serial, permit)
            if not run.should_retry(error):
                raise
        else:
            if succeeded:
                now = clock()
                if breaker is None or breaker.is_fault_free:
                    successes.append((permit, started, now))
                    if len(successes) > MAX_UNCOUNTED_SUCCESSES:
                        downstream.settle()
                else:
                    downstream.record(permit, SUCCESS, now - started, now, system.draw())
                return result
            run = RunningCall.after_first_attempt(config, started, serial, permit)
            if run.accepts(result):
                return result
            await release_result(run, result)
        await run.async_wait()
        return await drive(run, fn, args, kwargs)

    return call
