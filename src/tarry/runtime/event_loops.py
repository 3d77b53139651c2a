"""The little that asyncio and trio must do for the drivers, behind one face.

Neither is imported before a coroutine really needs it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator


def in_trio() -> bool:
    """Say whether the caller runs inside a trio task."""
    trio = sys.modules.get("trio")
    # A trio too old to tell may be loaded by somebody else; it is not what we run on.
    in_task = None if trio is None else getattr(trio.lowlevel, "in_trio_task", None)
    return in_task is not None and bool(in_task())


def in_event_loop() -> bool:
    """Say whether blocking this thread would freeze an event loop."""
    modules = sys.modules
    if "asyncio" in modules and modules["asyncio"]._get_running_loop() is not None:  # noqa: SLF001
        return True
    return "trio" in modules and in_trio()


async def sleep(seconds: float) -> None:
    """Sleep on whichever loop runs."""
    if in_trio():
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


class TimeoutStatus:
    """Whether a `timeout` block was cut off."""

    __slots__ = ("expired",)

    def __init__(self) -> None:
        self.expired: bool = False


@contextmanager
def timeout(seconds: float) -> Generator[TimeoutStatus]:
    """Cancel the block after some seconds and swallow that cancellation.

    A plain `with` on both loops, so that the blocks of `async for attempt in ...` need no other
    form than those of `for`.
    """
    expiry = TimeoutStatus()
    if in_trio():
        import trio

        with trio.CancelScope(deadline=trio.current_time() + seconds) as scope:
            yield expiry
        expiry.expired = scope.cancelled_caught
        return
    import asyncio

    limit = asyncio.timeout(seconds)
    _finish(limit.__aenter__())
    try:
        yield expiry
    except BaseException as error:
        try:
            _finish(limit.__aexit__(type(error), error, error.__traceback__))
        except TimeoutError:
            expiry.expired = True
            return
        raise
    _finish(limit.__aexit__(None, None, None))


def _finish(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that never waits, as both ends of `asyncio.timeout` are."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
