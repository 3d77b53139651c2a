"""Ports for the servers of tests, which several test runs take at the same time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from random import SystemRandom

PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORT = 10_000
CLUSTER_BUS_OFFSET = 10_000
"""Redis adds this number to the port of a node for the bus of the Cluster."""
PORTS_PER_BLOCK = 200


def free_port(*offsets: int) -> int:
    """Return a port that is not in use, and whose neighbours at `offsets` are not in use.

    An offset may be 1 or CLUSTER_BUS_OFFSET. No other test takes the port before a server listens
    there, or while the server is restarted: each test process has its own block of ports, and the
    system gives ports of another range to connections.
    """
    ports = _own_ports()
    for port in islice(ports, PORTS_PER_BLOCK):
        with ExitStack() as sockets, suppress(OSError):
            for offset in (0, *offsets):
                sockets.enter_context(_bind(port + offset))
            return port
    raise AssertionError("each port of this test process is in use: do servers outlive tests?")


@cache
def _own_ports() -> Iterator[int]:
    """Reserve a block of ports for this process; return its ports, two apart, without an end.

    The socket that reserves the block stays open until the process ends.
    """
    first_port_of_connections = int(PORTS_OF_CONNECTIONS.read_text().split()[0])
    end = min(MIN_PORT + CLUSTER_BUS_OFFSET, first_port_of_connections - CLUSTER_BUS_OFFSET)
    blocks = list(range(MIN_PORT, end - PORTS_PER_BLOCK + 1, PORTS_PER_BLOCK))
    SystemRandom().shuffle(blocks)  # a server of an earlier run may not have ended yet
    for block in blocks:
        with suppress(OSError):
            _reservations.append(_bind(block))
            return cycle(range(block + 2, block + PORTS_PER_BLOCK, 2))
    raise AssertionError("each block of ports is reserved by another test process")


_reservations: list[socket.socket] = []


def _bind(port: int) -> socket.socket:
    sock = socket.socket()
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return sock
