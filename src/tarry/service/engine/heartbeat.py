"""The heartbeat: records this process in the store, and finds the other processes.

Heartbeats have their own loop, because a step of the maintenance may take longer than the time
after which a process without a heartbeat is considered dead (`WORKER_EXPIRY_MS`).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING
from zlib import crc32

from msgspec.structs import replace

from tarry.errors import StoreUnavailable
from tarry.service.engine.context import ADDING, DATA, STORE
from tarry.service.records.workers import list_workers, record_worker, remove_worker

if TYPE_CHECKING:
    from tarry.service.engine.context import EngineContext
    from tarry.service.engine.rate_limits import TenantRateLimiter
    from tarry.service.engine.worker import Worker
    from tarry.service.model import WorkerRecord

_logger = logging.getLogger("tarry.service")
_MIN_INTERVAL_S, _INTERVAL_RANGE_S = 4.5, 1.0
_MAX_REPORTED_BLOCKED_LANES = 201
"""Blocked lanes in a heartbeat, more than `Lanes.block` allows. A full list may be incomplete."""
_MAX_REPORTED_WAITING_LANES = 200
_FAILING_INTERVAL_S = 1.0
"""The interval while the store is failing."""
_MAX_OWNER_SILENCE_MS = 9_000
"""A process whose last heartbeat is older owns no lanes: it has probably been killed or suspended,
but stays listed for `WORKER_EXPIRY_MS`. A heartbeat may be a few seconds late. If the process runs
after all, two processes attempt the same limited lane for a moment."""


class Heartbeat:
    """Records one process in the store every five seconds, until it is cancelled."""

    def __init__(
        self, context: EngineContext, worker: Worker, rate_limiter: TenantRateLimiter | None
    ) -> None:
        self._context = context
        self._worker = worker
        self._rate_limiter = rate_limiter
        self._process = context.process
        self.other_workers: list[WorkerRecord] = []
        """The other processes, at the time of the last heartbeat."""
        self._is_stopping = False
        self._wakeup = asyncio.Event()
        self._compared_targets = {context.process.allow_target}
        # Each process has a different interval, so that processes that were started together do not
        # send their heartbeats at the same time.
        jitter = crc32(context.process.name.encode()) / 2**32
        self._interval_s = _MIN_INTERVAL_S + jitter * _INTERVAL_RANGE_S

    async def run(self) -> None:
        """Send heartbeats until cancelled. They also show when a failing store has recovered."""
        health = self._context.health
        self._process = replace(self._process, started_at=self._context.clock.now_ms())
        while True:
            try:
                await self.send()
            except StoreUnavailable as error:
                health.mark_failing(STORE, error)
            except Exception:
                _logger.exception("heartbeat failed")
            else:
                # A store accepts this write even if its memory is full, as it accepts results.
                health.mark_healthy(STORE)
            try:
                # Also without requests to `/readyz`: the metrics show whether the store was
                # replaced.
                await self._context.store_check.run_if_due()
            except Exception:  # the heartbeats continue, or others consider this process dead
                _logger.exception("check of the store failed")
            is_failing = not health.failing.keys().isdisjoint((STORE, ADDING, DATA))
            with suppress(TimeoutError):
                async with asyncio.timeout(_FAILING_INTERVAL_S if is_failing else self._interval_s):
                    await self._wakeup.wait()
            self._wakeup.clear()

    def announce_stop(self) -> None:
        """Report soon that this process starts no more attempts: others own its lanes then."""
        if not self._is_stopping:
            self._is_stopping = True
            self._wakeup.set()

    async def send(self) -> None:
        """Record this process, and divide rate limits and turns among all processes."""
        context, worker = self._context, self._worker
        store = context.store
        await record_worker(
            store,
            replace(
                self._process,
                running_attempts=worker.running_count,
                leased_tasks=len(worker.leased_tasks),
                blocked_lanes=context.lanes.blocked_reasons(_MAX_REPORTED_BLOCKED_LANES),
                waiting_lanes=context.lanes.list_waits(
                    _MAX_REPORTED_WAITING_LANES, context.clock.now_ms()
                ),
                is_stopping=self._is_stopping,
            ),
        )
        if not context.delivers:  # without claims, which synchronize the clock otherwise
            sent_at = context.clock.local_ms()
            context.clock.synchronize(sent_at, await store.ping())
        workers = await list_workers(store)
        self.other_workers = [each for each in workers if each.name != self._process.name]
        context.lanes.set_waits_elsewhere(each.waiting_lanes for each in self.other_workers)
        self._compare_allowed_targets()
        if self._rate_limiter is not None:
            self._rate_limiter.share(sum(each.role != "worker" for each in workers))
        if context.delivers:
            blocked_lanes = {
                each.name: each.blocked_lanes for each in workers if each.role != "api"
            }
            context.claim_turns.assign(self._process.name, blocked_lanes)
            # A process that stops or was killed, or one whose list of blocked lanes may be
            # incomplete, would be the owner of lanes that it does not deliver.
            newest = max((each.seen_at for each in workers), default=0)  # that of this process
            owners = {
                each.name: each.blocked_lanes
                for each in workers
                if each.name in blocked_lanes
                and not each.is_stopping
                and newest - each.seen_at <= _MAX_OWNER_SILENCE_MS
                and len(each.blocked_lanes) < _MAX_REPORTED_BLOCKED_LANES
            }
            context.lanes.owners.assign(self._process.name, owners)
            worker.result_writer.set_process_count(context.claim_turns.process_count)

    def _compare_allowed_targets(self) -> None:
        """Warn once about each other value of `allow_target` that a process of the store has."""
        for other in self.other_workers:
            if other.allow_target not in self._compared_targets:
                self._compared_targets.add(other.allow_target)
                _logger.warning(
                    "processes of one store allow different targets, so which tasks wait depends "
                    "on the process: start all with the same --dev and --allow-target, "
                    "process=%s allow_target=%s process=%s allow_target=%s",
                    self._process.name,
                    ",".join(self._process.allow_target) or "none",
                    other.name,
                    ",".join(other.allow_target) or "none",
                )

    async def remove(self) -> None:
        """Remove this process from the store. If the store fails, the entry expires."""
        with suppress(StoreUnavailable):
            await remove_worker(self._context.store, self._process.name)
