"""The scheduler: claims tasks that are due within the horizon, as many as there is capacity for."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tarry.core.breaker import BreakerState
from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.reporting import Reporter
    from tarry.service.engine.worker import Worker
    from tarry.service.store import ClaimResult

_logger = logging.getLogger("tarry.service")
_MIN_PAUSE_S = 0.02
"""Pause between two claims, unless the first could not take everything that was due."""


class Scheduler:
    """Claims tasks for a worker."""

    def __init__(self, context: EngineContext, worker: Worker, reporter: Reporter) -> None:
        self._context = context
        self._worker = worker
        self._reporter = reporter
        self._wakeup = asyncio.Event()
        self._lacked_capacity = self._is_stopping = False
        self._results_at_outage = 0
        """How many results had been submitted when the store last failed."""
        # Half the horizon: tasks that other processes add are claimed before they are due.
        self._poll_interval_s = context.lease.horizon_ms / 2000

    def wake(self) -> None:
        """Claim soon: a task may be due that is not leased."""
        self._wakeup.set()

    def stop(self) -> None:
        """Claim nothing more; the tasks of a claim that is running are still taken over."""
        self._is_stopping = True
        self._wakeup.set()

    def on_capacity(self) -> None:
        """Claim soon if the last claim lacked capacity; called when a task has left."""
        if self._lacked_capacity:
            self._wakeup.set()

    async def run_once(self) -> ClaimResult:
        """Claim tasks once, and pass them to the worker.

        Without capacity the claim has a limit of 0: it still returns the store's time, without
        which the worker would not know that its leases have expired. The limit is also 0 while
        results from an outage are not written yet: if their leases expired meanwhile, the claim
        would return exactly their tasks, and deliver them twice.
        """
        context, limits = self._context, self._context.limits
        lanes = context.lanes
        capacity = 0 if self._is_catching_up() else self._worker.leased_tasks.free_slots
        self._lacked_capacity = capacity < limits.claim or bool(lanes.full)
        limit, parked_before = max(0, min(limits.claim, capacity)), set(lanes.parked)
        sent_at = context.clock.local_ms()
        claimed = await context.store.claim(
            context.lease, limit=limit, per_lane=limits.lane_claim, skip=tuple(lanes.full)
        )
        context.clock.synchronize(sent_at, claimed.now)
        if not claimed.tasks and "store" in context.health.failing:
            # An empty claim writes nothing, so it succeeds on a full disk: ping writes.
            await context.store.ping()
        context.health.worked("store")
        if claimed.lost:
            self._reporter.attempts_lost(claimed.lost, claimed.now)
        for name in dict.fromkeys(task.lane for task in claimed.tasks):
            self._adopt_lane_state(
                name, claimed.probing.get(name), was_parked=name in parked_before
            )
        self._worker.add(claimed.tasks)
        return claimed

    def _is_catching_up(self) -> bool:
        """Return whether results that were submitted before the end of an outage are pending."""
        results = self._worker.results
        if self._context.health.delayed_writes:
            self._results_at_outage = results.submitted_results
        written = results.submitted_results - results.pending_results
        return written < self._results_at_outage

    async def run(self) -> None:
        """Claim until stopped: again at once while more is due, else twice in a horizon."""
        while not self._is_stopping:
            self._wakeup.clear()
            try:
                claimed = await self.run_once()
            except StoreUnavailable as error:
                self._context.health.failed("store", error)
            except Exception:
                _logger.exception("claim failed")
            else:
                if claimed.tasks and _has_more(claimed):
                    continue
            await asyncio.sleep(_MIN_PAUSE_S)
            try:
                async with asyncio.timeout(self._poll_interval_s):
                    await self._wakeup.wait()
            except TimeoutError:
                pass

    def _adopt_lane_state(self, name: str, opened: int | None, *, was_parked: bool) -> None:
        """Bring the breaker of a lane in line with the lane's state in the store.

        `opened` is set for a half-open lane: how often in a row its breaker has opened.
        """
        lane = self._context.lanes[name]
        lane.is_paused = False  # a paused lane would not have given a task
        breaker = lane.breaker
        if opened is not None:
            if breaker.state is BreakerState.CLOSED or not breaker.would_admit(
                self._context.clock.seconds()
            ):
                breaker.half_open(opened)
        elif was_parked:  # another worker or an operator has opened the lane
            self._context.lanes.parked.discard(name)
            lane.downstream.on_recovery(self._context.clock.seconds())


def _has_more(claimed: ClaimResult) -> bool:
    return claimed.next_at is not None and claimed.next_at <= claimed.now
