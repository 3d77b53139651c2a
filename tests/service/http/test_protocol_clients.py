from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn.server import ServerState

from tests.service.http.harness import GET, POST, ConnectionHarness, FakeLoop

HEALTHZ = GET.replace(b"/x", b"/healthz")


class FakeServer:
    """Connections that share the state of a server with a limit of clients."""

    def __init__(self, max_clients: int) -> None:
        self.state, self.loop = ServerState(), FakeLoop()
        self.is_answering = asyncio.Event()
        self._max_clients = max_clients

    def connect(self, data: bytes = b"") -> ConnectionHarness:
        """Open a connection, a little after the previous one, and send data."""
        self.loop.sleep(0.01)
        connection = ConnectionHarness(
            self._respond, state=self.state, loop=self.loop, max_clients=self._max_clients
        )
        connection.protocol.data_received(data)
        return connection

    async def _respond(self, scope: dict[str, Any], _: object, send: Any) -> None:
        if scope["path"] != "/healthz":
            await self.is_answering.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


def open_connections(connections: list[ConnectionHarness]) -> list[bool]:
    """Return which connections are open."""
    return [not each.transport.is_closed for each in connections]


@pytest.mark.parametrize("sent", [b"", b"GET /x HT"], ids=["silent", "partial headers"])
async def test_connection_without_a_request_is_closed_for_a_new_one(sent: bytes) -> None:
    """The oldest connection is closed, and the new client is served."""
    server = FakeServer(3)
    waiting = [server.connect(sent) for _ in range(3)]
    latest = server.connect()
    assert b"HTTP/1.1 200" in await latest.send(HEALTHZ)
    assert [False, True, True] == open_connections(waiting)


async def test_connection_that_had_a_response_lately_is_kept() -> None:
    """The connection that has been idle longest is closed for a new one."""
    server = FakeServer(3)
    idle = [server.connect() for _ in range(3)]
    for each in (idle[0], idle[2], idle[1]):
        server.loop.sleep(1.0)
        await each.send(HEALTHZ)
    server.connect()
    assert [False, True, True] == open_connections(idle)
    server.connect()
    assert [False, True, False] == open_connections(idle)


async def test_health_checks_are_served_while_all_clients_wait_for_a_response() -> None:
    """Other requests get a 503, and their connection is closed."""
    server = FakeServer(3)
    waiting = [server.connect(GET) for _ in range(3)]
    check, other = server.connect(), server.connect(POST)
    check.protocol.data_received(HEALTHZ)
    await asyncio.sleep(0)
    assert b"".join(check.transport.written).startswith(b"HTTP/1.1 200")
    refused = b"".join(other.transport.written)
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"\r\nretry-after: 1\r\n" in refused
    assert other.transport.is_closed
    server.is_answering.set()
    await asyncio.wait(server.state.tasks)
    assert [True] * 4 == open_connections([*waiting, check])


@pytest.mark.parametrize("is_unread", [True, False], ids=["unread response", "partial body"])
async def test_stalled_client_is_closed_for_a_new_one(is_unread: bool) -> None:
    """After a second, those that have been stalled for longest; clients that wait are kept."""
    server = FakeServer(3)
    waiting = server.connect(GET)
    stalled = []
    for _ in range(2):
        stalled.append(server.connect(GET if is_unread else POST[:-1]))
        if is_unread:
            stalled[-1].protocol.pause_writing()
    server.loop.sleep(0.9)
    early = server.connect(POST)
    server.loop.sleep(0.1)
    late = server.connect(HEALTHZ)
    await asyncio.sleep(0)
    are_open = open_connections([waiting, *stalled])
    server.is_answering.set()
    for each in stalled:  # so that their requests end
        each.protocol.connection_lost(None)
    await asyncio.wait(server.state.tasks)
    assert b"".join(early.transport.written).startswith(b"HTTP/1.1 503")
    assert b"".join(late.transport.written).startswith(b"HTTP/1.1 200")
    assert ([True, False, True], False) == (are_open, late.protocol.is_for_health_checks)


async def test_client_that_reads_its_response_again_is_kept() -> None:
    """Only clients that are stalled now are closed."""
    server = FakeServer(2)
    reader, sender = server.connect(GET), server.connect(POST[:-1])
    reader.protocol.pause_writing()
    server.loop.sleep(5.0)
    reader.protocol.resume_writing()
    sender.protocol.data_received(POST[-1:])
    refused = server.connect(POST)
    assert b"".join(refused.transport.written).startswith(b"HTTP/1.1 503")
    assert [True, True] == open_connections([reader, sender])
    server.is_answering.set()
    await asyncio.wait(server.state.tasks)


@pytest.mark.parametrize("is_reader", [True, False], ids=["response", "body"])
async def test_slow_client_that_makes_progress_is_kept(is_reader: bool) -> None:
    """A large body or response takes longer than a second; 16 KiB in each second are enough."""
    size, step = 200_000, 16_384

    server = FakeServer(1)
    head = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % size
    slow = server.connect(GET if is_reader else head)
    if is_reader:
        slow.transport.write_buffer_size = size
        slow.protocol.pause_writing()
    are_open = []
    for step_size in (step, step, 1):
        server.loop.sleep(1.0)
        if is_reader:
            slow.transport.write_buffer_size -= step_size
        else:
            slow.protocol.data_received(bytes(step_size))
        server.connect(POST).protocol.connection_lost(None)
        are_open += open_connections([slow])
    server.is_answering.set()
    slow.protocol.connection_lost(None)
    await asyncio.wait(server.state.tasks)
    assert [True, True, False] == are_open


async def test_connections_above_the_reserve_for_health_checks_are_aborted() -> None:
    """A client that opens many connections cannot take the descriptors of deliveries."""
    server = FakeServer(2)
    waiting = [server.connect(GET.replace(b"/x", b"/readyz")) for _ in range(2 + 32)]
    assert [True] * 34 == open_connections(waiting)
    assert server.connect().transport.is_aborted
    server.is_answering.set()
    await asyncio.wait(server.state.tasks)


async def test_idle_connection_for_health_checks_is_closed_for_a_new_one() -> None:
    """A silent client above the limit is closed only when all reserved connections are in use."""
    server = FakeServer(1)
    busy = server.connect(GET)
    reserved = [server.connect() for _ in range(32)]
    assert [True] * 32 == open_connections(reserved)
    latest = server.connect()
    assert [False] * 3 + [True] * 29 == open_connections(reserved)
    latest.protocol.data_received(HEALTHZ)
    server.is_answering.set()
    await busy.wait_until_served()
    assert b"".join(latest.transport.written).startswith(b"HTTP/1.1 200")
