"""Writes results, released leases and breaker states to the store, and reports them afterwards.

The breaker state of a lane is written so that it applies to all workers: the lane is parked when
its breaker opens, and unparked when the breaker closes. A lane is also parked while its target
cannot be attempted for a local reason, such as a DNS server that does not answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from contextlib import suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from tarry.core.breaker import BreakerState
from tarry.core.outcome import SUCCESS
from tarry.errors import StoreUnavailable
from tarry.service.defaults import MAX_TRANSACTION_TASKS
from tarry.service.delivery.targets import lane_name, parse_target
from tarry.service.delivery.vendor_headers import QSTASH
from tarry.service.engine.context import STORE, retry_until_stored
from tarry.service.engine.write_buffer import WriteBuffer, WriteBuffers
from tarry.service.model import BreakerChangeRecord, Status, Task, TaskContent
from tarry.service.records.lane_activity import record_breaker_change
from tarry.service.shutdown import cancel_and_wait
from tarry.service.store import FinishStatus, Release
from tarry.wire.tasks import STATUS_NAMES, CallbackBody

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import Any

    from tarry.service.delivery import DeliveryResult
    from tarry.service.engine.claim_wakeup import ClaimWakeup
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.lanes import LeasedTask, LocalLane
    from tarry.service.engine.leased_tasks import LeasedTasks
    from tarry.service.model import AttemptRecord
    from tarry.service.store import TaskResult

_logger = logging.getLogger("tarry.service")
_encode = msgspec.json.Encoder().encode
_MAX_WRITE_RESULTS = 128
"""Number of results that one call stores. With 64, as for new tasks, results wait behind new tasks
while batches arrive: the p99 delay of retries was 390 to 550 ms instead of 125 ms."""
_RESULT_LINGER_S = 0.005
"""How long a few results wait for new tasks, to be written in the same transaction. While requests
of about seven tasks follow each other, this takes 13 % less processor time than two transactions
for each request (median of 22 rounds, quartiles 5 % and 25 %). A crash within this time repeats the
attempts. This is the time with one process."""
_LINGER_PER_PROCESS_S, _MAX_LINGER_S = 0.01, 0.04
"""The time with several processes that share the store: for each process, and at most. Each process
has fewer results in the same time, so they wait longer to form groups."""
_MIN_LINGER_DELAY_MS = 10
"""A result does not linger if the next attempt is due earlier than this."""
_FAILING_PARTITION_WAIT_S = 5.0
"""How long a stop waits for a partition that fails when all else is done: a failover may end."""
_FLUSH_CHECK_INTERVAL_S = 0.1

# To read a member of an enum takes 0.27 us in Python 3.11, a constant 0.01 us.
_SUPERSEDED, _CANCELLED = FinishStatus.SUPERSEDED, FinishStatus.CANCELLED


class ResultWriter:
    """Writes the results of leased tasks, then requeues or drops the tasks.

    `claim_wakeup` is called when more tasks can be claimed. Every write is retried until the store
    accepts it, because the attempt has already been made.
    """

    def __init__(
        self, context: EngineContext, leased_tasks: LeasedTasks, claim_wakeup: ClaimWakeup
    ) -> None:
        self._context = context
        self._leased_tasks = leased_tasks
        self._claim_wakeup = claim_wakeup
        self._reporter = context.reporter
        self._partition_of = context.store.partition_of
        self._linger_s = _RESULT_LINGER_S
        self.results: WriteBuffers[LeasedTask, FinishStatus] = WriteBuffers(
            lambda partition: WriteBuffer(
                self._write_results,
                self._on_results_written,
                self._on_result_rejected,
                health=context.health,
                partition=partition,
                max_items=_MAX_WRITE_RESULTS,
                linger_s=self._linger_s,
            )
        )
        self._releases: WriteBuffers[Release, FinishStatus] = WriteBuffers(
            lambda partition: WriteBuffer(
                partial(self._write_releases, partition),
                partial(self._on_releases_written, partition),
                _log_rejected_release,
                health=context.health,
                partition=partition,
                max_items=MAX_TRANSACTION_TASKS,
            )
        )
        self._lane_writes: dict[int, set[asyncio.Task[None]]] = defaultdict(set)
        """The writes of lanes that are in progress, by partition."""
        self._is_stopping = False

    def set_process_count(self, process_count: int) -> None:
        """Set the linger of results for this number of processes that share the store."""
        if self._is_stopping:
            return
        linger_s = _RESULT_LINGER_S
        if process_count > 1:
            linger_s = min(_LINGER_PER_PROCESS_S * process_count, _MAX_LINGER_S)
        self._set_linger(linger_s)

    def _set_linger(self, linger_s: float) -> None:
        self._linger_s = linger_s
        for buffer in self.results.values():
            buffer.linger_s = linger_s

    def end_linger(self, partition: int) -> None:
        """Write the results that linger in a partition at once."""
        self.results[partition].end_linger()

    def stop_lingering(self) -> None:
        """Write all results at once from now on: a stop may end before a linger does."""
        self._is_stopping = True
        self._set_linger(0.0)
        for buffer in self.results.values():
            buffer.end_linger()

    @property
    def has_pending_writes(self) -> bool:
        """Whether results or released leases are not written yet."""
        return bool(self.results.pending_count or self._releases.pending_count)

    async def wait_for_writes(self, partition: int) -> None:
        """Wait until the results and released leases that are being written now are written."""
        await self.results[partition].wait_for_writes()
        await self._releases[partition].wait_for_writes()

    async def flush(self) -> bool:
        """Wait until all results and released leases are written; return whether they are.

        If only writes to partitions that fail are left, while other partitions work, they are
        awaited for `_FAILING_PARTITION_WAIT_S` only.
        """
        loop = asyncio.get_running_loop()
        flush = loop.create_task(self._flush_all())
        deadline: float | None = None
        try:
            while not flush.done():
                await asyncio.wait([flush], timeout=_FLUSH_CHECK_INTERVAL_S)
                if not self._waits_for_failing_partitions():
                    deadline = None
                elif deadline is None:
                    deadline = loop.time() + _FAILING_PARTITION_WAIT_S
                elif loop.time() >= deadline:
                    return flush.done()
            flush.result()
        finally:
            await cancel_and_wait([flush])
        return True

    async def _flush_all(self) -> None:
        await self.results.flush()
        await self._releases.flush()

    def _waits_for_failing_partitions(self) -> bool:
        """Return whether all pending writes are in partitions that fail, while others work."""
        health = self._context.health
        pending = self.results.pending_counts() | self._releases.pending_counts()
        partitions = range(self._context.store.partition_count)
        return all(health.is_failing(STORE, partition) for partition in pending) and not all(
            health.is_failing(STORE, partition) for partition in partitions
        )

    async def stop(self) -> None:
        """Cancel all writes; the leases of tasks whose result was not written expire."""
        for partition, count in sorted(self.results.pending_counts().items()):
            _logger.warning(
                "results not stored at stop, tasks are attempted again when their leases expire, "
                "partition=%d count=%d",
                partition,
                count,
            )
        await self.results.stop()
        await self._releases.stop()
        await cancel_and_wait([write for writes in self._lane_writes.values() for write in writes])

    def post(
        self, result: TaskResult, leased_task: LeasedTask, delivery_result: DeliveryResult | None
    ) -> None:
        """Write the result of a leased task with the next group; do not wait for the write."""
        max_linger_s: float | None = None
        if result.status.is_finished:
            task, content = result.task, leased_task.content
            if content is not None and content.callback_url is not None:
                result.callback_task = self._context.build_callback_task(task, content, result)
            if self._reporter.has_waiters(task.id):  # API callers
                max_linger_s = 0.0
        else:  # the next attempt waits for the write, which gets at least half of the time
            delay_ms = result.next_attempt_at - self._context.clock.now_ms()
            max_linger_s = delay_ms / 2000 if delay_ms >= _MIN_LINGER_DELAY_MS else 0.0
        buffer = self.results[self._partition_of(result.task.tenant)]
        leased_task.result, leased_task.delivery_result = result, delivery_result
        buffer.post(leased_task, max_linger_s)

    async def write_cancelled(self, result: TaskResult) -> FinishStatus:
        """Write the result of a task that was cancelled between attempts; wait for the write."""
        context, partition = self._context, self._partition_of(result.task.tenant)
        finish_statuses = await retry_until_stored(
            lambda: context.store.finish([result]), context.health, partition
        )
        return finish_statuses[0]

    def _write_results(self, leased_tasks: list[LeasedTask]) -> Awaitable[list[FinishStatus]]:
        encrypt_attempt = self._context.encrypt_attempt
        results = [each.result for each in leased_tasks if each.result is not None]
        if encrypt_attempt is not None:
            # Only the stored copy is encrypted: the reporter below needs the readable texts.
            results = [_encrypt_texts(result, encrypt_attempt) for result in results]
        return self._context.store.finish(results)

    def _on_results_written(
        self, leased_tasks: list[LeasedTask], finish_statuses: Sequence[FinishStatus]
    ) -> None:
        now, leased_count_before = self._context.clock.now_ms(), len(self._leased_tasks)
        for leased_task, finish_status in zip(leased_tasks, finish_statuses, strict=True):
            result, delivery_result = leased_task.result, leased_task.delivery_result
            leased_task.result = leased_task.delivery_result = None
            assert result is not None  # noqa: S101 - set by `post`
            try:
                self._process_written(leased_task, result, delivery_result, finish_status, now)
            except Exception:
                message = "result stored but post-processing failed, task=%s"
                _logger.exception(message, result.task.id)
        if len(self._leased_tasks) < leased_count_before:
            self._claim_wakeup.on_capacity()

    def _on_result_rejected(self, leased_task: LeasedTask, error: BaseException) -> None:
        _logger.error("result not stored, task=%s", leased_task.task.id, exc_info=error)
        # The lease expires by itself, and then a claim leases the task again.
        self._leased_tasks.drop(leased_task)

    def _process_written(
        self,
        leased_task: LeasedTask,
        result: TaskResult,
        delivery_result: DeliveryResult | None,
        finish_status: FinishStatus,
        now: int,
    ) -> None:
        """Report what the store did with a result, then requeue or drop the task."""
        task, renewed_lease = result.task, result.renewed_lease
        if renewed_lease is not None and finish_status is FinishStatus.APPLIED:
            leased_task.task = msgspec.structs.replace(  # as the store has changed it
                task,
                version=task.version + 1,
                attempts=task.attempts + 1,
                next_attempt_at=result.next_attempt_at,
                wake_at=result.next_attempt_at + renewed_lease.length_ms,  # the end of the lease
                previous_delay=result.previous_delay,
                backoff_offset=result.backoff_offset,
                last_outcome_kind=result.last_outcome_kind,
            )
            self._reporter.report_attempt(result, leased_task.startable_since, now)
            self.requeue_or_release(leased_task)
            return
        self._leased_tasks.drop(leased_task)
        if finish_status is _SUPERSEDED:
            _logger.warning("result discarded, the lease was lost, task=%s", task.id)
            # Or the result was written before, its reply was lost, and the store renewed the lease.
            self._leased_tasks.lost_replies[self._partition_of(task.tenant)] += 1
            self._reporter.report_superseded(task, now)
            return
        self._reporter.report_attempt(result, leased_task.startable_since, now)
        task_status = Status.CANCELLED if finish_status is _CANCELLED else result.status
        if task_status.is_finished:
            attempts_made = task.attempts + (result.attempt is not None)
            self._reporter.report_finished(
                task_status, task, attempts_made, result.reason, now, delivery_result
            )

    def requeue_or_release(self, leased_task: LeasedTask) -> None:
        """Queue a task for its next attempt, or release it if its lane is paused."""
        if leased_task.is_dropped:
            return
        if leased_task.lane.is_paused:
            self.release(leased_task)
        else:
            self._leased_tasks.requeue(leased_task)

    def release(self, leased_task: LeasedTask, deferred_until: int | None = None) -> None:
        """Drop a task and release its lease; it is not leased again before `deferred_until`."""
        self._leased_tasks.drop(leased_task)
        if deferred_until is None:  # an earlier deferral may not have ended
            now = self._context.clock.now_ms()
            deferred_until = self._leased_tasks.startable_at(leased_task.task, now)
        self._post_release(Release(leased_task.task, deferred_until))
        self._claim_wakeup.on_capacity()

    def release_unadded(self, tasks: Sequence[Task]) -> None:
        """Release the leases of tasks that were not added to `LeasedTasks`."""
        for task in tasks:
            self._post_release(Release(task))

    def _post_release(self, release: Release) -> None:
        self._releases[self._partition_of(release.task.tenant)].post(release)

    def pending_release_ids(self) -> list[str]:
        """Return the ids of tasks that were dropped, but are not released in the store yet."""
        return [release.task.id for release in self._releases.pending_items()]

    async def _write_releases(self, partition: int, releases: list[Release]) -> list[FinishStatus]:
        # A task that is released before its lane is parked would be claimed again at once.
        await self._wait_for_lane_writes(partition)
        return await self._context.store.release(releases)

    def _on_releases_written(
        self, partition: int, releases: list[Release], finish_statuses: Sequence[FinishStatus]
    ) -> None:
        for release, finish_status in zip(releases, finish_statuses, strict=True):
            if finish_status is FinishStatus.CANCELLED:
                self._reporter.report_cancelled(release.task)
            elif finish_status is FinishStatus.SUPERSEDED:
                # Perhaps this process has claimed the task again, and the reply was lost.
                self._leased_tasks.lost_replies[partition] += 1

    def store_breaker_state(self, lane: LocalLane, attempt: AttemptRecord | None = None) -> None:
        """Start writing the breaker state of a lane to the store, if the state has changed.

        `attempt` is the attempt whose result has changed the state.
        """
        transitions = lane.downstream.transitions
        if not transitions:
            return
        state, now = transitions[-1].after, self._context.clock.now_ms()
        changes: list[BreakerChangeRecord] = []
        for before, after in transitions:
            self._reporter.report_transition(before, after)
            reason = _describe_transition(before, after, attempt)
            changes.append(
                BreakerChangeRecord(at=now, before=str(before), after=str(after), reason=reason)
            )
        transitions.clear()
        self._start_lane_write(lane.name, self._write_breaker_state(lane, state, changes))

    def record_half_open(self, lane_name: str) -> None:
        """Record that the breaker of a lane is half-open: the store has leased a probe."""
        before, after = BreakerState.OPEN, BreakerState.HALF_OPEN
        self._start_lane_write(
            lane_name,
            self.record_breaker_change(
                lane_name, before, after, _describe_transition(before, after, None)
            ),
        )

    async def record_breaker_change(
        self, lane_name: str, before: BreakerState, after: BreakerState, reason: str
    ) -> None:
        """Add a change to the history of the breaker of a lane."""
        at = self._context.clock.now_ms()
        change = BreakerChangeRecord(at=at, before=str(before), after=str(after), reason=reason)
        await self._record_changes(lane_name, [change])

    async def _record_changes(self, lane_name: str, changes: list[BreakerChangeRecord]) -> None:
        # Not retried: the state of the lane is stored already, and the history only describes it.
        with suppress(StoreUnavailable):
            for change in changes:
                await record_breaker_change(self._context.store, lane_name, change)

    def park_waiting_lane(self, lane: LocalLane, pause_s: float, reason: str) -> None:
        """Park a lane for `pause_s`, because its target cannot be attempted for a local reason.

        Meanwhile, the tasks of the lane wait in the store, and no attempts are counted. Afterwards,
        the store leases one task at a time, until `end_wait`. The breaker keeps its state.
        """
        now = self._context.clock.now_ms()
        lane.wait_reason, lane.was_held_back = reason, True
        if now >= lane.waits_until and lane.breaker.state is not BreakerState.OPEN:
            lane.waits_until = now + ceil(pause_s * 1000)
            self._start_lane_write(lane.name, self._park(lane, lane.waits_until))

    def end_wait(self, lane: LocalLane) -> None:
        """Unpark and unblock a lane, because an attempt was made."""
        lane.wait_reason, lane.waits_until, lane.was_held_back = None, 0, True
        self._context.lanes.unblock(lane)
        if lane.breaker.state is BreakerState.CLOSED:
            self._start_lane_write(lane.name, self._unpark(lane))

    def _partition_of_lane(self, lane_name: str) -> int:
        return self._partition_of(lane_name.partition("/")[0])

    def _start_lane_write(self, lane_name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        write = asyncio.get_running_loop().create_task(coroutine)
        writes = self._lane_writes[self._partition_of_lane(lane_name)]
        writes.add(write)
        write.add_done_callback(writes.discard)

    async def _wait_for_lane_writes(self, partition: int) -> None:
        writes = self._lane_writes[partition]
        if writes:
            await asyncio.wait(writes)

    async def _write_breaker_state(
        self, lane: LocalLane, state: BreakerState, changes: list[BreakerChangeRecord]
    ) -> None:
        context, breaker, now_s = self._context, lane.breaker, self._context.clock.now_s()
        store = context.store
        if state is BreakerState.OPEN:
            until = ceil((now_s + (breaker.retry_after(now_s) or 0.0)) * 1000)
            probes, opens = breaker.probes, breaker.consecutive_opens
            await retry_until_stored(
                lambda: store.park(lane.name, until, probes=probes, consecutive_opens=opens),
                context.health,
                self._partition_of_lane(lane.name),
            )
            context.lanes.parked.add(lane.name)
            self._reporter.report_lane_change("parked", lane.name)
        elif state is BreakerState.CLOSED:
            await self._unpark(lane)
            # The public event is the same as when an operator resumes the lane.
            self._reporter.report_lane_change("resumed", lane.name)
        else:
            self._reporter.report_lane_change("probing", lane.name)
        await self._record_changes(lane.name, changes)

    async def _unpark(self, lane: LocalLane) -> None:
        context = self._context
        partition = self._partition_of_lane(lane.name)
        await retry_until_stored(lambda: context.store.unpark(lane.name), context.health, partition)
        context.lanes.parked.discard(lane.name)
        self._claim_wakeup.wake()

    async def _park(self, lane: LocalLane, until: int) -> None:
        context, opens = self._context, lane.breaker.consecutive_opens
        await retry_until_stored(
            lambda: context.store.park(lane.name, until, probes=1, consecutive_opens=opens),
            context.health,
            self._partition_of_lane(lane.name),
        )
        context.lanes.parked.add(lane.name)
        if lane.wait_reason is not None:
            # Set again: a claim that ran meanwhile may have returned tasks of the lane, and have
            # ended the wait in this process.
            lane.waits_until = until


def _log_rejected_release(release: Release, error: BaseException) -> None:
    _logger.error("lease not released, task=%s", release.task.id, exc_info=error)


def _describe_transition(
    before: BreakerState, after: BreakerState, attempt: AttemptRecord | None
) -> str:
    """Return why a breaker has changed its state, without texts of callers and targets."""
    if after is BreakerState.HALF_OPEN:
        return "The open period has ended."
    if after is BreakerState.CLOSED:
        return "A probe succeeded."
    is_probe = before is BreakerState.HALF_OPEN
    text = "A probe failed" if is_probe else "Too many attempts failed"
    # The failure rate may reach its limit with a success, when there are enough attempts.
    if attempt is None or attempt.outcome == SUCCESS.kind:
        return f"{text}."
    result = attempt.error_class or attempt.outcome
    if attempt.response_status is not None:
        result = f"status {attempt.response_status}"
    return f"{text}: {result}." if is_probe else f"{text}, the last one: {result}."


def _encrypt_texts(
    result: TaskResult, encrypt_attempt: Callable[[AttemptRecord], AttemptRecord]
) -> TaskResult:
    if result.attempt is None:
        return result
    return msgspec.structs.replace(result, attempt=encrypt_attempt(result.attempt))


def build_callback_task(
    task: Task,
    content: TaskContent,
    result: TaskResult,
    *,
    new_id: Callable[[], str],
    pack: Callable[[TaskContent], bytes],
) -> Task:
    """Build the task that sends the callback of `task`. It is as durable as any other task."""
    url = content.callback_url
    assert url is not None  # noqa: S101 - the caller has checked it
    target = parse_target(url)
    attempt = result.attempt
    body = _encode(
        CallbackBody(
            task_id=task.id,
            idempotency_key=task.key,
            target_url=content.url.partition("?")[0],
            status=STATUS_NAMES[result.status],
            reason=result.reason,
            attempt_number=task.attempts + (attempt is not None),
            response_status=None if attempt is None else attempt.response_status,
            created_at=task.created_at,
        )
    )
    callback_content = TaskContent(
        url=target.url,
        headers={"content-type": "application/json"},
        body=body,
        body_size=len(body),
        trace=content.trace,
        tracestate=content.tracestate,
        vendor=QSTASH if content.vendor == QSTASH else None,  # QStash signs callbacks, too
    )
    return Task(
        id=new_id(),
        tenant=task.tenant,
        lane=lane_name(task.tenant, target),
        # A task that is replayed and finishes again sends another callback.
        key=f"{task.id}-callback-{task.replays}",
        fingerprint=b"",
        packed_content=pack(callback_content),
        policy_id=content.callback_policy_id or "default",
    )
