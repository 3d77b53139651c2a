"""Shares the file descriptors of the process, so that clients cannot take those of deliveries."""

from __future__ import annotations

import resource
from typing import NamedTuple

_MAX_LIMIT = 1_048_576  # more are never needed, and some programs slow down with the limit
_MACOS_LIMIT = 10_240  # OPEN_MAX: macOS refuses a higher soft limit
_OTHER_DESCRIPTORS = 512  # for the store, pipes, DNS lookups, bodies and connection attempts
_MAX_CONNECTIONS, _MAX_CLIENTS = 4096, 16_384
RESERVED_FOR_HEALTH_CHECKS = 32
"""Connections above `max_clients` that are accepted for health checks only."""


class DescriptorShares(NamedTuple):
    """The number of descriptors for connections to targets, and from clients."""

    max_connections: int
    max_clients: int


def raise_limit() -> None:
    """Raise the soft limit of open files to the hard limit. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (_MAX_LIMIT, _MACOS_LIMIT):
        new_soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        if resource.RLIM_INFINITY != soft >= new_soft:
            return
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, hard))
        except (OSError, ValueError):
            continue
        return


def current_limit() -> int:
    """Return how many files the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_LIMIT if soft == resource.RLIM_INFINITY else soft


def share_descriptors(limit: int, in_flight: int) -> DescriptorShares:
    """Divide `limit` descriptors; each of `in_flight` attempts should get a connection."""
    usable = limit - min(_OTHER_DESCRIPTORS, limit // 2)
    max_connections = min(max(_MAX_CONNECTIONS, in_flight), usable // 2)
    max_clients = usable - max_connections - RESERVED_FOR_HEALTH_CHECKS
    return DescriptorShares(max_connections, max(1, min(_MAX_CLIENTS, max_clients)))
