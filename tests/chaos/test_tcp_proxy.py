"""The proxy disturbs connections as it says; otherwise the chaos tests would test nothing."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from socketserver import BaseRequestHandler, ThreadingUnixStreamServer

import pytest

from tests.chaos.tcp_proxy import Disturbance, TcpProxy, tcp_proxy
from tests.integration.servers import create_directory

_received: queue.Queue[bytes] = queue.Queue()


class EchoHandler(BaseRequestHandler):
    """Returns all bytes, and records them."""

    def handle(self) -> None:
        """Handle a connection."""
        connection: socket.socket = self.request
        while data := connection.recv(100):
            _received.put(data)
            connection.sendall(data)


@pytest.fixture
def proxy() -> Iterator[TcpProxy]:
    """Run a proxy of an echo server."""
    with create_directory() as home:
        path = str(home / "socket")
        with ThreadingUnixStreamServer(path, EchoHandler) as server:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            with tcp_proxy(path) as running_proxy:
                yield running_proxy
            server.shutdown()


@pytest.fixture
def connection(proxy: TcpProxy) -> Iterator[socket.socket]:
    """Connect through the proxy, and exchange some bytes."""
    with connect(proxy) as connected:
        connected.sendall(b"before")
        assert b"before" == connected.recv(100) == _received.get()
        yield connected


def connect(proxy: TcpProxy) -> socket.socket:
    """Open a connection through the proxy."""
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=30)


def test_dropped_bytes_arrive_later(proxy: TcpProxy, connection: socket.socket) -> None:
    """No byte arrives while bytes are dropped, and none is missing afterwards."""
    proxy.disturb(Disturbance.DROP)
    connection.sendall(b"x")
    connection.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.recv(100)
    proxy.disturb(Disturbance.NONE)
    connection.settimeout(30)
    assert b"x" == connection.recv(100) == _received.get()


def test_delayed_bytes_arrive(proxy: TcpProxy, connection: socket.socket) -> None:
    proxy.disturb(Disturbance.DELAY)
    connection.sendall(b"x")
    assert b"x" == connection.recv(100) == _received.get()


def test_connections_are_reset(proxy: TcpProxy, connection: socket.socket) -> None:
    """An existing connection is reset at once, and a new one after the store has its request."""
    proxy.disturb(Disturbance.RESET)
    with pytest.raises(ConnectionResetError):
        connection.recv(100)
    with connect(proxy) as new_connection:
        new_connection.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            new_connection.recv(100)
    assert b"x" == _received.get()


def test_connections_are_closed_in_one_direction(
    proxy: TcpProxy, connection: socket.socket
) -> None:
    """The client reads the end of the stream, but the store receives its next request."""
    proxy.disturb(Disturbance.HALF_CLOSE)
    assert b"" == connection.recv(100)
    connection.sendall(b"x")
    assert b"x" == _received.get(timeout=30)


def test_new_connections_are_refused(proxy: TcpProxy, connection: socket.socket) -> None:
    """An existing connection still works."""
    proxy.disturb(Disturbance.REFUSE)
    with pytest.raises(ConnectionResetError), connect(proxy) as new_connection:
        new_connection.recv(100)
    connection.sendall(b"x")
    assert b"x" == connection.recv(100) == _received.get()
