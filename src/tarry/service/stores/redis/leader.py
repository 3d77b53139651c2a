"""The leader of a store: one of the processes, until its lease expires."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable
from tarry.service.stores.redis.partitions import GLOBAL_PARTITION

if TYPE_CHECKING:
    from tarry.service.stores.redis.partitions import Partitions

_LEADER_LEASE_MS = 30_000
"""Renewed by each heartbeat of this process, and by each call of `try_lead`."""


class LeaderLease:
    """The lease of the leader, which this store may have."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._is_leader = False

    async def try_lead(self) -> bool:
        """Return whether this store is the leader; become the leader if there is none."""
        reply = await self._partitions.run(GLOBAL_PARTITION, "lead", "start", _LEADER_LEASE_MS)
        self._is_leader = bool(reply)
        return self._is_leader

    async def renew(self) -> None:
        """Renew the lease, if this store is the leader."""
        if self._is_leader:
            await self.try_lead()

    async def release(self) -> None:
        """Stop being the leader, when the store is closed."""
        if self._is_leader:
            self._is_leader = False
            with suppress(StoreUnavailable):  # then the lease expires
                await self._partitions.run(GLOBAL_PARTITION, "lead", "stop", 0)
