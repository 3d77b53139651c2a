"""Maintenance: old tasks leave in small steps, replays go on, what is not needed is forgotten."""

from __future__ import annotations

import asyncio
import logging
from math import ceil
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.scheduler import Scheduler
    from tarry.service.model import ReplayRecord

_logger = logging.getLogger("tarry.service")
_STEP = 200
_RELEASES = 10
"""Steps a second, about, in which a replay with a rate brings its letters back."""
_BODIES = 100
_STRAYS_EVERY = 600_000
_LANES_EVERY = 300_000
"""Milliseconds: a lane that is idle for twice as long is forgotten."""
_IDLE, _BUSY = 1.0, 0.02
"""Seconds between two rounds, at most and at least: a round that found work leaves others their
turn and goes on."""


class MaintenanceReport(msgspec.Struct):
    """What one round did."""

    swept: int = 0
    replayed: int = 0
    bodies: int = 0
    more: bool = False
    next_at: int | None = None
    """When the next step of a replay is due."""


class Maintenance:
    """Keeps the store small, and the memory."""

    def __init__(self, context: EngineContext, scheduler: Scheduler) -> None:
        self._context = context
        self._scheduler = scheduler
        self._strays_at = self._lanes_at = 0

    async def run_once(self) -> MaintenanceReport:
        """Make one small step of everything."""
        store, done = self._context.store, MaintenanceReport()
        swept = await store.sweep(self._context.retention, _STEP)
        done.swept, done.more = swept.tasks, swept.more
        await self._replay(done)
        orphans = await store.orphans(_BODIES)
        if orphans:
            await self._context.delete_bodies(orphans)
            await store.forget_orphans(orphans)
            done.bodies = len(orphans)
            done.more = True
        if self._context.clock.now() >= self._strays_at:
            self._strays_at = self._context.clock.now() + _STRAYS_EVERY
            done.bodies += await self._context.sweep_bodies()
        if self._context.clock.now() >= self._lanes_at:
            self._lanes_at = self._context.clock.now() + _LANES_EVERY
            self._context.lanes.forget()
        if done.replayed:
            self._scheduler.wake()
        return done

    async def _replay(self, done: MaintenanceReport) -> None:
        """Make a step of each replay that is due."""
        times: list[int] = []
        for job in await self._context.store.list_replays(running=True):
            after: ReplayRecord | None = job
            if job.next_at <= self._context.clock.now():
                after = await self._step_of(job)
            if after is not None:
                done.replayed += after.replayed - job.replayed
                if after.status == "running":
                    times.append(after.next_at)
        done.next_at = min(times, default=None)

    async def _step_of(self, job: ReplayRecord) -> ReplayRecord | None:
        try:
            return await self._context.store.replay_step(job.id, replay_step_size(job.rate))
        except StoreUnavailable:
            raise
        except Exception:
            _logger.exception("a step of replay %s failed", job.id)  # others have their turn
            return None

    def _pause(self, done: MaintenanceReport) -> float:
        if done.more:
            return _BUSY
        if done.next_at is None:
            return _IDLE
        return min(_IDLE, max(_BUSY, (done.next_at - self._context.clock.now()) / 1000))

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            pause = _IDLE
            try:
                pause = self._pause(await self.run_once())
            except StoreUnavailable as error:
                self._context.health.failed("store", error)
            except Exception:
                _logger.exception("maintenance failed")
            await asyncio.sleep(pause)


def replay_step_size(rate: float) -> int:
    """Return how many letters one step of a replay brings back; a rate of 0 is no limit."""
    return min(_STEP, ceil(rate / _RELEASES)) if rate else _STEP
