"""The records of idempotency keys, and the protocol that a store of these records implements.

    (free) ──claim──▶ RUNNING ──finish──▶ FINISHED ──retention ends──▶ (free)
                         └──release, or the lease expires──▶ (free)

`free_at` is the time at which a key becomes free. While the first request runs, this is the end of
its lease. Once that request has finished, it is the end of the response's retention.

Rules for stores:

- `key` is the digest that `record_name_and_fingerprint` returns, not the text of the header.
- Each call is one atomic step.
- A store has its own clock. If processes share a database, it is the clock of the database.
- `owner` is a random string that only the request which claimed the key knows. A request whose
  lease has expired therefore cannot change a record that another request has claimed since.
- An expired lease alone does no harm. Until another request claims the key, the first owner may
  still extend the lease and finish the key, even if `sweep` has deleted the record.
- An owner may repeat a call whose result was lost with a connection. The repeated call returns the
  same result.
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
        """Free the key of a request that has no response to store.

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
    """The first request with the key still runs. Its lease expires in `retry_after` seconds."""

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
    """Return the headers as JSON. Nothing is lost, as latin-1 maps each byte to one character."""
    return json.dumps(
        [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]
    )


def decode_headers(text: str | bytes) -> Headers:
    """Return the headers that `encode_headers` encoded."""
    return tuple(
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in json.loads(text)
    )
