"""The partitions of a store: which of them has a tenant, and scripts on one or several of them.

A tenant is in one partition, so a call for one tenant is one script. A call for all tenants runs a
script on each partition.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from tarry.errors import StoreUnavailable
from tarry.service.store import StoreLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from tarry.service.stores.redis.connection import RedisConnection

T = TypeVar("T")
R = TypeVar("R")

GLOBAL_PARTITION = 0
"""The partition of API keys, the leader, the registry of workers and the series, which have no
tenant."""


def find_partition(tenant: str, partition_count: int) -> int:
    """Return the partition of a tenant."""
    return crc32(tenant.encode()) % partition_count


def tenant_of(lane: str) -> str:
    """Return the tenant of a lane."""
    return lane.partition("/")[0]


class Partitions:
    """The partitions on a server or a Cluster. Every operation is a script on some of them."""

    def __init__(self, connection: RedisConnection) -> None:
        self.connection = connection
        self.replay_partitions: dict[str, int] = {}
        """The partitions of known replays that need steps, because a step has no tenant."""

    @property
    def partition_count(self) -> int:
        """The number of partitions; 1 before the store is opened."""
        return self.connection.partition_count

    def partition_of(self, tenant: str) -> int:
        """Return the partition of a tenant."""
        return find_partition(tenant, self.partition_count)

    def partitions_of(self, tenant: str | None) -> Sequence[int]:
        """Return the partition of a tenant, or all partitions (None)."""
        return range(self.partition_count) if tenant is None else [self.partition_of(tenant)]

    async def run(
        self, partition: int, script: str, *arguments: Any, values: Sequence[bytes] = ()
    ) -> Any:
        """Run a script on a partition, see `RedisConnection.run`."""
        return await self.connection.run(partition, script, *arguments, values=values)

    async def run_for_tenant(
        self, tenant: str, script: str, *arguments: Any, values: Sequence[bytes] = ()
    ) -> Any:
        """Run a script on the partition of a tenant."""
        partition = self.partition_of(tenant)
        return await self.connection.run(partition, script, *arguments, values=values)

    async def run_for_lane(self, lane: str, script: str, *arguments: Any) -> Any:
        """Run a script on the partition of a lane."""
        return await self.connection.run(self.partition_of(tenant_of(lane)), script, *arguments)

    async def run_on_all(self, script: str, *arguments: Any) -> list[Any]:
        """Run a script on all partitions; return the replies, or raise the first error."""
        return await self.run_on(range(self.partition_count), script, *arguments)

    async def run_on(self, partitions: Iterable[int], script: str, *arguments: Any) -> list[Any]:
        """Run a script on partitions; return the replies, or raise the first error."""
        return await gather(
            self.connection.run(partition, script, *arguments) for partition in partitions
        )

    async def run_on_available(
        self, partitions: Iterable[int], script: str, *arguments: Any
    ) -> dict[int, Any]:
        """Run a script on partitions; return the replies of those that are available.

        Raises if none is. For background work, which other partitions must not wait for.
        """
        return select_available(await self.try_on(partitions, script, *arguments))

    async def try_on(
        self, partitions: Iterable[int], script: str, *arguments: Any
    ) -> dict[int, Any]:
        """Run a script on partitions; return the reply, or the `StoreUnavailable`, of each."""
        return await self.connection.gather_available(
            {number: self.connection.run(number, script, *arguments) for number in partitions}
        )

    def group(self, items: Iterable[T], tenant_of_item: Callable[[T], str]) -> dict[int, list[T]]:
        """Return the items by partition."""
        count = self.partition_count
        groups: dict[int, list[T]] = defaultdict(list)
        for item in items:
            groups[find_partition(tenant_of_item(item), count)].append(item)
        return groups

    async def map_in_groups(
        self,
        items: Sequence[T],
        tenant_of_item: Callable[[T], str],
        run: Callable[[int, list[T]], Awaitable[list[R]]],
    ) -> list[R]:
        """Call `run` for the items of each partition; return the results in the order of items."""
        if self.partition_count == 1:  # nothing to divide
            return await run(0, list(items)) if items else []
        groups = self.group(enumerate(items), lambda entry: tenant_of_item(entry[1]))
        replies = await gather(
            run(partition, [item for _, item in group]) for partition, group in groups.items()
        )
        results: dict[int, R] = {}
        for group, reply in zip(groups.values(), replies, strict=True):
            results.update(zip((position for position, _ in group), reply, strict=True))
        return [results[position] for position in range(len(items))]


async def gather(calls: Iterable[Awaitable[R]]) -> list[R]:
    """Await calls at the same time. If one fails, raise its error after all have ended."""
    pending = list(calls)
    if len(pending) == 1:  # without the cost of an asyncio task
        return [await pending[0]]
    results = await asyncio.gather(*pending, return_exceptions=True)
    values: list[R] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        values.append(result)
    return values


def select_available(replies: dict[int, Any]) -> dict[int, Any]:
    """Return the replies that are no errors; raise an error if all are."""
    available = {
        partition: reply
        for partition, reply in replies.items()
        if not isinstance(reply, StoreUnavailable)
    }
    if not available:
        raise next(iter(replies.values()))
    return available


def raise_loss(replies: Iterable[Any]) -> None:
    """Raise the first `StoreLost` of the replies."""
    for reply in replies:
        if isinstance(reply, StoreLost):
            raise reply
