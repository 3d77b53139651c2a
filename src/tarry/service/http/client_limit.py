"""The limit of clients.

At the limit, idle connections are closed for new ones, then those of clients that neither send the
rest of their request nor read their response. Some connections above the limit are reserved for
health checks.
"""

from __future__ import annotations

from heapq import nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

from tarry.service.file_descriptors import RESERVED_FOR_HEALTH_CHECKS

if TYPE_CHECKING:
    from collections.abc import MutableSet

_UNUSED_PER_CLOSED_CLIENT = 16  # at the limit of clients, one of 16 unused connections is closed
_MIN_STALL_S = 1.0
"""A shorter pause of a client is normal while it sends a large body or reads a large response."""


class ClientConnection(Protocol):
    """A connection from a client, whose TLS handshake may not be complete yet."""

    is_for_health_checks: bool
    """Whether it was accepted above the limit of clients."""
    idle_since: float
    """Event loop time of the last response, or when the client connected."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        ...

    @property
    def stalled_since(self) -> float | None:
        """Event loop time since which its request waits for the client; None: it does not."""
        ...

    def abort(self) -> None:
        """Close the connection at once."""
        ...


def admit(
    client: ClientConnection, clients: MutableSet[ClientConnection], max_clients: int, now: float
) -> bool:
    """Return whether to serve a new client, which is already in `clients`; else it is refused.

    Above the limit, idle or stalled clients are closed. If there are none, the new client gets one
    of the connections that are reserved for health checks. `now` is the event loop time.
    """
    surplus = len(clients) - max_clients
    if surplus <= 0 or _close_unused_clients(client, clients, now, for_health_checks=False):
        return True
    client.is_for_health_checks = True
    return surplus <= RESERVED_FOR_HEALTH_CHECKS or _close_unused_clients(
        client, clients, now, for_health_checks=True
    )


def _close_unused_clients(
    new_client: ClientConnection,
    clients: MutableSet[ClientConnection],
    now: float,
    *,
    for_health_checks: bool,
) -> bool:
    """Close the connections that have been idle for longest; return whether one was closed.

    If none is idle, close those that have been stalled for longest.
    """
    others = [
        each
        for each in clients
        if each is not new_client and each.is_for_health_checks == for_health_checks
    ]
    unused = [(each.idle_since, each) for each in others if each.is_idle]
    if not unused:
        stalls = ((each.stalled_since, each) for each in others)
        unused = [
            (since, each)
            for since, each in stalls
            if since is not None and now - since >= _MIN_STALL_S
        ]
    # Several at a time, so that not every new connection causes a search of all connections.
    count = 1 + len(unused) // _UNUSED_PER_CLOSED_CLIENT
    for _, each in nsmallest(count, unused, key=itemgetter(0)):
        clients.discard(each)  # do not wait for `connection_lost`, which is called later
        each.abort()
    return bool(unused)
