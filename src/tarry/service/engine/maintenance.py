"""Maintenance: removes expired tasks and unused bodies, advances replays, drops idle lanes.

Everything is done in small steps, so that the store is never blocked for long.
"""

from __future__ import annotations

import asyncio
import logging
from math import ceil
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.scheduler import Scheduler
    from tarry.service.model import ReplayRecord

_logger = logging.getLogger("tarry.service")
_MAX_TASKS_PER_STEP = 200
_REPLAY_STEPS_PER_SECOND = 10
_MAX_BODIES_PER_STEP = 100
_UNUSED_BODY_SEARCH_INTERVAL_MS = 600_000  # rare, because it lists all stored bodies
_IDLE_LANE_CHECK_INTERVAL_MS = 300_000  # lanes that are idle between two checks are removed
_IDLE_PAUSE_S, _BUSY_PAUSE_S = 1.0, 0.02  # after a step that left no work, or some work


class Maintenance:
    """Runs the periodic work of one process."""

    def __init__(self, context: EngineContext, scheduler: Scheduler) -> None:
        self._context = context
        self._scheduler = scheduler
        self._next_unused_body_search_at = self._next_idle_lane_check_at = 0

    async def run_once(self) -> float:
        """Do one small step of each kind of maintenance; return the pause after it in seconds."""
        context, store = self._context, self._context.store
        sweep_result = await store.sweep(context.retention, _MAX_TASKS_PER_STEP)
        next_replay_at = await self._step_replays()
        # The store lists the bodies of removed tasks. Bodies that never had a task are found below.
        orphans = await store.list_orphaned_bodies(_MAX_BODIES_PER_STEP)
        if orphans:
            await context.delete_bodies(orphans)
            await store.forget_orphaned_bodies(orphans)
        now = context.clock.now()
        if now >= self._next_unused_body_search_at:
            self._next_unused_body_search_at = now + _UNUSED_BODY_SEARCH_INTERVAL_MS
            await context.delete_orphaned_bodies()
        if now >= self._next_idle_lane_check_at:
            self._next_idle_lane_check_at = now + _IDLE_LANE_CHECK_INTERVAL_MS
            context.lanes.forget_idle()
        if orphans or sweep_result.has_more:
            return _BUSY_PAUSE_S
        if next_replay_at is None:
            return _IDLE_PAUSE_S
        until_replay = (next_replay_at - context.clock.now()) / 1000
        return min(_IDLE_PAUSE_S, max(_BUSY_PAUSE_S, until_replay))

    async def _step_replays(self) -> int | None:
        """Do one step of each due replay; return when the next step is due (None: no replay)."""
        store = self._context.store
        next_times: list[int] = []
        for replay in await store.list_replays(running=True):
            new_record: ReplayRecord | None = replay
            if replay.next_at <= self._context.clock.now():
                try:
                    new_record = await store.replay_step(replay.id, replay_step_size(replay.rate))
                except StoreUnavailable:
                    raise
                except Exception:  # other replays continue
                    _logger.exception("replay step failed, replay=%s", replay.id)
                    continue
            if new_record is not None:
                if new_record.replayed > replay.replayed:
                    self._scheduler.wake()
                if new_record.status == "running":
                    next_times.append(new_record.next_at)
        return min(next_times, default=None)

    async def run(self) -> None:
        """Do maintenance until cancelled."""
        while True:
            pause = _IDLE_PAUSE_S
            try:
                pause = await self.run_once()
            except StoreUnavailable as error:
                self._context.health.mark_failing("store", error)
            except Exception:
                _logger.exception("maintenance failed")
            await asyncio.sleep(pause)


def replay_step_size(rate: float) -> int:
    """Return how many tasks one step replays; `rate` is in tasks per second, 0 means no limit."""
    if not rate:
        return _MAX_TASKS_PER_STEP
    return min(_MAX_TASKS_PER_STEP, ceil(rate / _REPLAY_STEPS_PER_SECOND))
