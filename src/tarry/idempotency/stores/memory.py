"""Records in this process: for tests, and for servers of one process that may forget them."""

from __future__ import annotations

import heapq
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from tarry.core.checks import count
from tarry.errors import LimitReached
from tarry.idempotency.record import Record
from tarry.idempotency.store import Taken
from tarry.runtime.clocks import world

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.idempotency.record import StoredResponse

_SLACK = 1000


class _Entry(NamedTuple):
    owner: str
    record: Record


class MemoryStore:
    """Keeps up to `capacity` records and refuses more, after those whose time is up have gone.

    `clock` returns seconds on any base, by default those of the library.
    """

    def __init__(self, capacity: int = 10_000, *, clock: Callable[[], float] | None = None) -> None:
        self._capacity = count("capacity", capacity)
        self._clock = clock
        self._lock = Lock()  # an application may run several loops in several threads
        self._entries: dict[str, _Entry] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of when to look at which key; it may know moments that have been put off."""

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key for `lease` seconds, or say by what it is taken."""
        with self._lock:
            now = self._now()
            entry = self._entries.get(key)
            if entry is not None and now < entry.record.free_at:
                return Taken(entry.record, now)
            if entry is None and len(self._entries) >= self._capacity:
                self._make_room(now)
            self._put(key, owner, Record(fingerprint, now + lease, None))
            return None

    async def extend(self, key: str, owner: str, lease: float) -> bool:
        """Hold a key for `lease` more seconds from now; False: it is not the owner's any more."""
        with self._lock:
            record = self._running(key, owner)
            if record is not None:
                self._put(key, owner, record._replace(free_at=self._now() + lease))
            return record is not None

    async def finish(self, key: str, owner: str, response: StoredResponse, keep: float) -> bool:
        """Keep the response for `keep` seconds; False: the key is not the owner's any more."""
        with self._lock:
            record = self._running(key, owner)
            if record is not None:
                done = Record(record.fingerprint, self._now() + keep, response)
                self._put(key, owner, done)
            return record is not None

    async def release(self, key: str, owner: str) -> None:
        """Free a key that is still the owner's and not finished."""
        with self._lock:
            if self._running(key, owner) is not None:
                del self._entries[key]

    async def sweep(self, limit: int) -> int:
        """Forget up to `limit` records whose time is up, and say how many those were."""
        with self._lock:
            return self._forget(limit, self._now())

    async def close(self) -> None:
        """Do nothing: there is nothing to let go of."""

    def _now(self) -> float:
        return world.now() if self._clock is None else self._clock()

    def _running(self, key: str, owner: str) -> Record | None:
        entry = self._entries.get(key)
        if entry is None or entry.owner != owner or entry.record.response is not None:
            return None
        return entry.record

    def _put(self, key: str, owner: str, record: Record) -> None:
        self._entries[key] = _Entry(owner, record)
        heapq.heappush(self._ends, (record.free_at, key))
        if len(self._ends) > 4 * len(self._entries) + _SLACK:
            self._ends = [(entry.record.free_at, key) for key, entry in self._entries.items()]
            heapq.heapify(self._ends)

    def _make_room(self, now: float) -> None:
        if not self._forget(1, now):
            wait = self._ends[0][0] - now
            msg = (
                f"the memory store holds {self._capacity} records, none of which has expired; "
                "a larger capacity, a shorter keep or a store on disk would take more"
            )
            raise LimitReached(msg, downstream="idempotency store", retry_after=wait)

    def _forget(self, limit: int, now: float) -> int:
        """Forget up to `limit` records; if fewer, what is now first in the heap is the next end."""
        forgotten = 0
        while self._ends:
            moment, key = self._ends[0]
            entry = self._entries.get(key)
            if entry is not None and entry.record.free_at == moment:
                if moment > now or forgotten == limit:
                    break
                del self._entries[key]
                forgotten += 1
            heapq.heappop(self._ends)
        return forgotten
