"""What happens in this process, for everybody who wants to know, such as `/events`."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.service.model import AttemptRecord

_logger = logging.getLogger("tarry.service")
_MOST_WAITING = 1000


class Event(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """Something that happened to a task or to a lane."""

    kind: str
    """added, attempt, succeeded, exhausted, cancelled, superseded, deferred, parked, probing,
    resumed, paused; lost is of several tasks, and of no tenant."""
    at: int
    tenant: str
    lane: str
    task_id: str | None = None
    policy_id: str | None = None
    attempt: AttemptRecord | None = None
    reason: str | None = None
    next_attempt_at: int | None = None
    created_at: int | None = None
    attempts: int | None = None


class Events:
    """Hands each event to the listeners, which are quick and do not fail each other."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        """Those who listen, to look at: an event that nobody wants is not made."""

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self.listeners)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call a function with each event from now on, until what this returns is called."""
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def publish(self, event: Event) -> None:
        """Tell everybody."""
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                _logger.exception("a listener failed on %s", event.kind)

    def subscribe(self, tenant: str) -> Subscription:
        """Queue a tenant's events for a slow reader."""
        return Subscription(self, tenant)


class Subscription:
    """A bounded queue of events: a reader that is too slow misses the oldest, and is told so."""

    def __init__(self, events: Events, tenant: str) -> None:
        self._tenant = tenant
        self._queue: asyncio.Queue[Event] = asyncio.Queue(_MOST_WAITING)
        self.missed: int = 0
        """Events that were dropped since this was last set to 0."""
        self._stop = events.listen(self._take)

    def _take(self, event: Event) -> None:
        if event.tenant != self._tenant:
            return
        if self._queue.full():
            self._queue.get_nowait()
            self.missed += 1
        self._queue.put_nowait(event)

    async def next(self) -> Event:
        """Wait for the next event."""
        return await self._queue.get()

    def close(self) -> None:
        """Stop listening."""
        self._stop()
