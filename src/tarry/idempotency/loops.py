"""What asyncio and trio must do for the middleware and its stores, behind one face."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from tarry.runtime.aio import in_trio
from tarry.runtime.clocks import world

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
    from concurrent.futures import Executor
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Any

T = TypeVar("T")

_unfinished: set[asyncio.Task[None]] = set()
"""Loops hold their tasks weakly."""


async def in_thread(executor: Executor, function: Callable[[], T]) -> T:
    """Run a blocking function in the thread of an executor."""
    future = executor.submit(function)
    if in_trio():
        import trio

        return await trio.to_thread.run_sync(future.result)
    import asyncio

    return await asyncio.wrap_future(future)


async def shielded(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to the end, also in a task that is being cancelled."""
    if in_trio():
        import trio

        with trio.CancelScope(shield=True):
            await function()
        return
    import asyncio

    # A task of its own: anyio, on which many frameworks stand, cancels a task again at every await.
    task = asyncio.create_task(function())
    _unfinished.add(task)
    task.add_done_callback(_unfinished.discard)
    await asyncio.shield(task)


class Every:
    """While the block runs, call a function every so many seconds until it returns False."""

    def __init__(self, seconds: float, function: Callable[[], Awaitable[bool]]) -> None:
        self._seconds = seconds
        self._function = function
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._on_trio: AbstractAsyncContextManager[None] | None = None

    async def __aenter__(self) -> None:
        """Begin."""
        if in_trio():
            self._on_trio = self._in_nursery()
            await self._on_trio.__aenter__()
            return
        import asyncio

        # Most blocks end before the first call: a timer costs them much less than a task.
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._begin)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """End."""
        if self._on_trio is not None:
            return await self._on_trio.__aexit__(kind, error, traceback)
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        return None

    def _begin(self) -> None:
        import asyncio

        self._task = asyncio.get_running_loop().create_task(self._go_on())

    async def _go_on(self) -> None:
        while await self._function():
            await world.asleep(self._seconds)

    @asynccontextmanager
    async def _in_nursery(self) -> AsyncGenerator[None]:
        import trio

        async def begin() -> None:
            await trio.sleep(self._seconds)
            await self._go_on()

        failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin)
            try:
                yield
            except Exception as error:  # noqa: BLE001 - a nursery would wrap it in a group
                failure = error
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
