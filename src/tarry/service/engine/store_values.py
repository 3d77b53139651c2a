"""The last known task counts of the store for the metrics page, which must not wait for the store.

A page with old values and their age is worth more than none: Prometheus gives up after ten seconds,
and then nothing shows what this process does while its store hangs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.store import Counters, Store

_logger = logging.getLogger("tarry.service")
_INTERVAL_S = 5.0
"""Time between two background reads of values that are in use."""
_MAX_READ_LOAD = 0.05
"""Share of the time that background reads may take: `Store.counters` reads all lanes."""
_MIN_AGE_S = 1.0
"""A request does not start a read while the values are younger than this."""
_IN_USE_S = 120.0
"""How long after a request its values are read again in the background. Prometheus asks more often.
Without such requests, a process does not read the store, and does not compete to be the leader."""
_MAX_FIRST_WAIT_S = 1.0
"""How long the first request waits for its values, or the first one after a long time."""
_MAX_TENANTS = 100
"""Tenants whose values are kept; those that were requested last."""


class _Entry:
    """The values of one tenant, or of all tenants."""

    def __init__(self) -> None:
        self.requested_at = float("-inf")
        self.read_at = float("-inf")
        """When the last successful read was started."""
        self.counters: Counters | None = None
        """None also if another process reports the tasks of the store."""
        self.reading: asyncio.Task[None] | None = None


class StoreValuesCache:
    """Reads the counters of the store in the background, and returns the last ones at once."""

    def __init__(self, store: Store, monotonic: Callable[[], float]) -> None:
        self._store = store
        self._now = monotonic
        self._entries: dict[str | None, _Entry] = {}
        """By tenant (None: all tenants), the one that was requested last at the end."""

    async def get(self, tenant: str | None) -> tuple[Counters | None, float]:
        """Return the last counters of a tenant (None: of all tenants), and their age in seconds.

        They are read again in the background. The counters are None if another process reports the
        tasks of the store, or if they were never read.
        """
        entry = self._entries.pop(tenant, None) or _Entry()
        self._entries[tenant] = entry
        if len(self._entries) > _MAX_TENANTS:
            del self._entries[next(iter(self._entries))]
        now = self._now()
        was_in_use = now - entry.requested_at < _IN_USE_S
        entry.requested_at = now
        if now - entry.read_at >= _MIN_AGE_S:
            reading = self._start_reading(tenant, entry)
            if not was_in_use:
                await asyncio.wait([reading], timeout=_MAX_FIRST_WAIT_S)
        return entry.counters, max(0.0, self._now() - entry.read_at)

    async def run(self) -> None:
        """Read the values that are in use until cancelled."""
        while True:
            started_at = self._now()
            oldest = started_at - _IN_USE_S
            for tenant, entry in list(self._entries.items()):
                if entry.requested_at > oldest:
                    await asyncio.wait([self._start_reading(tenant, entry)])
            duration_s = self._now() - started_at
            await asyncio.sleep(max(_INTERVAL_S, duration_s / _MAX_READ_LOAD - duration_s))

    def _start_reading(self, tenant: str | None, entry: _Entry) -> asyncio.Task[None]:
        """Return the asyncio task that reads the values; only one runs at a time."""
        if entry.reading is None or entry.reading.done():
            entry.reading = asyncio.create_task(self._read(tenant, entry))
        return entry.reading

    async def _read(self, tenant: str | None, entry: _Entry) -> None:
        started_at = self._now()
        try:
            # Only one process reports the tasks, so that the metrics of all can be summed.
            is_leader = await self._store.try_lead()
            entry.counters = await self._store.counters(tenant) if is_leader else None
            entry.read_at = started_at
        except StoreUnavailable:
            pass  # the age of the values shows it; other calls log that the store fails
        except Exception:
            _logger.exception("reading the counters of the store failed")

    async def close(self) -> None:
        """Cancel the reads that still run."""
        readings = [entry.reading for entry in self._entries.values() if entry.reading is not None]
        for reading in readings:
            reading.cancel()
        if readings:
            await asyncio.wait(readings)
