"""Records in this process: for tests, and for servers of one process that may forget them."""

from __future__ import annotations

import heapq
from collections import deque
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, NoReturn

from tarry.core.checks import count
from tarry.errors import LimitReached
from tarry.idempotency.record import Record, StoredResponse
from tarry.idempotency.store import Taken
from tarry.runtime.clocks import system

if TYPE_CHECKING:
    from collections.abc import Callable

_SLACK = 1000


class MemoryStore:
    """Keeps up to `capacity` records and refuses more, after those whose time is up have gone.

    `max_bytes`: for all bodies and headers together. What does not fit is not kept: its request
    counts as done, and is neither replayed nor run again.
    `clock` returns seconds on any base, by default those of the library.
    """

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        max_bytes: int = 64 << 20,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._capacity = count("capacity", capacity)
        self._max_bytes = count("max_bytes", max_bytes, 0)
        self._bytes = 0
        self._clock = clock
        self._lock = Lock()  # an application may run several loops in several threads
        self._entries: dict[str, _Entry] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of when each key ends, unless that has been put off since."""
        self._left: deque[tuple[str, str, float]] = deque()
        """Keys that were held and are to run out, with their owners, and when."""

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key for `lease` seconds, or say by what it is taken."""
        return self._take(key, fingerprint, owner, lease, lease)

    def hold(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key until it is finished, released or let run out.

        Whoever shares this memory needs no lease: they live and die together. The others are told
        that it is held for `lease` seconds.
        """
        return self._take(key, fingerprint, owner, lease, inf)

    def let_run_out(self, key: str, owner: str, lease: float) -> None:
        """Free a key in `lease` seconds, unless it is finished, released or extended by then.

        A finalizer may call this while the lock is held, by this very thread: it may not wait for
        it. So it leaves a word, and the next who has the lock sees to it.
        """
        self._left.append((key, owner, (self._clock or system.now)() + lease))

    def _take(
        self, key: str, fingerprint: str, owner: str, lease: float, held_for: float
    ) -> Taken | None:
        with self._lock:
            self._see_to_the_left()
            now = (self._clock or system.now)()
            entry = self._entries.get(key)
            if entry is not None:
                if now < entry.free_at and (entry.owner != owner or entry.response is not None):
                    free_at = now + lease if entry.free_at == inf else entry.free_at
                    return Taken(Record(entry.fingerprint, free_at, entry.response), now)
                self._drop(key, entry)
            elif len(self._entries) >= self._capacity and not self._forget(1, now):
                self._refuse(now)
            entry = _Entry(fingerprint, owner, now + held_for)
            if held_for == inf:
                self._entries[key] = entry
            else:
                self._put(key, entry)
            return None

    def _see_to_the_left(self) -> None:
        while self._left:
            key, owner, free_at = self._left.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.owner == owner and entry.response is None:
                entry.free_at = free_at
                self._put(key, entry)

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Hold a key for `lease` more seconds from now; False: it is finished, or another's."""
        with self._lock:
            self._see_to_the_left()
            now = (self._clock or system.now)()
            entry = self._entries.get(key)
            if entry is None:
                self._put(key, _Entry(fingerprint, owner, now + lease))
                return True
            if entry.owner != owner or entry.response is not None:
                return False
            entry.free_at = now + lease
            if entry.free_at < entry.look_at:
                self._put(key, entry)
            return True

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, keep: float
    ) -> bool:
        """Keep the response for `keep` seconds; False: the key is another's by now."""
        return self.finish_now(key, fingerprint, owner, response, keep)

    def finish_now(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, keep: float
    ) -> bool:
        """Do what `finish` does, without a coroutine."""
        with self._lock:
            self._see_to_the_left()
            now = (self._clock or system.now)()
            entry = self._entries.get(key)
            if entry is None:
                entry = _Entry(fingerprint, owner, now)
                self._put(key, entry)
            elif entry.owner != owner:
                return False
            elif entry.response is not None:
                return entry.response == response
            entry.free_at = now + keep
            size = len(response.body or b"")
            for name, value in response.headers:
                size += len(name) + len(value)
            if self._bytes + size > self._max_bytes and not self._make_bytes(size, now):
                response, size = StoredResponse(response.status, (), None), 0
            self._bytes += size
            entry.size = size
            entry.response = response
            if entry.free_at < entry.look_at:
                self._put(key, entry)
            return True

    async def release(self, key: str, owner: str) -> None:
        """Free a key that is still the owner's and not finished."""
        with self._lock:
            self._see_to_the_left()
            entry = self._entries.get(key)
            if entry is not None and entry.owner == owner and entry.response is None:
                self._drop(key, entry)

    async def sweep(self, limit: int) -> int:
        """Forget up to `limit` records that are over, and say how many those were."""
        with self._lock:
            self._see_to_the_left()
            return self._forget(limit, (self._clock or system.now)())

    async def close(self) -> None:
        """Do nothing: there is nothing to let go of."""

    def _drop(self, key: str, entry: _Entry) -> None:
        del self._entries[key]
        self._bytes -= entry.size

    def _refuse(self, now: float) -> NoReturn:
        first = self._first()
        msg = (
            f"the memory store holds {self._capacity} records, none of which has expired; "
            "a larger capacity, a shorter keep or a store on disk would take more"
        )
        wait = None if first is None else first[1].free_at - now
        raise LimitReached(msg, downstream="idempotency store", retry_after=wait)

    def _make_bytes(self, size: int, now: float) -> bool:
        """Forget what is over until there is room, and say whether there is."""
        while self._bytes + size > self._max_bytes:
            if not self._forget(1, now):
                return False
        return True

    def _forget(self, limit: int, now: float) -> int:
        """Forget up to `limit` records that are over, and say how many those were."""
        forgotten = 0
        while forgotten < limit and (first := self._first()) and first[1].free_at <= now:
            self._drop(*first)
            forgotten += 1
        return forgotten

    def _put(self, key: str, entry: _Entry) -> None:
        """Keep an entry, and note when it ends."""
        self._entries[key] = entry
        entry.look_at = entry.free_at
        heapq.heappush(self._ends, (entry.look_at, key))
        if len(self._ends) > 4 * len(self._entries) + _SLACK:
            looks = ((entry.look_at, key) for key, entry in self._entries.items())
            self._ends = [look for look in looks if look[0] < inf]
            heapq.heapify(self._ends)

    def _first(self) -> tuple[str, _Entry] | None:
        """Return the entry that ends first."""
        while self._ends:
            moment, key = self._ends[0]
            entry = self._entries.get(key)
            if entry is not None and entry.free_at == moment:
                return key, entry
            heapq.heappop(self._ends)
            if entry is not None and entry.look_at == moment:
                self._put(key, entry)
        return None


class _Entry:
    """What is kept of a key."""

    __slots__ = ("fingerprint", "free_at", "look_at", "owner", "response", "size")

    def __init__(self, fingerprint: str, owner: str, free_at: float) -> None:
        self.fingerprint = fingerprint
        self.owner = owner
        self.free_at = free_at
        self.look_at = inf
        self.response: StoredResponse | None = None
        self.size = 0
