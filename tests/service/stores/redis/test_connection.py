"""Connections that fail. Scripts are tested with real servers."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from importlib import import_module

import pytest
import uvloop

from tarry.errors import StoreUnavailable
from tarry.service.stores.redis import RedisTaskStore, connection
from tarry.service.stores.redis.connection import RedisConnection


def test_a_node_of_a_cluster_is_not_a_single_server() -> None:
    """The error for a URL without `+cluster` says which URL to use, and has no password."""
    connection = RedisConnection("redis://u:secret@h", None)
    error = connection.translate(import_module("redis.exceptions").MovedError("13907 h:7003"))
    assert (
        "Redis at redis://[redacted]@h is unavailable: the server is a node of a Cluster: "
        "use redis+cluster://HOST in `store`"
    ) == str(error)


async def test_a_store_that_is_not_open_is_unavailable() -> None:
    """Every call raises `StoreUnavailable` before `open` and after `close`."""
    store = RedisTaskStore("redis://h")
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.ping()
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.counters()
    await store.close()


def test_a_closed_connection_of_uvloop_is_unavailable() -> None:
    """A write to a closed transport, for which uvloop raises RuntimeError, may be repeated."""

    async def write_to_closed_transport() -> RuntimeError:
        near, far = socket.socketpair()
        with far:
            _, writer = await asyncio.open_connection(sock=near)
            writer.close()
            await writer.wait_closed()
            with pytest.raises(RuntimeError) as raised:
                writer.write(b"PING")
        return raised.value

    error = uvloop.run(write_to_closed_transport())

    connection = RedisConnection("redis://localhost", None)
    assert isinstance(connection.translate(error), StoreUnavailable)
    assert connection.translate(RuntimeError("no running event loop")) is None


def test_a_server_that_accepts_no_connection_delays_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a call waits for a connection, other calls fail at once."""
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_S", 0.5)

    async def main(port: int) -> None:
        redis_connection = RedisConnection(f"redis://127.0.0.1:{port}", None)
        redis_connection.open()
        with pytest.raises(StoreUnavailable, match="Timeout connecting"):
            await redis_connection.run(0, "ping")
        waiting = asyncio.create_task(redis_connection.run(0, "ping"))
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="no reply in time"):
            await redis_connection.run(0, "ping")
        assert not waiting.done()
        with pytest.raises(StoreUnavailable, match="Timeout connecting"):
            await waiting
        await redis_connection.close()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as clients:
        address = server.getsockname()
        for _ in range(8):  # the queue is full, so that further connections get no response
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        asyncio.run(main(address[1]))
