"""Hedged calls: another copy when the first takes too long; the first answer wins."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple
from weakref import WeakKeyDictionary

from tarry.core.checks import count
from tarry.core.hedging import Hedging
from tarry.core.verdict import Stop
from tarry.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    LimitReached,
    ResultNotAccepted,
)
from tarry.runtime import aio
from tarry.runtime.callables import COROUTINE, callable_, flags_of, name_of
from tarry.runtime.classify import Classifier
from tarry.runtime.copies import copies
from tarry.runtime.downstream import Downstream
from tarry.runtime.hedged import HedgedRun
from tarry.runtime.spec import BOTH, instance
from tarry.runtime.threads import Threads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.core.verdict import Attempt
    from tarry.runtime.classify import On
    from tarry.runtime.copies import Copies
    from tarry.runtime.threads import Ended

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def hedge(
    fn: Callable[[*Ts], Awaitable[T]],
    /,
    *args: *Ts,
    after: float | str | None = None,
    max_extra_load: float | None = None,
    attempts: int = 2,
    on: On | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    policy: None = None,
) -> T:
    """Await a coroutine function, and send another copy when it takes too long.

    after: seconds, or a live percentile such as "p95", which needs 100 calls to be known.
    max_extra_load: 0.05 hedges at p95 and never adds more than 5 % to the calls.
    attempts: copies in all (2).
    on: errors after which the next copy goes at once; any other error is the answer.
    downstream: the dependency; without one, latency is kept per function.
    """
    if policy is not None:
        raise ConfigurationError(BOTH)
    callable_("hedge", fn)
    copies_in_all = count("attempts", attempts, 2)
    hedging = Hedging(after=after, max_extra_load=max_extra_load, max_attempts=copies_in_all)
    run = _run(fn, name, hedging, on, downstream)
    return await adrive(run, lambda _number: fn(*args))


def hedge_sync(
    fn: Callable[[*Ts], T],
    /,
    *args: *Ts,
    after: float | str | None = None,
    max_extra_load: float | None = None,
    attempts: int = 2,
    on: On | None = None,
    downstream: Downstream | None = None,
    name: str | None = None,
    policy: None = None,
) -> T:
    """Call a plain function in a thread, and send another copy when it takes too long.

    Takes the arguments of `hedge`. A loser cannot be cancelled: its thread runs on, and what it
    comes to is thrown away.
    """
    if policy is not None:
        raise ConfigurationError(BOTH)
    callable_("hedge_sync", fn)
    copies_in_all = count("attempts", attempts, 2)
    hedging = Hedging(after=after, max_extra_load=max_extra_load, max_attempts=copies_in_all)
    if flags_of(fn) & COROUTINE:
        msg = f"{name_of(fn)} is a coroutine function: use `await tarry.hedge(...)`"
        raise ConfigurationTypeError(msg)
    run = _run(fn, name, hedging, on, downstream)
    return drive(run, lambda _number: fn(*args))


def _run(
    fn: Callable[..., Any],
    name: str | None,
    hedging: Hedging,
    on: On | None,
    downstream: Downstream | None,
) -> HedgedRun:
    instance("downstream", downstream, Downstream, 'a tarry.Downstream("name")')
    classify = Classifier(on).outcome_of
    shared = downstream or _downstream_of(fn)
    return HedgedRun(name or name_of(fn), hedging, classify, shared)


def drive(
    run: HedgedRun, fn: Callable[[int], T], release: Callable[[Any], bool] | None = None
) -> T:
    """Call a function of the copy's number in threads, until one has the answer.

    `release` lets go of the result of a copy that lost, and says whether it is still of use.
    """
    running: Threads[T] = Threads(fn, release)
    try:
        first = run.begin()
        running.start(first.number, first.delay)
        while True:
            ended = running.next(run.left())
            if ended is None:
                another = run.late()
            else:
                try:
                    result = run.accepted(ended.result())
                except Exception as error:
                    lost = run.lost(ended.number, error)
                    if isinstance(lost, Stop):
                        raise
                    another = lost
                    if (
                        release is not None
                        and isinstance(error, ResultNotAccepted)
                        and not release(error.result)
                    ):
                        run.forget()
                else:
                    run.won(ended.number)
                    return result
            if another is not None and not _sent(running, another):
                run.unsent(another.number)
    except BaseException:
        run.drop()
        raise
    finally:
        running.leave()


def _sent(running: Threads[T], attempt: Attempt) -> bool:
    try:
        running.start(attempt.number, attempt.delay)
    except (LimitReached, RuntimeError):  # no thread to be had: no hedge, but no failure either
        return False
    return True


async def adrive(
    run: HedgedRun,
    fn: Callable[[int], Awaitable[T]],
    release: Callable[[Any], Awaitable[bool]] | None = None,
) -> T:
    """Do what `drive` does, in tasks of whichever loop runs."""
    try:
        first = run.begin()
        tasks: Copies[T] = copies(fn, release)
        async with tasks as running:
            running.start(first.number, first.delay)
            while True:
                ended = await _next(running, run.left())
                if ended is None:
                    another = run.late()
                else:
                    try:
                        result = run.accepted(ended.result())
                    except Exception as error:
                        lost = run.lost(ended.number, error)
                        if isinstance(lost, Stop):
                            raise
                        another = lost
                        if (
                            release is not None
                            and isinstance(error, ResultNotAccepted)
                            and not await release(error.result)
                        ):
                            run.forget()
                    else:
                        run.won(ended.number)
                        return result
                if another is not None:
                    running.start(another.number, another.delay)
    except BaseException:
        run.drop()
        raise


async def _next(running: Copies[T], timeout: float | None) -> Ended[T] | None:
    if timeout is None:
        return await running.next()
    with aio.timeout(timeout):
        return await running.next()
    return None  # the time was up first


_known: WeakKeyDictionary[Any, Downstream] = WeakKeyDictionary()
_locks = [threading.RLock()]


def _after_fork() -> None:
    _locks[0] = threading.RLock()  # whoever held it is not in the child


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _downstream_of(fn: Callable[..., Any]) -> Downstream:
    """Return the function's own downstream: where its latency is kept between calls."""
    key = getattr(fn, "__func__", fn)
    with _locks[0]:
        try:
            found = _known.get(key)
            if found is None:
                found = _known[key] = Downstream(name_of(fn))
        except TypeError:  # cannot be referred to weakly: begins anew each time
            found = Downstream(name_of(fn))
    return found
