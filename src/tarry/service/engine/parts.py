"""What the parts of an engine share; the composition root makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tarry.service import defaults

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tarry.service.delivery.messages import Delivery
    from tarry.service.engine.clock import StoreClock
    from tarry.service.engine.events import Events
    from tarry.service.engine.health import Health
    from tarry.service.engine.lanes import Lanes
    from tarry.service.engine.metrics import Metrics
    from tarry.service.engine.policies import Policies
    from tarry.service.engine.waiters import Waiters
    from tarry.service.model import Task, TaskContent
    from tarry.service.store import Lease, Retention, Store, TaskResult


class Limits(msgspec.Struct, frozen=True, kw_only=True):
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


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The surroundings of ingest, scheduler, worker and maintenance."""

    store: Store
    delivery: Delivery
    policies: Policies
    lanes: Lanes
    clock: StoreClock
    events: Events
    metrics: Metrics
    waiters: Waiters
    health: Health
    lease: Lease
    limits: Limits
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
