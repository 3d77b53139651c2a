"""The scheduler: claims as many tasks from the store as the worker has capacity for.

Tasks are claimed up to one *horizon* (`LeaseTerms.horizon_ms`) before they are due.

If the reply of a call that leases tasks is lost, the store may have leased tasks to this process
of which the process does not know: *unknown leases*. They are released before the next claim.
"""

from __future__ import annotations

import asyncio
import logging
from math import ceil
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tarry.core.breaker import BreakerState
from tarry.errors import StoreUnavailable
from tarry.service.engine.claim_turns import TURN_MS
from tarry.service.engine.context import STORE
from tarry.service.engine.lanes import MAX_LANES
from tarry.service.shutdown import cancel_and_wait

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.engine.claim_wakeup import ClaimWakeup
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.worker import Worker
    from tarry.service.store import ClaimResult

_logger = logging.getLogger("tarry.service")
_RELEASE_INTERVAL_MS = 5_000  # between two searches for leases that expire soon
_SURPLUS_INTERVAL_MS = 1_000  # between two searches for leases that others need
_MAX_RECONCILIATION_WAIT_S = 0.25
"""How long a claim waits until the unknown leases of partitions are released. A partition that
works needs a few milliseconds; the others are skipped."""
_RECONCILIATION_PAUSE_S = 0.5
"""Pause between two tries to release the unknown leases of a partition that fails."""
_NO_VERSION = -1
_FREE_LEASES_PER_CLAIMED_TASK = 4
"""A claim leases at most a quarter of the free leases, so that it exceeds the limit of a tenant's
leases, which the store does not know, only by a few."""
_MIN_PAUSE_S = TURN_MS / 1000
"""Pause between two claims, unless the first has left due tasks unclaimed. It is as long as a turn,
so that a single process claims as often as several processes together."""


