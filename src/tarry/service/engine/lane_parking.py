"""Parking: what a lane's breaker does here is told to the store, for all workers to go by."""

from __future__ import annotations

import asyncio
from math import ceil
from typing import TYPE_CHECKING

from tarry.core.breaker import BreakerState
from tarry.service.engine.context import retry_until_stored

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.lanes import LaneState
    from tarry.service.engine.reporting import Reporter


class LaneParking:
    """Parks lanes in the store and opens them; `room` is called when one is open again."""

    def __init__(
        self, context: EngineContext, reporter: Reporter, room: Callable[[], None]
    ) -> None:
        self._context = context
        self._reporter = reporter
        self._room = room
        self._jobs: set[asyncio.Task[None]] = set()

    def look_at(self, lane: LaneState) -> None:
        """Tell the store what the breaker of a lane has done."""
        moves = lane.downstream.transitions
        if not moves:
            return
        last = moves[-1].after
        moves.clear()
        job = asyncio.get_running_loop().create_task(self._tell(lane, last))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    async def settled(self) -> None:
        """Return when the store knows everything."""
        if self._jobs:
            await asyncio.wait(self._jobs)

    async def stop(self) -> None:
        """Tell the store nothing more."""
        for job in self._jobs:
            job.cancel()
        await self.settled()

    async def _tell(self, lane: LaneState, state: BreakerState) -> None:
        context, breaker, now = self._context, lane.breaker, self._context.clock.seconds()
        store = context.store
        if state is BreakerState.OPEN:
            until = ceil((now + (breaker.retry_after(now) or 0.0)) * 1000)
            probes, opened = breaker.probes, breaker.consecutive_opens
            await retry_until_stored(
                lambda: store.park(lane.name, until, probes=probes, opened=opened), context.health
            )
            context.lanes.parked.add(lane.name)
            self._reporter.lane("parked", lane)
        elif state is BreakerState.CLOSED:
            await retry_until_stored(lambda: store.unpark(lane.name), context.health)
            context.lanes.parked.discard(lane.name)
            self._reporter.lane("resumed", lane)
            self._room()
        else:
            self._reporter.lane("probing", lane)
