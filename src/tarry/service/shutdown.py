"""Bounds the time of a shutdown, whatever a store, a driver or a target does.

The steps of a shutdown cancel what still runs, and continue after a timeout if a cancellation has
no effect. A thread ends the process if the shutdown as a whole takes too long. What is abandoned is
logged. No task is lost: its lease expires, and then another process takes it over.
"""

from __future__ import annotations

import asyncio
import logging
import os
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

_logger = logging.getLogger("tarry.service")
GRACE_S = 5.0
"""How long a shutdown may take in addition to `drain_ms`: to store results and close connections.
The grace periods in `deploy/` allow for it."""
_MAX_CANCELLATIONS = 4
_CANCEL_INTERVAL_S = 0.5
_SLEEP_S = 0.1
_MAX_LOG_S = 1.0


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel asyncio tasks, and wait until they have ended; abandon them after two seconds.

    The cancellation is repeated: if a library has ignored one, a loop would continue for ever.
    """
    pending = set(tasks)
    for _ in range(_MAX_CANCELLATIONS):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_INTERVAL_S)
    if pending:
        _logger.error("shutdown continues without tasks that do not end: %s", _describe(pending))


async def run_bounded(coroutine: Coroutine[Any, Any, object], timeout_s: float) -> bool:
    """Run a step of a shutdown for up to `timeout_s`; return whether it has ended by then.

    An error or the timeout is only logged, so that the next steps are done, too.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    await asyncio.wait([task], timeout=timeout_s)
    if not task.done():
        _logger.error("shutdown step took longer than %.1f s: %s", timeout_s, _describe([task]))
        await cancel_and_wait([task])
        return False
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("shutdown step failed: %s", _describe([task]), exc_info=error)
    return True


def _describe(tasks: Iterable[asyncio.Future[Any]]) -> str:
    """Return the names of the coroutines of tasks, such as `Maintenance.run`."""
    names = {
        getattr(task.get_coro(), "__qualname__", task.get_name())
        if isinstance(task, asyncio.Task)
        else "attempt"
        for task in tasks
    }
    return ", ".join(sorted(names))


class ShutdownWatchdog:
    """Ends the process with `exit_code` if it still runs `timeout_s` after `start`.

    A thread, because the event loop itself may be blocked. Time during which the process is
    suspended does not count.
    """

    def __init__(
        self,
        timeout_s: float,
        exit_code: int,
        *,
        exit_process: Callable[[int], object] = os._exit,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._exit_code = exit_code
        self._exit_process = exit_process
        self._sleep = sleep or Event().wait
        self._thread: Thread | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop whose tasks are logged."""

    def start(self) -> None:
        """Start the timer; later calls have no effect. May be called by a signal handler."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="shutdown-watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        # Short sleeps: a process that was suspended does not exit as soon as it continues.
        for _ in range(round(self._timeout_s / _SLEEP_S)):
            self._sleep(_SLEEP_S)
        # The process also exits if the log blocks, for example because its pipe is full.
        log = Thread(target=self._log_abandoned, daemon=True)
        log.start()
        log.join(_MAX_LOG_S)
        self._exit_process(self._exit_code)

    def _log_abandoned(self) -> None:
        names = ""
        if self.loop is not None and not self.loop.is_closed():
            names = _describe(asyncio.all_tasks(self.loop))
        _logger.critical(
            "shutdown not complete after %g s, exiting; leases of unfinished tasks expire. "
            "Abandoned: %s", self._timeout_s, names or "threads"
        )  # fmt: skip
