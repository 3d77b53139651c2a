"""Runs the store's operations outside the event loop, in groups: one transaction for each group.

`ThreadExecutor` runs groups in a thread, `WriterProcessExecutor` (in `writer_process`) in another
process. `tarry.service.group_commit` describes how groups are formed. An `Answer` is the value that
an operation returned, or the error that it raised.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from tarry.errors import StoreUnavailable
from tarry.service.group_commit import Entry, GroupCommit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.stores.sqlite.database import Answer

    Group = list[Entry[Any]]

_MAX_GROUP_WEIGHT = 2_000  # tasks that one transaction changes
MAX_PENDING = 50_000
"""Backpressure limit: the approximate number of task changes that may wait for the disk."""


class Executor(GroupCommit[Any]):
    """Runs submitted operations in groups; all methods here run on the event loop."""

    def __init__(self, max_group_weight: int) -> None:
        super().__init__(max_weight=max_group_weight, max_pending=MAX_PENDING, allow_oversize=True)
        self._loop = asyncio.get_running_loop()
        self._group_done = asyncio.Event()

    def submit(self, operation: Any, weight: int) -> asyncio.Future[Any]:
        """Run an operation in one of the next groups; the future gets its value or error."""
        self._check_capacity(weight)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._enqueue(Entry(operation, future, weight))
        return future

    def _overload_error(self) -> Exception:
        # The error of an unreachable store, so that callers treat a slow disk in the same way.
        msg = f"the store is slow: {self.pending_count:,} changes wait for the disk already"
        return StoreUnavailable(msg)

    def _start_soon(self) -> None:
        # Not now, but in the next iteration of the event loop: in it, callers that have just got an
        # answer submit their next operations. One transaction for all of these saves fsyncs.
        self._loop.call_soon(self._start_group)

    def _start_group(self) -> None:
        self._is_start_scheduled = False
        if self._can_start():
            self._send_group(self._take_group())
            self._schedule_start()

    @abstractmethod
    def _send_group(self, group: Group) -> None:
        """Start a group outside the event loop; when it has run, `_set_answers` is called."""

    async def close(self) -> None:
        """Return when all operations have run; the executor cannot be used again."""
        # Neither `self.pending_count` (a sum of weights; operations that change no task weigh 0)
        # nor the futures (done at once if the caller is cancelled) show whether all have run.
        while self._groups_in_flight or self._waiting:
            self._group_done.clear()
            await self._group_done.wait()

    def _set_answers(self, group: Group, answers: Sequence[Answer]) -> None:
        """Set the futures of a group, then start the next group."""
        self._end_group(group)
        self._group_done.set()
        for entry, (value, error) in zip(group, answers, strict=True):
            future = entry.future
            if future is None or future.done():  # done: the caller was cancelled
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)
        self._schedule_start()


class ThreadExecutor(Executor):
    """Runs groups in a thread named `name`, by calling `run` with the operations of a group."""

    def __init__(self, name: str, run: Callable[[Sequence[Any]], list[Answer]]) -> None:
        super().__init__(_MAX_GROUP_WEIGHT)
        self._run = run
        self._groups: SimpleQueue[Group | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_groups, name=name, daemon=True)
        self._thread.start()

    def _send_group(self, group: Group) -> None:
        self._groups.put(group)

    async def close(self) -> None:
        """End the thread when all submitted operations have run."""
        await super().close()
        self._groups.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _run_groups(self) -> None:  # runs in the thread
        while (group := self._groups.get()) is not None:
            try:
                answers = self._run([entry.work for entry in group])
            except Exception as error:  # noqa: BLE001 - else its callers would wait for ever
                answers = [(None, error) for _ in group]
            with suppress(RuntimeError):  # the event loop is closed: no caller waits any more
                self._loop.call_soon_threadsafe(self._set_answers, group, answers)
