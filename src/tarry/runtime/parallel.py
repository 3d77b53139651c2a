"""Copies of a call that run in parallel: in threads, asyncio tasks or trio tasks.

All three classes have the same methods: `start(number)` starts a copy, and `next` waits for a copy
to finish and returns it. The result of a copy that finishes after the call has ended is passed to
`discard`.
"""

from __future__ import annotations

import os
import threading
from contextvars import copy_context
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tarry.errors import LimitReached
from tarry.runtime import clocks
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
"""Limit of attempts that run in threads, including attempts that timed out but still run."""

_thread_slots = [threading.BoundedSemaphore(MAX_ATTEMPT_THREADS)]
"""Holds the one semaphore. A list, so that the fork handler can replace the semaphore."""


def _reset_slots_after_fork() -> None:
    # A forked child has none of its parent's threads, so all slots are free.
    _thread_slots[0] = threading.BoundedSemaphore(MAX_ATTEMPT_THREADS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_slots_after_fork)


class FinishedCopy(Generic[T]):
    """A copy that has finished, with its result or its error."""

    __slots__ = ("_error", "_result", "number")

    def __init__(self, number: int, result: T | None, error: BaseException | None) -> None:
        self.number: int = number
        self._result = result
        self._error = error

    @property
    def has_result(self) -> bool:
        """Whether the copy returned a result."""
        return self._error is None

    def result(self) -> T:
        """Return the result, or raise the error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: break the reference cycle
        return self._result  # type: ignore[return-value]


class ThreadCopies(Generic[T]):
    """Copies of a plain function, each in a thread. The function takes the copy's number.

    A thread cannot be stopped from outside. After `close`, copies that have not finished continue
    to run, and their results are discarded. `MAX_ATTEMPT_THREADS` limits the number of threads.
    """

    __slots__ = ("_discard", "_finished", "_fn", "_is_closed", "_lock")

    def __init__(
        self, fn: Callable[[int], T], discard: Callable[[T], object] | None = None
    ) -> None:
        self._fn = fn
        self._discard = discard
        self._finished: SimpleQueue[FinishedCopy[T]] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start a copy in a new thread after `delay` seconds, with the caller's context variables.

        Raises LimitReached if too many threads run already.
        """
        slots = _thread_slots[0]
        if not slots.acquire(blocking=False):
            msg = (
                f"{MAX_ATTEMPT_THREADS} attempts run in threads already. Most of them have "
                "probably timed out without being stopped; set a timeout on the client that they "
                "use (tarry.remaining())"
            )
            raise LimitReached(msg)
        run, args = copy_context().run, (self._run, slots, number, delay)
        try:
            threading.Thread(target=run, args=args, name="tarry-attempt", daemon=True).start()
        except BaseException:
            slots.release()
            raise

    def next(self, timeout: float | None) -> FinishedCopy[T] | None:
        """Return the next finished copy, or None after `timeout` seconds."""
        try:
            return self._finished.get(timeout=timeout and min(timeout, threading.TIMEOUT_MAX))
        except Empty:
            return None

    def _run(self, slots: threading.Semaphore, number: int, delay: float) -> None:
        try:
            if delay:
                system.sleep(delay, None)
                if self._is_closed:
                    return
            finished = FinishedCopy(number, self._fn(number), None)
        except BaseException as error:
            finished = FinishedCopy[T](number, None, error)
        finally:
            slots.release()
        with self._lock:
            if not self._is_closed:
                self._finished.put(finished)
                return
        self._discard_result(finished)

    def close(self) -> None:
        """Stop waiting for copies: each copy that finishes from now on discards its own result."""
        with self._lock:
            self._is_closed = True
        while (finished := self.next(0.0)) is not None:
            self._discard_result(finished)

    def _discard_result(self, finished: FinishedCopy[T]) -> None:
        if self._discard is not None and finished.has_result:
            self._discard(finished.result())


class ParallelCopies(Protocol[T]):
    """Copies of a coroutine function, each in a task. The function takes the copy's number.

    Used as an `async with` block. Leaving the block cancels the copies that still run.
    """

    async def __aenter__(self) -> Self:
        """Prepare to start copies."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel the copies that still run, and wait for them."""
        ...

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start a copy in a new task after `delay` seconds."""
        ...

    async def next(self) -> FinishedCopy[T]:
        """Wait until a copy finishes, and return it."""
        ...


def parallel_copies(
    fn: Callable[[int], Awaitable[T]], discard: Callable[[T], Awaitable[object]] | None = None
) -> ParallelCopies[T]:
    """Return an object that runs copies of `fn` on the running event loop."""
    return TrioCopies(fn, discard) if clocks.in_trio() else AsyncioCopies(fn, discard)


async def _discard_result(
    finished: FinishedCopy[T], discard: Callable[[T], Awaitable[object]]
) -> None:
    if finished.has_result:
        await discard(finished.result())


class AsyncioCopies(Generic[T]):
    """Copies in asyncio tasks."""

    __slots__ = ("_discard", "_finished", "_fn", "_tasks")

    def __init__(
        self,
        fn: Callable[[int], Awaitable[T]],
        discard: Callable[[T], Awaitable[object]] | None,
    ) -> None:
        import asyncio

        self._fn = fn
        self._discard = discard
        self._finished: Queue[FinishedCopy[T]] = asyncio.Queue()
        self._tasks: set[Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Return itself: asyncio needs no preparation."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Cancel the copies that still run, and wait for them."""
        import asyncio

        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            while self._discard is not None and not self._finished.empty():
                await _discard_result(self._finished.get_nowait(), self._discard)

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start a copy in a new task after `delay` seconds."""
        import asyncio

        self._tasks.add(asyncio.create_task(self._run(number, delay)))

    async def next(self) -> FinishedCopy[T]:
        """Wait until a copy finishes, and return it."""
        return await self._finished.get()

    async def _run(self, number: int, delay: float) -> None:
        try:
            if delay:
                await system.async_sleep(delay)
            finished = FinishedCopy(number, await self._fn(number), None)
        except BaseException as error:
            finished = FinishedCopy[T](number, None, error)
        self._finished.put_nowait(finished)


class TrioCopies(Generic[T]):
    """Copies in trio tasks."""

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
        """Open the nursery."""
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
        """Cancel the copies that still run, and wait for them."""
        import trio

        self._nursery.cancel_scope.cancel()
        try:
            await self._manager.__aexit__(None, None, None)
        finally:
            while self._discard is not None and self._receive.statistics().current_buffer_used:
                with trio.CancelScope(shield=True):  # release connections even when cancelled
                    await _discard_result(self._receive.receive_nowait(), self._discard)

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start a copy in a new task after `delay` seconds."""
        self._nursery.start_soon(self._run, number, delay)

    async def next(self) -> FinishedCopy[T]:
        """Wait until a copy finishes, and return it."""
        return await self._receive.receive()

    async def _run(self, number: int, delay: float) -> None:
        try:
            if delay:
                await system.async_sleep(delay)
            finished = FinishedCopy(number, await self._fn(number), None)
        except self._cancelled:  # by `__aexit__` or by an outer scope: handled by the nursery
            raise
        except BaseException as error:
            finished = FinishedCopy[T](number, None, error)
        self._send.send_nowait(finished)
