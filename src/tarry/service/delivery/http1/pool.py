"""Connection pools: keep-alive connections to each origin, and a limit for all pools together."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from tarry.service.delivery import DeliveryError, DeliveryResult, Fault
from tarry.service.delivery.dns import DEADLINE_PAUSE_S
from tarry.service.delivery.http1.connection import CLOSED_WITHOUT_RESPONSE, HttpConnection

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.delivery.http1.connection import PendingRequest
    from tarry.service.delivery.http1.connector import Connector

_logger = logging.getLogger("tarry.service")
_MAX_IDLE_S = 60.0
_MAX_AGE_S = 300.0  # age at which a connection is closed, so that its host name is resolved again
_MAX_AGE_WHEN_SCARCE_S = 5.0  # the same, while another pool waits to open a connection


class ConnectionLimit:
    """Limits the number of connections of all pools together, and closes idle connections."""

    def __init__(self, limit: int) -> None:
        self._free_slots = limit
        self.idle_connections: OrderedDict[HttpConnection, HttpConnectionPool] = OrderedDict()
        """The idle connections of all pools, longest idle first. One order for all pools, because a
        search through the pools of 20,000 hosts takes 0.7 ms for each new connection."""
        self.waiting_pools: OrderedDict[HttpConnectionPool, None] = OrderedDict()
        """Pools that wait to open a connection, first come first served."""

    def acquire(self, pool: HttpConnectionPool) -> bool:
        """Reserve a slot for a connection and return True, or queue the pool and return False."""
        if self._free_slots:
            self._free_slots -= 1
            return True
        if pool not in self.waiting_pools:
            self.waiting_pools[pool] = None
            self._close_longest_idle()
        return False

    def release(self) -> None:
        """Release the slot of a closed connection, and let the next pool open a connection."""
        self._free_slots += 1
        while self._free_slots and self.waiting_pools:  # the next pool may not need the slot
            self.waiting_pools.popitem(last=False)[0].open_connections()

    def close_expired(self, now: float) -> None:
        """Close connections that have been idle for too long."""
        idle = self.idle_connections
        while idle and now - next(iter(idle)).idle_since >= _MAX_IDLE_S:
            self._close_longest_idle()

    def _close_longest_idle(self) -> None:
        if self.idle_connections:
            connection, pool = next(iter(self.idle_connections.items()))
            pool.close_idle(connection)


class HttpConnectionPool:
    """The connections of one tenant to one origin, at most `max_connections`."""

    def __init__(
        self,
        connector: Connector,
        limit: ConnectionLimit,
        clock: Callable[[], float],
        on_empty: Callable[[], object],
        *,
        max_connections: int,
        max_response_bytes: int,
    ) -> None:
        self._connector = connector
        self._clock = clock
        self._limit = limit
        self._on_empty = on_empty  # called when the pool has neither connections nor requests
        self._max_connections = max_connections
        self.max_response_bytes: int = max_response_bytes  # the rest of a body is not read
        self.url_prefix: str = ""
        """The origin, if a proxy without a tunnel needs the whole URL in each request line."""
        self.header_lines: list[str] = []  # the header lines that every request of this pool has
        self.head_parts: dict[tuple[str, ...], list[str]] = {}
        """The parts of request heads by the names of their headers; see `HttpDeliveryClient`."""
        self._idle_connections: dict[HttpConnection, None] = {}  # most recently used last
        self._connections: set[HttpConnection] = set()
        self._connect_tasks: dict[
            asyncio.Task[DeliveryResult | None], tuple[PendingRequest, HttpConnection]
        ] = {}
        self._queue: deque[PendingRequest] = deque()  # requests that wait for a connection

    @property
    def is_empty(self) -> bool:
        """Whether the pool has neither connections nor requests."""
        return not (self._connections or self._connect_tasks or self._queue)

    def send(self, pending: PendingRequest, now: float) -> None:
        """Send a request on an idle or a new connection, or queue it for the next free one."""
        idle_connections = self._idle_connections
        while idle_connections:
            connection, _ = idle_connections.popitem()
            del self._limit.idle_connections[connection]
            if now - connection.idle_since < _MAX_IDLE_S and connection.is_reusable():
                connection.send(pending, now)
                return
            connection.close()
        self._queue.append(pending)
        self.open_connections()

    def open_connections(self) -> None:
        """Open connections for queued requests, within the limits."""
        while (
            self._queue
            and len(self._connections) + len(self._connect_tasks) < self._max_connections
            and self._limit.acquire(self)
        ):
            pending, connection = self._queue.popleft(), HttpConnection(self, self._clock)
            task = asyncio.get_running_loop().create_task(self._connect(pending, connection))
            pending.connect_task = task
            self._connect_tasks[task] = pending, connection
            task.add_done_callback(self._on_connect_done)

    async def _connect(
        self, pending: PendingRequest, connection: HttpConnection
    ) -> DeliveryResult | None:
        """Open a connection and send a request on it; return the result if connecting fails."""
        try:
            connect_result = await self._connector.connect(connection)
        except DeliveryError as error:
            return error.to_result()
        except BaseException:
            connection.abort()  # the transport may exist already
            raise
        connection.start(connect_result)
        if not connection.is_open:
            return connection.fault_result(Fault.RESET, CLOSED_WITHOUT_RESPONSE)
        pending.connect_task = None
        self._connections.add(connection)
        connection.send(pending, self._clock())
        return None

    def _on_connect_done(self, task: asyncio.Task[DeliveryResult | None]) -> None:
        pending, _ = self._connect_tasks.pop(task)
        failure = None if task.cancelled() else task.exception() or task.result()
        if task.cancelled() or failure is not None:
            pending.connect_task = None
            self._limit.release()
        self.open_connections()
        self._check_if_empty()
        if failure is not None:
            pending.complete(failure, self._clock())

    def release(self, connection: HttpConnection, now: float) -> None:
        """Send the next request on a released connection, keep the connection idle, or close it."""
        age, waiting_pools = now - connection.opened_at, self._limit.waiting_pools
        if self._queue:
            max_age = _MAX_AGE_WHEN_SCARCE_S if waiting_pools else _MAX_AGE_S
            # A request that is resent must get a new connection.
            if age >= max_age or self._queue[0].is_resent or not connection.is_reusable():
                connection.close()
            else:
                connection.send(self._queue.popleft(), now)
        elif waiting_pools or age >= _MAX_AGE_S:
            connection.close()
        else:
            connection.idle_since = now
            self._idle_connections[connection] = None
            self._limit.idle_connections[connection] = self

    def remove(self, connection: HttpConnection) -> None:
        """Remove a closed connection from the pool."""
        if connection in self._connections:
            self._connections.remove(connection)
            if connection in self._idle_connections:
                del self._idle_connections[connection]
                del self._limit.idle_connections[connection]
            self._limit.release()
            self.open_connections()
            self._check_if_empty()

    def resend(self, pending: PendingRequest) -> None:
        """Send a request on a new connection, because the target had closed the idle connection."""
        endpoint = self._connector.target.endpoint
        _logger.debug(
            "request sent again: the target closed the reused connection, target=%s", endpoint
        )
        self._queue.appendleft(pending)
        self.open_connections()

    def time_out(self, pending: PendingRequest) -> None:
        """Fail a request whose deadline has passed."""
        within = f"within {pending.request.timeout:g} s"
        if pending.connection is not None:
            result = pending.connection.fault_result(Fault.TIMEOUT, f"No response {within}")
        elif pending.connect_task is not None:
            _, connection = self._connect_tasks[pending.connect_task]
            result = DeliveryResult(fault=Fault.TIMEOUT, error=f"No connection {within}")
            # A proxy or a DNS server that does not answer is not a failure of the target.
            if self._connector.proxy is not None and not connection.is_open:
                result.fault = Fault.INTERNAL
            elif pending.connect_task in self._connector.dns.waiting_tasks:
                result.fault, result.pause_s = Fault.DNS, DEADLINE_PAUSE_S
                result.error = f"The host name was not resolved {within}"
        else:
            message = f"No connection became free {within}: raise the connection limits"
            result = DeliveryResult(fault=Fault.INTERNAL, error=message)
        self.abort(pending)
        pending.complete(result, self._clock())

    def abort(self, pending: PendingRequest) -> None:
        """Drop a request that was cancelled or has timed out."""
        if pending.connection is not None:
            pending.connection.abort()
        elif pending.connect_task is not None:
            pending.connect_task.cancel()
        else:
            self._queue.remove(pending)
            self._check_if_empty()

    def close_idle(self, connection: HttpConnection) -> None:
        """Close an idle connection."""
        del self._idle_connections[connection]
        del self._limit.idle_connections[connection]
        connection.close()

    def _check_if_empty(self) -> None:
        if self.is_empty:
            self._on_empty()

    def close(self, now: float) -> list[asyncio.Task[DeliveryResult | None]]:
        """Fail all requests and close all connections; return the tasks to wait for."""
        connect_tasks = list(self._connect_tasks)
        sent = [each.pending for each in self._connections if each.pending is not None]
        connecting = [pending for pending, _ in self._connect_tasks.values()]
        failed = [*self._queue, *connecting, *sent]
        self._queue.clear()
        for connection in tuple(self._connections):
            connection.abort()
        for task in connect_tasks:
            task.cancel()
        for pending in failed:
            result = DeliveryResult(fault=Fault.INTERNAL, error="the service is shutting down")
            pending.complete(result, now)
        return connect_tasks
