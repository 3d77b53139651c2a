"""Calls of the store in PostgreSQL share the flush that makes their transactions durable."""

from __future__ import annotations

import asyncio

import pytest

from tarry.errors import StoreUnavailable
from tarry.service.stores.postgres.group_flush import GroupFlush


class ManualFlush:
    """A connection whose flushes end when the test calls `end`."""

    def __init__(self) -> None:
        self.started_count = 0
        self.opened_count = 0
        self._is_closed = False
        self._end: asyncio.Future[None] | None = None

    async def connect(self) -> ManualFlush:
        """Open the connection again."""
        self.opened_count += 1
        self._is_closed = False
        return self

    def is_closed(self) -> bool:
        """Return whether the connection is closed."""
        return self._is_closed

    def terminate(self) -> None:
        """Close the connection."""
        self._is_closed = True

    async def fetch(self, _statement: str) -> None:
        """Wait until `end` is called."""
        self.started_count += 1
        self._end = asyncio.get_running_loop().create_future()
        await self._end

    def end(self, error: Exception | None = None) -> None:
        """End the flush in progress, with an error if there is one."""
        assert self._end is not None
        self._end.set_result(None) if error is None else self._end.set_exception(error)


async def run_callbacks() -> None:
    """Run everything that waits for the event loop only."""
    for _ in range(5):
        await asyncio.sleep(0)


async def commit_and_wait(group: GroupFlush) -> None:
    """Do what a call of the store does: begin, commit, wait."""
    await group.wait(await group.begin())


def make_group() -> tuple[ManualFlush, GroupFlush]:
    """Return a group with a manual flush."""
    flush = ManualFlush()
    return flush, GroupFlush(flush.connect)


async def test_calls_share_a_flush() -> None:
    """Two calls that wait before a flush starts need one flush."""
    flush, group = make_group()
    calls = [asyncio.ensure_future(commit_and_wait(group)) for _ in range(2)]
    await run_callbacks()
    flush.end()
    await asyncio.gather(*calls)

    assert 1 == flush.started_count


async def test_a_call_needs_a_flush_that_starts_after_it() -> None:
    """A flush in progress may have started before the call's commit, so it does not count."""
    flush, group = make_group()
    first = asyncio.ensure_future(commit_and_wait(group))
    await run_callbacks()
    second = asyncio.ensure_future(commit_and_wait(group))
    await run_callbacks()
    flush.end()
    await first
    await run_callbacks()
    assert not second.done()
    flush.end()
    await second

    assert 2 == flush.started_count


async def test_the_error_of_a_flush_is_raised_by_its_calls() -> None:
    """Calls whose flush fails raise its error; later calls start another flush."""
    flush, group = make_group()
    calls = [asyncio.ensure_future(commit_and_wait(group)) for _ in range(2)]
    await run_callbacks()
    flush.end(StoreUnavailable("away"))
    for call in calls:
        with pytest.raises(StoreUnavailable):
            await call
    later = asyncio.ensure_future(commit_and_wait(group))
    await run_callbacks()
    flush.end()
    await later


async def test_a_cancelled_call_does_not_affect_others() -> None:
    """A call that shares the flush of a cancelled call still returns after the flush."""
    flush, group = make_group()
    calls = [asyncio.ensure_future(commit_and_wait(group)) for _ in range(2)]
    await run_callbacks()
    calls[0].cancel()
    await run_callbacks()
    flush.end()
    await calls[1]

    assert calls[0].cancelled()


async def test_a_call_fails_if_the_connection_was_lost_after_its_commit() -> None:
    """A flush on a new connection does not prove that a server that has crashed kept the commit."""
    flush, group = make_group()
    number = await group.begin()
    flush.terminate()  # the server crashes after the commit, and another call connects again
    later = asyncio.ensure_future(commit_and_wait(group))
    await run_callbacks()
    earlier = asyncio.ensure_future(group.wait(number))
    await run_callbacks()
    flush.end()
    await later
    await run_callbacks()
    flush.end()
    with pytest.raises(StoreUnavailable, match="before the transaction was flushed"):
        await earlier

    assert 2 == flush.opened_count


async def test_a_failed_flush_closes_the_connection() -> None:
    """Calls that committed before a failed flush fail, also if they wait for the next flush."""
    flush, group = make_group()
    calls = [asyncio.ensure_future(commit_and_wait(group))]
    await run_callbacks()
    calls.append(asyncio.ensure_future(commit_and_wait(group)))
    await run_callbacks()
    flush.end(StoreUnavailable("away"))
    for call in calls:
        with pytest.raises(StoreUnavailable):
            await call

    assert 1 == flush.started_count
