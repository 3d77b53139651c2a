"""The limit of clients.

At the limit, idle connections are closed for new ones. Some connections above the limit are
reserved for health checks.
"""

from __future__ import annotations

from heapq import nsmallest
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from tarry.service.file_descriptors import RESERVED_FOR_HEALTH_CHECKS

if TYPE_CHECKING:
    from collections.abc import MutableSet

_IDLE_PER_CLOSED_CLIENT = 16  # at the limit of clients, one of 16 idle connections is closed


class Client(Protocol):
    """A connection from a client, whose TLS handshake may not be complete yet."""

    is_for_health_checks: bool
    """Whether it was accepted above the limit of clients."""
    idle_since: float
    """Event loop time of the last response, or when the client connected."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


def admit(client: Client, clients: MutableSet[Client], max_clients: int) -> bool:
    """Return whether to serve a new client, which is already in `clients`; else it is refused.

    Above the limit, idle clients are closed. If no client is idle, the new client gets one of the
    connections that are reserved for health checks.
    """
    surplus = len(clients) - max_clients
    if surplus <= 0 or _close_idle_clients(client, clients, for_health_checks=False):
        return True
    client.is_for_health_checks = True
    return surplus <= RESERVED_FOR_HEALTH_CHECKS or _close_idle_clients(
        client, clients, for_health_checks=True
    )


def _close_idle_clients(
    new_client: Client, clients: MutableSet[Client], *, for_health_checks: bool
) -> bool:
    """Close the connections that have been idle for longest; return whether any is idle."""
    idle = [
        each
        for each in clients
        if each is not new_client
        and each.is_idle
        and each.is_for_health_checks == for_health_checks
    ]
    # Several at a time, so that not every new connection causes a search of all connections.
    count = 1 + len(idle) // _IDLE_PER_CLOSED_CLIENT
    for each in nsmallest(count, idle, key=attrgetter("idle_since")):
        clients.discard(each)  # do not wait for `connection_lost`, which is called later
        each.abort()
    return bool(idle)
