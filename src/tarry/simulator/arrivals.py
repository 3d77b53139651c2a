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
    from tarry.simulator.event_loop import World
    from tarry.simulator.metrics import Meter
    from tarry.simulator.node import Ended
    from tarry.simulator.scenario import Clients

Begin: TypeAlias = "Callable[[float, int, Ended], Stop | None]"
"""Begins a call of the client with that number; answers why it could not."""

_DEFERRED = frozenset({Reason.BREAKER_OPEN, Reason.LIMIT, Reason.BUDGET_EMPTY})
_LONG = 10.0
"""So many pauses before the run its clients began, by when their calls are spread out."""
_MOST_PAUSES = 1000
_POLL = 0.1
"""How often a backlog looks whether it is let through, in seconds, when nobody told it."""


class Arrivals:
    """Begins the calls of a scenario's clients, and has them counted."""

    __slots__ = (
        "_begin",
        "_clients",
        "_dice",
        "_meter",
        "_pause",
        "_polling",
        "_turn",
        "_waiting",
        "_world",
    )

    def __init__(self, clients: Clients, world: World, meter: Meter, begin: Begin) -> None:
        self._clients = clients
        self._world = world
        self._meter = meter
        self._begin = begin
        self._dice = world.dice("arrivals")
        self._pause = Exponential(1.0).sampler(self._dice)
        self._waiting = 0
        self._turn = 0
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
            world.at(0.0, self._polls)
        elif clients.arrivals == "closed":
            think = clients.think.sampler(self._dice)
            for client in range(clients.count):
                world.at(self._first(think), self._next, (client, think))
        else:
            for client in range(clients.count):
                world.at(0.0, self._once, client)

    def _count(self, begun: float, now: float, stop: Stop | None, attempts: int) -> None:
        if stop is None:
            self._meter.succeeded(now, now - begun)
        else:
            self._meter.failed(now, stop.reason, attempts)

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

    def _first(self, think: Sampler) -> float:
        """Return when a client makes its first call, as if it had been going on for long."""
        when = -self._clients.think.mean * (_LONG + self._dice.random())
        for _ in range(_MOST_PAUSES):
            if when >= 0:
                return when
            when += think()
        return think() * self._dice.random()  # its mean is far above what it mostly is

    def _next(self, begun: float, about: tuple[int, Sampler]) -> None:
        def ended(begun: float, now: float, stop: Stop | None, attempts: int) -> None:
            self._count(begun, now, stop, attempts)
            later = now + think()
            # Who is refused at once and does not think would ask for ever in the same moment.
            self._world.at(later if later > begun else now + _POLL, self._next, about)

        client, think = about
        self._meter.began(begun)
        self._begin(begun, client, ended)

    def _polls(self, now: float, _: object) -> None:
        self._polling = False
        self._fill(now)

    def _fill(self, now: float, _: object = None) -> None:
        """Begin calls of the backlog until no instance lets one through."""
        refusals, soonest = 0, inf
        while self._waiting and refusals < self._clients.instances:
            self._waiting -= 1
            self._turn += 1
            refused = self._begin(now, self._turn, self._of_backlog)
            if refused is None:
                refusals, soonest = 0, inf
            else:
                refusals += 1
                soonest = min(soonest, refused.retry_after or _POLL)
        if self._waiting:
            self._poll(now + max(_POLL, soonest))

    def _poll(self, when: float) -> None:
        if not self._polling:
            self._polling = True
            self._world.at(when, self._polls)

    def _of_backlog(self, _begun: float, now: float, stop: Stop | None, attempts: int) -> None:
        if stop is not None and stop.reason in _DEFERRED:  # as the service does: it costs nothing
            self._waiting += 1
            if attempts:  # of one that was not let through at all, `_fill` takes care
                self._poll(now + max(_POLL, stop.retry_after or 0.0))
        else:
            self._count(0.0, now, stop, attempts)
            self._world.at(now, self._fill)
