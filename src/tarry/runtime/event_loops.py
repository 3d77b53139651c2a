"""Sleep, timeout and loop detection for both asyncio and trio.

Neither library is imported before a coroutine needs it.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator


def in_trio() -> bool:
    """Return whether the caller runs inside a trio task."""
    trio = sys.modules.get("trio")
    # Another library may have imported an old version of trio, which lacks this function.
    in_task = None if trio is None else getattr(trio.lowlevel, "in_trio_task", None)
    return in_task is not None and bool(in_task())


def in_event_loop() -> bool:
    """Return whether this thread runs an event loop, which a blocking wait would freeze."""
    modules = sys.modules
    if "asyncio" in modules and modules["asyncio"]._get_running_loop() is not None:  # noqa: SLF001
        return True
    return "trio" in modules and in_trio()


async def sleep(seconds: float) -> None:
    """Sleep on the running event loop."""
    if in_trio():
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


class TimeoutStatus:
    """Whether a `timeout` block reached its timeout."""

    __slots__ = ("expired",)

    def __init__(self) -> None:
        self.expired: bool = False


@contextmanager
def timeout(seconds: float) -> Generator[TimeoutStatus]:
    """Cancel the block after `seconds`, and continue after the block.

    This is not an async context manager, although asyncio's own timeout is one. `with attempt:` can
    therefore be written the same way in `for` and in `async for` loops.
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
    _run_without_waiting(limit.__aenter__())
    try:
        yield expiry
    except BaseException as error:
        try:
            _run_without_waiting(limit.__aexit__(type(error), error, error.__traceback__))
        except TimeoutError:
            expiry.expired = True
            return
        raise
    _run_without_waiting(limit.__aexit__(None, None, None))


def _run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that never suspends, such as `asyncio.timeout`'s enter and exit."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
