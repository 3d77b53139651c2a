"""The scheduler: it claims what is due within the horizon, for as much as there is room."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tarry.core.breaker import BreakerState
from tarry.errors import StoreUnavailable
from tarry.service.engine.reporting import Event

if TYPE_CHECKING:
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.worker import Worker
    from tarry.service.store import ClaimResult

_logger = logging.getLogger("tarry.service")
_LEAST = 0.02
"""Seconds between two claims, unless there was more than the first could take."""


class Scheduler:
    """Claims tasks for a worker."""

    def __init__(self, context: EngineContext, worker: Worker) -> None:
        self._context = context
        self._worker = worker
        self._woken = asyncio.Event()
        self._starved = self._stopping = False
        self._owed = 0
        """How many results there were when the store was last away."""
        # Half the horizon: whatever others add meanwhile is claimed before it is due.
        self._poll = context.lease.horizon / 2000

    def wake(self) -> None:
        """Ask for a claim: something may be due that nobody has claimed."""
        self._woken.set()

    def stop(self) -> None:
        """Claim nothing more; a claim that has begun is taken up."""
        self._stopping = True
        self._woken.set()

    def room(self) -> None:
        """Learn that a task has left: there may be more where it came from."""
        if self._starved:
            self._woken.set()

    async def run_once(self) -> ClaimResult:
        """Claim once, as much as there is room for; hand everything to the worker.

        Without room nothing is claimed, and the store's time is learnt all the same: a worker that
        does not know it would not know either that its leases are over. Nor is anything claimed
        after an outage before its results are written: with their leases over, it would be them.
        """
        context, limits = self._context, self._context.limits
        lanes, room = context.lanes, 0 if self._is_behind() else self._worker.hold.room
        self._starved = room < limits.claim or bool(lanes.full)
        limit, parked = max(0, min(limits.claim, room)), set(lanes.parked)
        asked = context.clock.asks()
        claimed = await context.store.claim(
            context.lease, limit=limit, per_lane=limits.lane_claim, skip=tuple(lanes.full)
        )
        context.clock.learn(asked, claimed.now)
        if not claimed.tasks and "store" in context.health.failing:
            await context.store.ping()  # finding nothing writes nothing: a full disk lets it pass
        context.health.worked("store")
        if claimed.lost:
            self._tell_lost(claimed)
        for name in dict.fromkeys(task.lane for task in claimed.tasks):
            self._agree(name, claimed.probing.get(name), was_parked=name in parked)
        self._worker.take(claimed.tasks)
        return claimed

    def _is_behind(self) -> bool:
        """Whether results wait that had to, since the store was away."""
        ends = self._worker.ends
        if self._context.health.behind:
            self._owed = ends.posted
        return ends.posted - ends.waiting < self._owed

    def _tell_lost(self, claimed: ClaimResult) -> None:
        _logger.warning("%d attempts were lost: their workers have gone away", claimed.lost)
        self._context.metrics.lost(claimed.lost)
        self._context.events.publish(
            Event(kind="lost", at=claimed.now, tenant="", lane="", attempts=claimed.lost)
        )

    async def run(self) -> None:
        """Claim again and again: at once while there is plenty, else twice in a horizon."""
        while not self._stopping:
            self._woken.clear()
            try:
                claimed = await self.run_once()
            except StoreUnavailable as error:
                self._context.health.failed("store", error)
            except Exception:
                _logger.exception("a claim failed")
            else:
                if claimed.tasks and _has_more(claimed):
                    continue
            await asyncio.sleep(_LEAST)
            try:
                async with asyncio.timeout(self._poll):
                    await self._woken.wait()
            except TimeoutError:
                pass

    def _agree(self, name: str, opened: int | None, *, was_parked: bool) -> None:
        """Bring a lane's breaker in line with what the store says of it."""
        lane = self._context.lanes[name]
        lane.paused = False  # else there would be no task of it
        breaker = lane.breaker
        if opened is not None:
            if breaker.state is BreakerState.CLOSED or not breaker.would_admit(
                self._context.clock.seconds()
            ):
                breaker.half_open(opened)
        elif was_parked:  # somebody else has opened the lane: another worker, or a person
            self._context.lanes.parked.discard(name)
            lane.downstream.on_recovery(self._context.clock.seconds())


def _has_more(claimed: ClaimResult) -> bool:
    return claimed.next_at is not None and claimed.next_at <= claimed.now
