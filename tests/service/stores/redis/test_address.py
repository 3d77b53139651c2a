"""URLs of Redis stores."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import pytest

from tarry.errors import ConfigurationError
from tarry.service.store_url import StoreEngine, find_engine
from tarry.service.stores.redis import RedisTaskStore, address
from tarry.service.stores.redis.address import SCHEMES, StoreAddress


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

    monkeypatch.setattr(address, "urlsplit", strict_urlsplit)
    parsed = StoreAddress(f"redis+cluster://u:p@{hosts}")
    assert 2 == len(parsed.seeds)
    for seed in parsed.seeds:
        replaced = urlsplit(address.replace_host(parsed.driver_url, seed))
        assert ("u", "p", *seed) == (
            replaced.username,
            replaced.password,
            replaced.hostname,
            replaced.port,
        )


def test_all_schemes_are_urls_of_the_service() -> None:
    """The service uses a Redis store for each of the schemes."""
    assert {StoreEngine.REDIS} == {find_engine(f"{scheme}://h") for scheme in SCHEMES}
