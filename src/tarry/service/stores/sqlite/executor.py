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
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tarry.errors import StoreUnavailable
from tarry.service.defaults import MAX_TRANSACTION_TASKS
from tarry.service.group_commit import (
    BACKGROUND,
    URGENT,
    CommitGroup,
    Entry,
    GroupCommit,
    exceeds_limit,
    join_items,
    set_error,
    set_results,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tarry.service.stores.sqlite.database import Answer

T = TypeVar("T")
R = TypeVar("R")

MAX_PENDING = 50_000
"""Backpressure limit: the sum of the weights of operations that may wait for the disk."""
_MAX_BACKGROUND_WEIGHT = 2 * MAX_TRANSACTION_TASKS
"""A group may also have operations of this weight that write results. With
`MAX_TRANSACTION_TASKS`, results wait behind new tasks while batches arrive: the p99 delay of
retries was 390 to 550 ms instead of 125 ms."""


class BatchOperation(Generic[T, R]):
    """An operation on items; a group calls it once for all entries with equal arguments.

    `build` returns the operation for the items and the arguments. `unpack` is called in the event
    loop with the items, what the operation has returned, and the arguments; it returns the results.
    """

    def __init__(self, build: Callable[..., Any], unpack: Callable[..., Sequence[R]]) -> None:
        self.build: Callable[..., Any] = build
        self.unpack: Callable[..., Sequence[R]] = unpack


class Executor(GroupCommit):
    """Runs submitted operations in groups; all methods here run on the event loop."""

    def __init__(self) -> None:
        super().__init__(
            max_weight=MAX_TRANSACTION_TASKS, max_background_weight=_MAX_BACKGROUND_WEIGHT
        )
        self._loop = asyncio.get_running_loop()
        self._group_done = asyncio.Event()

    def submit(
        self, operation: Any, weight: int, priority: int = BACKGROUND
    ) -> asyncio.Future[Any]:
        """Run an operation in one of the next groups; the future gets its value or error."""
        return self._submit(operation, None, weight, priority)

    def submit_batch(
        self, operation: BatchOperation[T, R], items: Sequence[T], priority: int, *arguments: Any
    ) -> asyncio.Future[list[R]]:
        """Run an operation on items in one of the next groups; the future gets their results."""
        return self._submit((operation, *arguments), items, len(items), priority)

    def _submit(
        self, operation: Any, items: Sequence[Any] | None, weight: int, priority: int
    ) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        if exceeds_limit(MAX_PENDING, self.pending_count, weight, urgent=priority == URGENT):
            # StoreUnavailable, because callers handle a slow disk like an unreachable store.
            msg = f"the store is slow: {self.pending_count:,} changes wait for the disk already"
            future.set_exception(StoreUnavailable(msg))
        else:
            self._enqueue(Entry(operation, items, future, weight), priority)
        return future

    def _start_soon(self) -> None:
        # The group starts in the next iteration of the event loop. Until then, callers that have
        # just got an answer submit their next operations. A larger group needs fewer fsyncs.
        self._loop.call_soon(self._start_group)

    def _start_group(self) -> None:
        self._is_start_scheduled = False
        if self._can_start():
            group = self._take_group()
            try:
                group.operations = list(map(_build_operation, group.calls))
                self._send_group(group)
            except Exception as error:  # noqa: BLE001 - else the callers would wait for ever
                self._fail(group, error)
            self._schedule_start()  # more groups may be allowed in flight

    @abstractmethod
    def _send_group(self, group: CommitGroup) -> None:
        """Pass the operations of a group to the thread or process.

        When they have run, `_set_answers` is called.
        """

    async def close(self) -> None:
        """Return when all operations have run; the executor cannot be used again."""
        # `pending_count` is not sufficient: the weight of an empty batch is 0. Nor are the futures:
        # that of a cancelled caller is done before its operation has run.
        while self._groups_in_flight or self._has_waiting:
            self._group_done.clear()
            await self._group_done.wait()

    def _set_answers(self, group: CommitGroup, answers: Sequence[Answer]) -> None:
        """Set the futures of a group that has run, and schedule the next group."""
        outage: StoreUnavailable | None = None
        for entries, (value, error) in zip(group.calls, answers, strict=True):
            if error is None:
                self._set_value(entries, value)
            elif len(entries) > 1 and not isinstance(error, StoreUnavailable):
                self._commit_alone(entries)  # the error of one entry must not affect the others
            else:
                set_error(entries, error)
                if isinstance(error, StoreUnavailable):
                    outage = error
        self._end_group(group, outage)
        self._group_done.set()
        self._schedule_start()

    def _fail(self, group: CommitGroup, error: Exception) -> None:
        self._set_answers(group, [(None, error) for _ in group.calls])

    def _set_value(self, entries: list[Entry], value: Any) -> None:
        if entries[0].items is None:
            if not entries[0].future.done():  # done: the caller was cancelled
                entries[0].future.set_result(value)
            return
        operation, *arguments = entries[0].operation
        try:
            results = operation.unpack(join_items(entries), value, *arguments)
        except Exception as error:  # noqa: BLE001 - else the callers would wait for ever
            set_error(entries, error)
        else:
            set_results(entries, results)


def _build_operation(entries: list[Entry]) -> Any:
    """Return the operation that runs all entries of a call."""
    if entries[0].items is None:
        return entries[0].operation
    operation, *arguments = entries[0].operation
    return operation.build(join_items(entries), *arguments)


class ThreadExecutor(Executor):
    """Runs groups in its own thread: `run` is called with the operations of each group."""

    def __init__(self, thread_name: str, run: Callable[[Sequence[Any]], list[Answer]]) -> None:
        super().__init__()
        self._run = run
        self._groups: SimpleQueue[CommitGroup | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run_groups, name=thread_name, daemon=True)
        self._thread.start()

    def _send_group(self, group: CommitGroup) -> None:
        self._groups.put(group)

    async def close(self) -> None:
        """End the thread when all submitted operations have run."""
        await super().close()
        self._groups.put(None)
        await self._loop.run_in_executor(None, self._thread.join)

    def _run_groups(self) -> None:  # runs in the thread
        while (group := self._groups.get()) is not None:
            try:
                answers = self._run(group.operations)
            except Exception as error:  # noqa: BLE001 - else the callers would wait for ever
                answers = [(None, error) for _ in group.operations]
            with suppress(RuntimeError):  # the event loop is closed: no caller waits any more
                self._loop.call_soon_threadsafe(self._set_answers, group, answers)
