"""The records of idempotency keys, and the port that a store of such records implements.

    (free) ──claim──▶ RUNNING ──finish──▶ FINISHED ──retention ends──▶ (free)
                         └──release, or the lease expires──▶ (free)

`free_at` is the time at which a key becomes free: while the first request runs it is the end of the
lease, after that the end of the retention.

Rules for stores:

- Each call is one atomic step.
- A store has its own clock. If processes share a database, it is the clock of the database.
- `owner` is a random text that only the request which claimed the key knows. A request whose lease
  has expired therefore cannot change a record that another request has claimed since.
- An expired lease alone does no harm: until another request claims the key, the first owner may
  extend and finish it, even if the record was swept.
- A call that its owner repeats, because the answer to the first was lost, returns the same result.
- A call may take long and may be cancelled. The middleware waits for at most five seconds.
"""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol, TypeAlias

Headers: TypeAlias = tuple[tuple[bytes, bytes], ...]


class StoredResponse(NamedTuple):
    """The response to the first request with a key."""

    status: int
    headers: Headers
    body: bytes | None
    """None if it was too large to store: it cannot be sent again, and the request is not rerun."""


class Record(NamedTuple):
    """The state of a key that is not free."""

    fingerprint: str
    """A digest of the request: the same key must not be used for a different request."""
    free_at: float
    """On the clock of the store."""
    response: StoredResponse | None
    """None while the first request runs."""


class ExistingRecord(NamedTuple):
    """The record of a key that could not be claimed, and the time on the store's clock."""

    record: Record
    now: float


class IdempotencyStore(Protocol):
    """Stores the records of keys."""

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim a free key for `lease` seconds. Return the record if the key is not free."""
        ...

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
        """Free the key of a request without a response to store.

        Do nothing if the request has finished or another owner has claimed the key.
        """
        ...

    async def sweep(self, limit: int) -> int:
        """Delete up to `limit` expired records, and return how many were deleted."""
        ...

    async def close(self) -> None:
        """Close connections and files. A later call opens them again."""
        ...


class InProgress(NamedTuple):
    """The first request with the key still runs. Its lease ends after `retry_after` seconds."""

    retry_after: float


class FingerprintMismatch(NamedTuple):
    """The key was used for a different request."""


def evaluate_record(
    record: Record, fingerprint: str, now: float
) -> StoredResponse | InProgress | FingerprintMismatch:
    """Return how to answer a request whose key already has a record."""
    if record.fingerprint != fingerprint:
        return FingerprintMismatch()
    if record.response is None:
        return InProgress(max(0.0, record.free_at - now))
    return record.response


def encode_headers(headers: Headers) -> str:
    """Return the headers as JSON text, without loss: latin-1 maps each byte to one character."""
    return json.dumps(
        [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    )


def decode_headers(text: str | bytes) -> Headers:
    """Return the headers that `encode_headers` encoded."""
    return tuple(
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in json.loads(text)
    )
