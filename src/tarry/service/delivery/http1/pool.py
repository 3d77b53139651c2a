"""The connections to one server: kept for the next request, and never more than are allowed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from tarry.service.delivery.http1.connection import Connection
from tarry.service.delivery.messages import DeliveryError, DeliveryResult, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery.http1.connector import Connector
    from tarry.service.delivery.http1.pending_request import PendingRequest

_IDLE_SECONDS, _LIFE_SECONDS = 60.0, 300.0
"""How long a connection is kept unused, and at all: then a name is looked up anew."""
_TURN_SECONDS = 5.0
"""How long a connection goes from request to request while another server waits for room."""


class ConnectionLimit:
    """How many connections there may be to all servers together."""

    def __init__(self, most: int, full: Callable[[], None]) -> None:
        self._left = most
        self._full = full
        self.waiting: OrderedDict[ConnectionPool, None] = OrderedDict()
        """Who is served next when there is room."""

    def take(self, pool: ConnectionPool) -> bool:
        """Take room for a connection; a pool that gets none is served when there is some."""
        if self._left:
            self._left -= 1
            return True
        if pool not in self.waiting:
            self.waiting[pool] = None
            self._full()
        return False

    def give(self) -> None:
        """Give the room of a connection back."""
        self._left += 1
        while self._left and self.waiting:  # the first may need it no longer
            self.waiting.popitem(last=False)[0].serve()


class ConnectionPool:
    """Connections to one server, at most so many of them."""

    def __init__(
        self,
        way: Connector,
        room: ConnectionLimit,
        clock: Callable[[], float],
        *,
        most: int,
        max_body: int,
    ) -> None:
        self._way = way
        self._clock = clock
        self._room = room
        self._most = most
        self.max_body: int = max_body
        self.prefix: str = ""
        """What stands before the path in a request's first line: something where it goes to a
        proxy.
        """
        self.lines: str = ""
        """The header lines that every request to the server has."""
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._connecting: dict[asyncio.Task[bool], tuple[PendingRequest, Connection]] = {}
        self._waiting: deque[PendingRequest] = deque()
        """Requests that wait for a connection, because no more may be opened."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self._all or self._connecting or self._waiting)

    def send(self, sending: PendingRequest, now: float) -> None:
        """Send a request on a connection that is free, or on a new one, or let it wait."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.free_since < _IDLE_SECONDS:
                connection.send(sending, now)
                return
            connection.close()
        self._waiting.append(sending)
        self.serve()

    def serve(self) -> None:
        """Open connections for requests that wait, as far as there is room."""
        while (
            self._waiting
            and len(self._all) + len(self._connecting) < self._most
            and self._room.take(self)
        ):
            sending, connection = self._waiting.popleft(), Connection(self, self._clock)
            task = asyncio.get_running_loop().create_task(self._connect(sending, connection))
            sending.connecting = task
            self._connecting[task] = sending, connection
            task.add_done_callback(self._connected)

    async def _connect(self, sending: PendingRequest, connection: Connection) -> bool:
        """Open a connection for a request; whether there is one now."""
        try:
            opened = await self._way.open(connection)
        except DeliveryError as error:
            sending.end(DeliveryResult(fault=error.fault, error=str(error)), self._clock())
            return False
        except BaseException:
            connection.drop()  # it may stand already
            raise
        connection.stand(opened)
        sending.connecting = None
        if not connection.is_open:
            words = "The connection ended without an answer"
            sending.end(connection.failed(Fault.RESET, words), self._clock())
            return False
        self._all.add(connection)
        connection.send(sending, self._clock())
        return True

    def _connected(self, task: asyncio.Task[bool]) -> None:
        sending, _ = self._connecting.pop(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None or not task.result():
            sending.connecting = None
            if error is not None:
                sending.fail(error)
            self._room.give()
        self.serve()

    # --- for its connections ----------------------------------------------------------------------

    def release(self, connection: Connection, now: float) -> None:
        """Take a connection back that can be used again."""
        age, is_wanted = now - connection.opened_at, self._room.waiting
        if self._waiting:
            most = _TURN_SECONDS if is_wanted else _LIFE_SECONDS
            if age >= most or self._waiting[0].was_sent:  # that one is to have a new connection
                connection.close()
            else:
                connection.send(self._waiting.popleft(), now)
        elif is_wanted or age >= _LIFE_SECONDS:
            connection.close()
        else:
            connection.free_since = now
            self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        """Learn that a connection has ended."""
        if connection in self._all:
            self._all.remove(connection)
            if connection in self._idle:
                self._idle.remove(connection)
            self._room.give()
            self.serve()

    def again(self, sending: PendingRequest) -> None:
        """Send what went out on a connection that had been closed in silence, on a new one."""
        self._waiting.appendleft(sending)
        self.serve()

    # --- the end ----------------------------------------------------------------------------------

    def late(self, sending: PendingRequest) -> None:
        """End a request whose time is over."""
        within = f"within {sending.request.timeout:g} s"
        if sending.connection is not None:
            delivered = sending.connection.failed(Fault.TIMEOUT, f"No answer {within}")
        elif sending.connecting is not None:
            _, connection = self._connecting[sending.connecting]
            is_reached = connection.is_open or not self._way.is_proxied
            fault = Fault.TIMEOUT if is_reached else Fault.INTERNAL
            delivered = DeliveryResult(fault=fault, error=f"No connection {within}")
        else:
            words = f"No connection came free {within}: raise the limits"
            delivered = DeliveryResult(fault=Fault.INTERNAL, error=words)
        sending.end(delivered, self._clock())
        self.leave(sending)

    def leave(self, sending: PendingRequest) -> None:
        """Let go of a request that nobody waits for any more."""
        if sending.connection is not None:
            sending.connection.drop()
        elif sending.connecting is not None:
            sending.connecting.cancel()
        else:
            self._waiting.remove(sending)

    def drop_idle(self) -> bool:
        """Close the connection that was idle for longest; whether there was one."""
        if self._idle:
            self._idle.pop(0).close()
            return True
        return False

    def drop_stale(self, now: float) -> None:
        """Close the connections that nobody has used for a while."""
        while self._idle and now - self._idle[0].free_since >= _IDLE_SECONDS:
            self._idle.pop(0).close()

    def close(self, now: float) -> list[asyncio.Task[bool]]:
        """End everything that runs; return what has yet to come to its end."""
        connecting = list(self._connecting)
        running = [each.sending for each in self._all if each.sending is not None]
        opening = [sending for sending, _ in self._connecting.values()]
        for sending in [*self._waiting, *opening, *running]:
            sending.end(DeliveryResult(fault=Fault.INTERNAL, error="the delivery is closed"), now)
        self._waiting.clear()
        for connection in tuple(self._all):
            connection.drop()
        for task in connecting:
            task.cancel()
        return connecting
