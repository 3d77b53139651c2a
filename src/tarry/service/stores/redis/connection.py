"""Connections to a Redis server or Cluster: runs scripts, and translates errors.

Redis runs a script completely or, if the server is out of memory or a replica, not at all. A call
is never repeated by the driver, because a repeated claim would lease other tasks.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from importlib import import_module
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit
from zlib import crc32

from tarry.core.checks import require_extra
from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.stores.redis.codec import encode
from tarry.service.stores.redis.durability import parse_config
from tarry.service.stores.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DEFAULT_PREFIX = "tarry"
MAX_PARTITIONS = 1024
GLOBAL_PARTITION = 0
"""The partition of API keys, the leader and the registry of workers, which have no tenant."""
MAX_CONNECTIONS = 16
"""The maximum number of connections to a server or, in a Cluster, to each node."""
_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 15.0
"""The maximum time of a call, including the wait for a connection and for a new Cluster layout."""

_CLUSTER_SUFFIX, _UNIX_SUFFIX = "+cluster", "+unix"
_SCHEMES = {"redis": "redis", "rediss": "rediss", "valkey": "redis", "valkeys": "rediss"}
SCHEMES = frozenset(
    [f"{scheme}{suffix}" for scheme in _SCHEMES for suffix in ("", _CLUSTER_SUFFIX)]
    + [f"{scheme}{_UNIX_SUFFIX}" for scheme in ("redis", "valkey")]
)
"""The schemes of the URLs of Redis stores."""
_DRIVER_PARAMETERS = frozenset(
    {"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}
)
# Errors of a server that cannot write at the moment. Inside of a script, the driver does not
# recognize them.
_TEMPORARY_ERROR = re.compile(
    r"\b(READONLY|OOM|MISCONF|NOREPLICAS|LOADING|CLUSTERDOWN|MASTERDOWN|BUSY|TRYAGAIN)\b"
)


def find_partition(tenant: str, partition_count: int) -> int:
    """Return the partition of a tenant."""
    return crc32(tenant.encode()) % partition_count


class StoreAddress:
    """The parts of a store URL: the URL for the driver, and the parameters of the store."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        if scheme not in SCHEMES:
            raise ConfigurationError("store", "must be a Redis URL", scheme)
        is_socket = scheme.endswith(_UNIX_SUFFIX)
        if not (parts.path.strip("/") if is_socket else parts.hostname):
            rule = f"must be {scheme}://{'/PATH' if is_socket else 'HOST'}"
            raise ConfigurationError("store", rule)
        self.is_cluster: bool = scheme.endswith(_CLUSTER_SUFFIX)
        self.prefix: str = DEFAULT_PREFIX
        self.partition_count: int | None = None
        driver_parameters: list[tuple[str, str]] = []
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name == "prefix":
                self.prefix = _check_prefix(value)
            elif name == "partitions":
                self.partition_count = _parse_partition_count(value)
            elif name in _DRIVER_PARAMETERS:
                driver_parameters.append((name, value))
            else:
                allowed = ", ".join(sorted({"prefix", "partitions", *_DRIVER_PARAMETERS}))
                raise ConfigurationError("store", f"parameters of the URL can be {allowed}", name)
        driver_scheme = "unix" if is_socket else _SCHEMES[scheme.removesuffix(_CLUSTER_SUFFIX)]
        query = urlencode(driver_parameters)
        self.driver_url: str = f"{driver_scheme}://{parts.netloc}{parts.path}?{query}"
        """The URL for the driver, which knows neither Valkey nor the parameters of the store."""


