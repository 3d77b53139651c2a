"""The pool of connections of the store in PostgreSQL."""

from __future__ import annotations

import asyncio

import pytest

from tarry.service.stores.postgres import connection_pool
from tarry.service.stores.postgres.connection_pool import ConnectionPool


class FakeConnection:
    """A connection that records how it was closed."""

    def __init__(self) -> None:
        self.is_broken = self.was_closed = self.was_terminated = False
        self.may_close = asyncio.Event()
        self.may_close.set()

    def is_closed(self) -> bool:
        """Return whether the connection cannot be used any more."""
        return self.is_broken or self.was_closed or self.was_terminated

    async def close(self, timeout: float) -> None:
        """Close the connection when the test allows it."""
        async with asyncio.timeout(timeout):
            await self.may_close.wait()
        self.was_closed = True

    def terminate(self) -> None:
        """Close the connection at once."""
        self.was_terminated = True


async def connect() -> FakeConnection:
    """Open a connection."""
    return FakeConnection()


def make_pool(*, timeout_s: float = 5.0) -> ConnectionPool:
    """Return a pool of two connections."""
    return ConnectionPool(connect, size=2, timeout_s=timeout_s)


async def test_the_connection_that_was_used_last_is_used_again() -> None:
    """A released connection is reused, the last one first, unless it is closed."""
    pool = make_pool()
    first, second = await pool.acquire(), await pool.acquire()
    pool.release(first)
    pool.release(second)
    assert second is await pool.acquire()
    pool.release(second)
    second.is_broken = True

    assert first is await pool.acquire()


async def test_a_call_waits_for_a_free_connection() -> None:
    """There are never more connections than the size of the pool."""
    pool = make_pool()
    first, _ = await pool.acquire(), await pool.acquire()
    waiting = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    pool.release(first)

    assert first is await waiting


async def test_a_call_does_not_wait_for_ever() -> None:
    """If no connection becomes free within the timeout, the call raises an error."""
    pool = make_pool(timeout_s=0.01)
    await pool.acquire()
    await pool.acquire()
    with pytest.raises(TimeoutError):
        await pool.acquire()


async def test_an_error_of_connect_does_not_use_up_the_pool() -> None:
    """After failed attempts to connect, there are as many connections as before."""
    is_away = True

    async def connect_if_up() -> FakeConnection:
        if is_away:
            raise ConnectionRefusedError
        return FakeConnection()

    pool = ConnectionPool(connect_if_up, size=1, timeout_s=0.01)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            await pool.acquire()
    is_away = False
    assert await pool.acquire() is not None


async def test_a_discarded_connection_is_replaced_after_it_was_closed() -> None:
    """A statement that may still run is cancelled before another connection is opened."""
    pool = make_pool()
    first, _ = await pool.acquire(), await pool.acquire()
    first.may_close.clear()
    pool.discard(first)
    waiting = asyncio.ensure_future(pool.acquire())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.may_close.set()

    assert first is not await waiting
    assert first.was_closed


async def test_a_connection_that_was_idle_for_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been dropped by a firewall, so it is closed."""
    monkeypatch.setattr(connection_pool, "_MAX_IDLE_S", -1.0)

    pool = make_pool()
    first = await pool.acquire()
    pool.release(first)

    assert first is not await pool.acquire()
    assert first.was_terminated


async def test_close_waits_for_calls() -> None:
    """`close` returns when connections in use are released."""
    pool = make_pool()
    idle, used = await pool.acquire(), await pool.acquire()
    pool.release(idle)
    closing = asyncio.ensure_future(pool.close())
    await asyncio.sleep(0)
    pool.release(used)
    await closing

    assert idle.was_closed
    assert used.was_terminated


async def test_close_terminates_connections_that_stay_in_use() -> None:
    """`close` does not wait for longer than the timeout."""
    pool = make_pool(timeout_s=0.01)
    used = await pool.acquire()
    await pool.close()

    assert used.was_terminated
