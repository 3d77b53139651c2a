"""When calls begin: all at once, by chance, one after the other, or from a backlog."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeAlias

from tarry.core.verdict import Reason
from tarry.simulator.distributions import Exponential

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.verdict import Stop
    from tarry.simulator.distributions import Sampler
    from tarry.simulator.meter import Meter
    from tarry.simulator.node import Ended
    from tarry.simulator.scenario import Clients
    from tarry.simulator.world import World

Begin: TypeAlias = "Callable[[float, int, Ended], Stop | None]"
"""Begins a call of the client with that number; answers why it could not."""

_DEFERRED = frozenset({Reason.BREAKER_OPEN, Reason.LIMIT, Reason.BUDGET_EMPTY})
_LONG = 10.0
"""So many pauses before the run its clients began, by when their calls are spread out."""
_POLL = 0.1
"""How often a backlog looks whether it is let through, in seconds, when nobody told it."""


class Arrivals:
    """Begins the calls of a scenario's clients, and has them counted."""

    __slots__ = ("_begin", "_clients", "_meter", "_pause", "_polling", "_waiting", "_world")

    def __init__(self, clients: Clients, world: World, meter: Meter, begin: Begin) -> None:
        self._clients = clients
        self._world = world
        self._meter = meter
        self._begin = begin
        self._pause = world.sampler(Exponential(1.0))
        self._waiting = 0
        self._polling = False

    def start(self) -> None:
        """Set the first events."""
        clients, world = self._clients, self._world
        if clients.arrivals == "poisson":
            self._plan(0.0, 0)
        elif clients.arrivals == "backlog":
            self._waiting = clients.count
            for _ in range(clients.count):
                self._meter.began(0.0)
            world.at(0.0, self._pump)
        elif clients.arrivals == "closed":
            think = self._world.sampler(clients.think)
            for client in range(clients.count):
                world.at(self._first(think), self._next, (client, think))
        else:
            for client in range(clients.count):
                world.at(0.0, self._once, client)

    def _first(self, think: Sampler) -> float:
        """Return when a client makes its first call, as if it had been going on for long."""
        mean = self._clients.think.mean
        when = -mean * (_LONG + self._world.dice.random())
        while when < 0:
            when += think()
        return when

    def _count(self, begun: float, now: float, stop: Stop | None) -> None:
        if stop is None:
            self._meter.succeeded(now, now - begun)
        else:
            self._meter.failed(now, stop.reason)

    def _once(self, begun: float, client: int) -> None:
        self._meter.began(begun)
        self._begin(begun, client, self._count)

    def _plan(self, now: float, client: int) -> None:
        """Set the next arrival; where the rate changes first, begin anew from there."""
        if not self._clients.surges:
            self._world.at(now + self._pause() / self._clients.rate, self._arrives, client)
            return
        rate, change = self._clients.rate, inf
        for surge in self._clients.surges:
            if surge.start <= now < surge.end:
                rate, change = surge.rate, surge.end
            elif now < surge.start:
                change = min(change, surge.start)
        when = now + self._pause() / rate if rate else inf
        if when < change:
            self._world.at(when, self._arrives, client)
        else:
            self._world.at(change, self._plan, client)

    def _arrives(self, now: float, client: int) -> None:
        self._once(now, client)
        self._plan(now, client + 1)

    def _next(self, begun: float, about: tuple[int, Callable[[], float]]) -> None:
        def ended(begun: float, now: float, stop: Stop | None) -> None:
            self._count(begun, now, stop)
            later = now + think()
            # Who is refused at once and does not think would ask for ever in the same moment.
            self._world.at(later if later > begun else now + _POLL, self._next, about)

        client, think = about
        self._meter.began(begun)
        self._begin(begun, client, ended)

    def _pump(self, now: float, _: object = None) -> None:
        """Begin calls of the backlog until one is not let through."""
        self._polling = False
        self._fill(now)

    def _fill(self, now: float) -> None:
        while self._waiting:
            self._waiting -= 1
            if self._begin(now, self._waiting, self._of_backlog) is not None:
                return

    def _of_backlog(self, _begun: float, now: float, stop: Stop | None) -> None:
        if stop is not None and stop.reason in _DEFERRED:
            self._waiting += 1
            if not self._polling:
                self._polling = True
                self._world.at(now + max(_POLL, stop.retry_after or 0.0), self._pump)
            return
        self._count(0.0, now, stop)
        self._world.at(now, self._refill)

    def _refill(self, now: float, _: object) -> None:
        self._fill(now)
