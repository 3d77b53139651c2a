"""The operations that run rarely: on policies, on replays, and to lead."""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable
from tarry.service.store import (
    MAX_PAGE_BYTES,
    MAX_REPLAY_COUNT_INTERVAL_MS,
    MAX_REPLAY_LAG_MS,
    MAX_REPLAY_PAUSE_MS,
    MIN_REPLAY_COUNT_INTERVAL_MS,
    REPLAY_QUOTA_PAUSE_MS,
    PolicyWriteStatus,
    RecordPage,
)
from tarry.service.stores.records import (
    decode_replay,
    encode,
)
from tarry.service.stores.redis.codec import (
    pack_ids,
    to_policies,
)
from tarry.service.stores.redis.partitions import (
    GLOBAL_PARTITION,
    Partitions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import (
        PolicyVersion,
        ReplayRecord,
    )
    from tarry.service.stores.redis.connection import RedisConnection

_LEADER_LEASE_MS = 30_000
"""Renewed by each heartbeat of this process, and by each call of `try_lead`."""
_MAX_LISTED_REPLAYS = 100
_MAX_COUNTED_TASKS = 500
"""Maximum number of replayed tasks that one step reads to find finished ones."""


class ColdRecords(Partitions):
    """The operations of a store that run rarely."""

    def __init__(self, connection: RedisConnection) -> None:
        super().__init__(connection)
        self._replay_partitions: dict[str, int] = {}
        """The partitions of known replays, because a step has no tenant."""
        self._is_leader = False

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool, quota: int | None = None
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        arguments = ("put", policy.tenant, policy.id, replace, quota)
        status, *fields = await self.run_for_tenant(
            policy.tenant, "policies", *arguments, values=[policy.document]
        )
        stored = to_policies(policy.tenant, fields) or [policy]
        return PolicyWriteStatus(status.decode()), stored[0]

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        _, *fields = await self.run_for_tenant(
            tenant, "policies", "get", tenant, policy_id, version
        )
        return to_policies(tenant, fields)[0] if fields else None

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> RecordPage[PolicyVersion]:
        arguments = ("list", tenant, cursor or "", limit, MAX_PAGE_BYTES)
        status, *fields = await self.run_for_tenant(tenant, "policies", *arguments)
        policies = to_policies(tenant, fields)
        return RecordPage(policies, policies[-1].id if status == b"more" and policies else None)

    async def delete_policy(self, tenant: str, policy_id: str) -> PolicyWriteStatus:
        [status] = await self.run_for_tenant(tenant, "policies", "delete", tenant, policy_id)
        return PolicyWriteStatus(status.decode())

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        values = [encode(replay)]
        arguments = ("start", replay.tenant, replay.id)
        reply = await self.run_for_tenant(replay.tenant, "change_replay", *arguments, values=values)
        return decode_replay(reply)

    async def get_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        reply = await self.run_for_tenant(tenant, "change_replay", "get", tenant, replay_id)
        return None if reply is None else decode_replay(reply)

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        reply = await self.run_for_tenant(tenant, "change_replay", "cancel", tenant, replay_id)
        return None if reply is None else decode_replay(reply)

    async def list_replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        arguments = (running, tenant, _MAX_LISTED_REPLAYS)
        partitions = self.partitions_of(tenant)
        replies = await self.run_on_available(partitions, "list_replays", *arguments)
        replays = [decode_replay(packed) for reply in replies.values() for packed in reply]
        if running:
            replays.sort(key=lambda replay: (replay.next_at, replay.id))
        else:
            replays.sort(key=lambda replay: (replay.created_at, replay.id), reverse=True)
        return replays[:_MAX_LISTED_REPLAYS]

    async def replay_step(
        self,
        replay_id: str,
        cursor: str | None,
        task_ids: Sequence[str],
        next_cursor: str | None,
        *,
        quota: int | None = None,
    ) -> ReplayRecord | None:
        arguments = (
            replay_id,
            cursor,
            pack_ids(task_ids),
            next_cursor,
            quota,
            MAX_REPLAY_LAG_MS,
            REPLAY_QUOTA_PAUSE_MS,
            MAX_REPLAY_PAUSE_MS,
            MIN_REPLAY_COUNT_INTERVAL_MS,
            MAX_REPLAY_COUNT_INTERVAL_MS,
            _MAX_COUNTED_TASKS,
        )
        known = self._replay_partitions.get(replay_id)
        for partition in range(self.partition_count) if known is None else [known]:
            reply = await self.run(partition, "replay_step", *arguments)
            if reply is not None:
                replay = decode_replay(reply)
                # Only replays that need another step are cached, so that the cache stays small.
                self._replay_partitions[replay_id] = partition
                if not replay.needs_steps:
                    del self._replay_partitions[replay_id]
                return replay
        self._replay_partitions.pop(replay_id, None)
        return None

    async def try_lead(self) -> bool:
        arguments = ("lead", "start", _LEADER_LEASE_MS)
        self._is_leader = bool(await self.run(GLOBAL_PARTITION, *arguments))
        return self._is_leader

    async def keep_leading(self) -> None:
        """Renew the lease of the leader, if this store is the leader."""
        if self._is_leader:
            await self.try_lead()

    async def stop_leading(self) -> None:
        """Stop being the leader, when the store is closed."""
        if self._is_leader:
            self._is_leader = False
            with suppress(StoreUnavailable):  # then the lease of the leader expires
                await self.run(GLOBAL_PARTITION, "lead", "stop", 0)
