"""Opening a store: creates it, or checks that the servers have the expected one.

`meta` of each partition has the identity of the store. Partition 0 also has the schema version and
the number of partitions. Each script checks the identity, see `identity.lua`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.store_url import missing_store
from tarry.service.stores.redis.durability import SETTING_NAMES, find_problems
from tarry.service.stores.redis.partitions import GLOBAL_PARTITION, Partitions, raise_loss

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tarry.service.stores.redis.cluster import NodeAddress

_logger = logging.getLogger("tarry.service.store")

SCHEMA_VERSION = 2
_FIRST_VERSION = 2
"""Earlier versions were never released."""
COMPATIBLE_VERSION = 2
"""The oldest schema version whose processes work with the data of `SCHEMA_VERSION`. They also start
on this data: during a rolling upgrade, a process of the previous release may crash."""
DEFAULT_CLUSTER_PARTITIONS = 16


class StoreOpener:
    """Opens a store; `name` is its URL without the password.

    See `RedisTaskStore` for `must_exist` and `strict_durability`.
    """

    def __init__(
        self, partitions: Partitions, name: str, *, must_exist: bool, strict_durability: bool
    ) -> None:
        self._partitions = partitions
        self._name = name
        self._must_exist = must_exist
        self._strict_durability = strict_durability
        self._reported_problems: set[str] = set()
        """The durability problems that were logged."""

    async def open(self) -> None:
        """Create the store if it does not exist, and check the servers of its partitions."""
        connection = self._partitions.connection
        wanted = connection.address.partition_count
        default = DEFAULT_CLUSTER_PARTITIONS if connection.address.is_cluster else 1
        schema, compatible, count, identity, is_complete = await self._create(wanted or default)
        if compatible > SCHEMA_VERSION:
            msg = (
                f"the store has schema version {schema}, but this tarry supports up to version "
                f"{SCHEMA_VERSION}: use the newer tarry that created the store"
            )
            raise ConfigurationError(msg)
        if wanted is not None and wanted != count:
            rule = f"has {count} partitions, which cannot be changed"
            raise ConfigurationError("store", rule, f"partitions={wanted}")
        connection.partition_count = count
        errors = await self._mark_partitions(identity.decode(), is_complete=bool(is_complete))
        errors |= await self._check_durability(set(range(count)) - errors.keys())
        if GLOBAL_PARTITION in errors:
            raise errors[GLOBAL_PARTITION]
        connection.unchecked_partitions = set(errors)
        connection.check_partition = self._check_partition
        _log_unavailable_partitions(errors)

    async def _create(self, partition_count: int) -> list[Any]:
        """Create the store if it does not exist; return what `create.lua` returns."""
        connection = self._partitions.connection
        connection.identity = ""
        connection.unchecked_partitions = set()
        schema, *_, identity, _ = await connection.run(GLOBAL_PARTITION, "create", "read")
        if schema is not None and schema < _FIRST_VERSION:
            msg = (
                f"the store at {self._name} was written by an unreleased version of tarry, whose "
                "data cannot be upgraded: use another database or prefix"
            )
            raise ConfigurationError(msg)
        is_new = False
        if identity is None:
            others = range(1, partition_count)
            replies = await self._partitions.run_on(others, "create", "read")
            identity = next((reply[3] for reply in replies if reply[3] is not None), None)
            # Read again, because another process may create the store at the same time.
            schema, *_, created, _ = await connection.run(GLOBAL_PARTITION, "create", "read")
            is_new = schema is None
            if created is not None:
                identity = created
            elif identity is None:
                if self._must_exist:
                    raise missing_store(self._name)
                identity = token_hex(8).encode()
            elif is_new:
                connection.identity = identity.decode()
                await connection.run(GLOBAL_PARTITION, "create", "read")  # fails if it was flushed
        versions = (SCHEMA_VERSION, COMPATIBLE_VERSION)
        arguments = ("create", *versions, partition_count, identity.decode())
        stored: list[Any] = await connection.run(GLOBAL_PARTITION, "create", *arguments)
        if is_new:
            _logger.warning("created an empty store at %s", self._name)
        return stored

    async def _mark_partitions(
        self, identity: str, *, is_complete: bool
    ) -> dict[int, StoreUnavailable]:
        """Write the identity of a new store to all partitions; check that each partition has it.

        Return the errors of partitions that are unavailable. All must be available until the store
        is complete: one that is unavailable may have the data of another store.
        """
        partitions = self._partitions
        if not is_complete:
            await partitions.run_on_all("create", "mark", identity)
        partitions.connection.identity = identity
        if not is_complete:
            await partitions.run_on_all("create", "read")
            await partitions.run(GLOBAL_PARTITION, "create", "complete")
            return {}
        replies = await partitions.try_on(range(partitions.partition_count), "create", "read")
        raise_loss(replies.values())
        return {
            partition: reply
            for partition, reply in replies.items()
            if isinstance(reply, StoreUnavailable)
        }

    async def _check_durability(self, partitions: Iterable[int]) -> dict[int, StoreUnavailable]:
        """Log a warning, or raise an error, if the servers may lose acknowledged tasks.

        Return the errors of partitions whose servers are unavailable.
        """
        connection = self._partitions.connection
        partitions_by_server: dict[NodeAddress | None, list[int]] = defaultdict(list)
        for partition in partitions:
            partitions_by_server[await connection.find_server(partition)].append(partition)
        servers = {each[0]: server for server, each in partitions_by_server.items()}
        replies = await connection.gather_available(
            {
                partition: connection.read_config(server, SETTING_NAMES)
                for partition, server in servers.items()
            }
        )
        errors: dict[int, StoreUnavailable] = {}
        problems: set[str] = set()
        for partition, reply in replies.items():
            server = servers[partition]
            if isinstance(reply, StoreUnavailable):
                errors |= dict.fromkeys(partitions_by_server[server], reply)
            else:
                name = "Redis" if server is None else f"Redis node {server}"
                problems |= {f"{name}: {problem}" for problem in find_problems(reply)}
        if problems and self._strict_durability:
            rule = "the servers must keep acknowledged tasks, because strict_durability is set"
            raise ConfigurationError(f"store: {rule}. {'; '.join(sorted(problems))}")
        for problem in sorted(problems - self._reported_problems):
            _logger.warning("%s", problem)
        self._reported_problems |= problems
        return errors

    async def _check_partition(self, partition: int) -> None:
        """Check a partition that was unavailable when the store was opened, as `open` does.

        Each script checks the identity of the store itself.
        """
        try:
            errors = await self._check_durability([partition])
        except ConfigurationError as error:
            raise StoreUnavailable(str(error)) from error
        if partition in errors:
            raise errors[partition]


def _log_unavailable_partitions(errors: dict[int, StoreUnavailable]) -> None:
    """Log each error once, with all partitions that have it."""
    partitions_by_error: dict[str, list[int]] = defaultdict(list)
    for partition, error in sorted(errors.items()):
        partitions_by_error[str(error)].append(partition)
    for text, partitions in partitions_by_error.items():
        _logger.error(
            "store opened without partitions that are unavailable, partitions=%s: %s",
            ",".join(map(str, partitions)),
            text,
        )
