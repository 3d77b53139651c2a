"""Writes the breaker state of lanes to the store, so that it applies to all workers."""

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
    """Parks a lane when its breaker opens, and unparks it when the breaker closes.

    `on_capacity` is called when a lane was unparked, because its tasks can be claimed again.
    """

    def __init__(
        self, context: EngineContext, reporter: Reporter, on_capacity: Callable[[], None]
    ) -> None:
        self._context = context
        self._reporter = reporter
        self._on_capacity = on_capacity
        self._writes: set[asyncio.Task[None]] = set()

    def apply_transitions(self, lane: LaneState) -> None:
        """Start writing the state of a lane's breaker to the store, if the state has changed."""
        transitions = lane.downstream.transitions
        if not transitions:
            return
        state = transitions[-1].after
        transitions.clear()
        write = asyncio.get_running_loop().create_task(self._write(lane, state))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)

    async def flush(self) -> None:
        """Return when all started writes have ended."""
        if self._writes:
            await asyncio.wait(self._writes)

    async def stop(self) -> None:
        """Cancel the writes in flight."""
        for write in self._writes:
            write.cancel()
        await self.flush()

    async def _write(self, lane: LaneState, state: BreakerState) -> None:
        context, breaker, now = self._context, lane.breaker, self._context.clock.seconds()
        store = context.store
        if state is BreakerState.OPEN:
            until = ceil((now + (breaker.retry_after(now) or 0.0)) * 1000)
            probes, opened = breaker.probes, breaker.consecutive_opens
            await retry_until_stored(
                lambda: store.park(lane.name, until, probes=probes, opened=opened), context.health
            )
            context.lanes.parked.add(lane.name)
            self._reporter.lane_changed("parked", lane.name)
        elif state is BreakerState.CLOSED:
            await retry_until_stored(lambda: store.unpark(lane.name), context.health)
            context.lanes.parked.discard(lane.name)
            self._reporter.lane_changed("resumed", lane.name)
            self._on_capacity()
        else:
            self._reporter.lane_changed("probing", lane.name)
