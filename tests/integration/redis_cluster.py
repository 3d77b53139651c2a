"""A Cluster of Redis or Valkey on free loopback ports."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from tests.integration.ports import CLUSTER_BUS_OFFSET, free_port
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


class ClusterNode(NamedTuple):
    """A node of a Cluster."""

    port: int
    server: Server
    client: Any
    socket_path: str
    """Its Unix socket, for proxies. Clients connect to the port."""


@contextmanager
def redis_cluster(size: int, program: Path | None = None) -> Generator[str]:
    """Run a Cluster of `size` nodes of Redis or `program`, and yield the URL of one node."""
    with redis_cluster_nodes(size, program=program) as nodes:
        yield nodes[0].server.address


@contextmanager
def redis_cluster_nodes(
    size: int, *options: str, has_replicas: bool = False, program: Path | None = None
) -> Generator[list[ClusterNode]]:
    """Run a Cluster of `size` primaries, and yield its nodes: the primaries, then their replicas.

    Primary number n has the n-th part of the slots, and is replicated by replica number n.
    """
    with ExitStack() as stack:
        node_count = 2 * size if has_replicas else size
        nodes = [stack.enter_context(_run_node(program, *options)) for _ in range(node_count)]
        for number, node in enumerate(nodes):
            if number < size:
                slots = range(SLOTS * number // size, SLOTS * (number + 1) // size)
                node.client.execute_command("CLUSTER ADDSLOTS", *slots)
            if number:
                node.client.execute_command("CLUSTER MEET", "127.0.0.1", nodes[0].port)
        _wait_until(lambda: all(_is_cluster_ready(node.client, node_count) for node in nodes))
        for primary, replica in zip(nodes, nodes[size:], strict=False):
            primary_id = primary.client.execute_command("CLUSTER MYID")
            replica.client.execute_command("CLUSTER REPLICATE", primary_id)
        _wait_until(lambda: all(_is_replicating(node.client) for node in nodes[size:]))
        yield nodes


@contextmanager
def _run_node(program: Path | None, *options: str) -> Generator[ClusterNode]:
    with create_directory() as home:
        port, path = free_port(CLUSTER_BUS_OFFSET), str(home / "redis.sock")
        command = [*redis_command(home, program), "--bind", "127.0.0.1", "--port", str(port)]
        command += ["--unixsocket", path]
        command += ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
        command += ["--cluster-replica-validity-factor", "0"]
        command += ["--cluster-require-full-coverage", "no", *options]
        server = Server(
            f"redis://127.0.0.1:{port}",
            command,
            home,
            lambda: _responds_to_ping(port),
            stop_with=signal.SIGKILL,
        )
        with run_server(server), redis.Redis(port=port) as client:
            yield ClusterNode(port, server, client, path)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SERVER_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise ServerFailed("the Redis nodes did not form a Cluster")
        time.sleep(0.02)


def _responds_to_ping(port: int) -> bool:
    with redis.Redis(port=port) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def _is_replicating(node: Any) -> bool:
    return bool(node.info("replication").get("master_link_status") == "up")


def _is_cluster_ready(node: Any, node_count: int) -> bool:
    info = node.execute_command("CLUSTER INFO")
    return bool(info["cluster_state"] == "ok" and int(info["cluster_known_nodes"]) == node_count)
