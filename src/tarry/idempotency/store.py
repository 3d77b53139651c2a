"""The records of idempotency keys, the protocol of their stores, and the store in memory.

    (free) ──claim──▶ RUNNING ──finish──▶ FINISHED ──retention ends──▶ (free)
                         └──release, or the lease expires──▶ (free)

`free_at` is the time at which a key becomes free: the end of the lease while the first request
runs, and the end of the response's retention once that request has finished.

Rules for stores:

- `key` is the name from `request.record_name_and_fingerprint`, not the text of the header.
- Each call of a method is atomic.
- A store has its own clock. If processes share a database, it is the clock of the database.
- `owner` is a random string that identifies the request which claimed the key. A request whose
  lease has expired therefore cannot change a record that another request has claimed since.
- An expired lease alone does no harm. Until another request claims the key, the first owner may
  still extend the lease and finish the key, even if `sweep` has deleted the record.
- An owner may repeat a call whose result was lost with a connection. The repeated call returns the
  same result.
- A call may take long and may be cancelled. The middleware waits for at most five seconds.
"""

from __future__ import annotations

import heapq
import json
import logging
from collections import deque
from math import inf
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, NoReturn, Protocol, TypeAlias

from tarry.core.checks import check_count
from tarry.errors import LimitReached
from tarry.runtime.effects import effects

if TYPE_CHECKING:
    from collections.abc import Callable

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]

logger: logging.Logger = logging.getLogger("tarry.idempotency")

_HEAP_SLACK = 1000
"""The heap is rebuilt when it has more than four items per record plus this number."""
_RECOVERED_SHARE = 0.9
"""A store that rejects new keys has recovered when this share of its records is left."""


class StoredResponse(NamedTuple):
    """The response to the first request with a key."""

    status: int
    headers: Headers
    body: bytes | None
    """None if the body was not stored, for example because it was too large. The response cannot be
    sent again then, but the request is not run again either."""


class Record(NamedTuple):
    """The state of a key that is not free."""

    fingerprint: str
    """A digest of the request, to detect a key that is used again for a different request."""
    free_at: float
    """When the key becomes free, in seconds on the clock of the store."""
    response: StoredResponse | None
    """None while the first request runs."""


class ExistingRecord(NamedTuple):
    """The record of a key that could not be claimed, and the current time on the store's clock."""

    record: Record
    now: float


