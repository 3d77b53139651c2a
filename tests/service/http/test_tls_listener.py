"""Clients that do not complete their TLS handshake. `test_service_tls` runs a whole service."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tarry.service.http.client_limit import ClientConnection
from tarry.service.http.tls_listener import TlsListener
from tests.certificates import Authority


class FakeProtocol(asyncio.Protocol):
    """A connection that replaces its handshake among the clients, and sends `ok`."""

    is_idle = True
    stalled_since: float | None = None
    is_for_health_checks = False
    idle_since = 0.0

    def __init__(self, clients: set[Any], handshake: ClientConnection | None = None) -> None:
        self._clients, self._handshake = clients, handshake

    def connection_made(self, transport: Any) -> None:
        """Send two bytes."""
        self._clients.discard(self._handshake)
        self._clients.add(self)
        self._transport = transport
        transport.write(b"ok")

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the client."""
        self._clients.discard(self)

    def abort(self) -> None:
        """Close the connection."""
        self._transport.abort()


class ListenerHarness:
    """A listener on a free port, and its clients."""

    def __init__(self, folder: Path, max_clients: int, timeout_s: float) -> None:
        authority = Authority(folder)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*authority.issue("service"))
        self._client_context = ssl.create_default_context(cafile=authority.ca_file)
        self.clients: set[Any] = set()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.listener = TlsListener(
            [self.socket],
            lambda handshake: FakeProtocol(self.clients, handshake),
            context,
            self.clients,
            max_clients=max_clients,
            handshake_timeout_s=timeout_s,
        )
        self.address = self.socket.getsockname()
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self, *, tls: bool) -> asyncio.StreamReader:
        """Connect; without TLS, send nothing."""
        context = self._client_context if tls else None
        reader, writer = await asyncio.open_connection(*self.address, ssl=context)
        self._writers.append(writer)
        return reader

    async def connect_silently(self, total: int) -> asyncio.StreamReader:
        """Connect without TLS; return when the listener has `total` clients."""
        reader = await self.connect(tls=False)
        await self.wait_for_clients(total)
        # The next client must be newer. The time of uvloop has a resolution of 1 ms.
        await asyncio.sleep(0.005)
        return reader

    async def wait_for_clients(self, total: int) -> None:
        """Wait until the listener has `total` clients."""
        while len(self.clients) != total:  # noqa: ASYNC110 - the set has no event
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self.listener.close()
        await self.listener.wait_closed()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run_async(
    request: pytest.FixtureRequest,
) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    """Run coroutine functions on asyncio and on uvloop."""

    def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(main())

    return run


@asynccontextmanager
async def open_listener(
    folder: Path, *, max_clients: int = 3, timeout_s: float = 600.0
) -> AsyncIterator[ListenerHarness]:
    """Start a listener, and close it."""
    harness = ListenerHarness(folder, max_clients, timeout_s)
    harness.listener.start(backlog=100)
    try:
        yield harness
    finally:
        await harness.close()


@pytest.mark.usefixtures("run_async")
async def test_silent_client_is_counted_and_closed_for_a_new_one(tmp_path: Path) -> None:
    """At the limit, the oldest client without a handshake is closed, and the new one is served."""
    async with open_listener(tmp_path) as harness:
        silent = [await harness.connect_silently(total) for total in (1, 2, 3)]
        new = await harness.connect(tls=True)
        assert b"ok" == await new.readexactly(2)
        assert b"" == await silent[0].read()
        assert 3 == len(harness.clients)
        assert [False, False] == [each.at_eof() for each in silent[1:]]


@pytest.mark.usefixtures("run_async")
async def test_connected_client_is_counted_once(tmp_path: Path) -> None:
    """A client counts once, during and after its handshake, until it disconnects."""
    async with open_listener(tmp_path) as harness:
        readers = [await harness.connect(tls=True) for _ in range(3)]
        assert [b"ok"] * 3 == [await each.readexactly(2) for each in readers]
        assert [FakeProtocol] * 3 == [type(each) for each in harness.clients]
        for each in tuple(harness.clients):
            each.abort()
        await harness.wait_for_clients(0)


@pytest.mark.usefixtures("run_async")
async def test_failed_handshake_is_not_counted_any_more(tmp_path: Path) -> None:
    """A client whose handshake fails, or that disconnects during the handshake, is not counted."""
    async with open_listener(tmp_path) as harness:
        reader, writer = await asyncio.open_connection(*harness.address)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        await harness.wait_for_clients(0)
        _, writer = await asyncio.open_connection(*harness.address)
        await harness.wait_for_clients(1)
        writer.close()
        await harness.wait_for_clients(0)


@pytest.mark.usefixtures("run_async")
async def test_handshake_has_a_timeout(tmp_path: Path) -> None:
    """A client that sends nothing is disconnected after the timeout."""
    async with open_listener(tmp_path, timeout_s=0.05) as harness:
        silent = await harness.connect(tls=False)
        assert b"" == await silent.read()
        await harness.wait_for_clients(0)


@pytest.mark.usefixtures("run_async")
async def test_client_above_the_limit_is_refused(tmp_path: Path) -> None:
    """If all clients have running requests, also those for health checks, a new one is refused."""
    async with open_listener(tmp_path, max_clients=1) as harness:
        for _ in range(33):
            busy = FakeProtocol(harness.clients)
            busy.is_idle = False
            harness.clients.add(busy)
        refused = await harness.connect(tls=False)
        assert b"" == await refused.read()
        assert 33 == len(harness.clients)


@pytest.mark.usefixtures("run_async")
async def test_shutdown_closes_silent_clients(tmp_path: Path) -> None:
    """A handshake that is not complete does not delay the shutdown."""
    async with open_listener(tmp_path) as harness:
        silent = await harness.connect_silently(1)
        harness.listener.close()
        for each in tuple(harness.clients):
            each.shutdown()
        await harness.listener.wait_closed()
        assert b"" == await silent.read()
        assert set() == harness.clients


class FaultySocket(socket.socket):
    """A listening socket whose first `accept` finds no free file descriptor."""

    failures = 1

    def accept(self) -> tuple[socket.socket, object]:
        """Raise an error once."""
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_listener_recovers_from_a_lack_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The listener logs the error once, and accepts connections again after a pause."""
    monkeypatch.setattr("tarry.service.http.tls_listener._ACCEPT_PAUSE_S", 0.01)

    async with open_listener(tmp_path) as harness:
        harness.listener.close()
        faulty = FaultySocket()
        faulty.bind(("127.0.0.1", 0))
        harness.address = faulty.getsockname()
        harness.listener.sockets = [faulty]
        harness.listener.start(backlog=10)
        reader = await harness.connect(tls=True)
        assert b"ok" == await reader.readexactly(2)
    assert 1 == caplog.text.count("cannot accept connections: [Errno 24] Too many open files")
