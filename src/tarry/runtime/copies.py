"""Copies of one coroutine function that run side by side: asyncio tasks or trio tasks.

Both have the two verbs of `Threads`: `start(number)` one, and take the `next` that ended. What a
copy comes to that nobody waits for any more is discarded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from tarry.runtime import aio
from tarry.runtime.clocks import world
from tarry.runtime.threads import Ended

if TYPE_CHECKING:
    from asyncio import Queue, Task
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Self

    import trio

T = TypeVar("T")


class Copies(Protocol[T]):
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

    async def next(self) -> Ended[T]:
        """Wait for the next copy that ends."""
        ...


def copies(
    fn: Callable[[int], Awaitable[T]], discard: Callable[[T], Awaitable[object]] | None = None
) -> Copies[T]:
    """Return the copies for whichever loop runs."""
    return Nursery(fn, discard) if aio.in_trio() else Tasks(fn, discard)


async def _throw_away(ended: Ended[T], discard: Callable[[T], Awaitable[object]]) -> None:
    if ended.has_result:
        await discard(ended.result())


class Tasks(Generic[T]):
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
        self._ended: Queue[Ended[T]] = asyncio.Queue()
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

    async def next(self) -> Ended[T]:
        """Wait for the next copy that ends."""
        return await self._ended.get()

    async def _run(self, number: int, delay: float) -> None:
        try:
            if delay:
                await world.asleep(delay)
            ended = Ended(number, await self._fn(number), None)
        except BaseException as error:
            ended = Ended[T](number, None, error)
        self._ended.put_nowait(ended)


class Nursery(Generic[T]):
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
        self._send: trio.MemorySendChannel[Ended[T]]
        self._receive: trio.MemoryReceiveChannel[Ended[T]]
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

    async def next(self) -> Ended[T]:
        """Wait for the next copy that ends."""
        return await self._receive.receive()

    async def _run(self, number: int, delay: float) -> None:
        try:
            if delay:
                await world.asleep(delay)
            ended = Ended(number, await self._fn(number), None)
        except self._cancelled:  # by us, or with us: the nursery knows
            raise
        except BaseException as error:
            ended = Ended[T](number, None, error)
        self._send.send_nowait(ended)
