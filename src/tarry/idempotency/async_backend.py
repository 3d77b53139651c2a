"""The functions of an event loop that the middleware and its stores need, for asyncio and trio."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tarry.runtime.clocks import in_trio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from concurrent.futures import Executor

T = TypeVar("T")

_running_tasks: set[asyncio.Task[Any]] = set()
"""Strong references: asyncio itself holds tasks only weakly."""


class AsyncEvent(Protocol):
    """The methods that `asyncio.Event` and `trio.Event` have in common."""

    def set(self) -> object:
        """Wake all waiting tasks."""
        ...

    async def wait(self) -> object:
        """Wait until the event is set."""
        ...


def new_event() -> AsyncEvent:
    """Return an event of the running event loop."""
    if in_trio():
        import trio

        return trio.Event()
    return asyncio.Event()


def running_loop() -> object:
    """Return an object that identifies the running event loop."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        import trio

        return trio.lowlevel.current_trio_token()


async def run_in_executor(executor: Executor, function: Callable[[], T]) -> T:
    """Run a blocking function in a thread of the executor."""
    future = executor.submit(function)
    if in_trio():
        import trio

        return await trio.to_thread.run_sync(future.result, abandon_on_cancel=True)
    return await asyncio.wrap_future(future)


def start_background_task(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start a task that outlives the request, without the request's deadline and context."""
    if in_trio():
        import trio

        trio.lowlevel.spawn_system_task(function)
    else:
        _create_task(function(), Context())


async def run_with_timeout(function: Callable[[], Coroutine[Any, Any, T]], seconds: float) -> T:
    """Run a coroutine function; after `seconds` cancel it and raise TimeoutError.

    On asyncio the function runs in its own task, so that it does not delay the caller if it ignores
    its cancellation or takes long to handle it.
    """
    if in_trio():
        import trio

        with trio.CancelScope(deadline=trio.current_time() + seconds):
            return await function()
    else:
        task = _create_task(function())
        try:
            done, _ = await asyncio.wait((task,), timeout=seconds)
        except BaseException:
            task.cancel()
            raise
        if done:
            return task.result()
        task.cancel()
    msg = f"no result within {seconds:g} s"
    raise TimeoutError(msg)


def _create_task(
    coroutine: Coroutine[Any, Any, T], context: Context | None = None
) -> asyncio.Task[T]:
    task = asyncio.get_running_loop().create_task(coroutine, context=context)
    _running_tasks.add(task)
    task.add_done_callback(_on_task_done)
    return task


def _on_task_done(task: asyncio.Task[Any]) -> None:
    _running_tasks.discard(task)
    if not task.cancelled():
        # Marks the error as retrieved. Otherwise asyncio would log it as "never retrieved" when
        # the caller was cancelled before the task ended.
        task.exception()
