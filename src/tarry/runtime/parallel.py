"""Copies of a call that run in parallel: in threads, or in tasks of asyncio or trio.

A copy is one execution of the called function. `ThreadCopies` and `TaskCopies` both have `start`,
which starts a copy, and `next_finished`, which waits until a copy has finished. If a copy returns a
result after the call has ended, the result is passed to the function `discard`.
"""

from __future__ import annotations

import threading
from collections import deque
from contextvars import Context, copy_context
from queue import Empty, Queue
from typing import TYPE_CHECKING, Generic, TypeVar

from tarry.errors import ConfigurationError, LimitReached
from tarry.runtime import event_loops
from tarry.runtime.effects import effects
from tarry.runtime.forks import PerProcess

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    import trio

    from tarry.runtime.call import RunningCall

T = TypeVar("T")

MAX_ATTEMPT_THREADS = 256
"""How many copies of all calls may run in threads, including those that have timed out."""


class _ThreadSlots:
    """The slots of the copies that run in threads.

    A slot is an object in a set, and not a number in a semaphore. So it can be released a second
    time without effect, after an exception of a signal handler that leaves open who must do it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[object] = set()
        self.release: Callable[[object], None] = self._taken.discard

    def take(self, slot: object) -> bool:
        """Take a slot; return False if all are taken."""
        with self._lock:
            if len(self._taken) >= MAX_ATTEMPT_THREADS:
                return False
            self._taken.add(slot)
            return True


_thread_slots = PerProcess(_ThreadSlots)
"""A forked child has none of the threads of its parent, so it starts with all slots free."""


class FinishedCopy(Generic[T]):
    """A copy that has finished, with its result or its error."""

    __slots__ = ("_error", "_result", "has_result", "number")

    def __init__(self, number: int, result: T | None, error: BaseException | None) -> None:
        self.number: int = number
        self._result = result
        self._error = error
        self.has_result: bool = error is None

    def result(self) -> T:
        """Return the result, or raise the error."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: break the reference cycle
        return self._result  # type: ignore[return-value]  # None only if `T` includes None


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
        # Not a SimpleQueue: its `get` waits for ever if the timeout ends before the wait begins
        # (CPython 3.11 and 3.12), as after a signal or when the machine is busy.
        self._finished: Queue[FinishedCopy[T]] = Queue()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start a thread that runs a copy after `delay` seconds, with the caller's contextvars.

        Raises LimitReached if `MAX_ATTEMPT_THREADS` threads run already.
        """
        slots, slot, thread = _thread_slots.value, object(), None
        try:
            if not slots.take(slot):
                raise LimitReached(
                    f"{MAX_ATTEMPT_THREADS} attempts run in threads already. Most of them have "
                    "probably timed out without being stopped; give the client that they use a "
                    "timeout, for example timeout=tarry.remaining()"
                )
            run, args = copy_context().run, (self._run, slots, slot, number, delay)
            thread = threading.Thread(target=run, args=args, name="tarry-attempt", daemon=True)
            thread.start()
        except BaseException:
            if thread is None or thread.ident is None:  # else the thread runs, and releases it
                slots.release(slot)
            raise

    def next_finished(self, timeout: float | None) -> FinishedCopy[T] | None:
        """Return the next copy that finishes; None if that takes longer than `timeout` seconds."""
        try:
            return self._finished.get(timeout=timeout and min(timeout, threading.TIMEOUT_MAX))
        except Empty:
            return None

    def _run(self, slots: _ThreadSlots, slot: object, number: int, delay: float) -> None:
        try:
            if delay:
                effects.blocking_sleep(delay, None)
                if self._is_closed:
                    return
            finished = FinishedCopy(number, self._fn(number), None)
        except BaseException as error:
            finished = FinishedCopy[T](number, None, error)
        finally:
            slots.release(slot)
        with self._lock:
            if not self._is_closed:
                self._finished.put(finished)
                return
        self._discard_result(finished)

    def close(self) -> None:
        """Discard the results of finished copies; copies that still run will discard their own."""
        with self._lock:
            self._is_closed = True
        while (finished := self.next_finished(0.0)) is not None:
            self._discard_result(finished)

    def _discard_result(self, finished: FinishedCopy[T]) -> None:
        if self._discard is not None and finished.has_result:
            self._discard(finished.result())


def call_in_thread(running: RunningCall, timeout: float, fn: Callable[[], T]) -> T:
    """Make an attempt of a plain function in a thread; raise if it takes longer than `timeout`.

    The caller gets the context variables that the function has set, as without a thread.
    """
    contexts: list[Context] = []

    def run(_number: int) -> T:
        try:
            return fn()
        finally:
            contexts.append(copy_context())

    threads = ThreadCopies(run)
    threads.start(running.attempts)
    finished = threads.next_finished(timeout)
    if finished is None:
        raise running.timeout_error(timeout)
    before = copy_context()
    for variable, value in contexts[0].items():
        if variable not in before or before[variable] is not value:
            variable.set(value)
    try:
        return finished.result()
    except Exception as error:
        # `sqlite3` is not imported for this check, because few programs use it.
        if type(error).__module__ == "sqlite3" and "created in a thread" in str(error):
            raise ConfigurationError(
                f"{running.config.operation}: with timeout= a plain function runs in another "
                "thread, where SQLite objects of the caller cannot be used. Use deadline= without "
                "timeout=, or open the connection inside the function"
            ) from error
        raise


class TaskCopies(Generic[T]):
    """Copies of a coroutine function, each in a task. The function takes the copy's number.

    Used as a context manager (`async with`). Leaving the block cancels the copies that still run.
    """

    def __init__(
        self,
        fn: Callable[[int], Awaitable[T]],
        discard: Callable[[T], Awaitable[object]] | None = None,
    ) -> None:
        self._fn = fn
        self._discard = discard
        self._finished: deque[FinishedCopy[T]] = deque()
        self._new_event: Callable[[], asyncio.Event | trio.Event]
        self._finished_event: asyncio.Event | trio.Event | None = None
        """Is set when a copy finishes; None until `next_finished` waits for the first time."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The tasks of the copies; empty on trio."""
        self._trio: tuple[AbstractAsyncContextManager[trio.Nursery], trio.Nursery] | None = None
        """The context manager of the trio nursery, and the nursery; None on asyncio."""
        self._uncaught_error: type[BaseException] | tuple[()] = ()
        """trio's cancellation error, which `_run` must not catch; () on asyncio."""

    async def __aenter__(self) -> Self:
        """Open a nursery if the event loop is trio's."""
        if event_loops.in_trio():
            import trio

            manager = trio.open_nursery()
            self._trio = manager, await manager.__aenter__()
            self._new_event, self._uncaught_error = trio.Event, trio.Cancelled
        else:
            import asyncio

            self._new_event = asyncio.Event
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Cancel the copies that still run, wait for them, and discard their results."""
        if self._trio is None:
            import asyncio

            for task in self._tasks:
                task.cancel()
            try:
                await asyncio.gather(*self._tasks, return_exceptions=True)
            finally:
                await self._discard_results()
        else:
            import trio

            manager, nursery = self._trio
            nursery.cancel_scope.cancel()
            try:
                await manager.__aexit__(None, None, None)
            finally:
                # Even if this task is cancelled, `discard` must release results, such as responses.
                with trio.CancelScope(shield=True):
                    await self._discard_results()

    def start(self, number: int, delay: float = 0.0) -> None:
        """Start a task that runs a copy after `delay` seconds."""
        if self._trio is None:
            import asyncio

            self._tasks.add(asyncio.create_task(self._run(number, delay)))
        else:
            self._trio[1].start_soon(self._run, number, delay)

    async def next_finished(self, timeout: float | None) -> FinishedCopy[T] | None:
        """Return the next copy that finishes; None if that takes longer than `timeout` seconds."""
        if timeout is None:
            return await self._wait_for_finished()
        with event_loops.timeout(timeout):
            return await self._wait_for_finished()
        return None  # reached only if the timeout has expired: see `event_loops.timeout`

    async def _wait_for_finished(self) -> FinishedCopy[T]:
        while not self._finished:
            self._finished_event = self._new_event()
            await self._finished_event.wait()
        return self._finished.popleft()

    async def _run(self, number: int, delay: float) -> None:
        try:
            if delay:
                await effects.async_sleep(delay)
            finished = FinishedCopy(number, await self._fn(number), None)
        except self._uncaught_error:  # the nursery handles the cancellation
            raise
        except BaseException as error:
            finished = FinishedCopy[T](number, None, error)
        self._finished.append(finished)
        if self._finished_event is not None:
            self._finished_event.set()

    async def _discard_results(self) -> None:
        while self._finished:
            finished = self._finished.popleft()
            if self._discard is not None and finished.has_result:
                await self._discard(finished.result())
