from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from tarry.service.delivery.http1.client import HttpDeliveryClient
from tarry.service.delivery.http1.connector import Connector, ConnectResult
from tests.integration.hostile import OK
from tests.service.delivery.harness import LOOPBACK_GUARD, new_request, run, wait_until_empty

MAX_CONNECTIONS = 10


class FakeTransport(asyncio.Transport):
    """A transport whose peer answers each request with OK."""

    def __init__(self, protocol: asyncio.Protocol, sock: socket.socket) -> None:
        super().__init__({"socket": sock})
        self._protocol = protocol
        self._is_closing = False
        self._loop = asyncio.get_running_loop()

    def write(self, data: Any) -> None:
        """Answer with OK."""
        del data
        self._loop.call_soon(self._protocol.data_received, OK)

    def get_write_buffer_size(self) -> int:
        """Return 0: all data was sent."""
        return 0

    def is_closing(self) -> bool:
        """Return whether the transport was closed."""
        return self._is_closing

    def abort(self) -> None:
        """Close the transport."""
        self._is_closing = True
        self._loop.call_soon(self._protocol.connection_lost, None)


@pytest.fixture(autouse=True)
def _fake_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Connect to `FakeTransport` instead of real targets."""
    never_readable, peer = socket.socketpair()

    async def connect(_: Connector, protocol: asyncio.Protocol) -> ConnectResult:
        transport = FakeTransport(protocol, never_readable)
        protocol.connection_made(transport)
        return ConnectResult(transport, transport, "192.0.2.1", None, 1.0)

    monkeypatch.setattr(Connector, "connect", connect)
    with never_readable, peer:
        yield


def url_of(number: int) -> str:
    """Return the URL of one of many hosts."""
    return f"http://host-{number}.example/"


async def send_to_hosts(delivery: HttpDeliveryClient, number: int) -> None:
    """Send one request to each of `number` hosts, one after the other."""
    for each in range(number):
        assert 200 == (await delivery.send(new_request(url_of(each)))).status


async def count_calls(delivery: HttpDeliveryClient, url: str) -> int:
    """Return the number of Python functions that are called for one request."""
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    gc.disable()  # Hypothesis adds a callback to the garbage collector, which would be counted
    sys.setprofile(count)
    try:
        await delivery.send(new_request(url))
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_cost_of_a_connection_does_not_depend_on_the_number_of_hosts() -> None:
    """The connection to close for a new one is found without a search through all hosts."""

    async def main(hosts: int) -> int:
        delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=MAX_CONNECTIONS)
        await send_to_hosts(delivery, hosts)
        # Not a host of an earlier run, whose URL is in the cache of parsed URLs.
        calls = await count_calls(delivery, f"http://last-of-{hosts}.example/")
        await delivery.close()
        return calls

    assert run(main(1000)) == run(main(20))


async def test_number_of_pools_does_not_exceed_the_number_of_connections() -> None:
    """A pool is removed with its last connection."""
    delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=MAX_CONNECTIONS)
    await send_to_hosts(delivery, 100)
    pools = len(delivery._pools)
    for pool in list(delivery._pools.values()):
        for connection in tuple(pool._connections):
            connection.abort()
    await wait_until_empty(delivery)
    remaining = len(delivery._pools)
    await delivery.close()
    assert pools <= MAX_CONNECTIONS
    assert 0 == remaining


async def test_pool_of_a_failed_or_cancelled_request_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hosts that no connection can be opened to leave nothing behind."""

    async def refuse(*_: object) -> ConnectResult:
        raise ZeroDivisionError

    delivery = HttpDeliveryClient(LOOPBACK_GUARD, max_connections=1)
    monkeypatch.setattr(Connector, "connect", refuse)
    with pytest.raises(ZeroDivisionError):
        await delivery.send(new_request(url_of(1)))
    numbers = [len(delivery._pools)]
    running, queued = (delivery.send(new_request(url_of(number))) for number in (1, 2))
    queued.cancel()
    numbers.append(len(delivery._pools))
    running.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    numbers.append(len(delivery._pools))
    await delivery.close()
    assert [0, 1, 0] == numbers
