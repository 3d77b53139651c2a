"""Clients that do not read their responses."""

from __future__ import annotations

import asyncio

import pytest

from tarry.service.http.protocol import _MIN_READ_BYTES, _STALL_TIMEOUT_S
from tests.service.http.harness import GET, KEEP_ALIVE_S, POST, FastRoute

BUFFERED_BYTES = 1_000_000
CLOSE = GET.replace(b"Host", b"Connection: close\r\nHost")


async def start_unread_response(request: bytes = GET) -> FastRoute:
    """Return a connection whose write buffer is full after the response to a request."""
    route = FastRoute()
    route.receive(request)
    await route.respond_to_all()
    route.connection.transport.write_buffer_size = BUFFERED_BYTES
    route.connection.protocol.pause_writing()
    return route


@pytest.mark.parametrize("request_", [GET, POST], ids=["uvicorn", "fast path"])
async def test_a_client_that_reads_nothing_is_disconnected(request_: bytes) -> None:
    """Its response is discarded, and the application is notified of the disconnect."""
    route = await start_unread_response(request_)
    route.receive(GET)  # waits until the client reads
    await asyncio.sleep(0)
    transport, loop = route.connection.transport, route.connection.loop
    loop.sleep(_STALL_TIMEOUT_S - 1)
    was_aborted_early = transport.is_aborted
    loop.sleep(1)
    was_aborted = transport.is_aborted
    route.connection.protocol.connection_lost(None)
    await route.respond_to_all()
    assert (False, True) == (was_aborted_early, was_aborted)
    assert ([201], 0) == (route.statuses, loop.pending)


async def test_a_slow_client_is_not_disconnected() -> None:
    """It reads enough in each interval, until writing is resumed."""
    route = await start_unread_response()
    transport, loop = route.connection.transport, route.connection.loop
    for _ in range(2):
        transport.write_buffer_size -= _MIN_READ_BYTES
        loop.sleep(_STALL_TIMEOUT_S)
        assert not transport.is_closed
    transport.write_buffer_size = 1
    route.connection.protocol.resume_writing()
    await route.respond_to_all()
    assert 1 == loop.pending  # the keep-alive timer


async def test_a_client_that_reads_too_slowly_is_disconnected() -> None:
    """A client that reads a few bytes in each interval could otherwise hold a page for hours."""
    route = await start_unread_response()
    route.connection.transport.write_buffer_size -= _MIN_READ_BYTES - 1
    route.connection.loop.sleep(_STALL_TIMEOUT_S)
    assert route.connection.transport.is_aborted


@pytest.mark.parametrize("data", [CLOSE, GET + b"nonsense\r\n\r\n"], ids=["close", "rejection"])
async def test_a_closed_connection_does_not_wait_for_its_client(data: bytes) -> None:
    """A closed connection is aborted if the client does not read the end of the last response."""
    route = FastRoute()
    route.connection.transport.write_buffer_size = 9
    route.receive(data)
    await route.respond_to_all()
    assert (True, False) == (
        route.connection.transport.is_closed,
        route.connection.transport.is_aborted,
    )
    route.connection.protocol.resume_writing()  # called when most of the buffer is sent
    route.connection.loop.sleep(_STALL_TIMEOUT_S)
    assert route.connection.transport.is_aborted


async def test_an_idle_connection_does_not_wait_for_its_client() -> None:
    """After the keep-alive timeout, the connection is aborted if its last response is not read."""
    route = FastRoute()
    route.receive(GET)
    await route.respond_to_all()
    route.connection.transport.write_buffer_size = 9
    route.connection.loop.sleep(KEEP_ALIVE_S)
    assert (True, False) == (
        route.connection.transport.is_closed,
        route.connection.transport.is_aborted,
    )
    route.connection.loop.sleep(_STALL_TIMEOUT_S)
    assert route.connection.transport.is_aborted


@pytest.mark.parametrize("data", [CLOSE, b"nonsense\r\n\r\n"], ids=["close", "rejection"])
async def test_a_lost_connection_has_no_timer(data: bytes) -> None:
    """A connection that is closed normally leaves no timer."""
    route = FastRoute()
    route.receive(data)
    await route.respond_to_all()
    route.connection.protocol.connection_lost(None)
    assert 0 == route.connection.loop.pending
