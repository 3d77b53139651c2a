"""Accepts connections with TLS, and counts a client from the moment it connects.

`loop.create_server` reports a connection when its handshake is complete. Until then, the server
could neither count nor close the connection, and clients that never start a handshake could take
all file descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from contextlib import suppress
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Protocol

from tarry.service.http.client_limit import admit

if TYPE_CHECKING:
    from collections.abc import MutableSet, Sequence
    from socket import socket
    from ssl import SSLContext

    from tarry.service.http.client_limit import ClientConnection

_logger = logging.getLogger("tarry.service")
_MAX_ACCEPTED_AT_ONCE = 64  # then the event loop handles other events
_TLS_SHUTDOWN_TIMEOUT_S = 1.0  # for clients that do not answer close_notify
_RESOURCE_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPT_PAUSE_S = 1.0  # after one of `_RESOURCE_ERRNOS`; asyncio waits as long


class ProtocolFactory(Protocol):
    """Creates the protocol of a connection."""

    def __call__(self, *, handshake: ClientConnection) -> asyncio.Protocol:
        """Return a protocol that removes `handshake` from the clients when it is connected."""
        ...


class PendingHandshake:
    """A client whose handshake is not complete. It counts as a connection of the server."""

    is_idle = True
    stalled_since = None
    is_for_health_checks: bool = False

    def __init__(self, connection: socket, idle_since: float) -> None:
        self._connection = connection
        self.idle_since = idle_since

    def abort(self) -> None:
        """Close the connection. The handshake then fails."""
        with suppress(OSError):  # the client has disconnected
            self._connection.shutdown(SHUT_RDWR)

    def shutdown(self) -> None:
        """Abort the handshake. Called by uvicorn when the server stops."""
        self.abort()


class TlsListener:
    """Accepts connections on listening sockets, as an `asyncio.Server` does.

    A client has `handshake_timeout_s` to complete the handshake. If `max_clients` are connected,
    its connection can be closed earlier, for a new client.
    """

    def __init__(
        self,
        sockets: Sequence[socket],
        create_protocol: ProtocolFactory,
        context: SSLContext,
        clients: MutableSet[ClientConnection],
        *,
        max_clients: int,
        handshake_timeout_s: float,
    ) -> None:
        self.sockets: Sequence[socket] = sockets
        self._create_protocol = create_protocol
        self._context = context
        self._clients = clients
        self._max_clients = max_clients
        self._handshake_timeout_s = handshake_timeout_s
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def start(self, backlog: int) -> None:
        """Start listening and accepting connections. Raises OSError."""
        for listener in self.sockets:
            listener.settimeout(0)
            listener.listen(backlog)
            self._resume(listener)

    def close(self) -> None:
        """Stop accepting connections, and close the listening sockets."""
        for listener in self.sockets:
            self._loop.remove_reader(listener)
            listener.close()
        self.sockets = ()

    async def wait_closed(self) -> None:
        """Wait until no handshake is running."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _resume(self, listener: socket) -> None:
        if listener in self.sockets:  # not closed during the pause
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket) -> None:
        for _ in range(_MAX_ACCEPTED_AT_ONCE):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _RESOURCE_ERRNOS:
                    raise
                _logger.error("cannot accept connections: %s", error)  # noqa: TRY400
                self._loop.remove_reader(listener)
                self._loop.call_later(_ACCEPT_PAUSE_S, self._resume, listener)
                return
            connection.settimeout(0)
            handshake = PendingHandshake(connection, self._loop.time())
            self._clients.add(handshake)
            if admit(handshake, self._clients, self._max_clients, handshake.idle_since):
                task = self._loop.create_task(self._complete_handshake(handshake, connection))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
            else:
                self._clients.discard(handshake)
                connection.close()

    async def _complete_handshake(self, handshake: PendingHandshake, connection: socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._create_protocol(handshake=handshake),
                connection,
                ssl=self._context,
                ssl_handshake_timeout=self._handshake_timeout_s,
                ssl_shutdown_timeout=_TLS_SHUTDOWN_TIMEOUT_S,
            )
        except OSError as error:  # also ssl.SSLError, a subclass
            _logger.debug("TLS handshake failed: %s", error)
        finally:
            self._clients.discard(handshake)
