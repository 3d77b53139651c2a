"""Servers at work: each takes a request and says when it is answered, and how.

A server that works by itself knows that the moment a request arrives, because its queue is
first come, first served. So a request costs two events, its arrival and its answer. A relay,
which calls another server, answers when that call ends.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, Protocol, TypeAlias

from tarry.core.outcome import SUCCESS, Kind, Outcome, outcome_of_status
from tarry.core.verdict import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from tarry.core.verdict import Stop
    from tarry.simulator.meter import Meter
    from tarry.simulator.scenario import Failure, Server
    from tarry.simulator.world import World

REFUSED = Outcome(Kind.TRANSIENT, detail="connection refused")
DROPPED = Outcome(Kind.TRANSIENT, detail="connection reset")
TIMEOUT = Outcome(Kind.TRANSIENT, timeout=True, detail="timeout")
ERROR = outcome_of_status(500, now=0.0)
UNAVAILABLE = outcome_of_status(503, now=0.0)
GAVE_UP = UNAVAILABLE.replace(retried=True)
"""What a relay answers whose own call failed: it has retried already."""

_MOST_ANSWERED = 1000
"""So many requests that were answered a fragile server remembers before it forgets them."""

Ended: TypeAlias = "Callable[[float, float, Stop | None], None]"
"""Told when a call began, when it ended, and why it failed if it did."""


class Requester(Protocol):
    """Who waits for an answer."""

    def answer(self, now: float, number: int, outcome: Outcome) -> None:
        """Take the answer to attempt `number`, which leaves the server now."""
        ...


class Node:
    """One server: what all have in common, which is how they fail."""

    __slots__ = (
        "_held",
        "_most",
        "_reject",
        "_room",
        "_server",
        "_up_at",
        "_world",
        "crashes",
        "meter",
    )

    def __init__(self, server: Server, world: World, room: int | None) -> None:
        self._server = server
        self._world = world
        self._room: float = inf if room is None else room
        self._most: float = min(self._room, server.crash_above or inf)
        self._reject = _unavailable(server.retry_after)
        self._held: list[tuple[Requester, int]] = []
        self._up_at: float = 0.0
        self.crashes: int = 0
        self.meter: Meter | None = None
        """Counts what arrives, on the last server of the path."""
        for failure in server.failures:
            if failure.kind == "refuse" and failure.rate >= 1:
                world.at(failure.start, self._dies, failure.end)
            if failure.kind == "freeze":
                world.at(failure.end, self._thaws)

    def take(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Return when the request is answered, and how; None when that is not known yet."""
        if self.meter is not None:
            self.meter.request(now)
        if now < self._up_at:
            return now, REFUSED
        for failure in self._server.failures:
            if failure.start <= now < failure.end and (
                failure.rate >= 1 or self._world.dice.random() < failure.rate
            ):
                return self._failed(now, failure, requester, number)
        return self.accept(now, requester, number)

    def overloaded(self, now: float, load: int) -> tuple[float, Outcome]:
        """Turn a request away because there are too many, or die of it."""
        if load >= self._room:
            return now, self._reject
        self.crashes += 1
        self._up_at = now + self._server.restart_after
        self.drop_all(now, self._up_at)
        return now, DROPPED

    def load(self, now: float) -> int:
        """Return the requests in progress, queued ones included."""
        raise NotImplementedError

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Work on a request."""
        raise NotImplementedError

    def drop_all(self, now: float, until: float) -> None:
        """Lose the requests in progress; a new process is there from `until` on."""
        raise NotImplementedError

    def _failed(
        self, now: float, failure: Failure, requester: Requester, number: int
    ) -> tuple[float, Outcome] | None:
        if failure.kind == "error":
            return now, _unavailable(failure.retry_after)
        if failure.kind == "refuse":
            return now, REFUSED
        if failure.kind == "freeze":
            self._held.append((requester, number))
        return None

    def _dies(self, now: float, until: float) -> None:
        self.drop_all(now, until)

    def _thaws(self, now: float, _: object) -> None:
        held, self._held = self._held, []
        for requester, number in held:
            requester.answer(now, number, DROPPED)


class Worker(Node):
    """A server that works by itself."""

    __slots__ = ("_booted", "_cold", "_draw", "_ends", "_fragile", "_free", "_open")

    def __init__(self, server: Server, world: World) -> None:
        bounded = server.concurrency is not None and server.queue is not None
        room = (server.concurrency or 0) + (server.queue or 0)
        super().__init__(server, world, room if bounded else None)
        self._draw = world.sampler(server.latency)
        self._ends: list[float] = []
        self._free = [0.0] * (server.concurrency or 0)
        self._booted: float = 0.0
        self._cold: bool = False
        self._fragile = server.crash_above is not None or bool(server.failures)
        self._open: list[tuple[float, Requester, int]] = []
        """Who waits for an answer; some of a fragile server's have had theirs."""

    def load(self, now: float) -> int:
        """Count the requests whose end lies ahead."""
        ends = self._ends
        while ends and ends[0] <= now:
            heappop(ends)
        return len(ends)

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Give the request to the worker that is free first."""
        server, free, ends = self._server, self._free, self._ends
        while ends and ends[0] <= now:
            heappop(ends)
        load = len(ends)
        if load >= self._most:
            return self.overloaded(now, load)
        takes = self._draw() + server.slowdown * load
        if self._cold:
            takes *= self._slower(now)
        if free:
            end = max(now, free[0]) + takes
            heapreplace(free, end)
        else:
            end = now + takes
        heappush(ends, end)
        if self._fragile:
            self._remember(now, load, (end, requester, number))
        if server.failure_rate and self._world.dice.random() < server.failure_rate:
            return end, ERROR
        return end, SUCCESS

    def drop_all(self, now: float, until: float) -> None:
        """Drop them in the order in which they came."""
        until = max(until, self._booted)
        dropped = [entry for entry in self._open if entry[0] > now]
        self._open.clear()
        self._ends.clear()
        self._free = [until] * len(self._free)
        self._booted, self._cold = until, self._server.warmup > 0
        for _, requester, number in dropped:
            requester.answer(now, number, DROPPED)

    def _remember(self, now: float, load: int, entry: tuple[float, Requester, int]) -> None:
        self._open.append(entry)
        if len(self._open) > 2 * load + _MOST_ANSWERED:
            self._open = [entry for entry in self._open if entry[0] > now]

    def _slower(self, now: float) -> float:
        """Return how much longer a request takes while caches are cold."""
        warm = (now - self._booted) / self._server.warmup
        self._cold = warm < 1
        return self._server.cold + (1 - self._server.cold) * min(1.0, warm)


class Relay(Node):
    """A server that answers by a call of its own; `concurrency` bounds how many at a time."""

    __slots__ = ("_begin", "_draw", "_running", "_single")

    def __init__(
        self, server: Server, world: World, begin: Callable[[float, int, Ended], Stop | None]
    ) -> None:
        super().__init__(server, world, server.concurrency)
        self._begin = begin
        self._draw = world.sampler(server.latency)
        self._running: dict[tuple[Requester, int], None] = {}
        defence = server.defence
        self._single = (
            defence is not None and defence.hedging is None and defence.policy.max_attempts == 1
        )
        """It never retries, so that a layer above may, as with the marks of the runtime."""

    def load(self, now: float) -> int:  # noqa: ARG002 - its requests end when they end
        """Count the requests whose call still runs."""
        return len(self._running)

    def accept(self, now: float, requester: Requester, number: int) -> tuple[float, Outcome] | None:
        """Work a little, then make the call."""
        load = len(self._running)
        if load >= self._most:
            return self.overloaded(now, load)
        self._running[requester, number] = None
        self._world.at(now + self._draw(), self._call, (requester, number))
        return None

    def drop_all(self, now: float, until: float) -> None:  # noqa: ARG002 - it is never cold
        """Drop them; what they have called for goes on without anybody who waits for it."""
        running, self._running = self._running, {}
        for requester, number in running:
            requester.answer(now, number, DROPPED)

    def _call(self, now: float, request: tuple[Requester, int]) -> None:
        if request not in self._running:
            return
        failure_rate = self._server.failure_rate
        if failure_rate and self._world.dice.random() < failure_rate:
            self._end(now, request, ERROR)
            return

        def ended(_begun: float, now: float, stop: Stop | None) -> None:
            if request in self._running:
                self._end(now, request, self._answer(stop))

        self._begin(now, 0, ended)

    def _answer(self, stop: Stop | None) -> Outcome:
        if stop is None:
            return SUCCESS
        return UNAVAILABLE if self._single and stop.reason is Reason.ATTEMPTS else GAVE_UP

    def _end(self, now: float, request: tuple[Requester, int], outcome: Outcome) -> None:
        del self._running[request]
        requester, number = request
        requester.answer(now, number, outcome)


def _unavailable(retry_after: float | None) -> Outcome:
    said = {} if retry_after is None else {"retry-after-ms": f"{retry_after * 1000:.0f}"}
    return outcome_of_status(503, said, now=0.0)