class Scheduler:
    """Claims tasks for a worker, until `stop`; `wakeup` ends the pause between two claims.

    After a lost reply of a partition, `find_known_lease_ids` returns the ids of this process's
    leases there, including those that writes in progress may create.
    """

    def __init__(
        self,
        context: EngineContext,
        worker: Worker,
        wakeup: ClaimWakeup,
        find_known_lease_ids: Callable[[int], Awaitable[list[str]]],
    ) -> None:
        self._context = context
        self._worker = worker
        self._wakeup = wakeup
        self._find_known_lease_ids = find_known_lease_ids
        self._is_stopping = False
        self._next_release_at_ms = self._next_surplus_at_ms = 0.0
        self._reconciliations: dict[int, asyncio.Task[None]] = {}
        """Asyncio tasks that release unknown leases, by partition; empty with one partition."""
        self._unrestored_partitions: set[int] = set()
        """The partitions whose stored limits could not be loaded at the start."""
        # The calls of `load_limits` are numbered, because their results may come in another order.
        self._last_load_number = self._applied_load_number = 0
        self._last_claim_ms = float("-inf")
        # Half the horizon, so that tasks added by other processes are claimed before they are due.
        self._poll_interval_s = context.lease_terms.horizon_ms / 2000

    def wake(self) -> None:
        """Claim soon, because the store may have a due task that is not leased."""
        self._wakeup.wake()

    def stop(self) -> None:
        """Make no more claims; the tasks of a claim in progress are still passed to the worker."""
        self._is_stopping = True
        self._wakeup.wake()

    async def run_once(self) -> ClaimResult:
        """Claim tasks once, and pass them to the worker.

        Without capacity, the claim has a limit of 0: it only reads the store's time, by which the
        worker recognizes expired leases.
        """
        context, limits = self._context, self._context.limits
        lanes = context.lanes
        skipped = await self._reconcile() if self._worker.leased_tasks.lost_replies else []
        capacity = self._worker.leased_tasks.free_leases
        limits_by_name = lanes.claim_limits()  # names of lanes, and of tenants
        # A tenant is at its limit if it has 4 * (free - max / 16) leases, see `SlotShares`. While
        # more than a quarter of all leases are free, even all others are fewer.
        if 0 < capacity <= limits.max_leased // 4:
            limits_by_name |= dict.fromkeys(lanes.tenants_at_lease_limit(capacity), 0)
        max_claimed = limits.max_claimed * context.claim_turns.claim_factor
        is_limited = capacity < max_claimed or 0 in limits_by_name.values()
        self._wakeup.was_capacity_limited = is_limited
        # Added after `is_limited`: when attempts end, no more tasks of these lanes can be claimed.
        limits_by_name |= lanes.blocked_limits(context.clock.now_ms())
        limits_by_name |= dict.fromkeys(lanes.list_handed_over(context.clock.now_ms()), 0)
        limit = max(0, min(max_claimed, ceil(capacity / _FREE_LEASES_PER_CLAIMED_TASK)))
        parked_before = set(lanes.parked)
        # The clock of this process, which `synchronize` compares with that of the store.
        sent_at = context.clock.local_ms()
        self._last_claim_ms = context.clock.unrounded_ms()
        claim = await context.store.claim(
            context.lease_terms,
            limit=limit,
            per_lane=limits.max_lane_claimed,
            lane_limits=limits_by_name,
            skip=skipped,
        )
        context.clock.synchronize(sent_at, claim.now)
        for partition, error in claim.errors.items():
            context.health.mark_failing(STORE, error)
            self._worker.leased_tasks.lost_replies[partition] += 1
        if claim.tasks and context.health.failing:
            # An empty claim writes nothing, so it succeeds even on a full disk. Then the next
            # heartbeat, which is a write, shows whether the store has recovered.
            for partition in {context.store.partition_of(task.tenant) for task in claim.tasks}:
                context.health.mark_healthy(STORE, partition)
        if claim.consecutive_opens_by_lane:
            # The number of probes has limited the claim. A probe may end without an attempt, for
            # example because the total budget of the task has ended.
            self._wakeup.was_capacity_limited = True
        if claim.lost_attempts:
            context.reporter.report_lost_attempts(claim.lost_attempts, claim.now)
        lane_names = dict.fromkeys(task.lane for task in claim.tasks)
        for name in lane_names:
            opens = claim.consecutive_opens_by_lane.get(name)
            self._adopt_lane_state(name, opens, was_parked=name in parked_before)
        self._worker.add(claim.tasks)
        if not context.limit_table.stored.paused_lanes.isdisjoint(lane_names):
            # The lane was resumed after its pause was loaded, or was paused after the claim.
            await self.load_limits(reload=True)
        self._worker.adopt_renewed(claim.renewed_tasks)
        if sent_at >= self._next_release_at_ms:
            self._next_release_at_ms = sent_at + _RELEASE_INTERVAL_MS
            self._worker.release_expiring()
        if sent_at >= self._next_surplus_at_ms:
            self._next_surplus_at_ms = sent_at + _SURPLUS_INTERVAL_MS
            leased_tasks = self._worker.leased_tasks
            surplus = lanes.select_surplus(leased_tasks.values(), leased_tasks.free_leases)
            for leased_task in surplus:
                self._worker.result_writer.release(leased_task)
        return claim

    async def _reconcile(self) -> list[int]:
        """Release unknown leases; return the partitions from which the next claim takes no tasks.

        With several partitions, a partition that does not respond is retried in the background,
        while the tasks of the others are claimed.
        """
        lost_replies = self._worker.leased_tasks.lost_replies
        if self._context.store.partition_count == 1:
            await self._release_unknown_leases(0)
            return []
        started: list[asyncio.Task[None]] = []
        for partition in lost_replies:
            if partition not in self._reconciliations:
                reconciliation = asyncio.create_task(self._recover_partition(partition))
                self._reconciliations[partition] = reconciliation
                started.append(reconciliation)
        if started:  # later claims do not wait again, so a partition that fails delays one claim
            await asyncio.wait(started, timeout=_MAX_RECONCILIATION_WAIT_S)
        return [*lost_replies]

    async def _recover_partition(self, partition: int) -> None:
        """Release the unknown leases of a partition, as soon as it is available."""
        health = self._context.health
        try:
            while partition in self._worker.leased_tasks.lost_replies:
                try:
                    await self._release_unknown_leases(partition)
                except StoreUnavailable as error:
                    health.mark_failing(STORE, error)
                    await asyncio.sleep(_RECONCILIATION_PAUSE_S)
                except Exception:
                    _logger.exception("releasing leases failed, partition=%d", partition)
                    await asyncio.sleep(_RECONCILIATION_PAUSE_S)
                else:
                    health.mark_healthy(STORE, partition)
        finally:
            del self._reconciliations[partition]
            self.wake()

    async def _release_unknown_leases(self, partition: int) -> None:
        """Release tasks that the store has leased to this process in a call whose reply was lost.

        Otherwise, these tasks would wait until their leases expire. What could not be loaded while
        a partition was unavailable is loaded before its tasks are claimed.
        """
        context, lost_replies = self._context, self._worker.leased_tasks.lost_replies
        lost_reply_count = lost_replies[partition]  # it may grow during the calls
        known_ids = await self._find_known_lease_ids(partition)
        count = await context.store.release_unknown_leases(
            context.lease_terms, known_ids, partition
        )
        if context.store.partition_count > 1:
            await self.load_limits()
        if partition in self._unrestored_partitions:
            await self._restore_limits(partition)
            self._unrestored_partitions.discard(partition)
        if lost_replies[partition] == lost_reply_count:
            del lost_replies[partition]
        if count:
            _logger.info("leases released after a lost reply of the store, count=%d", count)

    async def load_limits(self, *, reload: bool = False) -> None:
        """Apply the limits and pauses that operators have set, if they have changed.

        With `reload`, they are applied even if they have not changed.
        """
        context = self._context
        known = context.limit_table.stored
        if reload:
            known = replace(known, version=_NO_VERSION)
        self._last_load_number += 1
        load_number = self._last_load_number
        limits = await context.store.load_limits(known)
        # Versions are not compared: after a failover that has lost writes, the version is smaller.
        if limits is None or load_number < self._applied_load_number:
            return  # not changed, or the result of a later call was applied meanwhile
        self._applied_load_number = load_number
        context.limit_table.stored = limits
        for lane in context.lanes.values():
            context.limit_table.configure(lane.downstream)
            if lane.rate_timer is not None:  # the rate may be higher now
                self._worker.end_rate_delay(lane)
            was_paused, lane.is_paused = lane.is_paused, lane.name in limits.paused_lanes
            if lane.is_paused and not was_paused:
                self._worker.release_lane(lane.name)

    async def restore_limits(self) -> None:
        """Load the stored limits of lanes, for lanes that are created from now on.

        Of a partition that is unavailable, they are loaded before its tasks are claimed.
        """
        partitions = range(self._context.store.partition_count)
        results = await asyncio.gather(
            *map(self._restore_limits, partitions), return_exceptions=True
        )
        for partition, result in zip(partitions, results, strict=True):
            if isinstance(result, StoreUnavailable) and len(partitions) > 1:
                self._context.health.mark_failing(STORE, result)
                self._unrestored_partitions.add(partition)
                self._worker.leased_tasks.lost_replies[partition] += (
                    1  # until they are loaded, see `_reconcile`
                )
            elif isinstance(result, BaseException):
                raise result

    async def _restore_limits(self, partition: int) -> None:
        store = self._context.store
        limit = ceil(MAX_LANES / store.partition_count)
        self._context.lanes.restore_limits(await store.list_lane_limits(limit, partition))

    async def run(self) -> None:
        """Claim until stopped: at once while due tasks are left, else after `wake` or a timeout.

        Several processes then wait for their turns.
        """
        try:
            await self._run()
        finally:
            await cancel_and_wait(list(self._reconciliations.values()))

    async def _run(self) -> None:
        while not self._is_stopping:
            self._wakeup.clear()
            try:
                claim = await self.run_once()
            except StoreUnavailable as error:
                self._context.health.mark_failing(STORE, error)
                lost_replies = self._worker.leased_tasks.lost_replies
                for partition in range(self._context.store.partition_count):
                    lost_replies[partition] += 1
            except Exception:
                _logger.exception("claim failed")
            else:
                next_at = claim.next_at
                has_leased = claim.tasks or claim.renewed_tasks
                if has_leased and next_at is not None and next_at <= claim.now:
                    continue
            await asyncio.sleep(_MIN_PAUSE_S)
            await self._wakeup.wait(self._poll_interval_s)
            await self._wait_for_turn()

    async def _wait_for_turn(self) -> None:
        """Wait for the next turn of this process, unless it may claim at once."""
        context = self._context
        delay_ms = context.claim_turns.delay_ms(context.clock.unrounded_ms(), self._last_claim_ms)
        if delay_ms and not self._is_stopping:
            await asyncio.sleep(delay_ms / 1000)

    def _adopt_lane_state(
        self, name: str, consecutive_opens: int | None, *, was_parked: bool
    ) -> None:
        """Change the breaker of a lane to the state that the lane has in the store.

        `consecutive_opens` is None if the lane is not half-open in the store. Otherwise it is how
        often in a row its breaker has opened; 0 if the lane was parked with a closed breaker.
        `was_parked`: before the claim, the lane was in `Lanes.parked` of this process.
        """
        lane, now_s = self._context.lanes[name], self._context.clock.now_s()
        # The store leases no tasks of a lane that is paused or parked.
        lane.is_paused, lane.waits_until = False, 0
        breaker, state_before = lane.breaker, lane.breaker.state
        if consecutive_opens is not None:
            lane.was_held_back = True
        if consecutive_opens == 0:
            # After a restart the reason is unknown, but the worker unparks only a lane with one.
            lane.wait_reason = lane.wait_reason or "the last attempt could not be made"
        elif consecutive_opens is not None:
            if breaker.state is BreakerState.CLOSED or not breaker.would_admit(now_s):
                breaker.half_open(consecutive_opens)
                self._worker.result_writer.record_half_open(name)
        elif was_parked or state_before is BreakerState.HALF_OPEN:
            # Another worker has unparked the lane, or an operator has resumed it. If another worker
            # parked it, it is not in `parked` here; the half-open breaker is then the only sign of
            # it.
            self._context.lanes.parked.discard(name)
            lane.downstream.on_recovery(now_s)
        self._context.reporter.report_transition(state_before, breaker.state)
