"""URLs of Redis stores, and the partitions of tenants."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from importlib import import_module
from urllib.parse import SplitResult, urlsplit

import pytest
import uvloop

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.store_url import StoreEngine, find_engine
from tarry.service.stores.redis import RedisTaskStore, connection
from tarry.service.stores.redis.connection import SCHEMES, RedisConnection, StoreAddress


@pytest.mark.parametrize(
    ("url", "driver_url", "is_cluster"),
    [
        ("redis://h", "redis://h?", False),
        ("redis://u:p%40@h:7000/3", "redis://u:p%40@h:7000/3?", False),
        ("valkeys://[::1]:7000", "rediss://[::1]:7000?", False),
        ("redis+cluster://h:7000", "redis://h:7000?", True),
        ("valkeys+cluster://h", "rediss://h?", True),
        ("redis+unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2", False),
        ("rediss://h?prefix=a&ssl_ca_certs=/ca.pem", "rediss://h?ssl_ca_certs=%2Fca.pem", False),
    ],
)
def test_the_driver_gets_its_own_url(url: str, driver_url: str, is_cluster: bool) -> None:
    """The scheme says whether to use TLS and a Cluster; parameters of the store are removed."""
    address = StoreAddress(url)
    assert (driver_url, is_cluster) == (address.driver_url, address.is_cluster)


def test_parameters_of_the_store() -> None:
    """A URL may have a prefix of keys and a number of partitions."""
    address = StoreAddress("redis://h?prefix=shop:eu&partitions=8")
    assert ("shop:eu", 8) == (address.prefix, address.partition_count)
    default = StoreAddress("redis://h")
    assert ("tarry", None) == (default.prefix, default.partition_count)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis:", "store must be redis://HOST"),
        ("redis+unix://", "store must be redis.unix:///PATH"),
        ("http://h", "store must be a Redis URL, got 'http'"),
        ("redis://h?partitions=0", "number of partitions must be between 1 and 1024, got '0'"),
        ("redis://h?partitions=x", "number of partitions must be between 1 and 1024, got 'x'"),
        ("redis://h?prefix={1}", "prefix must consist of 1 to 64 letters, digits"),
        ("redis+cluster://h1,,h2", r"store must be redis\+cluster://HOST"),
        ("redis://h1,h2", "store must have one host"),
        ("redis://h:port", "store must have a number as the port"),
        ("redis://:pa/secret@h", "store must have a number as the port. Percent-encode"),
        ("redis://[::1", "store must be a Redis URL"),
        ("redis://h/shop", "store must have a number as the database"),
        ("redis://h?db=shop", "store must have a number as the database"),
        ("redis+cluster://h/3", "store must have no database"),
        ("redis://u:secret@h?timeout=5", "parameters of the URL can be db, partitions, .*'timeout"),
    ],
)
def test_invalid_urls_are_rejected(url: str, message: str) -> None:
    """The error names the invalid part, and has no password."""
    with pytest.raises(ConfigurationError, match=message) as raised:
        RedisTaskStore(url)
    assert "secret" not in str(raised.value)


def test_a_url_of_a_cluster_may_have_several_hosts() -> None:
    """A process can start while one of the hosts is down."""
    address = StoreAddress("valkeys+cluster://u:p%2C@h1:7000,[::1]:7001,h2/0")
    assert [("h1", 7000), ("::1", 7001), ("h2", 6379)] == address.seeds


@pytest.mark.parametrize("hosts", ["h1:7000,[::1]:7001", "[::1],[::2]:7001", "[::1]:7000,h2"])
def test_hosts_of_a_cluster_may_be_ipv6_addresses(
    monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    """Newer versions of Python reject a URL with text before `[` or after `]`, except a port."""

    def strict_urlsplit(url: str) -> SplitResult:
        parts = urlsplit(url)
        before, bracket, rest = parts.netloc.rpartition("@")[2].partition("[")
        port = rest.partition("]")[2]
        if bracket and (before or (port and not port.startswith(":"))):
            raise ValueError("Invalid IPv6 URL")
        return parts

    monkeypatch.setattr(connection, "urlsplit", strict_urlsplit)
    address = StoreAddress(f"redis+cluster://u:p@{hosts}")
    assert 2 == len(address.seeds)
    for seed in address.seeds:
        replaced = urlsplit(connection._replace_host(address.driver_url, seed))
        assert ("u", "p", *seed) == (
            replaced.username,
            replaced.password,
            replaced.hostname,
            replaced.port,
        )


def test_a_node_of_a_cluster_is_not_a_single_server() -> None:
    """The error for a URL without `+cluster` says which URL to use, and has no password."""
    connection = RedisConnection("redis://u:secret@h", None)
    error = connection.translate(import_module("redis.exceptions").MovedError("13907 h:7003"))
    assert (
        "Redis at redis://[redacted]@h is unavailable: the server is a node of a Cluster: "
        "use redis+cluster://HOST in `store`"
    ) == str(error)


def test_all_schemes_are_urls_of_the_service() -> None:
    """The service uses a Redis store for each of the schemes."""
    assert {StoreEngine.REDIS} == {find_engine(f"{scheme}://h") for scheme in SCHEMES}


def test_a_store_that_is_not_open_is_unavailable() -> None:
    """Every call raises `StoreUnavailable` before `open` and after `close`."""

    async def main() -> None:
        store = RedisTaskStore("redis://h")
        with pytest.raises(StoreUnavailable, match="not open"):
            await store.ping()
        with pytest.raises(StoreUnavailable, match="not open"):
            await store.counters()
        await store.close()

    asyncio.run(main())


def test_a_closed_connection_of_uvloop_is_unavailable() -> None:
    """A write to a closed transport, for which uvloop raises RuntimeError, may be repeated."""

    async def write_to_closed_transport() -> RuntimeError:
        near, far = socket.socketpair()
        with far:
            _, writer = await asyncio.open_connection(sock=near)
            writer.close()
            await writer.wait_closed()
            with pytest.raises(RuntimeError) as raised:
                writer.write(b"PING")
        return raised.value

    error = uvloop.run(write_to_closed_transport())

    connection = RedisConnection("redis://localhost", None)
    assert isinstance(connection.translate(error), StoreUnavailable)
    assert connection.translate(RuntimeError("no running event loop")) is None


def test_a_server_that_accepts_no_connection_delays_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While a call waits for a connection, other calls fail at once."""
    monkeypatch.setattr(connection, "_CONNECT_TIMEOUT_S", 0.5)

    async def main(port: int) -> None:
        redis_connection = RedisConnection(f"redis://127.0.0.1:{port}", None)
        redis_connection.open()
        with pytest.raises(StoreUnavailable, match="Timeout connecting"):
            await redis_connection.run(0, "ping")
        waiting = asyncio.create_task(redis_connection.run(0, "ping"))
        await asyncio.sleep(0)
        with pytest.raises(StoreUnavailable, match="no reply in time"):
            await redis_connection.run(0, "ping")
        assert not waiting.done()
        with pytest.raises(StoreUnavailable, match="Timeout connecting"):
            await waiting
        await redis_connection.close()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as clients:
        address = server.getsockname()
        for _ in range(8):  # the queue is full, so that further connections get no response
            client = clients.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        asyncio.run(main(address[1]))
