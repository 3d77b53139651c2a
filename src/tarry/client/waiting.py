"""How the clients wait: the blocking client in a thread, the asynchronous one in an event loop.

A function whose name begins with `async_` has the same purpose as the function without it.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from tarry.runtime import scopes
from tarry.runtime.effects import effects
from tarry.runtime.event_loops import in_event_loop, in_trio, timeout

if TYPE_CHECKING:
    import asyncio
    from typing import TypeAlias

    import trio

    from tarry.client.coalescing import WaitStep

    AsyncEvent: TypeAlias = asyncio.Event | trio.Event


class ThreadEvent:
    """An event for which one thread waits.

    `threading.Event`, which any number of threads can wait for, takes a quarter of the time of a
    coalesced call.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake the thread; raises a `RuntimeError` if the event is already set."""
        self._lock.release()

    def wait(self, timeout: float | None) -> None:
        """Return when the event is set, and clear it, or return after `timeout` seconds."""
        self._lock.acquire(timeout=-1 if timeout is None else timeout)


def new_event() -> ThreadEvent:
    """Return an event for one thread."""
    return ThreadEvent()


def new_async_event() -> AsyncEvent:
    """Return an event of the running event loop."""
    if in_trio():
        import trio

        return trio.Event()
    import asyncio

    return asyncio.Event()


def wait_for_step(step: WaitStep[ThreadEvent]) -> None:
    """Wait for the event of a coalesced call."""
    step.event.wait(step.max_wait_s)


async def async_wait_for_step(step: WaitStep[AsyncEvent]) -> None:
    """Wait for the event of a coalesced call."""
    if step.max_wait_s is None:
        await step.event.wait()
    else:
        with timeout(step.max_wait_s):
            await step.event.wait()


def can_share_requests() -> bool:
    """Return whether the current call may be sent in a request with other calls.

    The deadline of one call must not end the request of others. On an event loop, the request of
    others could not be retried, because a wait would block the loop.
    """
    return scopes.current_deadline() is None and not in_event_loop()


def async_can_share_requests() -> bool:
    """Return whether the current call may be sent in a request with other calls.

    The deadline of one call must not end the request of others.
    """
    return scopes.current_deadline() is None


def sleep(seconds: float) -> None:
    """Block the thread for some seconds."""
    effects.blocking_sleep(seconds, None)


async def async_sleep(seconds: float) -> None:
    """Suspend the coroutine for some seconds."""
    await effects.async_sleep(seconds)