def _check_prefix(prefix: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", prefix):
        rule = "the prefix must consist of 1 to 64 letters, digits and . _ - :"
        raise ConfigurationError("store", rule, prefix)
    return prefix


def _parse_partition_count(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text, re.ASCII) or not 1 <= int(text) <= MAX_PARTITIONS:
        rule = f"the number of partitions must be between 1 and {MAX_PARTITIONS}"
        raise ConfigurationError("store", rule, text)
    return int(text)


def _replace_host(url: str, host: str, port: int) -> str:
    """Return a URL with another host, and with the same credentials."""
    parts = urlsplit(url)
    credentials, separator, _ = parts.netloc.rpartition("@")
    shown_host = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{credentials}{separator}{shown_host}:{port}").geturl()


class RedisConnection:
    """Runs the scripts of a store on its partitions.

    `clock` returns epoch milliseconds; None: scripts use the clock of the server.
    """

    def __init__(self, url: str, clock: Callable[[], int] | None) -> None:
        with require_extra("a Redis store needs redis", "redis"):
            self._errors = import_module("redis.exceptions")
            self._aio = import_module("redis.asyncio")
            self._retry = import_module("redis.asyncio.retry").Retry
            self._no_backoff = import_module("redis.backoff").NoBackoff
        self.address = StoreAddress(url)
        self.token: str = secrets.token_hex(8)
        """Identifies this store in notifications, and as a leader."""
        self._clock = clock
        self._client: Any = None
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    @property
    def is_open(self) -> bool:
        """Whether `open` was called."""
        return self._client is not None

    def open(self) -> None:
        """Create the client; it connects when it is used."""
        if self._client is None:
            self._client = self._build_client()

    def _build_client(self) -> Any:
        driver = self._aio
        client = driver.RedisCluster if self.address.is_cluster else driver.Redis
        options = {**self._options(), "socket_timeout": _READ_TIMEOUT_S}
        return client.from_url(self.address.driver_url, **options)

    def build_subscriber(self) -> Any:
        """Return a client of one server for notifications, which all nodes of a Cluster pass on."""
        url = self.address.driver_url
        if self.address.is_cluster and self._client is not None:
            nodes = self._client.get_primaries()
            if nodes:
                node = secrets.choice(nodes)
                url = _replace_host(url, node.host, node.port)
        # The listener has its own timeout.
        return self._aio.Redis.from_url(url, **self._options(), socket_timeout=None)

    def _options(self) -> dict[str, Any]:
        return {
            "socket_connect_timeout": _CONNECT_TIMEOUT_S,
            "retry": self._retry(self._no_backoff(), 0),
            "max_connections": MAX_CONNECTIONS,
        }

    async def close(self) -> None:
        """Close all connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def partition_key(self, partition: int) -> str:
        """Return the prefix of the keys of a partition. The number in braces is its hash tag."""
        return f"{self.address.prefix}:{{{partition}}}"

    async def run(
        self, partition: int, name: str, *arguments: Any, values: Sequence[bytes] = ()
    ) -> Any:
        """Run a script on a partition; `values` are stored by the script as they are."""
        script = load_script(name)
        time = b"" if self._clock is None else self._clock()
        key = self.partition_key(partition)
        # Neither key exists. While Redis Cluster moves a slot, some keys of the partition are on
        # one node and some on the other, and a script would not find all of them. With two keys of
        # which one is missing, both nodes refuse to run the script until all keys were moved.
        parameters = (2, key, f"{key}:", time, self.token, encode(arguments), *values)
        try:
            return await self._execute("EVALSHA", script.digest, *parameters)
        except self._errors.NoScriptError:  # the server was restarted, or is a new primary
            return await self._execute("EVAL", script.source, *parameters)

    async def read_config(self, names: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
        """Return the name and the settings of each server that stores data.

        Settings that cannot be read are omitted: managed servers often forbid CONFIG.
        """
        servers: list[tuple[str, dict[str, Any]]] = [("Redis", {})]
        if self.address.is_cluster:
            await self._client.initialize()
            nodes = self._client.get_primaries()
            servers = [(f"Redis node {node.name}", {"target_nodes": node}) for node in nodes]
        found: list[tuple[str, dict[str, str]]] = []
        for server, options in servers:
            settings: dict[str, str] = {}
            for name in names:
                try:
                    reply = await self._execute("CONFIG GET", name, **options)
                except self._errors.ResponseError:
                    continue
                settings |= parse_config(reply)
            found.append((server, settings))
        return found

    async def _execute(self, *command: Any, **options: Any) -> Any:
        """Run a command on a free connection; raises `StoreUnavailable` and script errors."""
        client = self._client
        if client is None:
            raise StoreUnavailable("the store is not open: call open() first")
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S), self._slots:
                return await client.execute_command(*command, **options)
        except Exception as error:
            unavailable = self.translate(error)
            if unavailable is None:
                raise
            raise unavailable from error

    def translate(self, error: Exception) -> StoreUnavailable | None:
        """Return the error to raise instead of an error of the driver, or None."""
        errors = self._errors
        temporary = (
            errors.AskError,
            errors.ClusterError,
            errors.OutOfMemoryError,
            errors.ReadOnlyError,
            errors.TryAgainError,
        )
        if isinstance(error, errors.ResponseError) and not isinstance(error, temporary):
            if _TEMPORARY_ERROR.search(str(error)) is None:
                return None
        elif not isinstance(error, (errors.RedisError, OSError, TimeoutError)):
            return None
        reason = str(error) or type(error).__name__
        return StoreUnavailable(f"Redis is unavailable: {reason}")
