"""`RedisTaskStore`: implements `tarry.service.store.Store` with Redis or Valkey.

An operation is a function of the partitions. Modules have the functions by subject. The class names
all of them, and has those that need state of their own.
"""

# ruff: noqa: D102 - the methods are documented in `tarry.service.store.Store`

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from tarry.service.store import PROCESS_KIND
from tarry.service.store_url import redact_store_url
from tarry.service.stores.redis import (
    lanes,
    policies,
    queries,
    records,
    replays,
    retention,
    transfer,
    transitions,
)
from tarry.service.stores.redis.claim import ClaimMerger
from tarry.service.stores.redis.connection import RedisConnection
from tarry.service.stores.redis.leader import LeaderLease
from tarry.service.stores.redis.listener import WakeupListener
from tarry.service.stores.redis.opening import StoreOpener
from tarry.service.stores.redis.partitions import Partitions, raise_loss, select_available
from tarry.service.stores.write_queues import WriteQueues

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from tarry.service.model import Task
    from tarry.service.store import ClaimResult, LeaseTerms, RecordChange, Retention, SweepResult


class RedisTaskStore(Partitions):
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
        super().__init__(RedisConnection(url, clock))
        self._opener = StoreOpener(
            self,
            redact_store_url(url),
            must_exist=must_exist,
            strict_durability=strict_durability,
        )
        self._claims = ClaimMerger(self)
        self._sweeper = retention.Sweeper(self)
        self._leader = LeaderLease(self)
        self._listener: WakeupListener | None = None
        self._writes = WriteQueues(
            self.partition_of,
            add=partial(transitions.add, self),
            finish=partial(transitions.finish, self),
            release=partial(transitions.release, self),
        )
        self.add: Final = self._writes.add
        self.finish: Final = self._writes.finish
        self.release: Final = self._writes.release

    async def open(self) -> None:
        """Connect, and create the store if it does not exist."""
        self.connection.open()
        try:
            await self._opener.open()
        except BaseException:
            await self.connection.close()
            raise
        self._claims = ClaimMerger(self)

    async def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        await self._writes.close()
        await self._leader.release()
        await self.connection.close()

    async def ping(self, partition: int | None = None) -> int:
        if partition is not None:
            time: int = await self.run(partition, "ping")
            return time
        replies = await self.try_on(range(self.partition_count), "ping")
        raise_loss(replies.values())
        times: dict[int, int] = select_available(replies)
        return max(times.values())

    def listen(self, callback: Callable[[], None]) -> None:
        self._listener = WakeupListener(self, callback)
        self._listener.start()

    async def try_lead(self) -> bool:
        return await self._leader.try_lead()

    async def has_other_processes(self) -> bool | None:
        return None

    # --- tasks ------------------------------------------------------------------------------------

    release_unknown_leases: Final = transitions.release_unknown_leases
    cancel: Final = transitions.cancel
    retry_now: Final = transitions.retry_now
    delete_dead_letters: Final = transitions.delete_dead_letters

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

    def record_start(self, slot: int, task: Task) -> None:
        """Do nothing: the leases of a dead process end when they expire."""

    get_task: Final = queries.get_task
    list_tasks: Final = queries.list_tasks
    count_tasks: Final = queries.count_tasks
    last_attempts: Final = queries.last_attempts
    list_attempts: Final = queries.list_attempts
    list_attempts_of_tasks: Final = queries.list_attempts_of_tasks
    counters: Final = queries.counters
    attempts_per_minute: Final = queries.attempts_per_minute

    # --- lanes ------------------------------------------------------------------------------------

    park: Final = lanes.park
    unpark: Final = lanes.unpark
    pause: Final = lanes.pause
    resume: Final = lanes.resume
    set_limits: Final = lanes.set_limits
    load_limits: Final = lanes.load_limits
    record_lane_limits: Final = lanes.record_lane_limits
    list_lane_limits: Final = lanes.list_lane_limits
    add_to_budgets: Final = lanes.add_to_budgets
    get_lane: Final = lanes.get_lane
    list_lanes: Final = lanes.list_lanes

    # --- policies and replays ---------------------------------------------------------------------

    put_policy: Final = policies.put_policy
    get_policy: Final = policies.get_policy
    list_policies: Final = policies.list_policies
    delete_policy: Final = policies.delete_policy
    start_replay: Final = replays.start_replay
    get_replay: Final = replays.get_replay
    list_replays: Final = replays.list_replays
    replay_step: Final = replays.replay_step
    cancel_replay: Final = replays.cancel_replay

    # --- records ----------------------------------------------------------------------------------

    read_records: Final = records.read_records
    list_records: Final = records.list_records

    async def write_records(self, changes: Sequence[RecordChange]) -> bool:
        is_written = await records.write_records(self, changes)
        if any(change.kind == PROCESS_KIND for change in changes):
            await self._leader.renew()
        return is_written

    # --- retention and transfer -------------------------------------------------------------------

    async def sweep(self, retention: Retention, limit: int) -> SweepResult:
        return await self._sweeper.sweep(retention, limit)

    list_orphaned_bodies: Final = retention.list_orphaned_bodies
    forget_orphaned_bodies: Final = retention.forget_orphaned_bodies
    export_records: Final = transfer.export_records
    import_records: Final = transfer.import_records
