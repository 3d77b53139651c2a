"""The operations that run rarely: policies, keys, secrets, replays, processes and series."""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace as copy_with

from tarry.errors import StoreUnavailable
from tarry.service.store import (
    LATENCY_WINDOW_MS,
    MAX_BREAKER_CHANGES,
    MAX_LANE_SIGNING_SECRETS,
    MAX_LATENCY_WINDOWS,
    MAX_LISTED_WORKERS,
    MAX_PAGE_BYTES,
    MAX_REPLAY_COUNT_INTERVAL_MS,
    MAX_REPLAY_LAG_MS,
    MAX_REPLAY_PAUSE_MS,
    MAX_SIGNING_SECRETS,
    MIN_REPLAY_COUNT_INTERVAL_MS,
    REPLAY_QUOTA_PAUSE_MS,
    SERIES_RETENTION_MS,
    WORKER_EXPIRY_MS,
    PolicyWriteStatus,
    RecordPage,
    SeriesPoint,
)
from tarry.service.stores.records import (
    decode_activity,
    decode_replay,
    decode_transfer_mark,
    decode_worker,
    encode,
)
from tarry.service.stores.redis.codec import (
    pack_ids,
    to_api_key,
    to_policies,
    to_raw,
    to_signing_secret,
)
from tarry.service.stores.redis.partitions import (
    GLOBAL_PARTITION,
    Partitions,
    as_pairs,
    gather,
    tenant_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.model import (
        ApiKeyRecord,
        BreakerChangeRecord,
        LaneActivity,
        PolicyVersion,
        ReplayRecord,
        SigningSecretRecord,
        WorkerRecord,
    )
    from tarry.service.store import TransferMark
    from tarry.service.stores.redis.connection import RedisConnection

_LEADER_LEASE_MS = 30_000
"""Renewed by each heartbeat of this process, and by each call of `try_lead`."""
_SERIES_EXPIRY_MARGIN_S = 600
_API_KEY_PAGE_SIZE = 500
_MAX_LISTED_REPLAYS = 100
_MAX_LISTED_API_KEYS = 1000
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

    async def put_api_key(self, key: ApiKeyRecord) -> None:
        arguments = ("put", key.id, to_raw(key.digest))
        await self.run(GLOBAL_PARTITION, "api_keys", *arguments, values=[encode(key)])

    async def find_api_key(self, digest: bytes) -> ApiKeyRecord | None:
        reply = await self.run(GLOBAL_PARTITION, "api_keys", "find", to_raw(digest))
        return None if reply is None else to_api_key(*reply)

    async def list_api_keys(self, tenant: str | None = None) -> list[ApiKeyRecord]:
        keys: list[ApiKeyRecord] = []
        after = ""
        while len(keys) < _MAX_LISTED_API_KEYS:
            arguments = ("list", after, _API_KEY_PAGE_SIZE)
            reply = await self.run(GLOBAL_PARTITION, "api_keys", *arguments)
            page = [to_api_key(*reply[i : i + 3]) for i in range(0, len(reply), 3)]
            keys += [key for key in page if tenant in {None, key.tenant}]
            if len(page) < _API_KEY_PAGE_SIZE:
                break
            after = page[-1].id
        return keys[:_MAX_LISTED_API_KEYS]

    async def revoke_api_key(self, key_id: str) -> bool:
        return bool(await self.run(GLOBAL_PARTITION, "api_keys", "revoke", key_id))

    async def put_signing_secret(
        self, secret: SigningSecretRecord, *, expire_previous_ms: int
    ) -> SigningSecretRecord | None:
        reply = await self.run_for_tenant(
            secret.tenant,
            "signing_secrets",
            "put",
            secret.tenant,
            secret.id,
            secret.lane,
            expire_previous_ms,
            MAX_SIGNING_SECRETS,
            MAX_LANE_SIGNING_SECRETS,
            values=[encode(secret)],
        )
        return None if reply is None else to_signing_secret(*reply)

    async def list_signing_secrets(self, tenant: str) -> list[SigningSecretRecord]:
        reply = await self.run_for_tenant(tenant, "signing_secrets", "list", tenant)
        secrets = [to_signing_secret(*reply[i : i + 3]) for i in range(0, len(reply), 3)]
        return sorted(secrets, key=lambda secret: secret.id, reverse=True)

    async def delete_signing_secret(self, tenant: str, secret_id: str) -> bool:
        return bool(
            await self.run_for_tenant(tenant, "signing_secrets", "delete", tenant, secret_id)
        )

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

    async def record_breaker_change(self, lane: str, change: BreakerChangeRecord) -> None:
        values = (change.at, change.before, change.after, change.reason)
        arguments = ("change", lane, values, MAX_BREAKER_CHANGES)
        await self.run_for_lane(lane, "lane_activity", *arguments)

    async def record_latencies(self, counts_by_lane: dict[str, dict[str, int]]) -> None:
        flattened = [
            (lane, [value for pair in counts.items() for value in pair])
            for lane, counts in counts_by_lane.items()
        ]
        window = (LATENCY_WINDOW_MS, MAX_LATENCY_WINDOWS)
        await gather(
            self.run(partition, "lane_activity", "latencies", group, *window)
            for partition, group in self.group(flattened, lambda each: tenant_of(each[0])).items()
        )

    async def read_lane_activity(self, lanes: Sequence[str]) -> dict[str, LaneActivity]:
        replies = await gather(
            self.run(partition, "lane_activity", "read", group)
            for partition, group in self.group(lanes, tenant_of).items()
        )
        pairs = [pair for reply in replies for pair in as_pairs(reply)]
        return {lane.decode(): decode_activity(packed) for lane, packed in pairs}

    async def record_worker(self, worker: WorkerRecord) -> None:
        arguments = ("record", worker.name, worker.role != "api")
        values = [encode(worker)]
        await self.run(GLOBAL_PARTITION, "workers", *arguments, values=values)
        if self._is_leader:
            await self.try_lead()

    async def list_workers(self) -> list[WorkerRecord]:
        arguments = ("list", WORKER_EXPIRY_MS)
        reply = await self.run(GLOBAL_PARTITION, "workers", *arguments)
        workers = [
            copy_with(decode_worker(packed), seen_at=seen_at) for packed, seen_at in as_pairs(reply)
        ]
        return sorted(workers, key=lambda worker: worker.name)[:MAX_LISTED_WORKERS]

    async def remove_worker(self, name: str) -> None:
        await self.run(GLOBAL_PARTITION, "workers", "remove", name)

    async def try_lead(self) -> bool:
        arguments = ("lead", "start", _LEADER_LEASE_MS)
        self._is_leader = bool(await self.run(GLOBAL_PARTITION, *arguments))
        return self._is_leader

    async def stop_leading(self) -> None:
        """Stop being the leader, when the store is closed."""
        if self._is_leader:
            self._is_leader = False
            with suppress(StoreUnavailable):  # then the lease of the leader expires
                await self.run(GLOBAL_PARTITION, "lead", "stop", 0)

    async def record_series(self, points: Sequence[SeriesPoint]) -> None:
        packed = [
            (
                point.step_ms,
                point.at,
                SERIES_RETENTION_MS[point.step_ms] // 1000 + _SERIES_EXPIRY_MARGIN_S,
                [value for pair in point.sums.items() for value in pair],
            )
            for point in points
        ]
        await self.run(GLOBAL_PARTITION, "series", "record", packed)

    async def list_series(self, step_ms: int, *, since: int) -> list[SeriesPoint]:
        arguments = ("list", step_ms, since, SERIES_RETENTION_MS[step_ms])
        reply = await self.run(GLOBAL_PARTITION, "series", *arguments)
        return [
            SeriesPoint(step_ms, at, {name.decode(): int(count) for name, count in as_pairs(sums)})
            for at, sums in as_pairs(reply)
        ]

    async def get_transfer(self) -> TransferMark | None:
        reply = await self.run(GLOBAL_PARTITION, "transfer", "get")
        return None if reply is None else decode_transfer_mark(reply)

    async def set_transfer(self, mark: TransferMark | None) -> None:
        values = [] if mark is None else [encode(mark)]
        await self.run(GLOBAL_PARTITION, "transfer", "set", values=values)
