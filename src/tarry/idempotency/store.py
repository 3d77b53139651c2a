"""The port: what the middleware needs of a store, by intent.

Every call is one atomic step. A store keeps its own clock: the one of its database, where many
processes share it. `owner` is a random text that only the request which claimed the key knows, so
that one whose lease has run out cannot touch what another has claimed since. Being late alone does
no harm: until another claims the key its first owner may extend and finish, even if the record is
gone. An owner that repeats a step, because the answer to the first was lost, gets the same answer.

A call may take as long as it takes, and may be cancelled: the middleware waits for five seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tarry.idempotency.record import Record, StoredResponse


class Taken(NamedTuple):
    """The key is not free: its record, and the time on the store's clock."""

    record: Record
    now: float


class Store(Protocol):
    """Keeps the records of keys."""

    async def claim(self, key: str, fingerprint: str, owner: str, lease: float) -> Taken | None:
        """Take a free key for `lease` seconds, or say by what it is taken."""
        ...

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Hold a key for `lease` more seconds from now; False: it is finished, or another's."""
        ...

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, keep: float
    ) -> bool:
        """Keep the response for `keep` seconds; False: the key is another's by now."""
        ...

    async def release(self, key: str, owner: str) -> None:
        """Free a key whose request came to nothing; nothing happens if it has been finished, or is
        not the owner's any more.
        """
        ...

    async def sweep(self, limit: int) -> int:
        """Forget up to `limit` records that are over, and say how many those were."""
        ...

    async def close(self) -> None:
        """Let go of connections and files. A call after that opens them anew."""
        ...
