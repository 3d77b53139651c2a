"""The driver for coroutines and async generators, on asyncio and trio."""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.outcome import SUCCESS
from tarry.runtime import deadlines, event_loops
from tarry.runtime.call import Run, first_failure
from tarry.runtime.clocks import system
from tarry.runtime.downstream import MOST_UNCOUNTED
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping

    from tarry.runtime.config import Spec
    from tarry.runtime.downstream import Downstream

T = TypeVar("T")

_deadline = deadlines.scope.get


def wrap(
    fn: Callable[..., Awaitable[T]],
    spec: Spec,
    first: Callable[..., Awaitable[T]] | None = None,
    is_success: Callable[[T], bool] | None = None,
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the cheapest wrapper that does what the spec asks for.

    An adapter may pass `first`, a quicker function for first attempts, and `is_success`, a quicker
    test than `spec.judge` for most of the results that are successes.
    """
    if spec.needs_run:
        return _full(fn, spec)
    if spec.downstream is None:
        return _plain(fn, spec)
    judge = spec.judge
    if is_success is None and judge is not None:

        def is_success(result: T) -> bool:
            return judge(result) is SUCCESS

    return _guarded(fn, spec, spec.downstream, first or fn, is_success)


def wrap_generator(
    fn: Callable[..., AsyncGenerator[Any, Any]], spec: Spec
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

    first_of = wrap(first, spec)

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
    run: Run, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> T:
    """Make attempts until the call is over."""
    try:
        while True:
            attempt = run.begin()
            if run.spec.numbered:
                kwargs = {**kwargs, "number": attempt.number}
            if attempt.delay:
                await run.await_(attempt.delay)
            try:
                if attempt.timeout is None:
                    result = await fn(*args, **kwargs) if kwargs else await fn(*args)
                else:
                    result = await _limited(run, attempt.timeout, fn, args, kwargs)
            except Exception as error:
                if not run.survives(error):
                    raise
            else:
                if run.accepts(result):
                    return result
                await let_go(run, result)
            await run.await_()
    except BaseException:
        run.drop()
        raise


async def let_go(run: Run, result: object) -> None:
    """Keep no connection during the wait that a result has caused."""
    release = run.spec.release
    if release is not None and not await release(result):
        run.forget()


async def _limited(
    run: Run,
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
    raise run.timed_out(timeout)


def _full(fn: Callable[..., Awaitable[T]], spec: Spec) -> Callable[..., Coroutine[Any, Any, T]]:
    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        return await drive(Run.new(spec), fn, args, kwargs)

    return call


def _plain(fn: Callable[..., Awaitable[T]], spec: Spec) -> Callable[..., Coroutine[Any, Any, T]]:
    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        if bus.listeners or _deadline() is not None:
            return await drive(Run.new(spec), fn, args, kwargs)
        serial = bus.serial
        try:
            if kwargs:  # to merge nothing costs a dict
                return await fn(*args, **kwargs)
            return await fn(*args)
        except Exception as error:
            first = first_failure(spec, error, serial)
            if first is None:
                raise
            if isinstance(first, tuple) and first[2].delay > 0:
                await system.async_sleep(first[2].delay)
        if isinstance(first, tuple):
            serial = bus.serial
            try:
                return await fn(*args, **kwargs)
            except Exception as error:
                run = Run(spec, None, None, serial)
                run.adopt_first_failure(*first)
                if not run.survives(error):
                    raise
        else:
            run = first
        await run.await_()
        return await drive(run, fn, args, kwargs)

    return call


def _guarded(
    fn: Callable[..., Awaitable[T]],
    spec: Spec,
    downstream: Downstream,
    first: Callable[..., Awaitable[T]],
    is_success: Callable[[T], bool] | None,
) -> Callable[..., Coroutine[Any, Any, T]]:
    """Return the wrapper for calls that share a downstream: the guarded happy path.

    The twin of `sync_driver._guarded`, which has the comments. Keep the two the same.
    """
    closed, successes = downstream.closed, downstream.successes

    @wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> T:
        breaker = downstream.breaker
        if (
            (breaker is not None and breaker.state is not closed)
            or bus.listeners
            or _deadline() is not None
        ):
            return await drive(Run.new(spec), fn, args, kwargs)
        permit = 0 if breaker is None else breaker.generation
        serial, clock = bus.serial, system.now
        started = clock()
        try:
            result = await first(*args, **kwargs) if kwargs else await first(*args)
            succeeded = is_success is None or is_success(result)
        except Exception as error:
            run = Run.adopted(spec, started, serial, permit)
            if not run.survives(error):
                raise
        else:
            if succeeded:
                now = clock()
                if breaker is None or breaker.is_fault_free:
                    successes.append((permit, started, now))
                    if len(successes) > MOST_UNCOUNTED:
                        downstream.settle()
                else:
                    downstream.record(permit, SUCCESS, now - started, now, system.draw())
                return result
            run = Run.adopted(spec, started, serial, permit)
            if run.accepts(result):
                return result
            await let_go(run, result)
        await run.await_()
        return await drive(run, fn, args, kwargs)

    return call
