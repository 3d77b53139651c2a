"""The signal that the next claim may lease more tasks."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class ClaimWakeup:
    """Ends the pause of the scheduler between two claims."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.was_capacity_limited: bool = False
        """Whether the last claim could have leased more tasks with more capacity."""

    def wake(self) -> None:
        """Claim soon, because the store may have a due task that is not leased."""
        self._event.set()

    def on_capacity(self) -> None:
        """Claim soon if the last claim was limited by capacity: fewer tasks are leased now."""
        if self.was_capacity_limited:
            self._event.set()

    def clear(self) -> None:
        """Forget the calls so far, before a claim that takes them into account."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at the first call since `clear`, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
