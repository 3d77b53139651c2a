"""Writes that no caller waits for: they linger, and are repeated until the store accepts them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tarry.errors import StoreUnavailable
from tarry.service.engine.context import STORE, ServiceHealth
from tarry.service.engine.write_buffer import WriteBuffer, WriteBuffers

LINGER_S = 10.0


class FakeStore:
    """Doubles items; calls raise the next of `errors`, and negative items are rejected."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.errors: list[Exception] = []
        self.duration_s = 0.0
        self.written: dict[int, int] = {}
        self.rejected: list[int] = []
        self.health = ServiceHealth(asyncio.get_running_loop().time)

    async def write(self, items: list[int]) -> list[int]:
        """Write items, or raise an error."""
        self.calls.append(list(items))
        await asyncio.sleep(self.duration_s)
        if self.errors:
            raise self.errors.pop(0)
        if min(items) < 0:
            raise ValueError
        return [item * 2 for item in items]

    def on_written(self, items: list[int], results: Sequence[int]) -> None:
        """Record the results of items."""
        self.written.update(zip(items, results, strict=True))

    def on_rejected(self, item: int, _: BaseException) -> None:
        """Record an item that was rejected."""
        self.rejected.append(item)

    def new_buffer(self, *, max_items: int = 100, linger_s: float = 0.0) -> WriteBuffer[int, int]:
        """Return a buffer that writes to this store."""
        return WriteBuffer(
            self.write,
            self.on_written,
            self.on_rejected,
            health=self.health,
            partition=0,
            max_items=max_items,
            linger_s=linger_s,
        )


async def test_items_of_one_iteration_are_written_together() -> None:
    """Items that are posted later are written with another call; each gets its result."""
    store = FakeStore()
    buffer = store.new_buffer()
    for item in (1, 2, 3):
        buffer.post(item)
    assert (3, [1, 2, 3]) == (buffer.pending_count, buffer.pending_items())
    await asyncio.sleep(0)
    buffer.post(4)
    await buffer.flush()
    assert [[1, 2, 3], [4]] == store.calls
    assert {1: 2, 2: 4, 3: 6, 4: 8} == store.written
    assert (0, []) == (buffer.pending_count, buffer.pending_items())


async def test_calls_have_a_maximum_size() -> None:
    """A full call is made at once, and the other items follow."""
    store = FakeStore()
    buffer = store.new_buffer(max_items=2)
    for item in range(5):
        buffer.post(item)
    await buffer.flush()
    assert [[0, 1], [2, 3], [4]] == store.calls


async def test_items_linger() -> None:
    """Items that are posted within the linger of the first one are written with it."""
    store = FakeStore()
    buffer = store.new_buffer(linger_s=LINGER_S)
    buffer.post(1)
    await asyncio.sleep(LINGER_S - 1)
    buffer.post(2)
    assert [] == store.calls
    await asyncio.sleep(2)
    assert [[1, 2]] == store.calls


async def test_a_shorter_linger_applies_to_all_items() -> None:
    """The shortest linger of the waiting items applies, and none extends it."""
    store = FakeStore()
    buffer = store.new_buffer(linger_s=LINGER_S)
    for linger_s in (None, 6.0, 8.0, 2 * LINGER_S):
        buffer.post(len(buffer.pending_items()), linger_s)
    await asyncio.sleep(5)
    assert [] == store.calls
    await asyncio.sleep(2)
    assert [[0, 1, 2, 3]] == store.calls
    buffer.post(4)
    buffer.post(5, 0.0)
    await asyncio.sleep(0.1)
    assert [4, 5] == store.calls[1]


async def test_end_of_the_linger() -> None:
    """Lingering items are written at once; without items, nothing is written."""
    store = FakeStore()
    buffer = store.new_buffer(linger_s=LINGER_S)
    buffer.end_linger()
    buffer.post(1)
    buffer.end_linger()
    await asyncio.sleep(0.1)
    assert [[1]] == store.calls
    await asyncio.sleep(2 * LINGER_S)
    assert [[1]] == store.calls


async def test_many_items_do_not_linger() -> None:
    """From 32 items, a call is worth its own transaction."""
    store = FakeStore()
    buffer = store.new_buffer(linger_s=LINGER_S)
    for item in range(32):
        assert not store.calls
        buffer.post(item)
    await asyncio.sleep(0.1)
    assert [list(range(32))] == store.calls


async def test_writes_are_repeated_during_an_outage() -> None:
    """Items are written when the store is available again, and its health shows the outage."""
    store = FakeStore()
    store.errors = [StoreUnavailable("disk full")] * 3
    buffer = store.new_buffer()
    buffer.post(1)
    await asyncio.sleep(0.01)
    assert [STORE] == list(store.health.failing)
    assert [1] == buffer.pending_items()
    await asyncio.sleep(10)
    assert [[1]] * 4 == store.calls
    assert {1: 2} == store.written
    assert {} == store.health.failing


async def test_rejected_item_does_not_affect_others() -> None:
    """If the store rejects a call, each item is written alone."""
    store = FakeStore()
    buffer = store.new_buffer()
    for item in (1, -2, 3):
        buffer.post(item)
    await buffer.flush()
    assert [[1, -2, 3], [1], [-2], [3]] == store.calls
    assert ({1: 2, 3: 6}, [-2]) == (store.written, store.rejected)


async def test_wait_for_writes_does_not_wait_for_later_items() -> None:
    """The wait ends when the items that were being written are written, also if it is repeated."""
    store = FakeStore()
    store.duration_s = 5.0
    store.errors = [StoreUnavailable("disk full")]
    buffer = store.new_buffer(linger_s=LINGER_S)
    await buffer.wait_for_writes()
    buffer.post(1, 0.0)
    await asyncio.sleep(0.1)
    buffer.post(2)
    await buffer.wait_for_writes()
    assert {1: 2} == store.written


async def test_stop_cancels_the_writes() -> None:
    """Neither the items of a call nor those that linger are written later."""
    store = FakeStore()
    store.duration_s = 5.0
    buffer = store.new_buffer(linger_s=LINGER_S)
    buffer.post(1, 0.0)
    await asyncio.sleep(0.1)
    buffer.post(2)
    await buffer.stop()
    assert 0 == buffer.pending_count
    await asyncio.sleep(60)
    assert ([[1]], {}) == (store.calls, store.written)


async def test_each_partition_has_a_buffer() -> None:
    """The counts are by partition, without those that have nothing to write."""
    stores = [FakeStore() for _ in range(3)]
    buffers: WriteBuffers[int, int] = WriteBuffers(
        lambda partition: stores[partition].new_buffer(linger_s=LINGER_S)
    )
    for partition, item in ((0, 1), (2, 3), (2, 4)):
        buffers[partition].post(item)
    buffers[1].end_linger()
    assert ({0: 1, 2: 2}, 3) == (buffers.pending_counts(), buffers.pending_count)
    assert [1, 3, 4] == sorted(buffers.pending_items())
    await buffers.flush()
    assert [[[1]], [], [[3, 4]]] == [store.calls for store in stores]
    buffers[0].post(5)
    await buffers.stop()
    assert 0 == buffers.pending_count
