"""Maintenance: removes expired tasks and bodies without a task, and advances replays.

It also loads the limits that operators have set, stores the rates, latencies and retry budgets of
lanes (a lane is the queue of one downstream), and removes idle lanes from memory. It works in small
steps, so that the store is never blocked for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.engine.context import ADDING, BODY_STORE, STORE
from tarry.service.payloads import BodyStoreUnavailable
from tarry.service.records.lane_activity import record_latencies
from tarry.service.task_search import search_of_replay

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator

    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.rate_limits import TenantRateLimiter
    from tarry.service.engine.scheduler import Scheduler
    from tarry.service.model import ReplayRecord

_logger = logging.getLogger("tarry.service")
_MAX_TASKS_PER_STEP = 200
_REPLAY_STEPS_PER_SECOND = 10
_MAX_BODIES_PER_STEP = 100
_UNREFERENCED_BODY_SEARCH_INTERVAL_MS = 600_000  # rare, because it lists all stored bodies
_IDLE_LANE_CHECK_INTERVAL_MS = 300_000  # lanes idle between two checks are removed
_STORE_LIMITS_INTERVAL_MS = 5_000
_STORE_LATENCIES_INTERVAL_MS = 30_000
_MAX_BUDGETS_PER_CALL = 500
_MAX_LATENCIES_PER_CALL = 100  # 4 ms of the writer of SQLite
_BUDGET_EXCHANGE_INTERVAL_MS = 900  # below `_IDLE_PAUSE_S`: after each pause, an exchange is due
_IDLE_PAUSE_S = 1.0  # after a step that left no work
_BUSY_PAUSE_S = 0.02  # after a step that left more work to do


class Maintenance:
    """Runs the periodic work of one process."""

    def __init__(
        self, context: EngineContext, scheduler: Scheduler, rate_limiter: TenantRateLimiter | None
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._rate_limiter = rate_limiter
        self._next_budget_exchange_at = 0
        self._next_body_search_at = self._next_idle_lane_check_at = self._next_store_limits_at = 0
        self._next_store_latencies_at = 0

    async def run_once(self) -> float:
        """Do a small step of each kind of maintenance; return the seconds to pause after it."""
        context = self._context
        await self._scheduler.load_limits()
        has_more = await self._sweep()
        next_replay_at = await self._step_replays()
        now = context.clock.now_ms()
        if now >= self._next_budget_exchange_at:
            self._next_budget_exchange_at = now + _BUDGET_EXCHANGE_INTERVAL_MS
            await self.exchange_budgets()
        if now >= self._next_store_limits_at:
            self._next_store_limits_at = now + _STORE_LIMITS_INTERVAL_MS
            await self.store_limits()
        if now >= self._next_store_latencies_at:
            self._next_store_latencies_at = now + _STORE_LATENCIES_INTERVAL_MS
            await self.store_latencies()
        if now >= self._next_idle_lane_check_at:
            self._next_idle_lane_check_at = now + _IDLE_LANE_CHECK_INTERVAL_MS
            context.lanes.remove_idle()
        has_deleted_bodies = False
        try:
            has_deleted_bodies = await self._delete_bodies()
        except BodyStoreUnavailable as error:
            context.health.mark_failing(BODY_STORE, error)
        if has_deleted_bodies or has_more:
            return _BUSY_PAUSE_S
        if next_replay_at is None:
            return _IDLE_PAUSE_S
        seconds_until_replay = (next_replay_at - context.clock.now_ms()) / 1000
        return min(_IDLE_PAUSE_S, max(_BUSY_PAUSE_S, seconds_until_replay))

    async def _sweep(self) -> bool:
        """Remove expired tasks; return whether there are more."""
        context = self._context
        try:
            result = await context.store.sweep(context.retention, _MAX_TASKS_PER_STEP)
        except StoreUnavailable as error:
            self._continue_without(error)
            return False
        return result.has_more

    def _continue_without(self, error: StoreUnavailable) -> None:
        """Report an error of one of several partitions; raise any other error."""
        if error.partition is None:
            raise error
        self._context.health.mark_failing(STORE, error)

    async def _write_by_partition(
        self, lanes: Iterable[str], write: Callable[[list[str]], Awaitable[None]]
    ) -> None:
        """Call `write` with the lanes of each partition, at the same time.

        One after another, the partitions of a node that hangs would each take until a timeout.
        Partitions that are known to fail are skipped, so that they do not hold up a stop.
        """
        context = self._context
        groups: dict[int, list[str]] = defaultdict(list)
        for lane in lanes:
            groups[context.store.partition_of(lane.partition("/")[0])].append(lane)

        async def write_group(lanes_of_partition: list[str]) -> None:
            try:
                await write(lanes_of_partition)
            except StoreUnavailable as error:
                self._continue_without(error)

        if context.store.partition_count == 1:  # without the cost of an asyncio task
            for names in groups.values():
                await write_group(names)
            return
        writes = [
            write_group(names)
            for partition, names in groups.items()
            if not context.health.is_partition_failing(partition)
        ]
        for error in await asyncio.gather(*writes, return_exceptions=True):
            if error is not None:
                raise error

    async def _delete_bodies(self) -> bool:
        """Delete a few bodies whose task does not exist; return whether there were any."""
        context, store = self._context, self._context.store
        if BODY_STORE in context.health.failing:
            # Until a check succeeds, no deletion is tried: each could take half a minute, during
            # which replays would stop.
            await context.body_store_check.run_if_due()
            return False
        # The store lists orphaned bodies (their task was removed). Unreferenced bodies (their task
        # was never added) are only found by a search of the body store.
        orphaned_bodies = await store.list_orphaned_bodies(_MAX_BODIES_PER_STEP)
        if orphaned_bodies:
            await context.delete_bodies(orphaned_bodies)
            await store.forget_orphaned_bodies(orphaned_bodies)
        now = context.clock.now_ms()
        if now >= self._next_body_search_at:
            self._next_body_search_at = now + _UNREFERENCED_BODY_SEARCH_INTERVAL_MS
            await context.delete_unreferenced_bodies()
        return bool(orphaned_bodies)

    async def store_limits(self) -> None:
        """Store the limits of lanes whose rate has changed, for use after a restart."""
        lanes = self._context.lanes
        by_lane = {each.lane: each for each in lanes.list_changed_limits()}

        async def store(names: list[str]) -> None:
            changed = [by_lane[name] for name in names]
            await self._context.store.record_lane_limits(changed)
            lanes.mark_stored(changed)

        await self._write_by_partition(by_lane, store)

    async def store_latencies(self) -> None:
        """Add the durations of attempts to the latencies of their lanes in the store.

        If the store fails, they may have been added, so they are not sent again.
        """
        latencies = self._context.reporter.metrics.take_latencies()

        async def store(lanes: list[str]) -> None:
            for names in _split(lanes, _MAX_LATENCIES_PER_CALL):
                chunk = {lane: latencies[lane] for lane in names}
                await record_latencies(self._context.store, chunk)

        await self._write_by_partition(latencies, store)

    async def exchange_budgets(self) -> None:
        """Add the changes of retry budgets to the store, and adopt the values of the store.

        If the store fails, the changes may have been stored, so they are not sent again.
        """
        context = self._context
        outdated = dict(context.lanes.list_outdated_budgets())

        async def exchange(lanes: list[str]) -> None:
            for names in _split(lanes, _MAX_BUDGETS_PER_CALL):
                now_s = context.clock.now_s()
                changes = {lane: outdated[lane].take_change(now_s) for lane in names}
                values = await context.store.add_to_budgets(changes)
                for lane, value in values.items():
                    outdated[lane].adopt(value, context.limit_table.stored.process_count)

        await self._write_by_partition(outdated, exchange)

    async def _step_replays(self) -> int | None:
        """Do one step of each due replay; return when the next step is due (None: none runs).

        Only processes that accept tasks make steps, because these processes share the rate at which
        a tenant may add and replay tasks.
        """
        store = self._context.store
        if not self._context.accepts_tasks:
            return None
        next_times: list[int] = []
        for replay in await store.list_replays(running=True):
            record: ReplayRecord | None = replay  # after the step, if one is due
            if replay.next_at <= self._context.clock.now_ms():
                try:
                    record = await self._replay_step(replay)
                except StoreUnavailable as error:
                    # To replay tasks is to add them: a store with full memory refuses only this.
                    self._context.health.mark_failing(ADDING, error)
                    continue
                except Exception:  # other replays continue
                    _logger.exception("replay step failed, replay=%s", replay.id)
                    continue
            if record is not None:
                if record.replayed > replay.replayed:
                    self._scheduler.wake()
                if record.needs_steps:
                    next_times.append(record.next_at)
        return min(next_times, default=None)

    async def _replay_step(self, replay: ReplayRecord) -> ReplayRecord | None:
        """Do one step of a replay, as far as the limits of its tenant allow."""
        store, limiter = self._context.store, self._rate_limiter
        if replay.status != "running":  # the step only counts finished tasks
            return await store.replay_step(replay.id, replay.cursor, [], None)
        limit = replay_step_size(replay.rate)
        if limiter is not None:
            limit = limiter.take_up_to(replay.tenant, limit)
            if not limit:
                pause_ms = 1000 // _REPLAY_STEPS_PER_SECOND
                next_at = self._context.clock.now_ms() + pause_ms
                return msgspec.structs.replace(replay, next_at=next_at)
        replayed_count = 0
        try:
            page = await self._context.task_finder.find_ids(
                replay.tenant, search_of_replay(replay), cursor=replay.cursor, limit=limit
            )
            quota = self._context.limits.max_tenant_unfinished_tasks
            record = await store.replay_step(
                replay.id, replay.cursor, page.items, page.cursor, quota=quota
            )
            if record is not None:
                replayed_count = record.replayed - replay.replayed
            return record
        finally:
            if limiter is not None:
                limiter.refund(replay.tenant, limit - replayed_count)

    async def run(self) -> None:
        """Do maintenance until cancelled."""
        while True:
            pause = _IDLE_PAUSE_S
            try:
                pause = await self.run_once()
            except StoreUnavailable as error:
                self._context.health.mark_failing(STORE, error)
            except Exception:
                _logger.exception("maintenance failed")
            await asyncio.sleep(pause)


def _split(names: list[str], size: int) -> Iterator[list[str]]:
    """Yield the names in lists of at most this size."""
    return (names[start : start + size] for start in range(0, len(names), size))


def replay_step_size(rate: float) -> int:
    """Return how many tasks one step replays; `rate` is in tasks per second, 0 means no limit."""
    if not rate:
        return _MAX_TASKS_PER_STEP
    return min(_MAX_TASKS_PER_STEP, ceil(rate / _REPLAY_STEPS_PER_SECOND))
