"""The engine of one process: ingest of new tasks, background loops, and the operator's actions.

Ingest (`Engine.submit`) writes new tasks to the store, which commits them in groups. If the worker
has capacity, they are leased by the same write and passed to the worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from math import ceil
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

from tarry.core.breaker import BreakerState
from tarry.errors import Overloaded, StoreUnavailable
from tarry.service.engine.claim_wakeup import ClaimWakeup
from tarry.service.engine.context import ADDING
from tarry.service.engine.heartbeat import Heartbeat
from tarry.service.engine.limits import MAX_CONFIGURED_LANES
from tarry.service.engine.maintenance import Maintenance
from tarry.service.engine.rate_limits import TenantRateLimiter
from tarry.service.engine.reporting import FinishedTask
from tarry.service.engine.scheduler import Scheduler
from tarry.service.engine.series import SeriesRecorder
from tarry.service.engine.worker import Worker
from tarry.service.group_commit import URGENT, exceeds_limit, priority_of_new_tasks
from tarry.service.model import LaneActivity, Status
from tarry.service.records.lane_activity import add_latencies, read_lane_activity, record_latencies
from tarry.service.shutdown import cancel_and_wait, run_bounded
from tarry.service.store import (
    AddStatus,
    CancelStatus,
    FinishStatus,
    LaneWriteStatus,
    RetryNowStatus,
    TaskResult,
)
from tarry.wire.tasks import LocalStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tarry.service.engine.context import (
        EngineContext,
        EngineLimits,
        HealthCheck,
        ServiceHealth,
        StoreClock,
    )
    from tarry.service.engine.lanes import LeasedTask
    from tarry.service.engine.policies import PolicyCache
    from tarry.service.engine.reporting import EventPublisher
    from tarry.service.engine.secrets import SecretResolver
    from tarry.service.engine.signers import SignerCache
    from tarry.service.model import LaneRecord
    from tarry.service.store import AddResult, Ingest, NewTask
    from tarry.wire.tasks import DownstreamLimits, LimitsSource, WaitReason

_MAX_WRITE_TASKS = 32
"""A larger batch is written with several calls of `Store.add`. Half of a group, so that tasks of
other callers fit into the same groups."""
_MIN_STEP_S = 1.0
"""How long a step of a shutdown may take, even if its timeout has passed."""
_RETRY_AFTER_S = 1.0  # for callers whose tasks are rejected because too many wait to be written
_get_lane_name = attrgetter("task.lane")
_DoneWrite: TypeAlias = (
    "tuple[int, asyncio.Future[list[AddResult]], asyncio.Future[list[AddResult]]]"
)
"""The partition, the future of the caller of `Engine.submit`, and that of the store."""


class Engine:
    """Accepts tasks and runs their attempts, from `start` to `stop`."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._reporter = context.reporter
        self.events: EventPublisher = context.reporter.events
        self.policies: PolicyCache = context.policies
        self.signers: SignerCache = context.signers
        self.secrets: SecretResolver = context.secrets
        self.health: ServiceHealth = context.health
        self.store_check: HealthCheck = context.store_check
        self.body_store_check: HealthCheck = context.body_store_check
        self.clock: StoreClock = context.clock
        self.limits: EngineLimits = context.limits
        claim_wakeup = ClaimWakeup()
        self.worker: Worker = Worker(context, claim_wakeup)
        self.scheduler: Scheduler = Scheduler(
            context, self.worker, claim_wakeup, self._find_known_lease_ids
        )
        self.rate_limiter: TenantRateLimiter | None = _build_rate_limiter(context)
        self.maintenance: Maintenance = Maintenance(context, self.scheduler, self.rate_limiter)
        self.series: SeriesRecorder = SeriesRecorder(context)
        self._heartbeat = Heartbeat(context, self.worker, self.rate_limiter)
        self._partition_of = context.store.partition_of
        self._unwritten: dict[asyncio.Future[list[AddResult]], Sequence[Ingest]] = {}
        """The new tasks of each write that has not ended."""
        self._unwritten_counts: Counter[int] = Counter()
        """The number of these tasks in each partition."""
        self._done_writes: list[_DoneWrite] = []
        """Writes that have ended in this iteration of the event loop."""
        self._is_stopping = False
        self._background_tasks: list[asyncio.Task[None]] = []
        """The asyncio tasks of the scheduler, if this process delivers, of the maintenance, and of
        the recording of series."""
        self._heartbeat_task: asyncio.Task[None] | None = None

    async def announce(self) -> None:
        """Record this process in the store, before `start`."""
        await self._heartbeat.send()

    async def withdraw(self) -> None:
        """Remove this process from the store, if it does not `start`."""
        await self._heartbeat.remove()

    async def start(self) -> None:
        """Read the store's time and the limits of lanes, then start the background loops.

        A process that does not deliver (role `api`) makes no claims.
        """
        store, sent_at = self._context.store, self.clock.local_ms()
        self.health.partition_count = store.partition_count
        self.clock.synchronize(sent_at, await store.ping())
        await self.scheduler.load_limits()
        await self.scheduler.restore_limits()
        if self._context.delivers:
            store.listen(self.scheduler.wake)
            self._background_tasks.append(asyncio.create_task(self.scheduler.run()))
        self._background_tasks.append(asyncio.create_task(self.maintenance.run()))
        self._background_tasks.append(asyncio.create_task(self.series.run()))
        self._heartbeat_task = asyncio.create_task(self._heartbeat.run())

    def stop_starting_attempts(self) -> None:
        """Claim and start no more tasks; tasks that are added from now on are stored only."""
        self.worker.stop_starting_attempts()
        self.scheduler.stop()
        self._heartbeat.announce_stop()

    async def stop(self, timeout_s: float) -> None:
        """Claim no more tasks, release waiting tasks, and wait for attempts in flight.

        After `timeout_s`, each step that is left takes only a few seconds, even if the store hangs.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s

        def remaining_s() -> float:
            return max(_MIN_STEP_S, deadline - loop.time())

        self.stop_starting_attempts()
        if self._background_tasks:
            if self._context.delivers:
                # The scheduler first: if its claim is cancelled, no worker knows of the new leases.
                await asyncio.wait(self._background_tasks[:1], timeout=timeout_s / 2)
            await cancel_and_wait(self._background_tasks)
        self._is_stopping = True  # new tasks are not leased to this process any more
        if not await run_bounded(self._flush(), remaining_s()):
            await cancel_and_wait(self._unwritten)
        await self.worker.stop(remaining_s())
        await run_bounded(self._store_state(), remaining_s())
        if self._heartbeat_task is not None:
            await cancel_and_wait([self._heartbeat_task])
            await run_bounded(self._heartbeat.remove(), remaining_s())

    async def _store_state(self) -> None:
        """Store what other processes and the next start use: limits, retry budgets, series.

        The latencies, which are only displayed, are stored last: with many lanes they need most of
        the time that is left.
        """
        with suppress(StoreUnavailable):
            await self.maintenance.store_limits()
            await self.maintenance.exchange_budgets()
            # Without a read: on a disk that has become read-only, a read from SQLite ends the
            # process with SIGBUS, because it changes the file of shared memory.
            await self.series.record(with_backlog=False)
            await self.maintenance.store_latencies()

    def submit(self, ingests: Sequence[Ingest]) -> asyncio.Future[list[AddResult]]:
        """Add tasks of one tenant; they are durable when the future is done.

        They are added even if the caller is cancelled. Raises `Overloaded` if too many tasks wait
        to be written.
        """
        leased_tasks, lanes = self.worker.leased_tasks, self._context.lanes
        can_lease = self._context.delivers and not self._is_stopping
        partition = self._partition_of(ingests[0].task.tenant) if ingests else 0
        count, unwritten_count = len(ingests), self._unwritten_counts[partition]
        is_urgent = priority_of_new_tasks(count) == URGENT
        if exceeds_limit(self.limits.max_unwritten, unwritten_count, count, urgent=is_urgent):
            msg = f"{unwritten_count} tasks wait to be written"
            raise Overloaded(msg, retry_after=_RETRY_AFTER_S)
        if ingests and can_lease and partition not in leased_tasks.lost_replies:
            # Each task that waits to be written may take one of the leases.
            free_leases = leased_tasks.free_leases - self._unwritten_counts.total()
            tenant_leases = lanes.lease_allowance(ingests[0].task.tenant, free_leases)
            # A tenant at its limit, for example because some of its targets hang, can still lease
            # tasks of fast lanes: these leases end soon.
            fast_leases = free_leases - lanes.reserved_leases
            if tenant_leases > 0 or fast_leases > 0:
                self._request_leases(ingests, tenant_leases, fast_leases)
        # Results that linger are written in the same transaction as the new tasks.
        self.worker.result_writer.end_linger(partition)
        if count <= _MAX_WRITE_TASKS:
            return self._write(partition, ingests)
        # Parts of the same size: none of them is urgent.
        size = ceil(count / ceil(count / _MAX_WRITE_TASKS))
        parts = [ingests[begin : begin + size] for begin in range(0, count, size)]
        return asyncio.ensure_future(_join([self._write(partition, part) for part in parts]))

    def _write(self, partition: int, ingests: Sequence[Ingest]) -> asyncio.Future[list[AddResult]]:
        """Write tasks; return a future that the caller may cancel, unlike that of the store."""
        write = asyncio.ensure_future(
            self._context.store.add(
                ingests,
                self._context.lease_terms,
                quota=self.limits.max_tenant_unfinished_tasks,
                lane_quota=self.limits.max_tenant_lanes,
            )
        )
        self._unwritten[write] = ingests
        self._unwritten_counts[partition] += len(ingests)
        future: asyncio.Future[list[AddResult]] = asyncio.get_running_loop().create_future()
        write.add_done_callback(partial(self._on_write_done, partition, future))
        return future

    def _request_leases(
        self, new_tasks: Sequence[NewTask], tenant_leases: int, fast_leases: int
    ) -> None:
        """Set `lease_on_add` of the tasks that may be leased.

        At most `tenant_leases` tasks are leased. Tasks of fast lanes are leased until
        `fast_leases` tasks are leased, if this is more.
        """
        if len(new_tasks) == 1:
            limits = self._lease_limits(new_tasks[0].task.lane, tenant_leases, fast_leases)
            new_tasks[0].lease_on_add = min(limits) > 0
            return
        limits_by_lane: dict[str, tuple[int, int]] = {}
        total_count = 0
        # Consecutive tasks of a lane are handled together, because most batches have only one lane.
        for lane_name, tasks_of_lane in groupby(new_tasks, _get_lane_name):
            capacity, free_leases = limits_by_lane.get(lane_name) or self._lease_limits(
                lane_name, tenant_leases, fast_leases
            )
            count = max(0, min(capacity, free_leases - total_count))
            tasks_to_lease = list(islice(tasks_of_lane, count))
            for new_task in tasks_to_lease:
                new_task.lease_on_add = True
            total_count += len(tasks_to_lease)
            limits_by_lane[lane_name] = capacity - len(tasks_to_lease), free_leases

    def _lease_limits(
        self, lane_name: str, tenant_leases: int, fast_leases: int
    ) -> tuple[int, int]:
        """Return how many tasks a lane may lease, and how many leases are free for its tasks."""
        lanes = self._context.lanes
        lane = lanes.get(lane_name)
        if lane is None:
            return tenant_leases, tenant_leases
        must_wait = lane.is_tripped or lanes.is_target_blocked(lane_name)
        capacity = 0 if must_wait else lanes.lease_capacity(lane)
        return capacity, tenant_leases if lane.is_slow else max(tenant_leases, fast_leases)

    def _on_write_done(
        self,
        partition: int,
        future: asyncio.Future[list[AddResult]],
        write: asyncio.Future[list[AddResult]],
    ) -> None:
        # The writes of a group end in the same iteration of the event loop, and are processed
        # together in the next one: to process each alone would take 5 us more for each request.
        if not self._done_writes:
            asyncio.get_running_loop().call_soon(self._process_done_writes)
        self._done_writes.append((partition, future, write))

    def _process_done_writes(self) -> None:
        """Pass leased tasks to the worker, and wake the scheduler for the others.

        This is done here and not by the callers of `submit`, which may have been cancelled
        meanwhile. A leased task that is not passed on would wait until its lease expires.
        """
        done_writes, self._done_writes = self._done_writes, []
        leased: list[Ingest] = []
        try:
            for partition, _, write in done_writes:
                ingests = self._unwritten.pop(write)
                self._unwritten_counts[partition] -= len(ingests)
                if write.cancelled():
                    continue
                error = write.exception()
                if error is None:
                    self._context.health.mark_healthy(ADDING, partition)
                    self._select_leased(ingests, write.result(), leased)
                elif isinstance(error, StoreUnavailable):
                    self._context.health.mark_failing(ADDING, error)
                    self.worker.leased_tasks.lost_replies[partition] += 1
            if leased:
                # In the next iteration of the event loop, the callers of `submit` respond to their
                # clients. To start 8 attempts takes 0.7 ms, in which these clients would wait.
                self.worker.delay_starts()
                contents = {ingest.task.id: ingest.content for ingest in leased}
                self.worker.add([ingest.task for ingest in leased], contents)
        finally:
            for _, future, write in done_writes:
                _copy_outcome(write, future)

    def _select_leased(
        self, ingests: Sequence[Ingest], results: Sequence[AddResult], leased: list[Ingest]
    ) -> None:
        """Add the tasks that were leased to `leased`; report tasks that were added."""
        context = self._context
        has_listeners = bool(self.events.listeners)
        added = AddStatus.ADDED  # read once, because it takes 0.27 us in Python 3.11
        for ingest, result in zip(ingests, results, strict=True):
            if result.status is not added:
                continue
            task = result.task
            if has_listeners:
                self._reporter.report_added(task)
            if result.leased:
                leased.append(ingest)
            elif task.next_attempt_at <= context.clock.now_ms() + context.lease_terms.horizon_ms:
                self.scheduler.wake()

    async def _flush(self) -> None:
        """Wait until no task waits to be written."""
        while self._unwritten:
            await asyncio.wait(tuple(self._unwritten))

    async def _find_known_lease_ids(self, partition: int) -> list[str]:
        """Return the ids of known leases after a lost reply of a partition, see `_known_lease_ids`.

        A write in flight may have ended a lease already, and the call whose reply was lost may have
        leased the same task again. Therefore the writes in flight are awaited first.
        """
        writes = [
            write
            for write, ingests in self._unwritten.items()
            if ingests and self._partition_of(ingests[0].task.tenant) == partition
        ]
        if writes:
            await asyncio.wait(writes)
        await self.worker.result_writer.wait_for_writes(partition)
        return self._known_lease_ids()

    def _known_lease_ids(self) -> list[str]:
        """Return the ids of tasks that are leased to this process, or may be by a pending write."""
        new_ids = [each.task.id for ingests in self._unwritten.values() for each in ingests]
        releasing_ids = self.worker.result_writer.pending_release_ids()
        return [*self.worker.leased_tasks, *new_ids, *releasing_ids]

    async def wait_until_finished(self, task_id: str, timeout_s: float) -> FinishedTask | None:
        """Wait until this process finishes a task; return None after `timeout_s`."""
        leased_task = self.worker.leased_tasks.get(task_id)
        if leased_task is not None and leased_task.is_busy:  # its result may linger already
            self.worker.result_writer.end_linger(self._partition_of(leased_task.task.tenant))
        return await self._reporter.wait_until_finished(task_id, timeout_s)

    async def cancel(self, tenant: str, task_id: str) -> CancelStatus | None:
        """Cancel a task; return None if there is no such task."""
        leased_task = self._find_waiting(tenant, task_id)
        if leased_task is None:
            status = await self._context.store.cancel(tenant, task_id)
        else:
            leased_task.is_busy = True  # the worker must not start the task meanwhile
            try:
                status = await self._context.store.cancel(tenant, task_id)
                if status is CancelStatus.REQUESTED:
                    # For the store, every leased task may be running. This process knows that no
                    # attempt of the task runs, so the task is finished at once.
                    task = leased_task.task
                    result = TaskResult(task=task, attempt=None, status=Status.CANCELLED)
                    finish_status = await self.worker.result_writer.write_cancelled(result)
                    if finish_status is not FinishStatus.SUPERSEDED:
                        status = CancelStatus.CANCELLED
            except BaseException:
                self.worker.result_writer.requeue_or_release(leased_task)
                raise
            self.worker.leased_tasks.drop(leased_task)
        if status is CancelStatus.CANCELLED:
            self._reporter.notify_waiters(task_id, FinishedTask(Status.CANCELLED, None, None))
            stored_task = await self._context.store.get_task(tenant, task_id)
            if stored_task is not None:
                self._reporter.report_cancelled(stored_task)
        return status

    async def retry_now(self, tenant: str, task_id: str) -> RetryNowStatus | None:
        """Make a task due now; return None if there is no such task."""
        leased_task = self._find_waiting(tenant, task_id)
        if leased_task is not None:
            task, now = leased_task.task, self._context.clock.now_ms()
            task.next_attempt_at = min(task.next_attempt_at, now)
            task.wake_at = min(task.wake_at, now + self._context.lease_terms.length_ms)
            contents = {} if leased_task.content is None else {task_id: leased_task.content}
            self.worker.leased_tasks.add([leased_task.task], contents)
            return RetryNowStatus.DUE
        quota = self.limits.max_tenant_unfinished_tasks
        status = await self._context.store.retry_now(tenant, task_id, quota=quota)
        if status is RetryNowStatus.DUE:
            self.scheduler.wake()
        return status

    def _find_waiting(self, tenant: str, task_id: str) -> LeasedTask | None:
        """Return a task that waits in this process for its next attempt, or None."""
        leased_task = self.worker.leased_tasks.get(task_id)
        if leased_task is None or leased_task.is_busy or leased_task.task.tenant != tenant:
            return None
        return leased_task

    def is_running(self, task_id: str) -> bool | None:
        """Return whether an attempt of a task runs; None if the task is not leased here."""
        leased_task = self.worker.leased_tasks.get(task_id)
        return None if leased_task is None else leased_task.is_busy

    async def pause(self, lane_name: str) -> LaneWriteStatus:
        """Stop a lane until an operator resumes it; attempts in flight continue."""
        self._context.lanes[lane_name].is_paused = True
        status = await self._context.store.pause(lane_name, lane_quota=self.limits.max_tenant_lanes)
        # Set again: a claim that ran meanwhile may have returned a task of the lane, and have
        # marked the lane as not paused.
        is_paused = status is LaneWriteStatus.CHANGED
        self._context.lanes[lane_name].is_paused = is_paused
        if is_paused:
            self.worker.release_lane(lane_name)
            self._reporter.report_lane_change("paused", lane_name)
        await self.scheduler.load_limits()
        return status

    async def resume(
        self, lane_name: str, *, reason: str = "An operator resumed the downstream."
    ) -> None:
        """Resume a lane that was paused or parked; its rate and concurrency limit start low.

        `reason` is recorded in the history of the breaker, if the breaker was not closed.
        """
        await self._context.store.resume(lane_name)
        await self.scheduler.load_limits()
        lane = self._context.lanes.get(lane_name)
        if lane is not None:
            lane.is_paused = False
            if self._context.lanes.is_target_blocked(lane_name):
                lane.blocked_until = self._context.clock.now_ms()  # the target is tried at once
            self._context.lanes.parked.discard(lane_name)
            state_before = lane.breaker.state
            lane.downstream.on_recovery(self._context.clock.now_s())
            unreported = [*lane.downstream.transitions, (state_before, lane.breaker.state)]
            lane.downstream.transitions.clear()
            for before, after in unreported:
                self._reporter.report_transition(before, after)
            self.worker.end_rate_delay(lane)
        self.scheduler.wake()
        self._reporter.report_lane_change("resumed", lane_name)
        closed = BreakerState.CLOSED  # ignored by the store if its last change is the same
        await self.worker.result_writer.record_breaker_change(lane_name, closed, closed, reason)

    async def reset(self, lane_name: str) -> None:
        """Reset the breaker, budget and latencies of a lane, and resume it."""
        store = self._context.store
        for name, budget_value in (await store.add_to_budgets({lane_name: 0.0})).items():
            await store.add_to_budgets({name: -budget_value})
        lane = self._context.lanes.get(lane_name)
        if lane is not None:
            state_before = lane.breaker.state
            lane.downstream = self._context.lanes.build_downstream(lane_name)
            self._reporter.report_transition(state_before, lane.breaker.state)
        self._reporter.metrics.take_latencies(lane_name)
        await record_latencies(store, {lane_name: {}})
        await self.resume(lane_name, reason="An operator reset the downstream.")

    async def set_limits(self, lane_name: str, limits: DownstreamLimits | None) -> LaneWriteStatus:
        """Set the limits of a lane (None: remove them)."""
        status = await self._context.store.set_limits(
            lane_name,
            limits,
            max_limited=MAX_CONFIGURED_LANES,
            lane_quota=self.limits.max_tenant_lanes,
        )
        await self.scheduler.load_limits()
        return status

    def configured_limits(self, lane_name: str) -> tuple[DownstreamLimits, LimitsSource]:
        """Return the configured limits of a lane, and where they are configured."""
        return self._context.limit_table.find(lane_name)

    async def read_activity(self, lane_names: Sequence[str]) -> dict[str, LaneActivity]:
        """Return the activity of lanes, with latencies of this process that are not stored yet."""
        found = await read_lane_activity(self._context.store, lane_names)
        unstored = self._reporter.metrics.read_latencies(lane_names)
        now = self._context.clock.now_ms()
        for lane, counts in unstored.items():
            found[lane] = add_latencies(found.get(lane, LaneActivity()), counts, now)
        return found

    def blocked_reason(self, lane_name: str) -> str | None:
        """Return why all processes leave a lane alone: none of them allows its target.

        None: a process allows the target, or has not tried it.
        """
        lanes = self._context.lanes
        reasons = [
            worker.blocked_lanes.get(lane_name)
            for worker in self._heartbeat.other_workers
            if worker.role != "api"
        ]
        if self._context.delivers:
            is_blocked = lanes.is_target_blocked(lane_name)
            reasons.insert(0, lanes[lane_name].wait_reason if is_blocked else None)
        return None if None in reasons or not reasons else reasons[0]

    def waiting_for(self, record: LaneRecord) -> WaitReason | None:
        """Return why due tasks of a lane wait; None: none waits, or this process cannot tell."""
        if record.pending:
            if record.paused:
                return "pause"
            if self.blocked_reason(record.name) is not None:
                return "blocked"
            if record.waiting_for is not None:
                return record.waiting_for
        elsewhere: WaitReason | None = None
        if record.pending or record.in_flight:  # the last report of another process may be older
            elsewhere = self._context.lanes.reason_elsewhere(record.name)
        lane = self._context.lanes.get(record.name)
        if lane is None:
            return elsewhere
        if record.pending and lane.waiting_for != "free-slot":
            return lane.waiting_for
        deferred = dict(lane.deferrals(self._context.clock.now_ms()))
        if deferred:
            return min(deferred, key=lambda reason: deferred[reason])
        return elsewhere or (lane.waiting_for if lane.has_due_tasks else None)

    def local_stats(self, lane_name: str) -> LocalStats | None:
        """Return the state of a lane in this process; None if this process has no such lane."""
        lane = self._context.lanes.get(lane_name)
        if lane is None:
            return None
        downstream = lane.downstream
        breaker, balance = downstream.status(self._context.clock.now_s())
        rate = downstream.limiter.rate
        p50, p95 = downstream.latency.quantile(0.5), downstream.latency.quantile(0.95)
        return LocalStats(
            breaker=breaker,
            budget=balance,
            running=lane.running_count,
            leased=lane.leased_count,
            p50_ms=None if p50 is None else round(p50 * 1000, 3),
            p95_ms=None if p95 is None else round(p95 * 1000, 3),
            wait_reason=lane.wait_reason,
            rate_per_second=None if rate is None else round(rate, 1),
            concurrency_limit=downstream.limiter.limit,
        )


def _copy_outcome(
    source: asyncio.Future[list[AddResult]], target: asyncio.Future[list[AddResult]]
) -> None:
    """End `target` as `source` has ended, unless its caller was cancelled."""
    if target.done():
        return
    if source.cancelled():
        target.cancel()
    elif (error := source.exception()) is not None:
        target.set_exception(error)
    else:
        target.set_result(source.result())


async def _join(writes: Sequence[asyncio.Future[list[AddResult]]]) -> list[AddResult]:
    return [result for results in await asyncio.gather(*writes) for result in results]


def _build_rate_limiter(context: EngineContext) -> TenantRateLimiter | None:
    rate, clock = context.limits.tenant_tasks_per_s, context.clock
    if rate is None:
        return None
    return TenantRateLimiter(rate, context.limits.tenant_burst, lambda: clock.local_ms() / 1000)