class IdempotencyStore(Protocol):
    """Stores the records of keys."""

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim a key for `lease` seconds. Return None, or the record of a key that is not free."""

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now.

        Return False if the request has finished or another owner has claimed the key.
        """
        ...

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, retention: float
    ) -> bool:
        """Store the response for `retention` seconds.

        Return False if another owner has claimed the key.
        """
        ...

    async def release(self, key: str, owner: str) -> None:
        """Free the key of a request that has no response to store.

        Do nothing if the request has finished or another owner has claimed the key.
        """

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` expired records, and return how many were deleted."""
        ...

    async def close(self) -> None:
        """Close connections and files. A later call opens them again."""


def is_refusal(response: StoredResponse) -> bool:
    """Return whether the request was refused (4xx), so that it is safe to run it again."""
    return 400 <= response.status < 500  # noqa: PLR2004 - the statuses of client errors


def encode_headers(headers: Headers) -> str:
    """Return the headers as JSON. Nothing is lost, as latin-1 maps each byte to one character."""
    pairs = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    return json.dumps(pairs)


def decode_response(
    status: int | None, headers: str | bytes | None, body: bytes | None
) -> StoredResponse | None:
    """Return a response from the columns of its record; None while the first request runs."""
    if status is None or headers is None:
        return None
    pairs = json.loads(headers)
    decoded = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs)
    return StoredResponse(int(status), decoded, body)


class MemoryStore:
    """Stores up to `capacity` records in this process, for tests and for single-process servers.

    When the store is full, it deletes expired records, and then those of refused requests (4xx),
    which are safe to run again. If there are none, `claim` raises `LimitReached`.

    No caller can fill the store: the middleware rejects a new key of a caller that has as many
    records as there are free ones. One caller gets at most half of the capacity, the next one half
    of the rest, and so on. The same holds for `max_bytes`.

    Args:
        capacity: the largest number of records.
        max_bytes: the largest total size of all response bodies and headers. Of a response that
            does not fit, only the status is stored: the request does not run again, but a repeated
            request does not get the response either.
        clock: returns seconds since a fixed point in time; by default the clock of the library.
    """

    def __init__(
        self,
        capacity: int = 20_000,
        *,
        max_bytes: int = 64 << 20,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._capacity = check_count("capacity", capacity)
        self._max_bytes = check_count("max_bytes", max_bytes, 0)
        self._stored_bytes = 0
        self._clock = clock
        self._lock = Lock()  # an application may run event loops in several threads
        self._entries: dict[str, _MemoryEntry] = {}
        self._expiry_heap: list[tuple[float, str]] = []
        """Items `(heap_time, key)`. When `free_at` of an entry moves to a later time, the item
        stays. A new item is pushed when that item reaches the top, so `extend` is cheap."""
        self._pending_expiries: deque[tuple[str, str, float]] = deque()
        """Key, owner and `free_at` from calls of `expire_later` that have not been applied yet."""
        self._usage_by_caller: dict[int, _CallerUsage] = {}
        self._refused_keys: dict[str, None] = {}
        """The keys of refused requests, the oldest first."""
        self._rejects_from: int | None = None
        """The number of records when the store began to reject new keys; None while it does not."""

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim a key for `lease` seconds. Return None, or the record of a key that is not free."""
        return self.claim_now(key, fingerprint, owner, lease)

    def expire_later(self, key: str, owner: str, lease: float) -> None:
        """Free a key in `lease` seconds, unless it is finished, released or extended by then.

        Synchronous, and without the lock, because a finalizer may call this in a thread that holds
        the lock. The next call that acquires the lock applies the new `free_at`.
        """
        self._pending_expiries.append((key, owner, (self._clock or effects.now)() + lease))

    def claim_now(
        self,
        key: str,
        fingerprint: str,
        owner: str,
        lease: float,
        *,
        expires: bool = True,
        caller: int | None = None,
    ) -> ExistingRecord | None:
        """Claim a key synchronously, which saves the coroutine of `claim`.

        `caller` identifies the caller whose share of the store is limited; None has no such limit.

        Without `expires`, the claim lasts until `finish_now`, `release` or `expire_later` is
        called. A lease would only free the key after a crash, and a crash loses all records anyway.
        Other requests with the key get a record that expires `lease` seconds from now.
        """
        with self._lock:
            now = self._apply_expiries_and_read_clock()
            entry = self._entries.get(key)
            if entry is not None:
                if now < entry.free_at and (entry.owner != owner or entry.response is not None):
                    free_at = now + lease if entry.free_at == inf else entry.free_at
                    return ExistingRecord(Record(entry.fingerprint, free_at, entry.response), now)
                self._remove(key, entry)
            usage = self._usage_by_caller.get(caller) if caller is not None else None
            while len(self._entries) + (usage.records if usage else 0) >= self._capacity:
                if not self._delete_expired(1, now) and not self._delete_refused():
                    self._reject(usage, now)
            if self._rejects_from is not None:
                self._log_recovery(self._rejects_from)
            entry = _MemoryEntry(fingerprint, owner, now + lease if expires else inf)
            if caller is not None:
                if usage is None or not usage.records:  # deleted, if all its records were
                    usage = self._usage_by_caller[caller] = _CallerUsage(caller)
                usage.records += 1
                entry.usage = usage
            if expires:
                self._push(key, entry)
            else:
                self._entries[key] = entry
            return None

    def _reject(self, usage: _CallerUsage | None, now: float) -> NoReturn:
        """Raise `LimitReached`, and log it if no key was rejected before."""
        count, capacity = len(self._entries), self._capacity
        if count < capacity and usage is not None:
            problem = (
                f"the memory store rejects a key: its caller has {usage.records} of {count} "
                f"records, and only {capacity - count} are free"
            )
        else:
            problem = f"the memory store is full: none of its {capacity} records has expired"
        if self._rejects_from is None:
            self._rejects_from = count
            logger.warning("%s; this is not logged again until records have expired", problem)
        next_expiring = self._next_expiring()
        raise LimitReached(
            f"{problem}; use a larger capacity, a shorter retention, or a store on disk",
            downstream="idempotency store",
            retry_after=None if next_expiring is None else next_expiring[1].free_at - now,
        )

    def _log_recovery(self, rejects_from: int) -> None:
        """Log that keys are accepted again, once a tenth of the records has been deleted.

        Without this margin, a caller at its limit would cause two lines for each expired record.
        """
        if len(self._entries) <= rejects_from * _RECOVERED_SHARE:
            self._rejects_from = None
            logger.info("memory store accepts new keys again, records=%d", len(self._entries))

    def _apply_expiries_and_read_clock(self) -> float:
        """Apply the calls of `expire_later`, and return the time on the store's clock."""
        while self._pending_expiries:
            key, owner, free_at = self._pending_expiries.popleft()
            entry = self._entries.get(key)
            if entry is not None and entry.owner == owner and entry.response is None:
                entry.free_at = free_at
                self._push(key, entry)
        return (self._clock or effects.now)()

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend the lease to `lease` seconds from now; see `IdempotencyStore`."""
        with self._lock:
            now = self._apply_expiries_and_read_clock()
            entry = self._entries.get(key)
            if entry is None:
                self._push(key, _MemoryEntry(fingerprint, owner, now + lease))
                return True
            if entry.owner != owner or entry.response is not None:
                return False
            entry.free_at = now + lease
            if entry.free_at < entry.heap_time:
                self._push(key, entry)
            return True

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, retention: float
    ) -> bool:
        """Store the response for `retention` seconds; see `IdempotencyStore`."""
        return self.finish_now(key, fingerprint, owner, response, retention)

    def finish_now(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, retention: float
    ) -> bool:
        """Store the response synchronously, which saves the coroutine of `finish`."""
        with self._lock:
            now = self._apply_expiries_and_read_clock()
            entry = self._entries.get(key)
            if entry is None:
                entry = _MemoryEntry(fingerprint, owner, now)
                self._push(key, entry)
            elif entry.owner != owner:
                return False
            elif entry.response is not None:
                return entry.response == response
            entry.free_at = now + retention
            size = len(response.body or b"")
            for name, value in response.headers:
                size += len(name) + len(value)
            usage = entry.usage
            while (
                self._stored_bytes + (usage.stored_bytes if usage else 0) + size > self._max_bytes
            ):
                if not self._delete_expired(1, now) and not self._delete_refused():
                    response, size = StoredResponse(response.status, (), None), 0
                    break
            self._stored_bytes += size
            if usage is not None:
                usage.stored_bytes += size
            entry.size = size
            entry.response = response
            if is_refusal(response):
                self._refused_keys[key] = None
            if entry.free_at < entry.heap_time:
                self._push(key, entry)
            return True

    async def release(self, key: str, owner: str) -> None:
        """Free a key that this owner has claimed and not finished."""
        with self._lock:
            self._apply_expiries_and_read_clock()
            entry = self._entries.get(key)
            if entry is not None and entry.owner == owner and entry.response is None:
                self._remove(key, entry)

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` expired records, and return how many were deleted."""
        with self._lock:
            return self._delete_expired(limit, self._apply_expiries_and_read_clock())

    async def close(self) -> None:
        """Do nothing: there are no connections or files."""

    def _remove(self, key: str, entry: _MemoryEntry) -> None:
        del self._entries[key]
        self._stored_bytes -= entry.size
        self._refused_keys.pop(key, None)
        usage = entry.usage
        if usage is not None:
            usage.records -= 1
            usage.stored_bytes -= entry.size
            if not usage.records:
                del self._usage_by_caller[usage.caller]

    def _delete_refused(self) -> bool:
        """Delete the oldest record of a refused request; return False if there is none."""
        for key in self._refused_keys:
            self._remove(key, self._entries[key])
            return True
        return False

    def _delete_expired(self, limit: int, now: float) -> int:
        for deleted in range(limit):
            expiring = self._next_expiring()
            if expiring is None or expiring[1].free_at > now:
                return deleted
            self._remove(*expiring)
        return limit

    def _push(self, key: str, entry: _MemoryEntry) -> None:
        """Store an entry, and push an item for it to the heap."""
        self._entries[key] = entry
        entry.heap_time = entry.free_at
        heapq.heappush(self._expiry_heap, (entry.heap_time, key))
        if len(self._expiry_heap) > 4 * len(self._entries) + _HEAP_SLACK:
            items = ((entry.heap_time, key) for key, entry in self._entries.items())
            self._expiry_heap = [item for item in items if item[0] < inf]
            heapq.heapify(self._expiry_heap)

    def _next_expiring(self) -> tuple[str, _MemoryEntry] | None:
        """Return key and entry of the record that expires first. Drops outdated heap items."""
        while self._expiry_heap:
            heap_time, key = self._expiry_heap[0]
            entry = self._entries.get(key)
            if entry is not None and entry.free_at == heap_time:
                return key, entry
            heapq.heappop(self._expiry_heap)
            if entry is not None and entry.heap_time == heap_time:
                self._push(key, entry)
        return None


class _MemoryEntry:
    """The record of a key with its owner, its size, and its time in the expiry heap."""

    __slots__ = ("fingerprint", "free_at", "heap_time", "owner", "response", "size", "usage")

    def __init__(self, fingerprint: str, owner: str, free_at: float) -> None:
        self.fingerprint = fingerprint
        self.owner = owner
        self.free_at = free_at
        self.heap_time = inf  # infinity: not in the heap
        self.response: StoredResponse | None = None
        self.size = 0
        self.usage: _CallerUsage | None = None


class _CallerUsage:
    """The number of records of one caller, and the bytes of their responses."""

    __slots__ = ("caller", "records", "stored_bytes")

    def __init__(self, caller: int) -> None:
        self.caller = caller
        self.records = 0
        self.stored_bytes = 0
