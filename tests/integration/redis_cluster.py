"""A private Redis Cluster for tests, on free loopback ports."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from tests.integration.servers import (
    PATIENCE,
    Server,
    ServerFailed,
    create_directory,
    redis_command,
    run_server,
)

redis = import_module("redis")

SLOTS = 16_384


@contextmanager
def redis_cluster(size: int) -> Generator[str]:
    """Run nodes that share the slots, and yield the URL of one node."""
    with ExitStack() as stack:
        ports = [stack.enter_context(_node()) for _ in range(size)]
        nodes = [stack.enter_context(redis.Redis(port=port)) for port in ports]
        for number, node in enumerate(nodes):
            slots = range(SLOTS * number // size, SLOTS * (number + 1) // size)
            node.execute_command("CLUSTER ADDSLOTS", *slots)
            if number:
                node.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])
        deadline = time.monotonic() + PATIENCE
        while not all(map(_knows_all_slots, nodes)):
            if time.monotonic() > deadline:
                raise ServerFailed("the Redis nodes do not become a Cluster")
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{ports[0]}"


@contextmanager
def _node() -> Generator[int]:
    with create_directory() as home:
        port = _free_port()
        where = ["--bind", "127.0.0.1", "--port", str(port), "--cluster-enabled", "yes"]
        command = [*redis_command(home), *where]
        with run_server(Server(f"redis://127.0.0.1:{port}", command, home, lambda: _answers(port))):
            yield port


def _answers(port: int) -> bool:
    with redis.Redis(port=port) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def _knows_all_slots(node: Any) -> bool:
    return bool(node.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def _free_port() -> int:
    """Return a free port whose Cluster bus port, 10,000 higher, is free, too."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port: int = low.getsockname()[1]
            try:
                high.bind(("127.0.0.1", port + 10_000))
            except (OverflowError, OSError):
                continue
            return port
