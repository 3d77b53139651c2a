"""Runs the store's operations off the event loop, in groups: one transaction for each group.

`ThreadExecutor` runs them in a thread, `WriterProcessExecutor` (in `writer_process`) in another
process. `tarry.service.group_commit` describes how groups are formed.
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

_MAX_GROUP_WEIGHT = 2_000  # changed tasks
MAX_PENDING = 50_000
"""Backpressure limit: the approximate number of changed tasks that may wait for the disk."""


class Executor(GroupCommit[Any]):
    """Takes operations, and sets the results of their futures, on the event loop."""

    def __init__(self, max_group_weight: int) -> None:
        super().__init__(max_weight=max_group_weight, max_pending=MAX_PENDING, may_exceed=True)
        self._loop = asyncio.get_running_loop()
        self._group_done = asyncio.Event()

    def submit(self, operation: Any, weight: int) -> asyncio.Future[Any]:
        """Run an operation in one of the next groups; the future has its result."""
        self._check_capacity(weight)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._enqueue(Entry(operation, future, weight))
        return future

    def _overload_error(self) -> Exception:
        # The error for a missing disk, so that callers treat a slow disk in the same way.
        msg = f"the store is slow: {self.pending_count:,} changes wait for the disk already"
        return StoreUnavailable(msg)

    def _start_soon(self) -> None:
        # In the next iteration, not now: the answers of a group wake callers, which submit their
        # next operations in that iteration. One transaction for all of them saves an fsync.
        self._loop.call_soon(self._start_group)

    def _start_group(self) -> None:
        self._is_start_scheduled = False
        if self._can_start():
            self._run_group(self._take_group())
            self._schedule_start()

    @abstractmethod
    def _run_group(self, group: Group) -> None:
        """Start a group elsewhere; `_set_answers` is called on the event loop when it is done."""

    async def close(self) -> None:
        """Return when all operations are done; the executor cannot be used again."""
        # Not `self.pending_count`: operations that change no task have a weight of 0. Nor the
        # futures: the future of a cancelled caller is done before its group is.
        while self._groups_in_flight or self._waiting:
            self._group_done.clear()
            await self._group_done.wait()

    def _set_answers(self, group: Group, answers: Sequence[Answer]) -> None:
        """Set the results of a group, then start the next one."""
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
    """Runs groups in a thread, by calling `run` with the operations of a group."""

    def __init__(self, name: str, run: Callable[[Sequence[Any]], list[Answer]]) -> None:
        super().__init__(_MAX_GROUP_WEIGHT)
        self._run = run
        self._groups: SimpleQueue[Group | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_groups, name=name, daemon=True)
        self._thread.start()

    def _run_group(self, group: Group) -> None:
        self._groups.put(group)

    async def close(self) -> None:
        """End the thread when everything that was submitted is done."""
        await super().close()
        self._groups.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _run_groups(self) -> None:  # runs in the thread
        while (group := self._groups.get()) is not None:
            try:
                answers = self._run([entry.work for entry in group])
            except Exception as error:  # noqa: BLE001 - else its callers would wait for ever
                answers = [(None, error) for _ in group]
            with suppress(RuntimeError):  # the loop is closed: no caller waits any more
                self._loop.call_soon_threadsafe(self._set_answers, group, answers)
