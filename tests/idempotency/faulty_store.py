"""A memory store with the faults of a remote store: its calls yield, hang and fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from tarry.idempotency import ExistingRecord, MemoryStore, StoredResponse
from tarry.runtime import event_loops

T = TypeVar("T")

FOREVER_S = 1e9


class FaultyStore(MemoryStore):
    """A memory store whose calls yield. `failing_calls` raise an error.

    `delays_before_effect` and `delays_after_effect` map the name of a method to the seconds that a
    call waits before or after it changes the store.
    """

    def __init__(
        self,
        *failing_calls: str,
        delays_before_effect: dict[str, float] | None = None,
        delays_after_effect: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.failing_calls: tuple[str, ...] = failing_calls
        self.delays_before_effect: dict[str, float] = delays_before_effect or {}
        self.delays_after_effect: dict[str, float] = delays_after_effect or {}
        self.calls: list[str] = []

    async def _call_with_faults(self, call: str, function: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(call)
        await event_loops.async_sleep(self.delays_before_effect.get(call, 0))
        if call in self.failing_calls:
            raise ConnectionError("the store is unreachable")
        result = await function()
        await event_loops.async_sleep(self.delays_after_effect.get(call, 0))
        return result

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim a key, with the faults of this call."""
        return await self._call_with_faults(
            "claim", partial(super().claim, key, fingerprint, owner, lease)
        )

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend a lease, with the faults of this call."""
        return await self._call_with_faults(
            "extend", partial(super().extend, key, fingerprint, owner, lease)
        )

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, retention: float
    ) -> bool:
        """Store a response, with the faults of this call."""
        function = partial(super().finish, key, fingerprint, owner, response, retention)
        return await self._call_with_faults("finish", function)

    async def release(self, key: str, owner: str) -> None:
        """Release a key, with the faults of this call."""
        await self._call_with_faults("release", partial(super().release, key, owner))

    async def sweep(self, limit: int) -> int:
        """Delete expired records, with the faults of this call."""
        return await self._call_with_faults("sweep", partial(super().sweep, limit))
