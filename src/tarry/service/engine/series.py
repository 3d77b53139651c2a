"""Series: what all processes have counted in each interval of time, for the overview.

Nothing is counted here. Every ten seconds, the difference between the totals of `Metrics` and the
totals at the last time is added to the points of the store, so a task costs nothing more. One
process also adds a sample of the backlog. Every value is a sum, so that the values of processes can
be added, and those of short intervals to longer ones:

    attempts.*, finished.*, lag.*, delay.*    see `Metrics.read_totals`
    samples                                   number of samples of the backlog
    backlog.STATUS, backlog.age_ms            sums over the samples: number of tasks in a status,
                                              age of the oldest task that is due

Sums that are not stored yet are added to the points that are read in the same process.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service.engine.context import STORE
from tarry.service.model import Status
from tarry.service.records.series import (
    SERIES_RETENTION_MS,
    SeriesPoint,
    list_series,
    record_series,
)
from tarry.service.records.workers import list_workers

if TYPE_CHECKING:
    from tarry.service.engine.context import EngineContext
    from tarry.wire.tasks import WaitReason

_logger = logging.getLogger("tarry.service")
RECORD_INTERVAL_MS = min(SERIES_RETENTION_MS)
BACKLOG_STATUSES = (Status.PENDING, Status.IN_FLIGHT, Status.EXHAUSTED)


class Backlog(msgspec.Struct, frozen=True):
    """The number of tasks by status, and the age of the oldest task that is due."""

    task_counts: dict[Status, int]
    oldest_due_age_ms: int
    waiting_for: WaitReason | None = None
    """Why the oldest task that is due waits; None: no task is due."""


class SeriesRecorder:
    """Adds what this process has counted to the series in the store."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._metrics = context.reporter.metrics
        self._recorded_totals: Counter[str] = Counter()
        self._interval_at: int | None = None
        """The interval of the sums that are not recorded yet; None before the first one."""
        self._lock = asyncio.Lock()  # a reader must not find sums twice, or not at all

    async def run(self) -> None:
        """Record at the end of each interval, until cancelled."""
        self._interval_at = self._current_interval()
        while True:
            elapsed_ms = self._context.clock.now_ms() % RECORD_INTERVAL_MS
            await asyncio.sleep((RECORD_INTERVAL_MS - elapsed_ms) / 1000)
            try:
                await self.record()
            except StoreUnavailable as error:
                self._context.health.mark_failing(STORE, error)
            except Exception:
                _logger.exception("recording of series failed")

    async def record(self, *, with_backlog: bool = True) -> None:
        """Add the sums since the last call to the store, and a sample of the backlog.

        If the store fails, the sums may have been added, so they are not sent again.
        """
        async with self._lock:
            sample = await self._sample_backlog() if with_backlog else {}
            sums = self._unrecorded_sums()
            self._recorded_totals.update(sums)
            at, self._interval_at = self._interval_at, self._current_interval()
            if at is None:
                at = self._interval_at
            sums.update(sample)
            if sums:
                await record_series(
                    self._context.store,
                    [
                        SeriesPoint(step_ms, at - at % step_ms, dict(sums))
                        for step_ms in SERIES_RETENTION_MS
                    ],
                )

    async def read(self, step_ms: int, since: int) -> list[SeriesPoint]:
        """Return the points of the store and what this process has not recorded yet."""
        async with self._lock:
            points = await list_series(self._context.store, step_ms, since=since)
            sums = self._unrecorded_sums()
            at = self._current_interval() if self._interval_at is None else self._interval_at
        at -= at % step_ms
        if not sums or at < since - since % step_ms:
            return points
        if points and points[-1].at == at:
            sums.update(points.pop().sums)
        return [*points, SeriesPoint(step_ms, at, dict(sums))]

    async def read_backlog(self, tenant: str | None = None) -> Backlog:
        """Return the backlog of one tenant, or of all tenants (None)."""
        counters = await self._context.store.counters(tenant)
        # Tasks that are leased to this process are not due any more for the store.
        now = self._context.clock.now_ms()
        oldest_due = self._context.lanes.oldest_due(counters.due_lanes, now, tenant)
        if not oldest_due:
            return Backlog(counters.task_counts, 0)
        reason = min(oldest_due, key=lambda each: oldest_due[each])
        return Backlog(counters.task_counts, max(0, now - oldest_due[reason]), reason)

    async def _sample_backlog(self) -> dict[str, int]:
        """Return a sample of the backlog, if this process is the first of all processes.

        It is not the leader of the store (`Store.try_lead`), which is a process whose metrics are
        read. If two processes make a sample, the averages are still right.
        """
        workers = await list_workers(self._context.store)
        if workers and workers[0].name != self._context.process.name:
            return {}
        backlog = await self.read_backlog()
        counts = {
            f"backlog.{status.name}": backlog.task_counts[status] for status in BACKLOG_STATUSES
        }
        return {"samples": 1, "backlog.age_ms": backlog.oldest_due_age_ms, **counts}

    def _unrecorded_sums(self) -> Counter[str]:
        return self._metrics.read_totals() - self._recorded_totals

    def _current_interval(self) -> int:
        now = self._context.clock.now_ms()
        return now - now % RECORD_INTERVAL_MS
