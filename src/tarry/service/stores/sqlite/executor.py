"""Runs the store's operations outside the event loop, in groups: one transaction for each group.

`ThreadExecutor` runs groups in a thread, `WriterProcessExecutor` (in `writer_process`) in another
process. `tarry.service.group_commit` describes how groups are formed. The *weight* of an operation
is the approximate number of tasks that it changes. An `Answer` is the value that an operation
returned, or the error that it raised.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from tarry.errors import StoreUnavailable
from tarry.service.defaults import MAX_TRANSACTION_TASKS
from tarry.service.group_commit import Entry, GroupCommit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.stores.sqlite.database import Answer

    Group = list[Entry[Any]]

MAX_PENDING = 50_000
"""Backpressure limit: the sum of the weights of operations that may wait for the disk."""


class Executor(GroupCommit[Any]):
    """Runs submitted operations in groups; all methods here run on the event loop."""

    def __init__(self) -> None:
        # `allow_oversize`: the last operation may raise a group's weight above the maximum.
        super().__init__(
            max_weight=MAX_TRANSACTION_TASKS, max_pending=MAX_PENDING, allow_oversize=True
        )
        self._loop = asyncio.get_running_loop()
        self._group_done = asyncio.Event()

    def submit(self, operation: Any, weight: int, *, urgent: bool = False) -> asyncio.Future[Any]:
        """Run an operation in one of the next groups; the future gets its value or error."""
        self._check_capacity(weight, urgent=urgent)
        future: asyncio.Future[Any] = self._loop.create_future()
        self._enqueue(Entry(operation, future, weight), urgent=urgent)
        return future

    def _overload_error(self) -> Exception:
        # StoreUnavailable, because callers handle a slow disk like an unreachable store.
        msg = f"the store is slow: {self.pending_count:,} changes wait for the disk already"
        return StoreUnavailable(msg)

    def _start_soon(self) -> None:
        # The group starts in the next iteration of the event loop. Until then, callers that have
        # just got an answer submit their next operations. A larger group needs fewer fsyncs.
        self._loop.call_soon(self._start_group)

    def _start_group(self) -> None:
        self._is_start_scheduled = False
        if self._can_start():
            self._send_group(self._take_group())
            self._schedule_start()

    @abstractmethod
    def _send_group(self, group: Group) -> None:
        """Pass a group to the thread or process; when it has run, `_set_answers` is called."""

    async def close(self) -> None:
        """Return when all operations have run; the executor cannot be used again."""
        # `pending_count` is not sufficient: the weight of an empty batch is 0. Nor are the futures:
        # that of a cancelled caller is done before its operation has run.
        while self._groups_in_flight or self._has_waiting:
            self._group_done.clear()
            await self._group_done.wait()

    def _set_answers(self, group: Group, answers: Sequence[Answer]) -> None:
        """Set the futures of a group that has run, and schedule the next group."""
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
    """Runs groups in its own thread: `run` is called with the operations of each group."""

    def __init__(self, thread_name: str, run: Callable[[Sequence[Any]], list[Answer]]) -> None:
        super().__init__()
        self._run = run
        self._groups: SimpleQueue[Group | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_groups, name=thread_name, daemon=True)
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
            except Exception as error:  # noqa: BLE001 - else the callers would wait for ever
                answers = [(None, error) for _ in group]
            with suppress(RuntimeError):  # the event loop is closed: no caller waits any more
                self._loop.call_soon_threadsafe(self._set_answers, group, answers)
