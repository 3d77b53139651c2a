"""Real servers of each engine, which faults kill and start again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from tests.integration.redis_cluster import ClusterNode, redis_cluster_nodes
from tests.integration.servers import Server, postgres_server, redis_server

DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


class ProxiedAddress(NamedTuple):
    """How a process connects to a store by TCP proxies."""

    url: str
    redirected_ports: dict[int, int]
    """The process connects to the second port instead of the first. A Cluster needs this: its
    clients connect to the ports that the nodes announce."""


class ChaosStore(Protocol):
    """A store for several processes of the service."""

    url: str
    socket_paths: list[str]
    """The Unix sockets of its servers."""

    def proxied_address(self, ports: list[int]) -> ProxiedAddress:
        """Return the address of the store by TCP proxies; each server has one, on a port."""
        ...

    def crash(self) -> None:
        """Kill the server and start it again, or let a replica take over."""
        ...

    def stop(self) -> None:
        """Kill all servers."""
        ...

    def start(self) -> None:
        """Start all servers again."""
        ...

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Kill all servers for the duration of a block."""
        self.stop()
        try:
            yield
        finally:
            self.start()


StoreFactory: TypeAlias = Callable[[Path], AbstractContextManager[ChaosStore]]


class SqliteFile(ChaosStore):
    """A SQLite file, which has no server."""

    def __init__(self, path: Path) -> None:
        self.url = f"sqlite:{path}"
        self.socket_paths: list[str] = []
        self._path = path
        self._renamed = path.with_name("elsewhere")

    def proxied_address(self, ports: list[int]) -> ProxiedAddress:
        """Raise an error: there is no connection."""
        raise NotImplementedError

    def crash(self) -> None:
        """Rename the file for a moment."""
        self.stop()
        time.sleep(0.5)
        self.start()

    def stop(self) -> None:
        """Rename the file."""
        self._path.rename(self._renamed)

    def start(self) -> None:
        """Undo the renaming."""
        self._renamed.rename(self._path)


class SingleServer(ChaosStore):
    """A server of PostgreSQL or Redis."""

    def __init__(self, server: Server, url: str, socket_path: str, proxied_url: str) -> None:
        self._server = server
        self.url = url
        self.socket_paths = [socket_path]
        self._proxied_url = proxied_url

    def proxied_address(self, ports: list[int]) -> ProxiedAddress:
        """Return the address of the store by a TCP proxy."""
        return ProxiedAddress(self._proxied_url.format(port=ports[0]), {})

    def crash(self) -> None:
        """Kill the server and start it again."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """Kill the server."""
        self._server.kill()

    def start(self) -> None:
        """Start the server."""
        self._server.start()

    def hanging(self) -> AbstractContextManager[None]:
        """Suspend the server for the duration of a block: it accepts requests, but is silent."""
        return self._server.suspended()


class Cluster(ChaosStore):
    """A Redis Cluster with replicas."""

    def __init__(self, nodes: list[ClusterNode]) -> None:
        self._nodes = nodes
        self.socket_paths = [node.socket_path for node in nodes]
        self.url = nodes[0].server.address.replace("redis://", "redis+cluster://")

    def proxied_address(self, ports: list[int]) -> ProxiedAddress:
        """Return the address of the store by a TCP proxy for each node."""
        node_ports = [node.port for node in self._nodes]
        return ProxiedAddress(self.url, dict(zip(node_ports, ports, strict=True)))

    def crash(self) -> None:
        """Kill the primary of most keys, wait until a replica took over, and start it again."""
        primaries = [node for node in self._nodes if _role(node) == "master"]
        primary = max(primaries, key=lambda node: int(node.client.dbsize()))
        _wait_until(lambda: _has_replica_in_sync(primary))
        [replica] = [node for node in self._nodes if _primary_port(node) == primary.port]
        primary.server.kill()
        _wait_until(lambda: _role(replica) == "master")
        primary.server.start()
        _wait_until(lambda: _primary_port(primary) == replica.port)
        _wait_until(lambda: _has_replica_in_sync(replica))

    def stop(self) -> None:
        """Kill all nodes."""
        for node in self._nodes:
            node.server.kill()

    def start(self) -> None:
        """Start all nodes."""
        for node in self._nodes:
            node.server.start()


def _has_replica_in_sync(primary: ClusterNode) -> bool:
    """Return whether a replica receives the changes of a primary as they happen."""
    info = primary.client.info("replication")
    return bool(info["connected_slaves"] and info["slave0"]["state"] == "online")


def _role(node: ClusterNode) -> str:
    role: str = node.client.info("replication")["role"]
    return role


def _primary_port(node: ClusterNode) -> int | None:
    """Return the port of the primary of a replica; None for a primary."""
    port: int | None = node.client.info("replication").get("master_port")
    return port


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true, or until the timeout of the test."""
    while not condition():
        time.sleep(0.05)


@contextmanager
def sqlite_file(folder: Path) -> Iterator[SqliteFile]:
    """Use a SQLite file."""
    yield SqliteFile(folder / "tarry.db")


@contextmanager
def postgres(_folder: Path) -> Iterator[SingleServer]:
    """Run PostgreSQL."""
    with postgres_server() as server:
        path = server.address.partition("host=")[2]
        proxied_url = "postgresql://postgres@127.0.0.1:{port}/postgres"
        yield SingleServer(server, server.address, f"{path}/.s.PGSQL.5432", proxied_url)


@contextmanager
def redis(_folder: Path) -> Iterator[SingleServer]:
    """Run Redis with an append-only file that is written before each response."""
    with redis_server(*DURABLE) as server:
        path = server.address.removeprefix("unix://")
        yield SingleServer(server, f"redis+unix://{path}", path, "redis://127.0.0.1:{port}/0")


@contextmanager
def cluster(_folder: Path) -> Iterator[Cluster]:
    """Run a Redis Cluster of three primaries and three replicas."""
    with redis_cluster_nodes(3, *DURABLE, has_replicas=True) as nodes:
        yield Cluster(nodes)
