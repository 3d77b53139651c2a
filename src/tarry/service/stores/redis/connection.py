"""Connections to a Redis server or Cluster: runs scripts, and translates errors.

Redis runs a script completely or, if the server is out of memory or a replica, not at all. A call
is never repeated by the driver, because a repeated claim would lease other tasks.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from tarry.core.extras import require_extra
from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.shutdown import cancel_and_wait
from tarry.service.store import StoreLost
from tarry.service.store_url import redact_store_url
from tarry.service.stores.records import encode
from tarry.service.stores.redis.cluster import ClusterMap, NodeAddress
from tarry.service.stores.redis.durability import parse_config
from tarry.service.stores.redis.scripts import load_script

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

R = TypeVar("R")

DEFAULT_PREFIX = "tarry"
MAX_PARTITIONS = 1024
MAX_CONNECTIONS = 16
"""The maximum number of connections to a server or, in a Cluster, to each node."""
_DEFAULT_PORT = 6379
_MAX_REDIRECTIONS = 5
_CONNECT_TIMEOUT_S = 3.0
_REPLY_TIMEOUT_S = 3.5
"""The maximum time to send a command and to receive its reply, including a new connection. A
server that hangs is left after a fraction of the shortest lease."""
_CALL_TIMEOUT_S = 4.5
"""The maximum time of a call, including the wait for a free connection and redirections."""
_STRAGGLER_TIMEOUT_S = 1.0
"""How much longer than the first partition the others may take, see `gather_available`."""

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
_NETLOC = re.compile(r"(?<=://)[^/?#]*")
_SCRIPT_FAILURE = "user_script"
"""Part of each error that a script has raised, or a command in a script."""
# Errors in a script that depend on the state of the server, not on the arguments of the script. The
# driver does not recognize them. The last three have no code: a command is not permitted, in Redis
# 6.2 and later, and SCRIPT KILL.
_TEMPORARY_ERROR = re.compile(
    r"\b(READONLY|OOM|MISCONF|NOREPLICAS|LOADING|CLUSTERDOWN|MASTERDOWN|BUSY|TRYAGAIN|MISSINGKEY"
    r"|NOPERM|NOAUTH|WRONGPASS|UNKILLABLE|EXECABORT"
    r"|can't run this command|ACL failure|Script killed)\b"
)
_UNTRUSTED_CERTIFICATE = re.compile(r"verify failed: (self.signed|unable to get \w* ?issuer)")
_STORE_LOST = "STORELOST "
"""Precedes the prefix of a partition in the error of `identity.lua`."""
_MISSING_KEY = "MISSINGKEY "
"""Precedes the name of a key in the error of a script that cannot continue without the key."""


class StoreAddress:
    """The parts of a store URL: the URL for the driver, and the parameters of the store."""

    def __init__(self, url: str) -> None:
        # The hosts of a Cluster are parsed one by one: since Python 3.11.12, 3.12.9 and 3.13.2,
        # `urlsplit` accepts an IPv6 address only as the first host, and before a port.
        address = _NETLOC.search(url)
        netloc = "" if address is None else address[0]
        credentials, separator, hosts = netloc.rpartition("@")
        first_netloc = f"{credentials}{separator}{hosts.partition(',')[0]}"
        try:
            parts = urlsplit(url.replace(f"://{netloc}", f"://{first_netloc}", 1))
        except ValueError as error:
            raise ConfigurationError("store", "must be a Redis URL") from error
        scheme = parts.scheme.lower()
        if scheme not in SCHEMES:
            raise ConfigurationError("store", "must be a Redis URL", scheme)
        is_socket = scheme.endswith(_UNIX_SUFFIX)
        self.seeds: list[NodeAddress] = _parse_hosts(hosts)
        """The nodes of a Cluster that are queried first; a single server has one."""
        has_hosts = all(seed.host for seed in self.seeds)
        if not (parts.path.strip("/") if is_socket else has_hosts):
            rule = f"must be {scheme}://{'/PATH' if is_socket else 'HOST'}"
            raise ConfigurationError("store", rule)
        self.is_cluster: bool = scheme.endswith(_CLUSTER_SUFFIX)
        if len(self.seeds) > 1 and not self.is_cluster:
            rule = "must have one host: only the URL of a Cluster (redis+cluster://) has several"
            raise ConfigurationError("store", rule)
        if not is_socket:
            _check_database(parts.path.strip("/"), is_cluster=self.is_cluster)
        self.prefix: str = DEFAULT_PREFIX
        self.partition_count: int | None = None
        driver_parameters: list[tuple[str, str]] = []
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            if name == "prefix":
                self.prefix = _check_prefix(value)
            elif name == "partitions":
                self.partition_count = _parse_partition_count(value)
            elif name in _DRIVER_PARAMETERS:
                if name == "db":
                    _check_database(value, is_cluster=self.is_cluster)
                driver_parameters.append((name, value))
            else:
                allowed = ", ".join(sorted({"prefix", "partitions", *_DRIVER_PARAMETERS}))
                rule = f"parameters of the URL can be {allowed}"
                if "@" in parts.query:  # the text before the @ may be a part of the password
                    raise ConfigurationError("store", rule)
                raise ConfigurationError("store", rule, name)
        driver_scheme = "unix" if is_socket else _SCHEMES[scheme.removesuffix(_CLUSTER_SUFFIX)]
        self.verifies_host: bool = (
            driver_scheme == "rediss" and ("ssl_cert_reqs", "none") not in driver_parameters
        )
        """Whether the certificate of the server must be for its host, by default."""
        query = urlencode(driver_parameters)
        self.driver_url: str = f"{driver_scheme}://{parts.netloc}{parts.path}?{query}"
        """The URL for redis-py, which supports neither Valkey nor the parameters of the store. Of
        the hosts of a Cluster it has only the first, which `_replace_host` replaces."""


def _parse_hosts(hosts: str) -> list[NodeAddress]:
    """Parse `HOST:PORT,HOST:PORT`."""
    addresses: list[NodeAddress] = []
    for text in hosts.split(","):
        try:
            parts = urlsplit(f"//{text}")
            addresses.append(NodeAddress(parts.hostname or "", parts.port or _DEFAULT_PORT))
        except ValueError:
            # The text is not shown, because it may be a part of the password.
            rule = "must have a number as the port. Percent-encode special characters of the"
            raise ConfigurationError("store", f"{rule} password, such as %2F for /") from None
    return addresses


def _check_database(text: str, *, is_cluster: bool) -> None:
    if is_cluster and text not in {"", "0"}:
        raise ConfigurationError("store", "must have no database: a Cluster has only database 0")
    if not re.fullmatch(r"[0-9]*", text, re.ASCII):  # redis-py would use database 0
        raise ConfigurationError("store", "must have a number as the database: redis://HOST/0")


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


def _replace_host(url: str, address: NodeAddress) -> str:
    """Return a URL with another host, and with the same credentials."""
    parts = urlsplit(url)
    credentials, separator, _ = parts.netloc.rpartition("@")
    host = f"[{address.host}]" if ":" in address.host else address.host
    return parts._replace(netloc=f"{credentials}{separator}{host}:{address.port}").geturl()


class _Server:
    """A client of one server with a connection pool, and the number of its free connections."""

    def __init__(
        self,
        build_client: Callable[[], Any],
        must_reconnect: Callable[[Exception], bool],
        timeout_errors: tuple[type[Exception], ...],
    ) -> None:
        self._build_client = build_client
        self._must_reconnect = must_reconnect
        self._timeout_errors = timeout_errors
        self._client = build_client()
        self.free_connections = asyncio.Semaphore(MAX_CONNECTIONS)
        self._running_counts: Counter[Any] = Counter()
        """The number of running commands by client."""
        self._has_timed_out = False
        """Whether the last command that has ended got no connection or no reply in time."""
        self._has_connected = False
        """Whether a command of the current client has succeeded."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def is_hanging(self) -> bool:
        """Whether the server does not respond, and another command waits for it already."""
        return self._has_timed_out and self._running_counts.total() > 0

    async def execute(self, *command: Any) -> Any:
        """Run a command on a pooled connection."""
        client = self._client
        self._running_counts[client] += 1
        try:
            # Not the timeout of redis-py: it sends with `asyncio.wait_for`, which in Python 3.11
            # ignores the cancellation of a task if it arrives when the command was just sent.
            async with asyncio.timeout(_REPLY_TIMEOUT_S):
                reply = await client.execute_command(*command)
        except Exception as error:
            self._has_timed_out = isinstance(error, self._timeout_errors)
            # The other connections of the pool were probably lost, too. redis-py detects that the
            # server has closed a connection, but not that it was reset. With this pool, calls would
            # fail and succeed in turn until each connection has failed once.
            is_current = client is self._client and self._has_connected
            if is_current and self._must_reconnect(error):
                self._client, self._has_connected = self._build_client(), False
            raise
        else:
            self._has_connected = self._has_connected or client is self._client
            self._has_timed_out = False
            return reply
        finally:
            self._running_counts[client] -= 1
            if client is not self._client:
                self._close_if_idle(client)

    def _close_if_idle(self, client: Any) -> None:
        """Close a client that was replaced, after its last command."""
        if not self._running_counts[client]:
            del self._running_counts[client]
            task = asyncio.get_running_loop().create_task(_close(client))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*self._closing, _close(self._client))


