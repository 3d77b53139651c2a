from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connection import HttpConnection
from tarry.service.delivery.http1.pool import HttpConnectionPool
from tests.integration.hostile import OK
from tests.service.delivery.harness import LOOPBACK_GUARD, new_request
from tests.service.delivery.scripted_server import ReceivedRequest, run_server

pytestmark = pytest.mark.usefixtures("each_loop")

FORGED = b"HTTP/1.1 299 Forged\r\nContent-Length: 0\r\n\r\n"


def send_second_response(received: ReceivedRequest, connection: HttpConnection) -> None:
    """Write a second response to a socket; return when the client could read it."""
    # Written to the file descriptor, because uvloop writes to a socket only in its next iteration.
    os.write(received._writer.get_extra_info("socket").fileno(), FORGED)
    transport = connection._raw_transport
    assert transport is not None
    assert select.select([transport.get_extra_info("socket").fileno()], [], [], 20)[0]


def open_connections(delivery: HttpDeliveryClient) -> Iterator[HttpConnection]:
    """Yield the open connections of a client."""
    for pool in delivery._pools.values():
        yield from pool._connections


async def test_tenants_do_not_share_connections() -> None:
    """A second response to a request of one tenant does not reach the task of another tenant."""
    async with run_server() as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        sent = delivery.send(new_request(server.url, tenant="a"))
        first = await server.received.get()
        first.respond()
        await sent
        first.respond(FORGED)
        sent = delivery.send(new_request(server.url, tenant="b"))
        second = await server.received.get()
        second.respond()
        result = await sent
        await delivery.close()
        value = (result.status, [first.connection, second.connection])
    assert (200, [1, 2]) == value


async def test_idle_connection_with_unread_bytes_is_not_reused() -> None:
    """Bytes that arrived after a response are not the response to the next request."""
    async with run_server() as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        sent = delivery.send(new_request(server.url))
        received = await server.received.get()
        received.respond()
        await sent
        send_second_response(received, next(open_connections(delivery)))
        sent = delivery.send(new_request(server.url))
        (await server.received.get()).respond()
        result = await sent
        await delivery.close()
        value = (result.status, server.connections)
    assert (200, 2) == value


async def test_released_connection_with_unread_bytes_is_not_reused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A queued request is not sent on a connection that has received bytes after its response."""
    release = HttpConnectionPool.release
    answered: list[ReceivedRequest] = []

    def release_with_unread_bytes(
        pool: HttpConnectionPool, connection: HttpConnection, now: float
    ) -> None:
        send_second_response(answered.pop(), connection)
        release(pool, connection, now)

    async with run_server() as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_pool_connections=1)
        sent = [delivery.send(new_request(server.url)) for _ in range(2)]
        answered.append(await server.received.get())
        monkeypatch.setattr(HttpConnectionPool, "release", release_with_unread_bytes)
        answered[0].respond()
        await sent[0]
        monkeypatch.setattr(HttpConnectionPool, "release", release)
        (await server.received.get()).respond()
        statuses = [(await each).status for each in sent]
        await delivery.close()
        result = (statuses, server.connections)
    assert ([200, 200], 2) == result


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(("body", "connections"), [(b"", 1), (b"{}", 2)])
async def test_connection_is_not_reused_after_an_unusual_body(
    method: str, body: bytes, connections: int
) -> None:
    """Some servers do not read the body of a GET or DELETE, and parse it as the next request."""
    async with run_server() as server:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD)
        for _ in range(2):
            sent = delivery.send(new_request(server.url, method=method, body=body))
            (await server.received.get()).respond(OK)
            assert 200 == (await sent).status
        await delivery.close()
        result = server.connections
    assert connections == result
