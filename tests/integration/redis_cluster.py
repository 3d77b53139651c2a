"""A Redis Cluster on free loopback ports."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from tests.integration.servers import (
    SERVER_TIMEOUT_S,
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
    """Run a Cluster of `size` nodes, and yield the URL of one node."""
    with ExitStack() as stack:
        ports = [stack.enter_context(_run_node()) for _ in range(size)]
        nodes = [stack.enter_context(redis.Redis(port=port)) for port in ports]
        for number, node in enumerate(nodes):
            slots = range(SLOTS * number // size, SLOTS * (number + 1) // size)
            node.execute_command("CLUSTER ADDSLOTS", *slots)
            if number:
                node.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])
        deadline = time.monotonic() + SERVER_TIMEOUT_S
        while not all(map(_is_cluster_ready, nodes)):
            if time.monotonic() > deadline:
                raise ServerFailed("the Redis nodes did not form a Cluster")
            time.sleep(0.02)
        yield f"redis://127.0.0.1:{ports[0]}"


@contextmanager
def _run_node() -> Generator[int]:
    with create_directory() as home:
        port = _free_port()
        options = ["--bind", "127.0.0.1", "--port", str(port), "--cluster-enabled", "yes"]
        command = [*redis_command(home), *options]
        with run_server(
            Server(f"redis://127.0.0.1:{port}", command, home, lambda: _responds_to_ping(port))
        ):
            yield port


def _responds_to_ping(port: int) -> bool:
    with redis.Redis(port=port) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def _is_cluster_ready(node: Any) -> bool:
    return bool(node.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def _free_port() -> int:
    """Return a free port whose Cluster bus port, which is 10,000 higher, is free as well."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port: int = low.getsockname()[1]
            try:
                high.bind(("127.0.0.1", port + 10_000))
            except (OverflowError, OSError):
                continue
            return port
