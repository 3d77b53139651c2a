"""Removal of old records, and bodies that no task owns any more."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable
from tarry.service.store import POLICY_RETENTION_MS, SweepResult
from tarry.service.stores.redis.claim import divide
from tarry.service.stores.redis.codec import split_rows
from tarry.service.stores.redis.opening import COMPATIBLE_VERSION, SCHEMA_VERSION
from tarry.service.stores.redis.partitions import GLOBAL_PARTITION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.store import Retention
    from tarry.service.stores.redis.partitions import Partitions

_logger = logging.getLogger("tarry.service.store")


class Sweeper:
    """Removes old records from all partitions, at most `limit` tasks at a time."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._first_partition = 0
        self._has_failed = False
        """Whether a partition was unavailable for the last sweep."""

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        """Remove old records, see `Store.sweep`."""
        removed, has_more = 0, False
        error: StoreUnavailable | None = None
        # Each sweep starts with another partition: if the first one always had more expired tasks
        # than the limit, those of the others would never be removed.
        start, count = self._first_partition, self._partitions.partition_count
        self._first_partition = (start + 1) % count
        remaining = [*range(start, count), *range(start)]
        while remaining:
            # One after another, with the rest of the limit. After a failure all at the same time:
            # a node that hangs would delay each of its partitions by the timeout of a call.
            batch = remaining if self._has_failed else remaining[:1]
            remaining = remaining[len(batch) :]
            shares = divide(limit - removed, batch, set(batch))
            calls = [
                self._sweep_partition(partition, retention, share)
                for partition, share in zip(batch, shares, strict=True)
            ]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(result, StoreUnavailable):
                    error = result  # raised after the other partitions
                    self._has_failed = True
                elif isinstance(result, BaseException):
                    raise result
                else:
                    removed += result.removed_task_count
                    has_more = has_more or result.has_more
        if error is not None:
            raise error
        self._has_failed = False
        return SweepResult(removed, has_more)

    async def _sweep_partition(
        self, partition: int, retention: Retention, limit: int
    ) -> SweepResult:
        meta = (SCHEMA_VERSION, COMPATIBLE_VERSION, self._partitions.partition_count)
        removed, has_more, missing_keys = await self._partitions.run(
            partition,
            "sweep",
            retention.succeeded_ms,
            retention.exhausted_ms,
            POLICY_RETENTION_MS,
            limit,
            meta if partition == GLOBAL_PARTITION else None,
        )
        for key, consequence in split_rows(missing_keys, 2):
            _logger.error(
                "Redis key %s is missing, evicted or deleted by mistake: %s. %s",
                key.decode(errors="backslashreplace"),
                consequence.decode(errors="backslashreplace"),
                "Set maxmemory-policy to noeviction",
            )
        return SweepResult(removed, bool(has_more))


async def list_orphaned_bodies(partitions: Partitions, limit: int) -> list[str]:
    """Return references to bodies whose tasks were deleted."""
    numbers = range(partitions.partition_count)
    replies = await partitions.run_on_available(numbers, "orphans", "list", limit)
    return [ref.decode() for reply in replies.values() for ref in reply][:limit]


async def forget_orphaned_bodies(partitions: Partitions, refs: Sequence[str]) -> None:
    """Remove references to bodies that were deleted."""
    if refs:
        await partitions.run_on_all("orphans", "forget", list(refs))
