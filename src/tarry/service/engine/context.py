"""What the parts of an engine share; the composition root makes it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, TypeVar

import msgspec

from tarry.errors import StoreUnavailable
from tarry.service import defaults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

if TYPE_CHECKING:
    from collections.abc import Callable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.delivery.messages import Delivery
    from tarry.service.engine.clock import StoreClock
    from tarry.service.engine.lanes import Lanes
    from tarry.service.engine.metrics import Metrics
    from tarry.service.engine.policies import Policies
    from tarry.service.engine.reporting import CompletionWaiters, Events
    from tarry.service.model import Task, TaskContent
    from tarry.service.store import Lease, Retention, Store, TaskResult


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How much an engine takes on at a time."""

    in_flight: int = defaults.MAX_IN_FLIGHT
    """Attempts that run in this process."""
    lane_in_flight: int = defaults.MAX_LANE_IN_FLIGHT
    """Attempts that run against one downstream."""
    held: int = 4096
    """Tasks that are leased to this process."""
    lane_held: int = 1024
    """Tasks of one lane that are leased to this process."""
    ingest: int = 10_000
    """Tasks that wait to be written."""
    claim: int = 500
    """Tasks taken by one claim."""
    lane_claim: int = 100
    """Tasks of one lane taken by one claim."""
    pending: int | None = None
    """Live tasks of one tenant."""


class EngineContext(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings of ingest, scheduler, worker and maintenance."""

    store: Store
    delivery: Delivery
    policies: Policies
    lanes: Lanes
    clock: StoreClock
    events: Events
    metrics: Metrics
    waiters: CompletionWaiters
    health: Health
    lease: Lease
    limits: EngineLimits
    retention: Retention
    draw: Callable[[], float]
    """One number from [0, 1)."""
    unpack: Callable[[bytes], TaskContent]
    read_body: Callable[[TaskContent], Awaitable[bytes]]
    """Fetch a body that lies elsewhere, and check it."""
    delete_bodies: Callable[[list[str]], Awaitable[None]]
    sweep_bodies: Callable[[], Awaitable[int]]
    """Delete bodies that were written for a task which was never added."""
    sign: Callable[[Task, bytes], list[tuple[str, str]]]
    """Return the headers that only the service can make: signatures."""
    callback: Callable[[Task, TaskContent, TaskResult], Task]
    """Return the task that tells the end of another."""


_logger = logging.getLogger("tarry.service")


class Health:
    """What is out of order just now, by part; said once in the log when it changes."""

    def __init__(self) -> None:
        self.failing: dict[str, str] = {}
        """The parts that are out of order, and why; to look at."""
        self.behind: int = 0
        """Writes of what has happened that the store did not take at once, and has not yet."""

    def failed(self, part: str, error: object) -> None:
        """Learn that a part does not work."""
        if part not in self.failing:
            _logger.error("%s is out of order: %s", part, error)
        self.failing[part] = str(error)

    def worked(self, part: str) -> None:
        """Learn that a part works."""
        if self.failing and self.failing.pop(part, None) is not None:
            _logger.warning("%s works again", part)


T = TypeVar("T")

FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


async def retry_until_stored(write: Callable[[], Awaitable[T]], health: Health) -> T:
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