async def _close(client: Any) -> None:
    with suppress(Exception):  # its connections may be lost
        await client.aclose()


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
            self._find_slot = import_module("redis.crc").key_slot
        self.address: StoreAddress = StoreAddress(url)
        self.server_name: str = f"Redis at {redact_store_url(url)}"
        self.token: str = secrets.token_hex(8)
        """Identifies this store in notifications, and as a leader."""
        self.identity: str = ""
        """The identity of the store, which each partition has; empty while the store is opened."""
        self.partition_count: int = 1
        self.unchecked_partitions: set[int] = set()
        """The partitions that were unavailable when the store was opened."""
        self.check_partition: Callable[[int], Awaitable[None]] | None = None
        """Called before the first script on one of `unchecked_partitions`."""
        self._checks: dict[int, asyncio.Task[None]] = {}
        """The calls of `check_partition` that are in progress."""
        self._clock = clock
        self._is_open = False
        self._running_count = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._servers: dict[NodeAddress | None, _Server] = {}
        """By address of a node of a Cluster; None for a single server."""
        self._cluster: ClusterMap | None = None

    def open(self) -> None:
        """Create the clients; they connect when they are used."""
        self._is_open = True
        if self.address.is_cluster and self._cluster is None:
            self._cluster = ClusterMap(self.address.seeds, self._read_slots)

    def _server(self, address: NodeAddress | None) -> _Server:
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = _Server(
                lambda: self._build_client(address),
                self._must_reconnect,
                # redis-py has its own error for a connection that cannot be opened in time.
                (TimeoutError, self._errors.TimeoutError),
            )
        return server

    def _must_reconnect(self, error: Exception) -> bool:
        """Return whether an error shows that all connections to a server should be replaced.

        A response shows it if this server has become a replica: the address may belong to the new
        primary now, but the connections stay with the old one.
        """
        errors = self._errors
        if not isinstance(error, errors.ResponseError):
            return True
        return isinstance(error, errors.ReadOnlyError) or "READONLY" in str(error)

    def _build_client(self, address: NodeAddress | None) -> Any:
        url = self.address.driver_url
        if address is not None:
            url = _replace_host(url, address)
        # Parameters of the URL have precedence. Before version 6, redis-py did not check the host.
        options = {"ssl_check_hostname": True} if self.address.verifies_host else {}
        return self._aio.Redis.from_url(
            url,
            **options,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=None,  # see `_Server.execute`; the listener has its own timeout
            retry=self._retry(self._no_backoff(), 0),
            max_connections=MAX_CONNECTIONS,
        )

    def build_subscriber(self) -> Any:
        """Return a client for notifications. Each node of a Cluster delivers those of all nodes."""
        address = None
        if self._cluster is not None:
            address = secrets.choice(self._cluster.primaries or self.address.seeds)
        return self._build_client(address)

    async def _read_slots(self, address: NodeAddress) -> list[Any]:
        slots: list[Any] = await self._server(address).execute("CLUSTER", "SLOTS")
        return slots

    async def close(self) -> None:
        """Wait for the scripts that are running, and close all connections."""
        self._is_open = False
        with suppress(TimeoutError):
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                await self._is_idle.wait()
        await cancel_and_wait(self._checks.values())
        if self._cluster is not None:
            await self._cluster.close()
        servers, self._servers, self._cluster = self._servers, {}, None
        await asyncio.gather(*(server.close() for server in servers.values()))

    def partition_key(self, partition: int) -> str:
        """Return the prefix of the keys of a partition. The number in braces is its hash tag."""
        return f"{self.address.prefix}:{{{partition}}}"

    async def run(
        self, partition: int, name: str, *arguments: Any, values: Sequence[bytes] = ()
    ) -> Any:
        """Run a script on a partition; `values` are stored by the script as they are."""
        if not self._is_open:
            raise StoreUnavailable("the store is not open: call open() first")
        self._running_count += 1
        self._is_idle.clear()
        try:
            if partition in self.unchecked_partitions:
                await self._check_once(partition)
            return await self._run_script(partition, name, arguments, values)
        except StoreUnavailable as error:
            if self.partition_count > 1:
                error.partition = partition
            raise
        finally:
            self._running_count -= 1
            if not self._running_count:
                self._is_idle.set()

    async def _check_once(self, partition: int) -> None:
        """Check a partition that was unavailable at the start. Concurrent calls check it once."""
        check = self._checks.get(partition)
        if check is None:
            loop = asyncio.get_running_loop()
            check = self._checks[partition] = loop.create_task(self._check(partition))
            check.add_done_callback(lambda done: self._end_check(partition, done))
        await asyncio.shield(check)

    async def _check(self, partition: int) -> None:
        if self.check_partition is not None:
            await self.check_partition(partition)
        self.unchecked_partitions.discard(partition)

    def _end_check(self, partition: int, check: asyncio.Task[None]) -> None:
        del self._checks[partition]
        if not check.cancelled():
            check.exception()  # otherwise, asyncio reports it if all callers were cancelled

    async def gather_available(
        self, calls: Mapping[int, Coroutine[Any, Any, R]]
    ) -> dict[int, R | StoreUnavailable]:
        """Await calls to several partitions at the same time; return their results or errors.

        When one has returned, the others have `_STRAGGLER_TIMEOUT_S`: the results must not wait for
        a node that hangs. Raises errors other than `StoreUnavailable`.
        """
        tasks = {number: asyncio.ensure_future(call) for number, call in calls.items()}
        try:
            pending: set[asyncio.Future[R]] = set(tasks.values())
            while pending and not any(_has_result(task) for task in tasks.values()):
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if pending:
                await asyncio.wait(pending, timeout=_STRAGGLER_TIMEOUT_S)
        finally:
            await cancel_and_wait(task for task in tasks.values() if not task.done())
        results: dict[int, R | StoreUnavailable] = {}
        for partition, task in tasks.items():
            error: BaseException | None
            if task.cancelled():
                error = self._unavailable("no reply in time", self._look_up_server(partition))
            else:
                error = task.exception()
            if isinstance(error, StoreUnavailable):
                if self.partition_count > 1:
                    error.partition = partition
                results[partition] = error
            else:
                results[partition] = task.result()
        return results

    async def _run_script(
        self, partition: int, name: str, arguments: tuple[Any, ...], values: Sequence[bytes]
    ) -> Any:
        script = load_script(name)
        time = b"" if self._clock is None else self._clock()
        key = self.partition_key(partition)
        # Neither key exists. While Redis Cluster moves a slot, some keys of the partition are on
        # one node and some on the other, and a script would not find all of them. With two keys of
        # which one is missing, both nodes refuse to run the script until all keys were moved.
        parameters = (
            2,
            key,
            f"{key}:",
            time,
            self.token,
            self.identity,
            encode(arguments),
            *values,
        )
        try:
            return await self._run_on(partition, "EVALSHA", script.digest, *parameters)
        except self._errors.NoScriptError:  # the server was restarted, or is a new primary
            return await self._run_on(partition, "EVAL", script.source, *parameters)

    async def _run_on(self, partition: int, *command: Any) -> Any:
        """Run a command on the server of a partition."""
        if self._cluster is None:
            return await self._execute(None, *command)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await self._run_in_cluster(self._cluster, partition, command)
        except TimeoutError as error:
            self._cluster.mark_stale()
            server = self._look_up_server(partition)
            raise self._unavailable("no reply in time", server) from error

    def _slot(self, partition: int) -> int:
        slot: int = self._find_slot(self.partition_key(partition).encode())
        return slot

    def _look_up_server(self, partition: int) -> NodeAddress | None:
        return None if self._cluster is None else self._cluster.look_up(self._slot(partition))

    async def _run_in_cluster(
        self, cluster: ClusterMap, partition: int, command: tuple[Any, ...]
    ) -> Any:
        """Run a command on the primary of a partition, which may have moved."""
        slot = self._slot(partition)
        for _ in range(_MAX_REDIRECTIONS):
            primary = await cluster.find_primary(slot)
            try:
                return await self._execute(primary, *command)
            except StoreUnavailable as error:
                moved: Any = error.__cause__
                if not isinstance(moved, self._errors.MovedError):
                    cluster.mark_stale(primary)
                    raise
                cluster.record_move(slot, NodeAddress(moved.host or primary.host, moved.port))
        cluster.mark_stale()
        raise self._unavailable("the slot of the partition is being moved")

    async def find_server(self, partition: int) -> NodeAddress | None:
        """Return the node of a Cluster that has a partition; None for a single server."""
        if self._cluster is None:
            return None
        return await self._cluster.find_primary(self._slot(partition))

    async def read_config(
        self, address: NodeAddress | None, names: Iterable[str]
    ) -> dict[str, str]:
        """Return settings of a server.

        Settings that cannot be read are omitted: managed servers often forbid CONFIG.
        """
        settings: dict[str, str] = {}
        for name in names:
            try:
                settings |= parse_config(await self._execute(address, "CONFIG", "GET", name))
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, self._errors.ResponseError):
                    raise
        return settings

    async def _execute(self, address: NodeAddress | None, *command: Any) -> Any:
        """Run a command on a server; raises `StoreUnavailable` and script errors."""
        server = self._server(address)
        if server.is_hanging:  # one command finds out when it responds again
            raise self._unavailable("no reply in time", address)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S), server.free_connections:
                return await server.execute(*command)
        except Exception as error:
            unavailable = self.translate(error, address)
            if unavailable is None:
                raise
            raise unavailable from error

    def translate(
        self, error: Exception, address: NodeAddress | None = None
    ) -> StoreUnavailable | None:
        """Return the error to raise instead of an error of the driver, or None.

        `address` is the node of a Cluster that the message names.
        """
        errors = self._errors
        if isinstance(error, errors.NoScriptError):
            return None
        if _STORE_LOST in str(error):
            return self._describe_loss(str(error))
        if isinstance(error, errors.ResponseError):
            # All other responses depend on the state of the server, such as its memory, its role or
            # the permissions of the user. Results of attempts have to be written again, and must
            # not be discarded.
            # The driver has a class for some of them, and removes their code from the message.
            has_code = type(error) is not errors.ResponseError
            is_script_failure = _SCRIPT_FAILURE in str(error) and not has_code
            if is_script_failure and _TEMPORARY_ERROR.search(str(error)) is None:
                return None
        elif isinstance(error, RuntimeError):
            # The driver writes to a pooled connection that was reset a moment ago. asyncio accepts
            # the bytes and the next read fails, but uvloop raises this error.
            if "handler is closed" not in str(error):
                return None
        elif not isinstance(error, (errors.RedisError, OSError, TimeoutError)):
            return None
        reason = str(error) or type(error).__name__
        if isinstance(error, TimeoutError):
            reason = "no reply in time"
        elif isinstance(error, errors.MovedError) and self._cluster is None:
            reason = "the server is a node of a Cluster: use redis+cluster://HOST in `store`"
        elif _UNTRUSTED_CERTIFICATE.search(reason) is not None:
            reason += " If the server has a private authority, add ?ssl_ca_certs=FILE to the URL."
        elif _MISSING_KEY in reason:
            key = reason.partition(_MISSING_KEY)[2].partition(" script: ")[0]  # added by Redis 7
            msg = f"Redis key {key} is missing, evicted or deleted by mistake, and other keys refer"
            return StoreUnavailable(
                f"{msg} to it: restore it from a backup, see `tarry docs redis`"
            )
        return self._unavailable(reason, address)

    def _describe_loss(self, reason: str) -> StoreLost:
        """Convert the error of `identity.lua`: the prefix of a partition, and its identity."""
        prefix, _, found = reason.partition(_STORE_LOST)[2].partition(" ")
        if found:
            return StoreLost(
                f"{prefix} on {self.server_name} has been replaced by the data of another store, "
                "and nothing is written to it: restore the data of this store, or restart this "
                "process to use the other store"
            )
        return StoreLost(
            f"{prefix} on {self.server_name} is empty, so its tasks and API keys are lost, and "
            "nothing is written to it. It was flushed, or an empty replica became the primary. "
            "Restore it from a backup, or accept the loss: see `tarry docs redis`, identity="
            f"{self.identity}"
        )

    def _unavailable(self, reason: str, address: NodeAddress | None = None) -> StoreUnavailable:
        if address is not None and str(address) not in reason:
            reason = f"node {address}: {reason}"
        return StoreUnavailable(f"{self.server_name} is unavailable: {reason}")


def _has_result(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
