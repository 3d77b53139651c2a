"""Runs the attempts of plain functions and generators.

The drivers read `bus.serial` before each attempt. It counts the errors that inner retry loops have
given up on, and shows after a failure whether one of them did during this attempt: see
`error_record`.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.outcome import SUCCESS
from tarry.runtime import deadlines
from tarry.runtime.call import RunningCall, blocking_wait, decide_after_first_failure
from tarry.runtime.clocks import system
from tarry.runtime.downstream import MAX_UNCOUNTED_SUCCESSES
from tarry.runtime.events import bus

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from tarry.runtime.config import RetryConfig
    from tarry.runtime.downstream import Downstream

T = TypeVar("T")

_get_deadline_scope = deadlines.scope.get


def wrap(fn: Callable[..., T], config: RetryConfig) -> Callable[..., T]:
    """Return the fastest wrapper of `fn` that supports the options in `config`."""
    if config.needs_full_driver:
        return _wrap_full(fn, config)
    if config.downstream is None:
        return _wrap_plain(fn, config)
    return _wrap_guarded(fn, config, config.downstream)


def wrap_generator(
    fn: Callable[..., Generator[Any, Any, Any]], config: RetryConfig
) -> Callable[..., Generator[Any, Any, Any]]:
    """Retry a generator until it yields its first item; later errors are not retried."""

    @wraps(fn)
    def first_item(*args: Any, **kwargs: Any) -> tuple[Generator[Any, Any, Any] | None, Any]:
        generator = fn(*args, **kwargs)
        try:
            return generator, next(generator)
        except StopIteration as end:
            return None, end.value

    retry_first_item = wrap(first_item, config)

    @wraps(fn)
    def generate(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator, item = retry_first_item(*args, **kwargs)
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


def drive(
    running: RunningCall, fn: Callable[..., T], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> T:
    """Make attempts until the call succeeds or is given up; return its result or raise."""
    try:
        while True:
            attempt = running.begin_attempt()
            if running.config.passes_number:
                kwargs = {**kwargs, "number": attempt.number}
            if attempt.delay:
                running.wait(attempt.delay)
            try:
                if attempt.timeout is None:
                    result = fn(*args, **kwargs) if kwargs else fn(*args)
                else:
                    result = _call_with_timeout(running, attempt.timeout, fn, args, kwargs)
            except Exception as error:
                if not running.should_retry(error):
                    raise
            else:
                if running.accepts(result):
                    return result
                release_result(running, result)
            running.wait()
    except BaseException:
        running.abort()
        raise


def release_result(running: RunningCall, result: object) -> None:
    """Release the connection of a result that was not accepted, before the wait for a retry."""
    release = running.config.release
    if release is not None and not release(result):
        running.discard_error()


def _call_with_timeout(
    running: RunningCall,
    timeout: float,
    fn: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> T:
    deadline_key = deadlines.enter(system.now() + timeout)
    try:
        if running.policy.attempt_timeout is None:  # only an attempt timeout interrupts `fn`
            return fn(*args, **kwargs)
        from tarry.runtime.parallel import ThreadCopies

        threads = ThreadCopies(lambda _number: fn(*args, **kwargs))
        threads.start(running.attempts)
        finished = threads.next(timeout)
    finally:
        deadlines.leave(deadline_key)
    if finished is None:
        raise running.timeout_error(timeout)
    return finished.result()


def _wrap_full(fn: Callable[..., T], config: RetryConfig) -> Callable[..., T]:
    """Return the wrapper that creates a `RunningCall` for each call; it supports all options."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        return drive(RunningCall.new(config), fn, args, kwargs)

    return call


def _wrap_plain(fn: Callable[..., T], config: RetryConfig) -> Callable[..., T]:
    """Return the wrapper for calls without a downstream and without limits.

    If it can, the wrapper creates a `RunningCall` only after two attempts have failed. After one
    failure `decide_after_first_failure` returns a tuple, `FirstFailure`, which is cheaper.
    """

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        if bus.listeners or _get_deadline_scope() is not None:
            return drive(RunningCall.new(config), fn, args, kwargs)
        serial = bus.serial
        try:
            if kwargs:  # passing an empty **kwargs would still build a dict
                return fn(*args, **kwargs)
            return fn(*args)
        except Exception as error:
            decision = decide_after_first_failure(config, error, serial)
            if decision is None:
                raise
            if isinstance(decision, tuple):  # a `FirstFailure`; its last item is the wait
                blocking_wait(config, decision[2].delay, error)
        if isinstance(decision, tuple):
            serial = bus.serial
            try:
                return fn(*args, **kwargs)
            except Exception as error:
                running = RunningCall(config, None, None, serial)
                running.adopt_first_failure(*decision)
                if not running.should_retry(error):
                    raise
        else:
            running = decision
        running.wait()
        return drive(running, fn, args, kwargs)

    return call


def _wrap_guarded(
    fn: Callable[..., T], config: RetryConfig, downstream: Downstream
) -> Callable[..., T]:
    """Return the wrapper for calls with a downstream, fast if the first attempt succeeds.

    A first attempt that succeeds while the breaker is closed creates no `RunningCall` and acquires
    no lock. Its success is appended to `downstream.uncounted_successes`, whose entries are counted
    in bulk. In all other cases the call continues in `drive`.

    This code is duplicated in `async_driver` and, for one argument, in `adapters/http/send.py`.
    Moving the choice of the permit and the counting of a success into shared functions would add
    0.12 us to the 1.35 us of a call with a budget and a breaker (9 %, CPython 3.11).
    """
    closed, successes = downstream.closed, downstream.uncounted_successes
    classify_result = config.classify_result

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> T:
        breaker = downstream.breaker
        # Reads the breaker's state without the lock. A call that starts while another thread opens
        # the breaker is treated as if it had started just before.
        if (
            (breaker is not None and breaker.state is not closed)
            or bus.listeners
            or _get_deadline_scope() is not None
        ):
            return drive(RunningCall.new(config), fn, args, kwargs)
        permit = 0 if breaker is None else breaker.generation
        serial, clock = bus.serial, system.now
        started = clock()
        try:
            # Passing an empty **kwargs would still build a dict.
            result = fn(*args, **kwargs) if kwargs else fn(*args)
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
            release_result(running, result)
        running.wait()
        return drive(running, fn, args, kwargs)

    return call
