"""What has happened must be written: a write is repeated until the store takes it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from tarry.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.engine.health import Health

T = TypeVar("T")

FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


async def until_taken(write: Callable[[], Awaitable[T]], health: Health) -> T:
    """Repeat a write, with pauses in seconds that grow, and say meanwhile that the store is ill."""
    pause, is_behind = FIRST_PAUSE, False
    try:
        while True:
            try:
                answer = await write()
            except StoreUnavailable as error:
                health.failed("store", error)
                health.behind += not is_behind
                is_behind = True
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)
            else:
                health.worked("store")
                return answer
    finally:
        health.behind -= is_behind
