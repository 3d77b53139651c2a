"""One server, or one node of a Cluster: its client with a connection pool."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CONNECTIONS = 16
"""The maximum number of connections to a server or, in a Cluster, to each node."""
_REPLY_TIMEOUT_S = 3.5
"""The maximum time to send a command and to receive its reply, including a new connection. A
server that hangs is left after a fraction of the shortest lease."""


class ServerClient:
    """A client of one server with a connection pool, and the number of its free connections."""

    def __init__(
        self,
        build_client: Callable[[], Any],
        must_reconnect: Callable[[Exception], bool],
        timeout_errors: tuple[type[Exception], ...],
    ) -> None:
        self._build_client = build_client
        self._must_reconnect = must_reconnect
        self._timeout_errors = timeout_errors
        self._client: Any = build_client()
        self.free_connections: asyncio.Semaphore = asyncio.Semaphore(MAX_CONNECTIONS)
        self._running_counts: Counter[Any] = Counter()
        """The number of running commands by client."""
        self._has_timed_out = False
        """Whether the last command that has ended got no connection or no reply in time."""
        self._has_connected = False
        """Whether a command of the current client has succeeded."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_hanging(self) -> bool:
        """Whether the server does not respond, and another command waits for it already."""
        return self._has_timed_out and self._running_counts.total() > 0

    async def execute(self, *command: Any) -> Any:
        """Run a command on a pooled connection."""
        client = self._client
        self._running_counts[client] += 1
        try:
            # Not the timeout of redis-py: it sends with `asyncio.wait_for`, which in Python 3.11
            # ignores the cancellation of a task if it arrives when the command was just sent.
            async with asyncio.timeout(_REPLY_TIMEOUT_S):
                reply = await client.execute_command(*command)
        except Exception as error:
            self._has_timed_out = isinstance(error, self._timeout_errors)
            # The other connections of the pool were probably lost, too. redis-py detects that the
            # server has closed a connection, but not that it was reset. With this pool, calls would
            # fail and succeed in turn until each connection has failed once.
            is_current = client is self._client and self._has_connected
            if is_current and self._must_reconnect(error):
                self._client, self._has_connected = self._build_client(), False
            raise
        else:
            self._has_connected = self._has_connected or client is self._client
            self._has_timed_out = False
            return reply
        finally:
            self._running_counts[client] -= 1
            if client is not self._client:
                self._close_if_idle(client)

    def _close_if_idle(self, client: Any) -> None:
        """Close a client that was replaced, after its last command."""
        if not self._running_counts[client]:
            del self._running_counts[client]
            task = asyncio.get_running_loop().create_task(_close(client))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._closing, _close(self._client))


async def _close(client: Any) -> None:
    with suppress(Exception):  # its connections may be lost
        await client.aclose()
