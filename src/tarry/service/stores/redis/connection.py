"""Runs scripts on the servers of a store.

Redis runs a script completely or, if the server is out of memory or a replica, not at all. A call
is never repeated by the driver, because a repeated claim would lease other tasks.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from tarry.core.extras import require_extra
from tarry.errors import StoreUnavailable
from tarry.service.shutdown import cancel_and_wait
from tarry.service.store_url import redact_store_url
from tarry.service.stores.records import encode
from tarry.service.stores.redis.address import StoreAddress, replace_host
from tarry.service.stores.redis.cluster import ClusterMap, NodeAddress
from tarry.service.stores.redis.durability import parse_config
from tarry.service.stores.redis.failures import ErrorTranslator
from tarry.service.stores.redis.scripts import load_script
from tarry.service.stores.redis.server_client import MAX_CONNECTIONS, ServerClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence

R = TypeVar("R")

_MAX_REDIRECTIONS = 5
_CONNECT_TIMEOUT_S = 3.0
_CALL_TIMEOUT_S = 4.5
"""The maximum time of a call, including the wait for a free connection and redirections."""
_STRAGGLER_TIMEOUT_S = 1.0
"""How much longer than the first partition the others may take, see `gather_available`."""


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
        self._translator = ErrorTranslator(
            self._errors,
            f"Redis at {redact_store_url(url)}",
            is_cluster=self.address.is_cluster,
        )
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
        self._servers: dict[NodeAddress | None, ServerClient] = {}
        """By address of a node of a Cluster; None for a single server."""
        self._cluster: ClusterMap | None = None

    def open(self) -> None:
        """Create the clients; they connect when they are used."""
        self._is_open = True
        if self.address.is_cluster and self._cluster is None:
            self._cluster = ClusterMap(self.address.seeds, self._read_slots)

    def _server(self, address: NodeAddress | None) -> ServerClient:
        server = self._servers.get(address)
        if server is None:
            server = self._servers[address] = ServerClient(
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
            url = replace_host(url, address)
        # Parameters of the URL have precedence. Before version 6, redis-py did not check the host.
        options = {"ssl_check_hostname": True} if self.address.verifies_host else {}
        return self._aio.Redis.from_url(
            url,
            **options,
            socket_connect_timeout=_CONNECT_TIMEOUT_S,
            socket_timeout=None,  # see `ServerClient.execute`; the listener has its own timeout
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
                error = self._translator.unavailable(
                    "no reply in time", self._look_up_server(partition)
                )
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
            raise self._translator.unavailable("no reply in time", server) from error

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
        raise self._translator.unavailable("the slot of the partition is being moved")

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
            raise self._translator.unavailable("no reply in time", address)
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S), server.free_connections:
                return await server.execute(*command)
        except Exception as error:
            unavailable = self._translator.translate(error, self.identity, address)
            if unavailable is None:
                raise
            raise unavailable from error

    def translate(self, error: Exception) -> StoreUnavailable | None:
        """Return the error to raise instead of an error of the driver, or None."""
        return self._translator.translate(error, self.identity)


def _has_result(task: asyncio.Future[Any]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
