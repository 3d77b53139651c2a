"""A store in memory that behaves as one across a network may: it yields, hangs and fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from tarry.idempotency import ExistingRecord, MemoryStore, StoredResponse
from tarry.runtime import event_loops

T = TypeVar("T")

FOR_EVER = 1e9


class Wayward(MemoryStore):
    """Yields in every call. Some calls fail, or take time before or after their effect."""

    def __init__(
        self,
        *fails: str,
        before: dict[str, float] | None = None,
        after: dict[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.fails: tuple[str, ...] = fails
        self.before: dict[str, float] = before or {}
        self.after: dict[str, float] = after or {}
        self.calls: list[str] = []

    async def _do(self, call: str, work: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(call)
        await event_loops.sleep(self.before.get(call, 0))
        if call in self.fails:
            raise ConnectionError("the store is away")
        done = await work()
        await event_loops.sleep(self.after.get(call, 0))
        return done

    async def claim(
        self, key: str, fingerprint: str, owner: str, lease: float
    ) -> ExistingRecord | None:
        """Claim, in its way."""
        return await self._do("claim", partial(super().claim, key, fingerprint, owner, lease))

    async def extend(self, key: str, fingerprint: str, owner: str, lease: float) -> bool:
        """Extend, in its way."""
        return await self._do("extend", partial(super().extend, key, fingerprint, owner, lease))

    async def finish(
        self, key: str, fingerprint: str, owner: str, response: StoredResponse, keep: float
    ) -> bool:
        """Finish, in its way."""
        work = partial(super().finish, key, fingerprint, owner, response, keep)
        return await self._do("finish", work)

    async def release(self, key: str, owner: str) -> None:
        """Release, in its way."""
        await self._do("release", partial(super().release, key, owner))

    async def sweep(self, limit: int) -> int:
        """Sweep, in its way."""
        return await self._do("sweep", partial(super().sweep, limit))
