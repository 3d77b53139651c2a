"""Maintenance: old tasks leave in small steps, replays go on, what is not needed is forgotten."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from tarry.service.engine.parts import Parts
    from tarry.service.engine.scheduler import Scheduler

_logger = logging.getLogger("tarry.service")
_STEP = 200
_BODIES = 100
_STRAYS_EVERY = 600_000
_LANES_EVERY = 300_000
"""Milliseconds: a lane that is idle for twice as long is forgotten."""
_IDLE, _BUSY = 1.0, 0.02
"""Seconds between two rounds; a round that found work leaves others their turn and goes on."""


class Upkeep(msgspec.Struct):
    """What one round did."""

    swept: int = 0
    replayed: int = 0
    bodies: int = 0
    more: bool = False


class Maintenance:
    """Keeps the store small, and the memory."""

    def __init__(self, parts: Parts, scheduler: Scheduler) -> None:
        self._parts = parts
        self._scheduler = scheduler
        self._strays_at = self._lanes_at = 0

    async def run_once(self) -> Upkeep:
        """Make one small step of everything."""
        store, done = self._parts.store, Upkeep()
        swept = await store.sweep(self._parts.retention, _STEP)
        done.swept, done.more = swept.tasks, swept.more
        for job in await store.replays(running=True):
            if job.next_at <= self._parts.clock.now():
                after = await store.replay_step(job.id, _STEP)
                if after is not None:
                    done.replayed += after.replayed - job.replayed
                    done.more |= after.status == "running" and not after.rate
        orphans = await store.orphans(_BODIES)
        if orphans:
            await self._parts.delete_bodies(orphans)
            await store.buried(orphans)
            done.bodies = len(orphans)
            done.more = True
        if self._parts.clock.now() >= self._strays_at:
            self._strays_at = self._parts.clock.now() + _STRAYS_EVERY
            done.bodies += await self._parts.sweep_bodies()
        if self._parts.clock.now() >= self._lanes_at:
            self._lanes_at = self._parts.clock.now() + _LANES_EVERY
            self._parts.lanes.forget()
        if done.replayed:
            self._scheduler.wake()
        return done

    async def run(self) -> None:
        """Go on for ever."""
        while True:
            pause = _IDLE
            try:
                if (await self.run_once()).more:
                    pause = _BUSY
            except StoreUnavailable as error:
                self._parts.health.failed("store", error)
            except Exception:
                _logger.exception("maintenance failed")
            await asyncio.sleep(pause)
