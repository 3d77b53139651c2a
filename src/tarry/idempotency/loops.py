"""What asyncio and trio must do for the middleware and its stores, behind one face."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tarry.runtime.event_loops import in_trio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

T = TypeVar("T")

_unfinished: set[asyncio.Task[Any]] = set()
"""Loops hold their tasks weakly."""


class Event(Protocol):
    """What the events of both loops can do."""

    def set(self) -> object:
        """Let all who wait go on."""
        ...

    async def wait(self) -> object:
        """Wait until it is set."""
        ...


def new_event() -> Event:
    """Return an event of the loop that runs."""
    if in_trio():
        import trio

        return trio.Event()
    return asyncio.Event()


def running_loop() -> object:
    """Return what stands for the loop that runs."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token()


async def in_thread(executor: Executor, function: Callable[[], T]) -> T:
    """Run a blocking function in the thread of an executor."""
    future = executor.submit(function)
    if in_trio():
        import trio

        return await trio.to_thread.run_sync(future.result, abandon_on_cancel=True)
    return await asyncio.wrap_future(future)


def in_background(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run beside the request and beyond its end: without its deadline, without its context."""
    if in_trio():
        import trio

        trio.lowlevel.spawn_system_task(function)
    else:
        _held(function(), Context())


async def apart(function: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
    """Wait for a function for so many seconds; then it is cancelled, and a TimeoutError.

    On asyncio it runs apart from the request, so that what does not heed its cancellation, or takes
    its time over it, keeps nobody waiting.
    """
    if in_trio():
        import trio

        with trio.CancelScope(deadline=trio.current_time() + seconds):
            return await function()
    else:
        task = _held(function())
        try:
            done, _ = await asyncio.wait((task,), timeout=seconds)
        except BaseException:
            task.cancel()
            raise
        if done:
            return task.result()
        task.cancel()
    msg = f"no answer within {seconds:g} s"
    raise TimeoutError(msg)


def _held(work: Coroutine[Any, Any, T], context: Context | None = None) -> asyncio.Task[T]:
    task = asyncio.get_running_loop().create_task(work, context=context)
    _unfinished.add(task)
    task.add_done_callback(_let_go)
    return task


def _let_go(task: asyncio.Task[Any]) -> None:
    _unfinished.discard(task)
    if not task.cancelled():
        task.exception()  # whoever waited has it; if nobody does any more, it is no news
