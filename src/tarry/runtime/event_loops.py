"""The event loops of asyncio and trio: detection, a sleep, and a timeout for a block.

Neither of them is imported before a coroutine needs it.
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
    asyncio = sys.modules.get("asyncio")
    # The private function returns None outside a loop. The public one would raise, which is slow.
    if asyncio is not None and asyncio._get_running_loop() is not None:  # noqa: SLF001 - see above
        return True
    return "trio" in sys.modules and in_trio()


async def async_sleep(seconds: float) -> None:
    """Suspend the coroutine for some seconds, in asyncio or trio."""
    if in_trio():
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


@contextmanager
def timeout(seconds: float) -> Generator[None]:
    """Cancel the block after `seconds`; the program then continues after the block.

    asyncio's own timeout needs `async with`. This one needs only `with`, because users of
    `tarry.attempts` write `with attempt:` in both `for` and `async for` loops.
    """
    if in_trio():
        import trio

        with trio.CancelScope(deadline=trio.current_time() + seconds):
            yield
        return
    import asyncio

    timeout_context = asyncio.timeout(seconds)
    _run_without_waiting(timeout_context.__aenter__())
    try:
        yield
    except BaseException as error:
        try:
            exit_coroutine = timeout_context.__aexit__(type(error), error, error.__traceback__)
            _run_without_waiting(exit_coroutine)
        except TimeoutError:
            return
        raise
    _run_without_waiting(timeout_context.__aexit__(None, None, None))


def _run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Run a coroutine that never suspends, such as `asyncio.timeout`'s enter and exit."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
