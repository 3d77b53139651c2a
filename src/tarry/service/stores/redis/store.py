"""`RedisTaskStore`: implements `tarry.service.store.Store` with Redis or Valkey.

A tenant is in one partition, so a call for one tenant is one script. Calls for all tenants run a
script on each partition. API keys, the leader, the registry of workers and the series are in
partition 0.
"""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace as copy_with

from tarry.errors import ConfigurationError, StoreUnavailable
from tarry.service.model import (
    MAX_ATTEMPT_NUMBER,
    ApiKeyRecord,
    BreakerChangeRecord,
    LaneActivity,
    PolicyVersion,
    ReplayRecord,
    SigningSecretRecord,
    Status,
    WorkerRecord,
)
from tarry.service.store import (
    BUDGET_DECAY_MS,
    LATENCY_WINDOW_MS,
    MAX_BREAKER_CHANGES,
    MAX_BUSIEST_LANES,
    MAX_LANE_SIGNING_SECRETS,
    MAX_LATENCY_WINDOWS,
    MAX_LISTED_WORKERS,
    MAX_PAGE_BYTES,
    MAX_REPLAY_COUNT_INTERVAL_MS,
    MAX_REPLAY_LAG_MS,
    MAX_REPLAY_PAUSE_MS,
    MAX_SIGNING_SECRETS,
    MIN_REPLAY_COUNT_INTERVAL_MS,
    POLICY_RETENTION_MS,
    REPLAY_QUOTA_PAUSE_MS,
    SERIES_RETENTION_MS,
    WORKER_EXPIRY_MS,
    AddResult,
    AddStatus,
    AttemptsOfMinute,
    CancelStatus,
    ConfiguredLimits,
    Counters,
    DueLane,
    FinishStatus,
    LaneLimits,
    LaneWriteStatus,
    NewTask,
    PolicyWriteStatus,
    RecordPage,
    RetryNowStatus,
    SeriesPoint,
    StoreLost,
    SweepResult,
    TransferMark,
    select_due_lanes,
)
from tarry.service.store_url import missing_store, redact_store_url
from tarry.service.stores.records import (
    decode_activity,
    decode_attempt,
    decode_limits,
    decode_replay,
    decode_transfer_mark,
    decode_worker,
    encode,
    encode_limits,
    is_task_id,
    parse_cursor,
)
from tarry.service.stores.redis.claim import ClaimMerger, divide
from tarry.service.stores.redis.codec import (
    StoredLane,
    decode_lane,
    decode_task,
    encode_fixed,
    pack_id,
    pack_ids,
    task_arguments,
    to_api_key,
    to_policies,
    to_raw,
    to_signing_secret,
    unpack_id,
)
from tarry.service.stores.redis.connection import GLOBAL_PARTITION, RedisConnection, find_partition
from tarry.service.stores.redis.durability import SETTING_NAMES, find_problems
from tarry.service.stores.redis.listener import WakeupListener
from tarry.service.stores.redis.task_lists import TaskScan
from tarry.service.stores.redis.transfer import RecordTransfer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence

    from tarry.service.model import AttemptRecord, LaneRecord, Task
    from tarry.service.store import (
        ClaimResult,
        LeaseTerms,
        RecordKind,
        Release,
        Retention,
        StoredTaskFilter,
        TaskResult,
    )
    from tarry.service.stores.redis.cluster import NodeAddress
    from tarry.wire.tasks import DownstreamLimits

R = TypeVar("R")

_logger = logging.getLogger("tarry.service.store")

SCHEMA_VERSION = 1
COMPATIBLE_VERSION = 1
"""The oldest schema version whose processes work with the data of `SCHEMA_VERSION`. They also start
on this data: during a rolling upgrade, a process of the previous release may crash."""
DEFAULT_CLUSTER_PARTITIONS = 16
_LEADER_LEASE_MS = 30_000
"""Renewed by each heartbeat of this process, and by each call of `try_lead`."""
_SERIES_EXPIRY_MARGIN_S = 600
_LANE_PAGE_SIZE = 500
_MAX_LANES_READ, _MAX_LEASES_READ = 200, 200
"""How many lanes and leases one script reads to find the leases of a worker, in about 2 ms. To
release so many takes about 4 ms."""
_MAX_LISTED_REPLAYS = 100
_MAX_LISTED_API_KEYS = 1000
_MAX_COUNTED_TASKS = 500
"""Maximum number of replayed tasks that one step reads to find finished ones."""
_MISSING_ID = to_raw(b"")
"""Replaces a malformed id; no task has this id."""
_ATTEMPT_NUMBER_BITS = MAX_ATTEMPT_NUMBER.bit_length()


