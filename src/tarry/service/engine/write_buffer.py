"""Writes that no caller waits for: results and released leases.

Items that are posted in the same iteration of the event loop are passed to the store in one call: a
call for each item would cost more than the rest of the way at thousands of results a second. The
store commits the calls that wait together, see `tarry.service.group_commit`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from tarry.errors import StoreUnavailable
from tarry.service.engine.context import FIRST_STORE_RETRY_PAUSE_S, STORE, retry_until_stored
from tarry.service.shutdown import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tarry.service.engine.context import ServiceHealth

T = TypeVar("T")
R = TypeVar("R")

_MAX_LINGERING_ITEMS = 32
"""This number of items is worth a transaction of its own."""


class WriteBuffer(Generic[T, R]):
    """The writes of one partition of the store, each of which is repeated until it is accepted.

    `write` passes items to the store, and `on_written` is called with them and their results. If
    the store rejects several items with an error, each is written alone. `on_rejected` is called
    with an item that is rejected alone.
    """

    def __init__(
        self,
        write: Callable[[list[T]], Awaitable[Sequence[R]]],
        on_written: Callable[[list[T], Sequence[R]], None],
        on_rejected: Callable[[T, BaseException], None],
        *,
        health: ServiceHealth,
        partition: int,
        max_items: int,
        linger_s: float = 0.0,
    ) -> None:
        self._write_items = write
        self._on_written = on_written
        self._on_rejected = on_rejected
        self._health = health
        self._partition = partition
        self._max_items = max_items
        self.linger_s: float = linger_s
        """How long items wait for a call of `end_linger`, to share a transaction."""
        self._posted: list[T] = []
        """The items that were not passed to the store yet."""
        self._is_write_scheduled = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._writes: dict[asyncio.Future[Sequence[R]], list[T]] = {}
        """The items of each call of the store that has not ended, and of its repetitions."""

    @property
    def pending_count(self) -> int:
        """The number of items that are not written yet."""
        return len(self._posted) + sum(map(len, self._writes.values()))

    def pending_items(self) -> list[T]:
        """Return the items that are not written yet."""
        return [*self._posted, *(item for items in self._writes.values() for item in items)]

    def post(self, item: T, max_linger_s: float | None = None) -> None:
        """Write an item, after `max_linger_s` at the latest; None: after `linger_s`."""
        self._posted.append(item)
        if len(self._posted) >= self._max_items:
            self._write_posted()
        elif not self._is_write_scheduled:
            linger_s = self.linger_s
            if max_linger_s is not None and max_linger_s < linger_s:
                linger_s = max_linger_s
            if linger_s <= 0 or len(self._posted) >= _MAX_LINGERING_ITEMS:
                self._schedule_write()
            else:
                self._linger(linger_s)

    def end_linger(self) -> None:
        """Write the items that linger in the next iteration of the event loop."""
        if self._linger_timer is not None:
            self._schedule_write()

    def _linger(self, linger_s: float) -> None:
        """Write the items that are not written yet after this time at the latest."""
        loop, timer = asyncio.get_running_loop(), self._linger_timer
        if timer is not None:
            if timer.when() <= loop.time() + linger_s:
                return
            timer.cancel()
        self._linger_timer = loop.call_later(linger_s, self._write_posted)

    def _schedule_write(self) -> None:
        self._is_write_scheduled = True
        asyncio.get_running_loop().call_soon(self._write_scheduled)

    def _write_scheduled(self) -> None:
        self._is_write_scheduled = False
        self._write_posted()

    def _write_posted(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        items, self._posted = self._posted, []
        if items:
            self._write(items)

    def _write(self, items: list[T]) -> None:
        self._track(asyncio.ensure_future(self._write_items(items)), items)

    def _track(self, write: asyncio.Future[Sequence[R]], items: list[T]) -> None:
        self._writes[write] = items
        write.add_done_callback(self._on_write_done)

    def _on_write_done(self, write: asyncio.Future[Sequence[R]]) -> None:
        items = self._writes.pop(write)
        if write.cancelled():  # by `stop`
            return
        error = write.exception()
        if error is None:
            self._health.mark_healthy(STORE, self._partition)
            self._on_written(items, write.result())
        elif isinstance(error, StoreUnavailable):
            self._health.mark_failing(STORE, error)
            self._track(asyncio.ensure_future(self._write_again(items)), items)
        elif len(items) > 1:
            for item in items:
                self._write([item])
        else:
            self._on_rejected(items[0], error)

    async def _write_again(self, items: list[T]) -> Sequence[R]:
        await asyncio.sleep(FIRST_STORE_RETRY_PAUSE_S)
        return await retry_until_stored(
            lambda: self._write_items(items), self._health, self._partition
        )

    async def wait_for_writes(self) -> None:
        """Wait until the items that were passed to the store have been written."""
        batches = list(self._writes.values())
        while writes := [
            write
            for write, items in self._writes.items()
            if any(items is batch for batch in batches)
        ]:
            await asyncio.wait(writes)

    async def flush(self) -> None:
        """Wait until all items are written, also those that are posted meanwhile."""
        while self._posted or self._writes:
            self._write_posted()
            await asyncio.wait(tuple(self._writes))

    async def stop(self) -> None:
        """Cancel all writes; those in flight may still take effect."""
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self._posted.clear()
        await cancel_and_wait(tuple(self._writes))


class WriteBuffers(dict[int, WriteBuffer[T, R]]):
    """The buffers by partition; `build` creates the buffer of a partition when it is used first."""

    def __init__(self, build: Callable[[int], WriteBuffer[T, R]]) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, partition: int) -> WriteBuffer[T, R]:
        """Create the buffer of a partition."""
        buffer = self[partition] = self._build(partition)
        return buffer

    @property
    def pending_count(self) -> int:
        """The number of items that are not written yet."""
        return sum([buffer.pending_count for buffer in self.values()])

    def pending_counts(self) -> dict[int, int]:
        """Return the number of items that are not written yet in each partition with any."""
        counts = {partition: buffer.pending_count for partition, buffer in self.items()}
        return {partition: count for partition, count in counts.items() if count}

    def pending_items(self) -> list[T]:
        """Return the items that are not written yet."""
        return [item for buffer in self.values() for item in buffer.pending_items()]

    async def flush(self) -> None:
        """Wait until all items are written."""
        await asyncio.gather(*(buffer.flush() for buffer in self.values()))

    async def stop(self) -> None:
        """Cancel all writes; those in flight may still take effect."""
        await asyncio.gather(*(buffer.stop() for buffer in self.values()))
