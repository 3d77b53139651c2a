"""Copies of one coroutine function that run side by side: asyncio tasks or trio tasks.

Both have the two verbs of `Threads`: `start(number)` one, and take the `next` that ended. What a
copy comes to that nobody waits for any more is discarded.
"""

from __future__ import annotations

import os
import threading
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tarry.errors import LimitReached
from tarry.runtime import event_loops
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from asyncio import Queue, Task
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    import trio

T = TypeVar("T")

MAX_ATTEMPT_THREADS = 256
"""Attempts in threads at a time, those that were cut off and still run included."""

_places = [threading.BoundedSemaphore(MAX_ATTEMPT_THREADS)]


def _after_fork() -> None:
    """Count from nothing in a forked child, which has none of its parent's threads."""
    _places[0] = threading.BoundedSemaphore(MAX_ATTEMPT_THREADS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class FinishedCopy(Generic[T]):
    """How one copy ended."""

    __slots__ = ("_error", "_result", "number")

    def __init__(self, number: int, result: T | None, error: BaseException | None) -> None:
        self.number: int = number
        self._result = result
        self._error = error

    @property
    def has_result(self) -> bool:
        """Whether there is a result, and not an error."""
        return self._error is None

    def result(self) -> T:
        """Return the result, or raise the error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: leave no cycle behind
        return self._result  # type: ignore[return-value]


class ThreadCopies(Generic[T]):
    """Copies of a plain function of the copy's number, each in a thread.

    A thread cannot be stopped from outside: one that is no longer waited for runs on, and what
    it comes to is thrown away. The number of those is bounded.
    """

    __slots__ = ("_discard", "_ended", "_fn", "_left", "_lock")

    def __init__(
        self, fn: Callable[[int], T], discard: Callable[[T], object] | None = None
    ) -> None:
        self._fn = fn
        self._discard = discard
        self._ended: SimpleQueue[FinishedCopy[T]] = SimpleQueue()
        self._lock = threading.Lock()
        self._left = False

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start one copy; it sees the caller's context variables."""
        places = _places[0]
        if not places.acquire(blocking=False):
            msg = (
                f"{MAX_ATTEMPT_THREADS} attempts run in threads already, most of them probably "
                "cut off by a timeout; give the client inside a timeout of its own "
                "(tarry.remaining())"
            )
            raise LimitReached(msg)
        run, args = copy_context().run, (self._run, places, number, delay)
        try:
            threading.Thread(target=run, args=args, name="tarry-attempt", daemon=True).start()
        except BaseException:
            places.release()
            raise

    def next(self, timeout: float | None) -> FinishedCopy[T] | None:
        """Return the next copy that ended, or None when the time is up first."""
        try:
            return self._ended.get(timeout=timeout and min(timeout, threading.TIMEOUT_MAX))
        except Empty:
            return None

    def _run(self, places: threading.Semaphore, number: int, delay: float) -> None:
        try:
            if delay:
                system.sleep(delay, None)
                if self._left:
                    return
            ended = FinishedCopy(number, self._fn(number), None)
        except BaseException as error:
            ended = FinishedCopy[T](number, None, error)
        finally:
            places.release()
        with self._lock:
            if not self._left:
                self._ended.put(ended)
                return
        self._throw_away(ended)

    def leave(self) -> None:
        """Wait for no more copies: from now on each discards its result when it has one."""
        with self._lock:
            self._left = True
        while (ended := self.next(0.0)) is not None:
            self._throw_away(ended)

    def _throw_away(self, ended: FinishedCopy[T]) -> None:
        if self._discard is not None and ended.has_result:
            self._discard(ended.result())


class ParallelCopies(Protocol[T]):
    """Copies of a coroutine function of the copy's number.

    Whatever still runs at the end of the block is cancelled.
    """

    async def __aenter__(self) -> Self:
        """Begin."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel what still runs, and wait until it is gone."""
        ...

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start one copy."""
        ...

    async def next(self) -> FinishedCopy[T]:
        """Wait for the next copy that ends."""
        ...


def parallel_copies(
    fn: Callable[[int], Awaitable[T]], discard: Callable[[T], Awaitable[object]] | None = None
) -> ParallelCopies[T]:
    """Return the copies for whichever loop runs."""
    return TrioCopies(fn, discard) if event_loops.in_trio() else AsyncioCopies(fn, discard)


async def _throw_away(ended: FinishedCopy[T], discard: Callable[[T], Awaitable[object]]) -> None:
    if ended.has_result:
        await discard(ended.result())


class AsyncioCopies(Generic[T]):
    """Copies as asyncio tasks."""

    __slots__ = ("_discard", "_ended", "_fn", "_tasks")

    def __init__(
        self,
        fn: Callable[[int], Awaitable[T]],
        discard: Callable[[T], Awaitable[object]] | None,
    ) -> None:
        import asyncio

        self._fn = fn
        self._discard = discard
        self._ended: Queue[FinishedCopy[T]] = asyncio.Queue()
        self._tasks: set[Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel what still runs, and wait until it is gone."""
        import asyncio

        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            while self._discard is not None and not self._ended.empty():
                await _throw_away(self._ended.get_nowait(), self._discard)

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start one copy."""
        import asyncio

        self._tasks.add(asyncio.create_task(self._run(number, delay)))

    async def next(self) -> FinishedCopy[T]:
        """Wait for the next copy that ends."""
        return await self._ended.get()

    async def _run(self, number: int, delay: float) -> None:
        try:
            if delay:
                await system.async_sleep(delay)
            ended = FinishedCopy(number, await self._fn(number), None)
        except BaseException as error:
            ended = FinishedCopy[T](number, None, error)
        self._ended.put_nowait(ended)


class TrioCopies(Generic[T]):
    """Copies as trio tasks."""

    __slots__ = ("_cancelled", "_discard", "_fn", "_manager", "_nursery", "_receive", "_send")

    _manager: AbstractAsyncContextManager[trio.Nursery]
    _nursery: trio.Nursery

    def __init__(
        self,
        fn: Callable[[int], Awaitable[T]],
        discard: Callable[[T], Awaitable[object]] | None,
    ) -> None:
        import trio

        self._fn = fn
        self._discard = discard
        self._send: trio.MemorySendChannel[FinishedCopy[T]]
        self._receive: trio.MemoryReceiveChannel[FinishedCopy[T]]
        self._send, self._receive = trio.open_memory_channel(float("inf"))
        self._cancelled = trio.Cancelled

    async def __aenter__(self) -> Self:
        """Begin."""
        import trio

        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel what still runs, and wait until it is gone."""
        import trio

        self._nursery.cancel_scope.cancel()
        try:
            await self._manager.__aexit__(None, None, None)
        finally:
            while self._discard is not None and self._receive.statistics().current_buffer_used:
                with trio.CancelScope(shield=True):  # a connection is given back in any case
                    await _throw_away(self._receive.receive_nowait(), self._discard)

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start one copy."""
        self._nursery.start_soon(self._run, number, delay)

    async def next(self) -> FinishedCopy[T]:
        """Wait for the next copy that ends."""
        return await self._receive.receive()

    async def _run(self, number: int, delay: float) -> None:
        try:
            if delay:
                await system.async_sleep(delay)
            ended = FinishedCopy(number, await self._fn(number), None)
        except self._cancelled:  # by us, or with us: the nursery knows
            raise
        except BaseException as error:
            ended = FinishedCopy[T](number, None, error)
        self._send.send_nowait(ended)