class RedisTaskStore:
    """A store at a URL such as `redis://host:6379/0` or `redis+cluster://host:6379`.

    `clock` returns epoch milliseconds, for tests; the default is the clock of the server. If
    `strict_durability` is true, `open` fails if acknowledged tasks may be lost in a crash with the
    configuration of the server. With `must_exist`, it fails if the server has no store.
    """

    def __init__(
        self,
        url: str,
        *,
        clock: Callable[[], int] | None = None,
        strict_durability: bool = False,
        must_exist: bool = False,
    ) -> None:
        self._connection = RedisConnection(url, clock)
        self._name = redact_store_url(url)
        self._must_exist = must_exist
        self._strict_durability = strict_durability
        self._partition_count = 1
        self._claims = ClaimMerger(self._connection)
        self._replay_partitions: dict[str, int] = {}
        """The partitions of known replays, because a step has no tenant."""
        self._first_swept_partition = 0
        self._has_sweep_failed = False
        """Whether a partition was unavailable for the last sweep."""
        self._reported_problems: set[str] = set()
        """The durability problems that were logged."""
        self._is_leader = False
        self._listener: WakeupListener | None = None

    async def open(self) -> None:
        """Connect, and create the store if it does not exist."""
        self._connection.open()
        try:
            await self._open()
        except BaseException:
            await self._connection.close()
            raise

    async def _open(self) -> None:
        wanted = self._connection.address.partition_count
        default = DEFAULT_CLUSTER_PARTITIONS if self._connection.address.is_cluster else 1
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
        self._partition_count = self._connection.partition_count = count
        self._claims.set_partition_count(count)
        errors = await self._mark_partitions(identity.decode(), is_complete=bool(is_complete))
        errors |= await self._check_durability(set(range(count)) - errors.keys())
        if GLOBAL_PARTITION in errors:
            raise errors[GLOBAL_PARTITION]
        self._connection.unchecked_partitions = set(errors)
        self._connection.check_partition = self._check_partition
        partitions_by_error: dict[str, list[int]] = defaultdict(list)
        for partition, error in sorted(errors.items()):
            partitions_by_error[str(error)].append(partition)
        for text, partitions in partitions_by_error.items():
            _logger.error(
                "store opened without partitions that are unavailable, partitions=%s: %s",
                ",".join(map(str, partitions)),
                text,
            )

    async def _create(self, partition_count: int) -> list[Any]:
        """Create the store if it does not exist; return what `create.lua` returns."""
        connection = self._connection
        connection.identity = ""
        connection.unchecked_partitions = set()
        schema, *_, identity, _ = await connection.run(GLOBAL_PARTITION, "create", "read")
        is_new = False
        if identity is None:
            replies = await _gather(
                connection.run(partition, "create", "read")
                for partition in range(1, partition_count)
            )
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
        if not is_complete:
            await self._run_all("create", "mark", identity)
        self._connection.identity = identity
        if not is_complete:
            await self._run_all("create", "read")
            await self._connection.run(GLOBAL_PARTITION, "create", "complete")
            return {}
        replies = await self._run_each(range(self._partition_count), "create", "read")
        _raise_loss(replies.values())
        return {
            partition: reply
            for partition, reply in replies.items()
            if isinstance(reply, StoreUnavailable)
        }

    async def _check_durability(self, partitions: Iterable[int]) -> dict[int, StoreUnavailable]:
        """Log a warning, or raise an error, if the servers may lose acknowledged tasks.

        Return the errors of partitions whose servers are unavailable.
        """
        connection = self._connection
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

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        if self._is_leader:
            self._is_leader = False
            with suppress(StoreUnavailable):  # then the lease of the leader expires
                await self._connection.run(GLOBAL_PARTITION, "lead", "stop", 0)
        await self._connection.close()

    async def ping(self, partition: int | None = None) -> int:
        if partition is not None:
            time: int = await self._connection.run(partition, "ping")
            return time
        replies = await self._run_each(range(self._partition_count), "ping")
        _raise_loss(replies.values())
        times: dict[int, int] = _select_available(replies)
        return max(times.values())

    # --- partitions -------------------------------------------------------------------------------

    @property
    def partition_count(self) -> int:
        return self._partition_count

    def partition_of(self, tenant: str) -> int:
        return find_partition(tenant, self._partition_count)

    def _partition_of_lane(self, lane: str) -> int:
        return self.partition_of(lane.partition("/")[0])

    async def _run(
        self, tenant: str, name: str, *arguments: Any, values: Sequence[bytes] = ()
    ) -> Any:
        """Run a script on the partition of a tenant."""
        return await self._connection.run(
            self.partition_of(tenant), name, *arguments, values=values
        )

    async def _run_on_lane(self, lane: str, name: str, *arguments: Any) -> Any:
        return await self._connection.run(self._partition_of_lane(lane), name, *arguments)

    async def _run_all(self, name: str, *arguments: Any) -> list[Any]:
        """Run a script on all partitions; return the replies."""
        return await _gather(
            self._connection.run(partition, name, *arguments)
            for partition in range(self._partition_count)
        )

    async def _run_available(
        self, partitions: Iterable[int], name: str, *arguments: Any
    ) -> dict[int, Any]:
        """Run a script on partitions; return the replies of those that are available.

        Raises if none is. For background work, which other partitions must not wait for.
        """
        return _select_available(await self._run_each(partitions, name, *arguments))

    async def _run_each(
        self, partitions: Iterable[int], name: str, *arguments: Any
    ) -> dict[int, Any]:
        """Run a script on partitions; return the reply, or the `StoreUnavailable`, of each."""
        return await self._connection.gather_available(
            {number: self._connection.run(number, name, *arguments) for number in partitions}
        )

    async def _run_batches(
        self, items: Sequence[R], tenants: Iterable[str], run: Callable[[int, list[R]], Any]
    ) -> list[Any]:
        """Run a script for the items of each partition; return the results in order."""
        batches: dict[int, list[int]] = defaultdict(list)
        for position, tenant in enumerate(tenants):
            batches[self.partition_of(tenant)].append(position)
        replies = await _gather(
            run(partition, [items[position] for position in positions])
            for partition, positions in batches.items()
        )
        results: list[Any] = [None] * len(items)
        for positions, reply in zip(batches.values(), replies, strict=True):
            for position, result in zip(positions, reply, strict=True):
                results[position] = result
        return results

    # --- add, claim, finish, release --------------------------------------------------------------

    async def add(
        self,
        tasks: Sequence[NewTask],
        terms: LeaseTerms | None = None,
        *,
        quota: int | None = None,
        lane_quota: int | None = None,
    ) -> list[AddResult]:
        packed_terms = None if terms is None else _pack_terms(terms)

        async def run(partition: int, batch: list[NewTask]) -> list[AddResult]:
            now, *results = await self._connection.run(
                partition,
                "add",
                [task_arguments(new) for new in batch],
                packed_terms,
                quota,
                lane_quota,
                values=[encode_fixed(new.task) for new in batch],
            )
            pairs = zip(batch, results, strict=True)
            return [_to_add_result(new, result, now, terms) for new, result in pairs]

        return await self._run_batches(tasks, (new.task.tenant for new in tasks), run)

    async def claim(
        self,
        terms: LeaseTerms,
        *,
        limit: int,
        per_lane: int,
        lane_limits: Mapping[str, int] = {},
        skip: Collection[int] = (),
    ) -> ClaimResult:
        return await self._claims.claim(terms, limit, per_lane, lane_limits, skip)

    async def finish(self, results: Sequence[TaskResult]) -> list[FinishStatus]:
        async def run(partition: int, batch: list[TaskResult]) -> list[FinishStatus]:
            packed = [_pack_result(result) for result in batch]
            reply = await self._connection.run(partition, "finish", packed)
            return [FinishStatus(status.decode()) for status in reply]

        return await self._run_batches(results, (result.task.tenant for result in results), run)

    async def release(self, releases: Sequence[Release]) -> list[FinishStatus]:
        async def run(partition: int, batch: list[Release]) -> list[FinishStatus]:
            packed = [
                (
                    pack_id(each.task.id) or _MISSING_ID,
                    each.task.tenant,
                    each.task.version,
                    each.deferred_until,
                )
                for each in batch
            ]
            reply = await self._connection.run(partition, "release", packed)
            return [FinishStatus(status.decode()) for status in reply]

        return await self._run_batches(releases, (each.task.tenant for each in releases), run)

    def record_start(self, slot: int, task: Task) -> None:
        """Do nothing: the leases of a dead process end when they expire."""

    async def release_unknown_leases(
        self, terms: LeaseTerms, known_ids: Collection[str], partition: int | None = None
    ) -> int:
        known = {bytes.fromhex(each.replace("-", "")) for each in known_ids if is_task_id(each)}

        async def release_in(partition: int) -> int:
            # Two scripts: a request that Redis executes late, after the client has given up, must
            # not release a lease that the worker has got meanwhile. `release` checks the version.
            count = 0
            lane, cursor = b"", b"0"
            while True:
                position = (to_raw(lane), to_raw(cursor), _MAX_LANES_READ, _MAX_LEASES_READ)
                lane, cursor, *fields = await self._connection.run(
                    partition, "unknown_leases", terms.worker, terms.length_ms, *position
                )
                leases = [
                    (to_raw(fields[i]), fields[i + 1].decode(), fields[i + 2], fields[i + 3])
                    for i in range(0, len(fields), 4)
                    if fields[i] not in known
                ]
                if leases:
                    statuses = await self._connection.run(partition, "release", leases)
                    count += sum(status != b"superseded" for status in statuses)
                if not lane:
                    return count

        partitions = range(self._partition_count) if partition is None else [partition]
        counts: list[int] = await _gather(map(release_in, partitions))
        return sum(counts)

    # --- lanes ------------------------------------------------------------------------------------

    async def park(self, lane: str, until: int, *, probes: int, consecutive_opens: int) -> None:
        arguments = ("park", lane, until, probes, consecutive_opens)
        await self._run_on_lane(lane, "change_lane", *arguments)

    async def unpark(self, lane: str) -> None:
        await self._run_on_lane(lane, "change_lane", "unpark", lane)

    async def resume(self, lane: str) -> None:
        await self._run_on_lane(lane, "change_lane", "resume", lane)

    async def pause(self, lane: str, *, lane_quota: int | None = None) -> LaneWriteStatus:
        status = await self._run_on_lane(lane, "change_lane", "pause", lane, lane_quota)
        return LaneWriteStatus(status.decode())

    async def set_limits(
        self,
        lane: str,
        limits: DownstreamLimits | None,
        *,
        max_limited: int,
        lane_quota: int | None = None,
    ) -> LaneWriteStatus:
        document = encode_limits(limits)
        arguments = ("set_limits", lane, document, max_limited, lane_quota)
        return LaneWriteStatus((await self._run_on_lane(lane, "change_lane", *arguments)).decode())

    async def record_lane_limits(self, limits: Sequence[LaneLimits]) -> None:
        batches: dict[int, list[LaneLimits]] = defaultdict(list)
        for each in limits:
            batches[self._partition_of_lane(each.lane)].append(each)
        await _gather(
            self._connection.run(partition, "record_limits", batch)
            for partition, batch in batches.items()
        )

    async def list_lane_limits(self, limit: int, partition: int | None = None) -> list[LaneLimits]:
        partitions = range(self._partition_count) if partition is None else [partition]
        replies = await _gather(
            self._connection.run(number, "list_limits", limit) for number in partitions
        )
        found = [(score, decode_lane(packed)) for reply in replies for score, packed in reply]
        found.sort(key=lambda entry: (entry[0], entry[1].name))
        return [
            LaneLimits(lane.name, lane.rate, lane.concurrency or 0) for _, lane in found[:limit]
        ]

    async def load_limits(self, known: ConfiguredLimits) -> ConfiguredLimits | None:
        partitions = range(self._partition_count)
        replies = await self._run_available(partitions, "load_limits", WORKER_EXPIRY_MS)
        if _sum_versions(replies, known) == (known.version, known.process_count):
            return None
        arguments = (WORKER_EXPIRY_MS, "with contents")
        replies = await self._run_available(partitions, "load_limits", *arguments)
        # The limits of a partition that is unavailable are kept.
        limits: dict[str, DownstreamLimits] = {
            lane: each
            for lane, each in known.by_lane.items()
            if self._partition_of_lane(lane) not in replies
        }
        paused_lanes = {
            lane for lane in known.paused_lanes if self._partition_of_lane(lane) not in replies
        }
        for *_, limit_pairs, names in replies.values():
            for name, document in _as_pairs(limit_pairs):
                limits[name.decode()] = decode_limits(document)
            paused_lanes.update(name.decode() for name in names)
        return ConfiguredLimits(*_sum_versions(replies, known), limits, frozenset(paused_lanes))

    async def add_to_budgets(self, changes: dict[str, float]) -> dict[str, float]:
        batches: dict[int, list[tuple[str, float]]] = defaultdict(list)
        for lane, change in changes.items():
            batches[self._partition_of_lane(lane)].append((lane, change))
        replies = await _gather(
            self._connection.run(partition, "add_to_budgets", batch, BUDGET_DECAY_MS)
            for partition, batch in batches.items()
        )
        pairs = [pair for reply in replies for pair in _as_pairs(reply)]
        return {lane.decode(): float(value) for lane, value in pairs}

    async def list_lanes(
        self, tenant: str | None, *, cursor: str | None = None, limit: int = 100
    ) -> RecordPage[LaneRecord]:
        partitions = self._partitions_of(tenant)
        pages = await _gather(
            self._read_lanes(partition, tenant, cursor or "", limit + 1) for partition in partitions
        )
        lanes = sorted((lane for page in pages for lane, _ in page), key=lambda lane: lane.name)
        records = [lane.to_record() for lane in lanes[:limit]]
        return RecordPage(records, records[-1].name if len(lanes) > limit and records else None)

    def _partitions_of(self, tenant: str | None) -> Sequence[int]:
        return range(self._partition_count) if tenant is None else [self.partition_of(tenant)]

    async def _read_lanes(
        self,
        partition: int,
        tenant: str | None,
        after: str,
        limit: int,
        *,
        with_due_times: bool = False,
    ) -> list[tuple[StoredLane, int]]:
        """Return lanes after a name, with the due time of their first pending task (0: none)."""
        prefix = b"" if tenant is None else f"{tenant}/".encode()
        position = after.encode()
        first = b"(" + position if position >= prefix else b"[" + prefix
        last = b"+" if tenant is None else b"(" + prefix + b"\xff"
        reply = await self._connection.run(
            partition, "lanes", to_raw(first), to_raw(last), limit, None, with_due_times
        )
        return [(decode_lane(packed), due) for packed, due, _ in reply]

    async def get_lane(self, name: str) -> LaneRecord | None:
        reply = await self._run_on_lane(name, "lanes", "", "", 1, name)
        return decode_lane(reply[0][0]).to_record() if reply else None

    async def record_breaker_change(self, lane: str, change: BreakerChangeRecord) -> None:
        values = (change.at, change.before, change.after, change.reason)
        arguments = ("change", lane, values, MAX_BREAKER_CHANGES)
        await self._run_on_lane(lane, "lane_activity", *arguments)

    async def record_latencies(self, counts_by_lane: dict[str, dict[str, int]]) -> None:
        batches: dict[int, list[tuple[str, list[str | int]]]] = defaultdict(list)
        for lane, counts in counts_by_lane.items():
            values = [value for pair in counts.items() for value in pair]
            batches[self._partition_of_lane(lane)].append((lane, values))
        window = (LATENCY_WINDOW_MS, MAX_LATENCY_WINDOWS)
        await _gather(
            self._connection.run(partition, "lane_activity", "latencies", batch, *window)
            for partition, batch in batches.items()
        )

    async def read_lane_activity(self, lanes: Sequence[str]) -> dict[str, LaneActivity]:
        batches: dict[int, list[str]] = defaultdict(list)
        for lane in lanes:
            batches[self._partition_of_lane(lane)].append(lane)
        replies = await _gather(
            self._connection.run(partition, "lane_activity", "read", batch)
            for partition, batch in batches.items()
        )
        pairs = [pair for reply in replies for pair in _as_pairs(reply)]
        return {lane.decode(): decode_activity(packed) for lane, packed in pairs}

    # --- tasks ------------------------------------------------------------------------------------

    async def get_task(self, tenant: str, task_id: str) -> Task | None:
        packed_id = pack_id(task_id)
        if packed_id is None:
            return None
        reply = await self._run(tenant, "get_tasks", tenant, [packed_id])
        return decode_task(reply)[1] if reply else None

    def _scan(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        position: int | None = None,
        *,
        oldest_first: bool = False,
    ) -> TaskScan:
        return TaskScan(
            self._connection,
            self.partition_of(tenant),
            tenant,
            task_filter,
            position=position,
            oldest_first=oldest_first,
        )

    async def list_tasks(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
        oldest_first: bool = False,
    ) -> RecordPage[Task]:
        position = None if cursor is None else parse_cursor(cursor)
        scan = self._scan(tenant, task_filter, position, oldest_first=oldest_first)
        return await scan.list_tasks(limit)

    async def count_tasks(self, tenant: str, task_filter: StoredTaskFilter) -> int:
        return await self._scan(tenant, task_filter).count()

    async def last_attempts(self, tenant: str, task_ids: Sequence[str]) -> dict[str, AttemptRecord]:
        packed_ids = pack_ids(task_ids)
        reply = await self._run(
            tenant, "attempts", tenant, packed_ids, -1, len(packed_ids), MAX_PAGE_BYTES * 16
        )
        return {
            unpack_id(packed_id): decode_attempt(attempts[0])
            for packed_id, *attempts in reply
            if attempts
        }

    async def list_attempts(
        self, tenant: str, task_id: str, *, after: int = 0, limit: int = 100
    ) -> list[AttemptRecord]:
        arguments = (tenant, pack_ids([task_id]), after, limit, MAX_PAGE_BYTES)
        reply = await self._run(tenant, "attempts", *arguments)
        return [decode_attempt(attempt) for _, *attempts in reply for attempt in attempts]

    async def list_attempts_of_tasks(
        self,
        tenant: str,
        task_filter: StoredTaskFilter,
        *,
        cursor: str | None = None,
        limit: int = 100,
    ) -> RecordPage[tuple[str, AttemptRecord]]:
        # A cursor is the number of a task and the number of its last attempt in one integer.
        last = None if cursor is None else parse_cursor(cursor)
        position = None if last is None else (last >> _ATTEMPT_NUMBER_BITS) + 1
        page = await self._scan(tenant, task_filter, position).list_ids(limit)
        numbers = {task_id: number for number, task_id in page.items}
        first_index = 0
        if last is not None and page.items and page.items[0][0] == last >> _ATTEMPT_NUMBER_BITS:
            first_index = last & MAX_ATTEMPT_NUMBER
        items: list[tuple[str, AttemptRecord]] = []
        for index, task_ids in ((first_index, list(numbers)[:1]), (0, list(numbers)[1:])):
            if task_ids and len(items) < limit:
                arguments = (tenant, pack_ids(task_ids), index, limit - len(items))
                reply = await self._run(tenant, "attempts", *arguments, MAX_PAGE_BYTES * 16)
                items += [
                    (unpack_id(packed_id), decode_attempt(attempt))
                    for packed_id, *attempts in reply
                    for attempt in attempts
                ]
        if len(items) == limit:
            task_id, attempt = items[-1]
            return RecordPage(items, str(numbers[task_id] << _ATTEMPT_NUMBER_BITS | attempt.number))
        if page.cursor is None:
            return RecordPage(items, None)
        # Continue before the first attempt of the next older task.
        return RecordPage(items, str(int(page.cursor) - 1 << _ATTEMPT_NUMBER_BITS))

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        packed_id = pack_id(task_id)
        if packed_id is None:
            return None
        status = await self._run(tenant, "change_task", "cancel", tenant, packed_id)
        return None if status is None else CancelStatus(status.decode())

    async def retry_now(
        self, tenant: str, task_id: str, *, quota: int | None = None
    ) -> RetryNowStatus | None:
        packed_id = pack_id(task_id)
        if packed_id is None:
            return None
        status = await self._run(tenant, "change_task", "retry", tenant, packed_id, quota)
        return None if status is None else RetryNowStatus(status.decode())

    # --- dead letters -----------------------------------------------------------------------------

    async def start_replay(self, replay: ReplayRecord) -> ReplayRecord:
        values = [encode(replay)]
        arguments = ("start", replay.tenant, replay.id)
        reply = await self._run(replay.tenant, "change_replay", *arguments, values=values)
        return decode_replay(reply)

    async def get_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        reply = await self._run(tenant, "change_replay", "get", tenant, replay_id)
        return None if reply is None else decode_replay(reply)

    async def cancel_replay(self, tenant: str, replay_id: str) -> ReplayRecord | None:
        reply = await self._run(tenant, "change_replay", "cancel", tenant, replay_id)
        return None if reply is None else decode_replay(reply)

    async def list_replays(self, *, running: bool, tenant: str | None = None) -> list[ReplayRecord]:
        arguments = (running, tenant, _MAX_LISTED_REPLAYS)
        partitions = self._partitions_of(tenant)
        replies = await self._run_available(partitions, "list_replays", *arguments)
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
        for partition in range(self._partition_count) if known is None else [known]:
            reply = await self._connection.run(partition, "replay_step", *arguments)
            if reply is not None:
                replay = decode_replay(reply)
                # Only replays that need another step are cached, so that the cache stays small.
                self._replay_partitions[replay_id] = partition
                if not replay.needs_steps:
                    del self._replay_partitions[replay_id]
                return replay
        self._replay_partitions.pop(replay_id, None)
        return None

    async def delete_dead_letters(self, tenant: str, task_ids: Sequence[str]) -> int:
        count: int = await self._run(tenant, "delete_dead_letters", tenant, pack_ids(task_ids))
        return count

    # --- policies, API keys, signing secrets ------------------------------------------------------

    async def put_policy(
        self, policy: PolicyVersion, *, replace: bool, quota: int | None = None
    ) -> tuple[PolicyWriteStatus, PolicyVersion]:
        arguments = ("put", policy.tenant, policy.id, replace, quota)
        status, *fields = await self._run(
            policy.tenant, "policies", *arguments, values=[policy.document]
        )
        stored = to_policies(policy.tenant, fields) or [policy]
        return PolicyWriteStatus(status.decode()), stored[0]

    async def get_policy(
        self, tenant: str, policy_id: str, version: int | None = None
    ) -> PolicyVersion | None:
        _, *fields = await self._run(tenant, "policies", "get", tenant, policy_id, version)
        return to_policies(tenant, fields)[0] if fields else None

    async def list_policies(
        self, tenant: str, *, cursor: str | None = None, limit: int = 100
    ) -> RecordPage[PolicyVersion]:
        arguments = ("list", tenant, cursor or "", limit, MAX_PAGE_BYTES)
        status, *fields = await self._run(tenant, "policies", *arguments)
        policies = to_policies(tenant, fields)
        return RecordPage(policies, policies[-1].id if status == b"more" and policies else None)

    async def delete_policy(self, tenant: str, policy_id: str) -> PolicyWriteStatus:
        [status] = await self._run(tenant, "policies", "delete", tenant, policy_id)
        return PolicyWriteStatus(status.decode())

    async def put_api_key(self, key: ApiKeyRecord) -> None:
        arguments = ("put", key.id, to_raw(key.digest))
        await self._connection.run(GLOBAL_PARTITION, "api_keys", *arguments, values=[encode(key)])

    async def find_api_key(self, digest: bytes) -> ApiKeyRecord | None:
        reply = await self._connection.run(GLOBAL_PARTITION, "api_keys", "find", to_raw(digest))
        return None if reply is None else to_api_key(*reply)

    async def list_api_keys(self, tenant: str | None = None) -> list[ApiKeyRecord]:
        keys: list[ApiKeyRecord] = []
        after = ""
        while len(keys) < _MAX_LISTED_API_KEYS:
            arguments = ("list", after, _LANE_PAGE_SIZE)
            reply = await self._connection.run(GLOBAL_PARTITION, "api_keys", *arguments)
            page = [to_api_key(*reply[i : i + 3]) for i in range(0, len(reply), 3)]
            keys += [key for key in page if tenant in {None, key.tenant}]
            if len(page) < _LANE_PAGE_SIZE:
                break
            after = page[-1].id
        return keys[:_MAX_LISTED_API_KEYS]

    async def revoke_api_key(self, key_id: str) -> bool:
        return bool(await self._connection.run(GLOBAL_PARTITION, "api_keys", "revoke", key_id))

    async def put_signing_secret(
        self, secret: SigningSecretRecord, *, expire_previous_ms: int
    ) -> SigningSecretRecord | None:
        reply = await self._run(
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
        reply = await self._run(tenant, "signing_secrets", "list", tenant)
        secrets = [to_signing_secret(*reply[i : i + 3]) for i in range(0, len(reply), 3)]
        return sorted(secrets, key=lambda secret: secret.id, reverse=True)

    async def delete_signing_secret(self, tenant: str, secret_id: str) -> bool:
        return bool(await self._run(tenant, "signing_secrets", "delete", tenant, secret_id))

    # --- transfer to another store ----------------------------------------------------------------

    async def export_records(
        self, kind: RecordKind, *, cursor: str | None = None, limit: int = 1000
    ) -> RecordPage[Any]:
        return await self._transfer().export_records(kind, cursor, limit)

    async def import_records(self, kind: RecordKind, records: Sequence[Any]) -> None:
        await self._transfer().import_records(kind, records)

    def _transfer(self) -> RecordTransfer:
        return RecordTransfer(self._connection, self._partition_count)

    async def get_transfer(self) -> TransferMark | None:
        reply = await self._connection.run(GLOBAL_PARTITION, "transfer", "get")
        return None if reply is None else decode_transfer_mark(reply)

    async def set_transfer(self, mark: TransferMark | None) -> None:
        values = [] if mark is None else [encode(mark)]
        await self._connection.run(GLOBAL_PARTITION, "transfer", "set", values=values)

    async def is_in_use(self) -> bool:
        return bool(await self.list_workers())

    # --- processes --------------------------------------------------------------------------------

    async def record_worker(self, worker: WorkerRecord) -> None:
        arguments = ("record", worker.name, worker.role != "api")
        values = [encode(worker)]
        await self._connection.run(GLOBAL_PARTITION, "workers", *arguments, values=values)
        if self._is_leader:
            await self.try_lead()

    async def list_workers(self) -> list[WorkerRecord]:
        arguments = ("list", WORKER_EXPIRY_MS)
        reply = await self._connection.run(GLOBAL_PARTITION, "workers", *arguments)
        workers = [
            copy_with(decode_worker(packed), seen_at=seen_at)
            for packed, seen_at in _as_pairs(reply)
        ]
        return sorted(workers, key=lambda worker: worker.name)[:MAX_LISTED_WORKERS]

    async def remove_worker(self, name: str) -> None:
        await self._connection.run(GLOBAL_PARTITION, "workers", "remove", name)

    def listen(self, callback: Callable[[], None]) -> None:
        partitions = range(self._partition_count)
        channels = [f"{self._connection.partition_key(number)}:wake" for number in partitions]
        self._listener = WakeupListener(self._connection, channels, callback)
        self._listener.start()

    # --- counters, leader, retention --------------------------------------------------------------

    async def try_lead(self) -> bool:
        arguments = ("lead", "start", _LEADER_LEASE_MS)
        self._is_leader = bool(await self._connection.run(GLOBAL_PARTITION, *arguments))
        return self._is_leader

    async def counters(self, tenant: str | None = None) -> Counters:
        partitions = self._partitions_of(tenant)
        replies = await _gather(
            self._connection.run(partition, "counters", tenant) for partition in partitions
        )
        now = max(reply[0] for reply in replies)
        sums = [sum(column) for column in list(zip(*replies, strict=True))[1:]]
        lanes = [lane async for lane in self._all_lanes(partitions, tenant)]
        due_lanes = (
            DueLane(lane.name, due, lane.to_record().waiting_for)
            for lane, due in lanes
            if 0 < due <= now
        )
        used = [lane for lane, _ in lanes if lane.pending or lane.in_flight or lane.exhausted]
        used.sort(key=lambda lane: (-lane.pending, lane.name))
        return Counters(
            task_counts={status: sums[status] for status in Status},
            superseded_count=sums[len(Status)],
            due_lanes=select_due_lanes(due_lanes),
            busiest_lanes=[lane.to_record() for lane in used[:MAX_BUSIEST_LANES]],
        )

    async def _all_lanes(
        self, partitions: Iterable[int], tenant: str | None
    ) -> AsyncIterator[tuple[StoredLane, int]]:
        """Yield all lanes with their due times. Other scripts run between two pages."""
        for partition in partitions:
            after = ""
            while True:
                page = await self._read_lanes(
                    partition, tenant, after, _LANE_PAGE_SIZE, with_due_times=True
                )
                for entry in page:
                    yield entry
                if len(page) < _LANE_PAGE_SIZE:
                    break
                after = page[-1][0].name

    async def attempts_per_minute(
        self, tenant: str | None, *, since: int
    ) -> list[AttemptsOfMinute]:
        replies = await _gather(
            self._connection.run(partition, "attempts_per_minute", tenant, since)
            for partition in self._partitions_of(tenant)
        )
        counts: dict[int, Counter[str]] = defaultdict(Counter)
        for reply in replies:
            for field, count in _as_pairs(reply):
                minute, _, outcome = field.decode().partition(":")
                counts[int(minute)][outcome] += int(count)
        return [AttemptsOfMinute(minute, dict(counts[minute])) for minute in sorted(counts)]

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
        await self._connection.run(GLOBAL_PARTITION, "series", "record", packed)

    async def list_series(self, step_ms: int, *, since: int) -> list[SeriesPoint]:
        arguments = ("list", step_ms, since, SERIES_RETENTION_MS[step_ms])
        reply = await self._connection.run(GLOBAL_PARTITION, "series", *arguments)
        return [
            SeriesPoint(step_ms, at, {name.decode(): int(count) for name, count in _as_pairs(sums)})
            for at, sums in _as_pairs(reply)
        ]

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        removed, has_more = 0, False
        error: StoreUnavailable | None = None
        # Each sweep starts with another partition: if the first one always had more expired tasks
        # than the limit, those of the others would never be removed.
        start, count = self._first_swept_partition, self._partition_count
        self._first_swept_partition = (start + 1) % count
        partitions = [*range(start, count), *range(start)]
        while partitions:
            # One after another, with the rest of the limit. After a failure all at the same time:
            # a node that hangs would delay each of its partitions by the timeout of a call.
            batch = partitions if self._has_sweep_failed else partitions[:1]
            partitions = partitions[len(batch) :]
            shares = divide(limit - removed, batch, set(batch))
            calls = [
                self._sweep_partition(partition, retention, share)
                for partition, share in zip(batch, shares, strict=True)
            ]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(result, StoreUnavailable):
                    error, self._has_sweep_failed = (
                        result,
                        True,
                    )  # raised after the other partitions
                elif isinstance(result, BaseException):
                    raise result
                else:
                    removed += result.removed_task_count
                    has_more = has_more or result.has_more
        if error is not None:
            raise error
        self._has_sweep_failed = False
        return SweepResult(removed, has_more)

    async def _sweep_partition(
        self, partition: int, retention: Retention, limit: int
    ) -> SweepResult:
        meta = (SCHEMA_VERSION, COMPATIBLE_VERSION, self._partition_count)
        removed, has_more, missing_keys = await self._connection.run(
            partition,
            "sweep",
            retention.succeeded_ms,
            retention.exhausted_ms,
            POLICY_RETENTION_MS,
            WORKER_EXPIRY_MS,
            limit,
            meta if partition == GLOBAL_PARTITION else None,
        )
        for key, consequence in _as_pairs(missing_keys):
            _logger.error(
                "Redis key %s is missing, evicted or deleted by mistake: %s. %s",
                key.decode(errors="backslashreplace"),
                consequence.decode(errors="backslashreplace"),
                "Set maxmemory-policy to noeviction",
            )
        return SweepResult(removed, bool(has_more))

    async def list_orphaned_bodies(self, limit: int) -> list[str]:
        partitions = range(self._partition_count)
        replies = await self._run_available(partitions, "orphans", "list", limit)
        return [ref.decode() for reply in replies.values() for ref in reply][:limit]

    async def forget_orphaned_bodies(self, refs: Sequence[str]) -> None:
        if refs:
            await self._run_all("orphans", "forget", list(refs))


async def _gather(calls: Iterable[Any]) -> list[Any]:
    """Await calls at the same time. If one fails, raise its error after all have ended."""
    pending = list(calls)
    if len(pending) == 1:  # without the cost of an asyncio task
        return [await pending[0]]
    results = await asyncio.gather(*pending, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _raise_loss(replies: Iterable[Any]) -> None:
    """Raise the first `StoreLost` of the replies."""
    for reply in replies:
        if isinstance(reply, StoreLost):
            raise reply


def _select_available(replies: dict[int, Any]) -> dict[int, Any]:
    """Return the replies that are no errors; raise an error if all are."""
    available = {
        partition: reply
        for partition, reply in replies.items()
        if not isinstance(reply, StoreUnavailable)
    }
    if not available:
        raise next(iter(replies.values()))
    return available


def _sum_versions(replies: dict[int, Any], known: ConfiguredLimits) -> tuple[int, int]:
    """Return the version of the limits, and the number of processes, from all partitions."""
    process_count = sum(reply[1] for reply in replies.values())
    if GLOBAL_PARTITION not in replies:
        process_count = known.process_count
    return sum(reply[0] for reply in replies.values()), max(1, process_count)


def _as_pairs(values: Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return zip(values[::2], values[1::2], strict=True)


def _pack_terms(terms: LeaseTerms) -> tuple[str, int, int]:
    return terms.worker, terms.length_ms, terms.horizon_ms


def _pack_result(result: TaskResult) -> tuple[Any, ...]:
    """Return a result as an argument of a script, see `finish.lua`."""
    task, attempt, callback = result.task, result.attempt, result.callback_task
    lease = result.renewed_lease
    return (
        pack_id(task.id) or _MISSING_ID,
        task.tenant,
        task.version,
        None if attempt is None else attempt.outcome,
        None if attempt is None else to_raw(encode(attempt)),
        int(result.status),
        result.reason,
        result.next_attempt_at,
        None if lease is None else _pack_terms(lease),
        result.previous_delay,
        result.backoff_offset,
        result.last_outcome_kind,
        None if callback is None else task_arguments(NewTask(callback)),
        None if callback is None else to_raw(encode_fixed(callback)),
    )


def _to_add_result(
    new: NewTask, result: list[Any], now: int, terms: LeaseTerms | None
) -> AddResult:
    """Convert the result of `add.lua` for one task."""
    status, *values = result
    if status == b"added":
        due, lease_end = values
        worker = terms.worker if terms is not None and lease_end else None
        stored = new.task.as_stored(now, due, wake_at=lease_end or None, worker=worker)
        return AddResult(AddStatus.ADDED, stored, worker is not None)
    if status == b"existing":
        _, stored = decode_task(values)
        is_same = stored.fingerprint == new.task.fingerprint
        return AddResult(AddStatus.EXISTING if is_same else AddStatus.CONFLICT, stored)
    if status == b"same_id":
        rule = f"must be new: {new.task.id} is the id of a task with another idempotency key"
        raise ConfigurationError("id", rule)
    return AddResult(AddStatus(status.decode()), copy_with(new.task))
