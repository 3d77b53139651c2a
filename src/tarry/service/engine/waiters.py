"""Those who wait for a task's end: callers with `Prefer: wait`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tarry.service.delivery.messages import DeliveryResult
    from tarry.service.model import Status


class Settled(msgspec.Struct):
    """How a task ended, and the last answer of its target, where there was one."""

    status: Status
    reason: str | None
    delivered: DeliveryResult | None


class Waiters:
    """Futures by task. A task that ends elsewhere, or is never settled, leaves its waiter alone."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[asyncio.Future[Settled]]] = {}
        """Those who wait, by task; to look at."""

    async def wait(self, task_id: str, seconds: float) -> Settled | None:
        """Wait for the end of a task, for so long."""
        future: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(task_id, []).append(future)
        try:
            async with asyncio.timeout(seconds):
                return await future
        except TimeoutError:
            return None
        finally:
            waiting = self.waiting.get(task_id, [])
            if future in waiting:
                waiting.remove(future)
            if not waiting:
                self.waiting.pop(task_id, None)

    def tell(self, task_id: str, settled: Settled) -> None:
        """Wake everybody who waits for a task."""
        for future in self.waiting.pop(task_id, ()):
            if not future.done():
                future.set_result(settled)
